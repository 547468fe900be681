"""Forced tokens: where a grammar or JSON schema leaves one text, its tokens are drafted without a model."""

from collections.abc import Sequence

from spec_local.core.calls import Logits
from spec_local.core.constraint import Constraint
from spec_local.core.proposal import EMPTY, Limit, Proposal


class ForcedTokens:
    """Proposes what the constraint of an answer hardly leaves a choice about: see `State.forced`.

    Args:
        constraint: of the main model's sampler.
    """

    name = "forced"
    needs_logits = False

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        state = self._constraint.after(history)
        found = state.forced(min(limit.depth, limit.nodes)) if state else ()
        if not found:
            return EMPTY
        tokens, confidence = zip(*found, strict=True)
        return Proposal.chain(tokens, source=self.name, confidence=confidence)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass
