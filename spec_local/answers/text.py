"""The text of an answer while it is generated: characters split across tokens, and what ends it.

Bytes that are not UTF-8 become lone surrogates (PEP 383), so that writing the text with ``surrogateescape``
restores exactly the bytes that the model generated. Here are the events that a session yields, too.
"""

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec_local.core.proposal import Proposal
from spec_local.core.sampling import TokenLogprob
from spec_local.engine.events import Event, Failed, FinishReason, Prefilled, Statistics, Step
from spec_local.llama.vocabulary import Vocabulary
from spec_local.settings import GenerationSettings
from spec_local.text import overlap


@dataclass(frozen=True, slots=True)
class Text:
    """The text of one step; joined, the texts are the whole answer.

    It may be empty, as an incomplete character or a possible stop string is held back. A last one without
    tokens has what was still held back when the answer ended.

    Attributes:
        tokens: generated in this step, without the end token.
        proposal: the draft tokens of this step.
        n_accepted: number of accepted draft tokens at the start of `tokens`.
        logprobs: log probability of each token, if requested.
    """

    text: str
    tokens: Sequence[int] = ()
    proposal: Proposal = field(default_factory=Proposal, repr=False)
    n_accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The last event.

    Attributes:
        stopping_word: the stop string that ended the answer, if any.
        end_token: the token with which the model ended the answer, if it did.
        message: the whole answer to a chat as a message: its ``content``, and its ``reasoning_content`` and
            ``tool_calls`` if it has any. None: the prompt was no chat, or nothing was generated.
        reasoning_closed_at: tokens after which the reasoning was closed, as no budget for it was given and a
            grammar needs room for the answer; 0: it was not.
    """

    reason: FinishReason
    statistics: Statistics
    stopping_word: str = ""
    end_token: int | None = None
    message: Mapping[str, Any] | None = None
    reasoning_closed_at: int = 0

    @property
    def cut_short(self) -> bool:
        """True if something other than the model ended the answer."""
        return self.reason != "stop" or bool(self.stopping_word)


class NumberedEvent(NamedTuple):
    """An event of one of several answers, and the number of its prompt, from 0.

    The last event of an answer is `Done`, or `Failed` if it could not be generated.
    """

    number: int
    event: Prefilled | Text | Done | Failed


class TextStream:
    """Decodes tokens incrementally, and holds back text that may be the start of a stop string.

    Args:
        piece: returns the bytes of a token.
        stops: strings that end the text and are not part of it.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = [s for s in stops if s]
        self._begun = b""  # the first bytes of a character
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; if so, no more text follows."""
        self.stopping_word = ""
        """The stop string that was found."""

    def feed(self, token: int) -> str:
        """The text that is complete after this token; empty inside a character or a possible stop string."""
        data = self._begun + self._piece(token)
        text, n = codecs.utf_8_decode(data, "surrogateescape", False)
        self._begun = data[n:]
        return self._release(text) if self._stops else text

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text, self._begun = self._begun.decode("utf-8", "surrogateescape"), b""
        text = self._release(text) if self._stops else text
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        # The stop string that ends first is used, regardless of how the text is split into tokens.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopping_word = min(found)
            text, self._held, self.stopped = self._held[:at], "", True
            return text
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class LineLimits:
    """A stream whose text ends before a line break, which is not part of it; used as a `TextStream`.

    Args:
        stream: the text, and the stop strings that may end it earlier.
        min_indent: spaces and tabs with which each line but the first begins; the text ends before a line
            with fewer, also an empty one. 0: lines are not limited.
        max_seconds: since the first call of `feed`; after them, the text ends at a line break. None: no
            limit.
    """

    def __init__(
        self,
        stream: TextStream,
        min_indent: int = 0,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stopped = False
        """Whether a line or a stop string has ended the text; if so, no more follows."""
        self.stopping_word = ""
        """The stop string that has ended the text, if any."""
        self._stream, self._min_indent, self._max_seconds = stream, min_indent, max_seconds
        self._clock = clock
        self._started: float | None = None
        self._held = ""  # a line break, and less indentation than the line after it needs

    def feed(self, token: int) -> str:
        """What is certain to be part of the text; empty where more is needed to know."""
        text = self._limited(self._stream.feed(token))
        if self._stream.stopped and not self.stopped:
            self.stopped, self.stopping_word = True, self._stream.stopping_word
            return text + self._held
        return text

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._limited(self._stream.finish())
        return text if self.stopped else text + self._held

    def _limited(self, text: str) -> str:
        if self.stopped:
            return ""
        now = self._clock()
        self._started = now if self._started is None else self._started
        is_late = self._max_seconds is not None and now - self._started > self._max_seconds
        text, self._held = self._held + text, ""
        at = -1
        while not self.stopped and (at := text.find("\n", at + 1)) >= 0:
            start = text[at + 1 : at + 1 + self._min_indent]
            is_complete = len(start) == self._min_indent
            is_indented = not start.strip(" \t")
            self.stopped = is_late or not is_indented
            if self.stopped or not is_complete:
                text, self._held = text[:at], "" if self.stopped else text[at:]
        return text


class AnswerText:
    """Converts the events of one answer.

    Args:
        vocabulary: the main model's.
        settings: what ends the answer, and the control tokens whose names are part of the text. A stop string
            that is the name of a control token, which has no text, stands for the token.
        clock: of the limits of lines.
        on_output: called with the tokens of the answer when it ends.
        closed_at: returns `Done.reasoning_closed_at` for them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: GenerationSettings,
        clock: Callable[[], float],
        on_output: Callable[[Sequence[int]], None],
        closed_at: Callable[[Sequence[int]], int],
    ) -> None:
        self.is_done = False
        """True if the answer has ended, perhaps for a reason that the engine does not know."""
        self._is_end, self._on_output, self._closed_at = vocabulary.is_end, on_output, closed_at
        shown = {token for name in settings.control_text for token in vocabulary.control(name)}

        def piece(token: int) -> bytes:
            return vocabulary.piece(token, special=token in shown)

        stops, limits = settings.stops, (settings.min_indent, settings.max_seconds)
        self._stop_tokens = {token: stop for stop in stops for token in vocabulary.control(stop)}
        stream = TextStream(piece if shown else vocabulary.piece, stops)
        self._stream = stream if limits == (0, None) else LineLimits(stream, *limits, clock)
        self._statistics = Statistics()
        self._output: list[int] = []
        self._end_token: int | None = None

    def feed(self, event: Event) -> Sequence[Prefilled | Text | Done | Failed]:
        """The events that follow from an event of the engine."""
        if isinstance(event, Step):
            return self._step(event)
        if isinstance(event, Prefilled):
            self._statistics = event.statistics
            return [event]
        self.is_done = True
        if isinstance(event, Failed):
            return [event]
        rest = self._stream.finish()
        done = self._done(event.reason, event.statistics, end_token=self._end_token)
        return [Text(rest), done] if rest else [done]

    def _step(self, step: Step) -> Sequence[Text | Done]:
        stream, text, word = self._stream, "", ""
        tokens = [token for token in step.tokens if not self._is_end(token)]
        self._end_token = step.tokens[-1] if len(tokens) < len(step.tokens) else None
        for i, token in enumerate(tokens):
            if word := self._stop_tokens.get(token, ""):
                n, text = i, text + stream.finish()
            else:
                n, text = i + 1, text + stream.feed(token)
            if word or stream.stopped:
                self.is_done = True
                self._statistics.predicted_n -= len(step.tokens) - i - 1
                tokens = tokens[:n]
                break
        self._output += tokens
        n_accepted, logprobs = min(step.n_accepted, len(tokens)), step.logprobs[: len(tokens)]
        found = Text(text, tokens, step.proposal, n_accepted, logprobs)
        if not self.is_done:
            return [found]
        word = stream.stopping_word if stream.stopped else word
        return [found, self._done("stop" if word else "length", self._statistics, word)]

    def _done(
        self, reason: FinishReason, statistics: Statistics, word: str = "", end_token: int | None = None
    ) -> Done:
        self._on_output(self._output)
        closed_at = self._closed_at(self._output)
        return Done(reason, statistics, word, end_token, reasoning_closed_at=closed_at)
