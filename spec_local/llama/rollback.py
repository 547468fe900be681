"""How the sequences of models roll back.

A cell of the cache belongs to a position, and the last ones can be removed. A recurrent layer has one state
for the whole history instead, so that its last tokens cannot simply be removed. There are two substitutes:

- The model keeps the states after the last tokens of a call, and can return to each of them: once, until the
  next call. The state before the call is not among them.
- A checkpoint is a copy of the whole state. The tokens after it have to be evaluated again.
"""

from collections.abc import Sequence

from spec_local.core.sequence import ModelSequence, common_prefix


class RollsBack:
    """The methods of a `ModelSequence` that can roll back to any length, and knows of no other sequences."""

    def checkpoint(self) -> bool:
        """See `ModelSequence.checkpoint`; this one needs none."""
        return True

    def stops(self, tokens: Sequence[int]) -> Sequence[int]:
        """See `ModelSequence.stops`; this one needs none."""
        return ()

    def keep(self) -> None:
        """See `ModelSequence.keep`; this one needs none."""

    def reuse(self: ModelSequence, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """See `ModelSequence.reuse`."""
        n = common_prefix(self.cached, tokens)
        self.truncate(n)
        return n


class KeptStates:
    """The kept states of one recurrent sequence; its model does what this class decides.

    Args:
        max_rollback: number of tokens of a call, from its end, before each of which the state is kept.

    Attributes:
        checkpoint: number of tokens of the checkpoint; None: there is none.
        has_rolled_back: whether a kept state is in use since the last call: a copy would be that of the state
            after the call.
    """

    def __init__(self, max_rollback: int) -> None:
        self._max_rollback = max_rollback
        self._n_removable = 0
        self.has_rolled_back = False
        self.checkpoint: int | None = None

    def on_call(self) -> None:
        """Note that a call begins, which may fail."""
        self._n_removable = 0

    def on_evaluated(self, n: int) -> None:
        """Note that a call with n tokens of the sequence has succeeded."""
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

    def lacks(self, length: int) -> bool:
        """Return whether a checkpoint needs a copy of the state of `length` tokens; no tokens need none."""
        return length not in (0, self.checkpoint)

    def nearest(self, length: int) -> int:
        """Number of tokens of the checkpoint; 0: it has more than `length`, and is forgotten, or none."""
        self._forget(length)
        return self.checkpoint or 0

    def _forget(self, length: int) -> None:
        if self.checkpoint is not None and self.checkpoint > length:
            self.checkpoint = None
