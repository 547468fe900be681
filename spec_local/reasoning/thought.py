"""The reasoning before an answer: free up to a limit, then the model's closing, then what the answer must be.

Up to the limit, and to the answer, the distribution is the main model's, and also within a character that the
limit would split, for as many tokens as its bytes may need. All of it is a constraint like any other, so that
it holds for draft tokens, trees and several answers alike.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spec_local.core.constraint import State
from spec_local.reasoning.markers import Markers, Splitter
from spec_local.text import begun_character

_MOST_MORE = 3  # tokens beyond the limit: a character has at most four bytes
_LINE_BREAKS = 2
"""Line breaks that may stand between the reasoning and an answer under a grammar, as in llama.cpp's."""


class ThoughtTokens:
    """The tokens of a vocabulary that write reasoning and its markers.

    Args:
        markers: of the model.
        piece: returns the bytes of a token, with the names of control tokens.
        n_vocab: number of tokens in the vocabulary.
        is_end: whether a token ends the answer.
    """

    def __init__(
        self, markers: Markers, piece: Callable[[int], bytes], n_vocab: int, is_end: Callable[[int], bool]
    ) -> None:
        self.markers, self.piece, self.n_vocab = markers, piece, n_vocab
        self._texts = (*markers.openings, *markers.closings, *markers.calls)
        self._shortest, self._is_end = min(map(len, self._texts)), is_end

    def text(self, token: int) -> str:
        """One character for each byte of a token: markers are ASCII."""
        return self.piece(token).decode("latin-1")

    @functools.cached_property
    def going_on(self) -> NDArray[np.bool_]:
        """Whether each token leaves the answer unfinished, (V,)."""
        return np.array([not self._is_end(token) for token in range(self.n_vocab)], bool)

    @functools.cached_property
    def marking(self) -> dict[int, str]:
        """The tokens that may be a part of a marker or contain one, and line breaks, with their texts."""
        ends = tuple(marker[i:] for marker in self._texts for i in range(len(marker)))
        parts = {end[:n] for end in ends for n in range(1, len(end) + 1)}
        texts = enumerate(map(self.text, range(self.n_vocab)))
        return {
            token: text
            for token, text in texts
            if text.startswith(ends)
            or text in parts
            or self._contains(text)
            or (text and not text.strip("\n"))
        }

    @functools.cached_property
    def whole(self) -> list[int]:
        """The tokens that contain a marker."""
        return [token for token, text in self.marking.items() if self._contains(text)]

    def _contains(self, text: str) -> bool:
        """Return whether a text contains a marker; most are too short."""
        return len(text) >= self._shortest and any(marker in text for marker in self._texts)


