"""Bookkeeping of the kept states of a recurrent model's history, which determine how it can roll back.

A recurrent layer has one state for the whole history instead of cells with positions, so that its last tokens
cannot simply be removed. There are two substitutes:

- The model keeps the states after the last tokens of a call, and can return to each of them: once, until the
  next call. The state before the call is not among them.
- A checkpoint is a copy of the whole state. The tokens after it have to be evaluated again.
"""

from typing import Literal

Kind = Literal["usual", "lasting"]
"""Kind of a checkpoint: one that moves from step to step, or one for later answers."""
KINDS: tuple[Kind, ...] = ("usual", "lasting")


class KeptStates:
    """The kept states of one row; the row's model does what this class decides.

    Args:
        max_rollback: number of tokens of a call, from its end, before each of which the state is kept.

    Attributes:
        checkpoints: number of tokens of the checkpoints.
        has_rolled_back: whether a kept state is in use since the last call: a copy would be that of the state
            after the call.
    """

    def __init__(self, max_rollback: int) -> None:
        self._max_rollback = max_rollback
        self._n_removable = 0
        self.has_rolled_back = False
        self.checkpoints: dict[Kind, int] = {}

    def on_call(self) -> None:
        """Note that a call begins, which may fail."""
        self._n_removable = 0

    def on_evaluated(self, n: int) -> None:
        """Note that a call with n tokens of the row has succeeded."""
        self._n_removable, self.has_rolled_back = min(n - 1, self._max_rollback), False

    def on_copied(self) -> None:
        """Note that a copy shares the state until the next call: removing tokens would change both."""
        self._n_removable = 0

    def on_replaced(self) -> None:
        """Note that the state was replaced by another one."""
        self._n_removable, self.has_rolled_back = 0, False

    def can_remove(self, n: int) -> bool:
        """Return whether the last n tokens can be removed by a kept state."""
        return 0 < n <= self._n_removable

    def on_removed(self, length: int) -> None:
        """Note that a kept state is in use, of a history of `length` tokens."""
        self._n_removable, self.has_rolled_back = 0, True
        self._forget(length)

    def lacks(self, length: int, kind: Kind) -> bool:
        """Return whether a checkpoint of this kind needs a copy of the state of `length` tokens.

        An empty history needs none.
        """
        return length not in (0, self.checkpoints.get(kind))

    def nearest(self, length: int) -> Kind | None:
        """The longest checkpoint of up to `length` tokens; None: there is none. Longer ones are forgotten."""
        self._forget(length)
        return max(self.checkpoints, key=self.checkpoints.__getitem__, default=None)

    def _forget(self, length: int) -> None:
        self.checkpoints = {kind: n for kind, n in self.checkpoints.items() if n <= length}
