"""Constraints: which tokens may follow the output so far.

The main model and the draft model are restricted in the same way, before top-k and the other settings apply.
p and q therefore remain functions of logits and path, and every verifier and proposer stays lossless.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest


class State(Protocol):
    """The set of tokens that may follow an output. Immutable."""

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return whether each of these tokens, (n,), may follow."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token of the vocabulary may follow, (V,); slower than `allows` for a few."""

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow one after another; at least as many as really may."""

    def after(self, token: int) -> "State | None":
        """The state after a token; None: any token may follow (after an end token, or one not allowed)."""

    def forced(self, n: int) -> Sequence[tuple[int, float]]:
        """Up to n tokens, at least 1, that probably follow because the constraint leaves hardly any choice.

        With each token comes the estimated probability that it follows the one before it. They are
        candidates for a draft, not certain: a text can be tokenized in several ways.
        """


@dataclass(slots=True)
class _Node:
    state: State | None
    children: dict[int, "_Node"] = field(default_factory=dict)

    def follow(self, tokens: Sequence[int]) -> "_Node":
        node = self
        for token in tokens:
            if token not in node.children:
                node.children[token] = _Node(node.state.after(token) if node.state else None)
            node = node.children[token]
        return node


class Constraint:
    """The states of one answer; those of draft tokens are kept until the next commit.

    Args:
        start: the state before the first token of the answer.
    """

    def __init__(self, start: State) -> None:
        self._node = _Node(start)
        self._length: int | None = None

    def commit(self, history: Sequence[int]) -> None:
        """Set the history, which only grows. The first history is the prompt, which is not constrained."""
        if self._length is not None:
            self._node = self._node.follow(history[self._length :])
        self._length = len(history)

    def after(self, history: Sequence[int]) -> State | None:
        """The state after a history that begins with the committed one; None: any token may follow."""
        return self._node.follow(history[self._length :]).state

    def is_complete(self, is_end: Callable[[int], bool]) -> bool:
        """Return whether only an end token may follow the committed history; False if it takes too long."""
        with suppress(InvalidRequest):
            state = self._node.state
            following = state.allowed().nonzero()[0].tolist() if state else []
            return bool(following) and all(map(is_end, following))
        return False
