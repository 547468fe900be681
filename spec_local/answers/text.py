"""The text of an answer while it is generated, and the events that a session yields."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec_local.answers.line_limits import LineLimits
from spec_local.core.proposal import Proposal
from spec_local.core.sampling import TokenLogprob
from spec_local.engine.events import Event, Failed, Finished, FinishReason, Prefilled, Statistics
from spec_local.llama.vocabulary import Vocabulary
from spec_local.text import TextStream


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


class RowEvent(NamedTuple):
    """An event of one of several answers, and the number of its prompt, from 0.

    The last event of an answer is `Done`, or `Failed` if it could not be generated.
    """

    number: int
    event: Prefilled | Text | Done | Failed


class AnswerText:
    """Converts the events of one row.

    Args:
        vocabulary: the main model's.
        stops: strings that end the answer; they are not part of it. The name of a control token, which has no
            text, stands for the token.
        lines: limits that may end the answer with a line.
        control_text: names of control tokens that are part of the text.
        on_output: called with the tokens of the answer when it ends.
        closed_at: returns `Done.reasoning_closed_at` for them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        lines: LineLimits,
        control_text: Sequence[str],
        on_output: Callable[[Sequence[int]], None],
        closed_at: Callable[[Sequence[int]], int],
    ) -> None:
        self.is_done = False
        """True if the answer has ended, perhaps for a reason that the engine does not know."""
        self._vocabulary, self._lines = vocabulary, lines
        self._on_output, self._closed_at = on_output, closed_at
        shown = {token for name in control_text for token in vocabulary.control(name)}
        self._stop_tokens = {token: stop for stop in stops for token in vocabulary.control(stop)}
        self._stream = TextStream(lambda token: vocabulary.piece(token, special=token in shown), stops)
        self._statistics = Statistics()
        self._output: list[int] = []
        self._end_token: int | None = None

    def feed(self, event: Event) -> Iterator[Prefilled | Text | Done | Failed]:
        """The events that follow from an event of the engine."""
        stream, lines, vocabulary = self._stream, self._lines, self._vocabulary
        if isinstance(event, Prefilled):
            self._statistics = event.statistics
            yield event
        elif isinstance(event, Failed):
            self.is_done = True
            yield event
        elif isinstance(event, Finished):
            self.is_done = True
            self._on_output(self._output)
            if rest := lines.feed(stream.finish()) + lines.finish():
                yield Text(rest)
            closed_at = self._closed_at(self._output)
            yield Done(event.reason, event.statistics, "", self._end_token, reasoning_closed_at=closed_at)
        else:
            text, tokens = "", [t for t in event.tokens if not vocabulary.is_end(t)]
            self._end_token = event.tokens[-1] if len(tokens) < len(event.tokens) else None
            stopping_word = ""
            for i, token in enumerate(tokens):
                if stopping_word := self._stop_tokens.get(token, ""):
                    text += lines.feed(stream.finish())
                    tokens = tokens[:i]
                else:
                    text += lines.feed(stream.feed(token))
                    stopping_word = stream.stopping_word
                if stopping_word or lines.ended:
                    text += lines.finish()
                    self._statistics.predicted_n -= len(event.tokens) - i - 1
                    tokens = tokens[: i + 1]
                    break
            self._output += tokens
            self.is_done = bool(stopping_word or lines.ended)
            n_accepted, logprobs = min(event.n_accepted, len(tokens)), event.logprobs[: len(tokens)]
            yield Text(text, tokens, event.proposal, n_accepted, logprobs)
            if self.is_done:
                self._on_output(self._output)
                reason: FinishReason = "length" if lines.ended else "stop"
                word = "" if lines.ended else stopping_word
                closed_at = self._closed_at(self._output)
                yield Done(reason, self._statistics, word, reasoning_closed_at=closed_at)
