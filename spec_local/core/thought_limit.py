"""A limit of the reasoning: as soon as it has so many tokens, the model writes its closing and then answers.

Up to the limit, the distribution is the main model's, and also within a character that the limit would split,
for as many tokens as its bytes may need. The closing is a constraint like any other, a function of the tokens
so far, so that it holds for draft tokens, trees and several answers alike.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spec_local.core.constraint import State
from spec_local.core.reasoning import Splitter
from spec_local.core.text import begun_character

_MOST_MORE = 3  # tokens beyond the limit: a character has at most four bytes


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """The state before the next token; after the reasoning, it is that of `rest`.

    Args:
        splitter: of what follows the output so far; not changed.
        n_left: tokens that the reasoning may still have; negative: it has more than the limit.
        closing: tokens between the reasoning and the answer.
        piece: returns the bytes of a token, with the names of control tokens.
        n_vocab: number of tokens in the vocabulary.
        rest: another constraint of all of the output; None: there is none. The closing goes before it.
        begun: the last tokens, which may be the beginning of the closing.
        character: the last bytes, if they are the beginning of a character.
        n_closed: number of tokens of the closing that were written; None: the limit is not reached.
    """

    splitter: Splitter
    n_left: int
    closing: Sequence[int]
    piece: Callable[[int], bytes]
    n_vocab: int
    rest: State | None = None
    begun: Sequence[int] = ()
    character: bytes = b""
    n_closed: int | None = None

    def start(self, answered: Sequence[int] = ()) -> State | None:
        """The state after the answer's tokens so far, if this is that of its beginning.

        Returns:
            None: any token may follow.
        """
        state = self._resolved()
        for token in answered:
            state = state.after(token) if state else None
        return state

    def _resolved(self) -> State | None:
        if self.splitter.is_past_reasoning:
            return self.rest
        if self.n_left > 0 or not self.splitter.is_reasoning:
            return self
        if self.character and self.n_left > -_MOST_MORE:
            return self
        begun, closing = [*self.begun], [*self.closing]
        lengths = range(min(len(begun), len(closing) - 1), -1, -1)
        return replace(self, n_closed=next(n for n in lengths if begun[len(begun) - n :] == closing[:n]))

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        if self.n_closed is not None:
            return np.isin(tokens, self.closing[self.n_closed])
        return self.rest.allows(tokens) if self.rest else np.ones(len(tokens), bool)

    def allowed(self) -> NDArray[np.bool_]:
        if self.rest and self.n_closed is None:
            return self.rest.allowed()
        return self.allows(np.arange(self.n_vocab))

    def n_allowed(self, tokens: Sequence[int]) -> int:
        state: State | None = self
        for n, token in enumerate(tokens):
            if not isinstance(state, ThoughtLimit):
                return n + (state.n_allowed(tokens[n:]) if state else len(tokens) - n)
            if not state.allows(np.array([token]))[0]:
                return n
            state = state.after(token)
        return len(tokens)

    def after(self, token: int) -> State | None:
        rest = self.rest.after(token) if self.rest else None
        n_closed = None
        if self.n_closed is not None and token == self.closing[self.n_closed]:
            n_closed = self.n_closed + 1
            if n_closed == len(self.closing):
                return rest
        splitter, piece = copy.copy(self.splitter), self.piece(token)
        splitter.feed(piece.decode("latin-1"))  # markers are ASCII
        following = replace(
            self,
            splitter=splitter,
            n_left=self.n_left - self.splitter.is_reasoning,
            rest=rest,
            begun=[*self.begun, token][-len(self.closing) :],
            character=begun_character(self.character + piece),
            n_closed=n_closed,
        )
        # Another token than the closing's: the answer, which is continued, was begun under a larger limit.
        return following if n_closed else following._resolved()

    def forced(self, n: int) -> Sequence[tuple[int, float]]:
        if self.n_closed is not None:
            return [(token, 1.0) for token in self.closing[self.n_closed :][:n]]
        return self.rest.forced(n) if self.rest else ()
