"""What every proposer takes and returns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_local.dice import Dice
from spec_local.proposal import Proposal

Lap = Callable[[str], None]
"""``lap("draft model")`` books the time since the last lap under that name."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How large a proposal may be: its depth, its nodes and its leaves; each at least 1."""

    depth: int
    nodes: int
    branches: int


class Proposer(Protocol):
    """Guesses how a history goes on. Any guess is allowed: the verifier keeps what is said exact.

    One rule keeps it so: whether a sampled token is proposed must not depend on tokens drawn after it, nor
    on how improbable it turned out to be. Stopping after a token is always allowed.
    """

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        """Read a prompt, in chunks between which the caller may stop; yields evaluated tokens."""

    def propose(self, history: Sequence[int], limit: Limit, dice: Dice, lap: Lap) -> Proposal:
        """Guess what may come after `history`; nothing is a fine answer."""

    def commit(self, history: Sequence[int]) -> None:
        """Forget guesses that did not become history."""
