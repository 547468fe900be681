"""Accumulates a streaming answer."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from spec_local.chat.messages import json_object, repaired_object
from spec_local.engine.events import Statistics
from spec_local.server.supervision.events import Delta, Ended, Event, Reading, Refused, Started, Token
from spec_local.text import printable

if TYPE_CHECKING:
    from spec_local.chat.tool_calls import ToolCall

Kind = Literal["reasoning", "content"]
Change = (
    tuple[Literal["open", "text", "close"], Kind, str]
    | tuple[Literal["open call", "close call"], "ToolCall"]
    | tuple[Literal["arguments"], str]
)


class AnswerSoFar:
    """Adds up the events of one answer.

    Bytes that are not UTF-8 become U+FFFD in each event by itself, so that the parts of a stream make exactly
    the text of a response in one object.

    Attributes:
        content, reasoning: text of the answer, and of the reasoning.
        n_prompt, n_cached: tokens of the prompt, and those of them that were in the cache.
        calls: of tools; the last one may be incomplete.
        tokens: all generated tokens without the end token.
        n_reasoning: those of them in steps that added only reasoning.
        ended: the last event; None: it has not come.
    """

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.n_prompt = self.n_cached = self.n_reasoning = 0
        self.calls: list[ToolCall] = []
        self.tokens: list[Token] = []
        self.ended: Ended | None = None
        self._n_drafted = self._n_accepted = 0
        self._begun = self._started = time.monotonic()  # of the prompt, and of the answer

    @property
    def statistics(self) -> Statistics:
        """Statistics of the answer, as soon as it has ended."""
        return self.ended.statistics if self.ended else Statistics()

    def statistics_so_far(self) -> Statistics:
        """Counts and times of an answer that has not ended, as this process sees them."""
        return Statistics(
            cached_n=self.n_cached,
            prompt_n=self.n_prompt - self.n_cached,
            prompt_s=self._started - self._begun,
            predicted_n=len(self.tokens),
            predicted_s=time.monotonic() - self._started,
            draft_n=self._n_drafted,
            draft_n_accepted=self._n_accepted,
        )

    def add(self, event: Event) -> Delta | None:
        """Add an event, and return what it adds, as printable text; None: it starts the answer.

        Raises:
            SpecLocalError: the answer was refused.
        """
        match event:
            case Refused(error):
                raise error
            case Reading():
                self._begun = time.monotonic() - event.seconds
                return None
            case Started(n_prompt, n_cached):
                self.n_prompt, self.n_cached = n_prompt, n_cached
                self._started = time.monotonic()
                return None
            case Ended(rest):
                self.ended = event
                return self._add(rest)
            case Delta():
                return self._add(event)

    def add_all(self, events: Iterable[Event]) -> None:
        """Add all events of an answer."""
        for event in events:
            self.add(event)

    def _add(self, delta: Delta) -> Delta:
        delta = replace(
            delta,
            content=printable(delta.content),
            reasoning=printable(delta.reasoning),
            arguments=printable(delta.arguments),
            tool_calls=[
                replace(call, name=printable(call.name), arguments=printable(call.arguments))
                for call in delta.tool_calls
            ],
        )
        self.content += delta.content
        self.reasoning += delta.reasoning
        if delta.arguments:
            self.calls[-1] = _with(self.calls[-1], delta.arguments)
        self.calls += delta.tool_calls
        self.tokens += delta.tokens
        self._n_drafted += delta.n_drafted
        self._n_accepted += delta.n_accepted
        if delta.reasoning and not delta.content:
            self.n_reasoning += len(delta.tokens)
        return delta


class Blocks:
    """Divides an answer into blocks: texts of one kind, and calls. kinds: of the texts that become blocks."""

    def __init__(self, kinds: Sequence[Kind] = ("reasoning", "content")) -> None:
        self._kinds = kinds
        self._growing: Kind | None = None  # the kind of the last block if more text may follow
        self._text = ""  # of that block
        self._call: ToolCall | None = None  # the last block if it is one

    def changes(self, delta: Delta, *, is_last: bool) -> Iterator[Change]:
        """Changes by the next part: a block opens, grows, or closes with its whole text or arguments."""
        if delta.arguments and self._call:
            self._call = _with(self._call, delta.arguments)
            yield "arguments", delta.arguments
        texts: dict[Kind, str] = {"reasoning": delta.reasoning, "content": delta.content}
        for kind in self._kinds:
            if text := texts[kind]:
                if kind != self._growing:
                    yield from self._close()
                    self._growing = kind
                    yield "open", kind, ""
                self._text += text
                yield "text", kind, text
        for call in delta.tool_calls:
            yield from self._close()
            self._call = call
            yield "open call", call
            if call.arguments:
                yield "arguments", call.arguments
        if is_last:
            yield from self._close()

    def _close(self) -> Iterator[Change]:
        if self._growing:
            yield "close", self._growing, self._text
            self._growing, self._text = None, ""
        if self._call:
            yield "close call", self._call
            self._call = None


def _with(call: "ToolCall", arguments: str) -> "ToolCall":
    return replace(call, arguments=call.arguments + arguments)


def arguments_of(call: "ToolCall") -> dict[str, Any]:
    """The arguments of a call as an object that can be written as JSON again.

    What is complete of them if they are cut.
    """
    value = json_object(call.arguments)
    value = repaired_object(call.arguments) if value is None else value
    text = json.dumps(value, ensure_ascii=False)
    found: dict[str, Any] = json.loads(text.encode(errors="replace"))  # of bytes that are not UTF-8
    return found
