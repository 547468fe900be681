"""The text of an answer while it is generated, and the events that a session yields."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec_local.answers.line_limits import LineLimits
from spec_local.core.proposal import Proposal
from spec_local.core.sampling import TokenLogprob
from spec_local.engine.events import Event, Failed, FinishReason, Prefilled, Statistics, Step
from spec_local.llama.vocabulary import Vocabulary
from spec_local.settings import GenerationSettings
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


class NumberedEvent(NamedTuple):
    """An event of one of several answers, and the number of its prompt, from 0.

    The last event of an answer is `Done`, or `Failed` if it could not be generated.
    """

    number: int
    event: Prefilled | Text | Done | Failed


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
