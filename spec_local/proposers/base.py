"""What every proposer takes and returns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from spec_local.core.language_model import Logits
from spec_local.core.proposal import Limit, Proposal
from spec_local.core.rng import Rng

__all__ = ["Lap", "Limit", "Proposer"]

Lap = Callable[[str], None]
"""``lap("draft model")`` books the time since the last lap under that name."""


class Proposer(Protocol):
    """Guesses how a history goes on. Any guess is allowed: the verifier keeps what is said exact.

    One rule keeps it so: whether a sampled token is proposed must not depend on tokens drawn after it, nor
    on how improbable it turned out to be. Stopping after a token is always allowed.
    """

    @property
    def needs_logits(self) -> bool:
        """Whether it wants to `observe`."""

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        """Read a prompt, in chunks between which the caller may stop; yields evaluated tokens."""

    def propose(self, history: Sequence[int], limit: Limit, rng: Rng, lap: Lap) -> Proposal:
        """Guess what may come after `history`; nothing is a fine answer."""

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        """Hear main's logits (n, V), of guesses that will be rejected, too: row i is what it expects after tokens[i].

        The first token is the history's last, those after it are the proposal's. Gone when this returns.
        """

    def commit(self, history: Sequence[int]) -> None:
        """Forget guesses that did not become history."""