@dataclass(frozen=True, slots=True)
class Thought:
    """The state before the next token of the reasoning, or of the text that may open it.

    Without an `answer`, everything may follow until the limit is reached. With it, the reasoning does not end
    the output, its last marker ends with a token, and what follows is constrained. Where the prompt has not
    opened the reasoning, the model may open it or answer at once.

    Args:
        splitter: of what follows the output so far; not changed.
        tokens: those of the model.
        closing: tokens between the reasoning and the answer, for the limit.
        n_left: tokens that the reasoning may still have; negative: it has more than the limit. None: any
            number.
        answer: the constraint of what follows the reasoning; None: there is none.
        begun: the last tokens, which may be the beginning of the closing.
        character: the last bytes, if they are the beginning of a character.
        n_closed: number of tokens of the closing that were written; None: the limit is not reached.
        unopened: the answer's constraint, if the tokens so far belong to the answer; None: they cannot.
        n_breaks: number of line breaks since the reasoning.
    """

    splitter: Splitter
    tokens: ThoughtTokens
    closing: Sequence[int]
    n_left: int | None = None
    answer: State | None = None
    begun: Sequence[int] = ()
    character: bytes = b""
    n_closed: int | None = None
    unopened: State | None = None
    n_breaks: int = 0

    def start(self, answered: Sequence[int] = ()) -> State | None:
        """The state after the answer's tokens so far, if this is that of its beginning.

        Returns:
            None: any token may follow.
        """
        state = self.answer
        if not self.splitter.is_past_reasoning:
            state = replace(self, unopened=self.answer)._resolved()
        for token in answered:
            state = state.after(token) if state else None
        return state

    def _resolved(self) -> State | None:
        if self.splitter.is_past_reasoning:
            if not (self.splitter.is_before_answer and self.answer):
                return self.unopened
            if self.n_breaks >= _LINE_BREAKS:
                return self.answer
            return replace(self, unopened=self.answer)
        if self.n_left is None or self.n_left > 0 or not self.splitter.is_reasoning:
            return self
        if self.character and self.n_left > -_MOST_MORE:
            return self
        begun, closing = [*self.begun], [*self.closing]
        lengths = range(min(len(begun), len(closing) - 1), -1, -1)
        return replace(self, n_closed=next(n for n in lengths if begun[len(begun) - n :] == closing[:n]))

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        if self.n_closed is not None:
            return np.isin(tokens, self.closing[self.n_closed])
        if not self.answer:
            return np.ones(len(tokens), bool)
        if self.splitter.is_reasoning:
            found = self.tokens.going_on[tokens]
        else:
            found = self.unopened.allows(tokens) if self.unopened else np.zeros(len(tokens), bool)
        return np.where(np.isin(tokens, [*self._exceptions()]), not self.splitter.is_reasoning, found)

    def allowed(self) -> NDArray[np.bool_]:
        n_vocab, is_reasoning = self.tokens.n_vocab, self.splitter.is_reasoning
        if self.n_closed is not None or not self.answer:
            return self.allows(np.arange(n_vocab))
        if is_reasoning:
            found = self.tokens.going_on.copy()
        else:
            found = self.unopened.allowed().copy() if self.unopened else np.zeros(n_vocab, bool)
        found[[*self._exceptions()]] = not is_reasoning
        return found

    def _exceptions(self) -> Iterator[int]:
        """Tokens of the reasoning that may not follow, as they end it and go on; else, further ones that may.

        The latter go on an opening marker, or are line breaks after the reasoning.
        """
        splitter, marking = self.splitter, self.tokens.marking
        rests = tuple(splitter.rests)
        if splitter.is_reasoning:
            found = [token for token, text in marking.items() if text.startswith(rests)] if rests else []
            for token in {*self.tokens.whole, *found}:
                after = self._read(token)
                if not after.is_reasoning and not after.is_before_answer:
                    yield token
        elif splitter.is_past_reasoning:
            for token, text in marking.items():
                if not text.strip("\n") and self.n_breaks + len(text) <= _LINE_BREAKS:
                    yield token
        else:
            begun = {rest[:n] for rest in rests for n in range(1, len(rest))}
            for token, text in marking.items():
                if text in begun or text.startswith(rests):
                    after = self._read(token)
                    if not after.is_past_reasoning or after.is_before_answer:
                        yield token

    def _read(self, token: int) -> Splitter:
        """The splitter after a token."""
        splitter = copy.copy(self.splitter)
        splitter.feed(self.tokens.text(token))
        return splitter

    def n_allowed(self, tokens: Sequence[int]) -> int:
        state: State | None = self
        for n, token in enumerate(tokens):
            if not isinstance(state, Thought):
                return n + (state.n_allowed(tokens[n:]) if state else len(tokens) - n)
            if not state.allows(np.array([token]))[0]:
                return n
            state = state.after(token)
        return len(tokens)

    def after(self, token: int) -> State | None:
        n_closed = None
        if self.n_closed is not None and token == self.closing[self.n_closed]:
            n_closed = self.n_closed + 1
            if n_closed == len(self.closing):
                return self.answer
        text = self.tokens.text(token)
        is_reasoning = self.splitter.is_reasoning
        n_breaks = len(text) - len(text.rstrip("\n"))
        if self.splitter.is_past_reasoning and not n_closed:
            n_breaks += self.n_breaks
            if not text or text.strip("\n") or n_breaks > _LINE_BREAKS:
                return self.unopened.after(token) if self.unopened else None
        following = replace(
            self,
            splitter=self._read(token),
            n_left=None if self.n_left is None else self.n_left - is_reasoning,
            begun=[*self.begun, token][-len(self.closing) :],
            character=begun_character(self.character + self.tokens.piece(token)),
            n_closed=n_closed,
            unopened=self.unopened.after(token) if self.unopened and not is_reasoning else None,
            n_breaks=n_breaks,
        )
        # Another token than the closing's: the answer, which is continued, was begun under a larger limit.
        return following if n_closed else following._resolved()

    def forced(self, n: int) -> Sequence[tuple[int, float]]:
        if self.n_closed is not None:
            return [(token, 1.0) for token in self.closing[self.n_closed :][:n]]
        return ()
