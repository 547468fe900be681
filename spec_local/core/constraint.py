"""Constraints: which tokens may follow the answer so far.

Main and draft are restricted alike, before top-k and the rest shape what is left. So p and q stay functions of logits and
path, and every acceptance rule and every proposer is as lossless as without.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class State(Protocol):
    """What may follow some text. A value: nothing that is asked of it changes it."""

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Of each of these tokens (n,), whether it may follow."""

    def allowed(self) -> NDArray[np.bool_]:
        """The same of the whole vocabulary (V,). Costs more."""

    def after(self, token: int) -> "State | None":
        """What may follow with this token; None: anything, as after an end, and after what may not follow."""


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
    """The states of one answer as it grows: those of its guesses are kept until it is known which of them stand.

    Args:
        start: what the answer may begin with.
    """

    def __init__(self, start: State) -> None:
        self._node = _Node(start)
        self._length: int | None = None

    def commit(self, text: Sequence[int]) -> None:
        """Hear what the text is by now; at first it is the prompt, which is none of the constraint's business."""
        if self._length is not None:
            self._node = self._node.follow(text[self._length :])
        self._length = len(text)

    def after(self, text: Sequence[int]) -> State | None:
        """What may follow a text that begins with the committed one; None: anything."""
        return self._node.follow(text[self._length :]).state
