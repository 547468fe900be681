"""What every proposer takes and returns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_local.dice import Dice
from spec_local.sampling import Distribution

Lap = Callable[[str], None]
"""``lap("draft model")`` books the time since the last lap under that name."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of guessed tokens, and the distribution that each was drawn from (q).

    A guess without probabilities has `Distribution.certain`: it stands with exactly p of it.
    """

    tokens: Sequence[int] = ()
    distributions: Sequence[Distribution] = ()

    @classmethod
    def certain(cls, tokens: Sequence[int]) -> "Proposal":
        return cls(tokens, [Distribution.certain(t) for t in tokens])


class Proposer(Protocol):
    """Guesses how a history goes on. Any guess is allowed: the verifier keeps what is said exact.

    One rule keeps it so: whether a sampled token is proposed must not depend on tokens drawn after it, nor
    on how improbable it turned out to be. Stopping after a token is always allowed.
    """

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        """Read a prompt, in chunks between which the caller may stop; yields evaluated tokens."""

    def propose(self, history: Sequence[int], limit: int, dice: Dice, lap: Lap) -> Proposal:
        """Guess up to `limit` (≥ 1) tokens after `history`; none is a fine answer."""

    def commit(self, history: Sequence[int]) -> None:
        """Forget guesses that did not become history."""
