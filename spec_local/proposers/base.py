"""The interface of a proposer."""

from collections.abc import Sequence
from typing import Protocol

from spec_local.core.calls import Logits
from spec_local.core.proposal import Limit, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sequence import Head
from spec_local.policies.sharing import SharedCosts


class Proposer(Protocol):
    """Drafts tokens that may follow a history. Any draft is allowed: verification keeps the output exact.

    `prefill` and `propose` are coroutines that await calls of models (see `spec_local.core.calls`), which
    requests share.

    One rule applies to drawn tokens: whether one is proposed must not depend on tokens drawn after it, nor
    on its own probability. Stopping after a token is always allowed.
    """

    @property
    def needs_logits(self) -> bool:
        """True if `observe` must be called."""

    @property
    def head(self) -> Head | None:
        """The head that reads the main model's hidden states, which it must receive; None: there is none."""

    @property
    def main_costs(self) -> SharedCosts | None:
        """What is known of the main model's costs; None: nothing."""

    async def prefill(self, history: Sequence[int]) -> None:
        """Read a prompt. The caller may stop after any of the calls."""

    async def propose(self, history: Sequence[int], limit: Limit, rng: Rng) -> Proposal:
        """Draft tokens that may follow `history`, within the limit; possibly none."""

    def shorten(self, proposal: Proposal) -> None:
        """Note that only this part of the last proposal is verified."""

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        """Receive the main model's logits (n, V), a view: the i-th score the token after tokens[i].

        The first token is the last of the history; the others are those of the proposal, rejected ones
        included.
        """

    def commit(self, history: Sequence[int]) -> None:
        """Discard draft tokens that are not part of the history."""
