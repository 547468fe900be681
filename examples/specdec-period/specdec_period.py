"""A lookup in a package of its own, which specdec finds by its entry point in pyproject.toml.

pip install ./examples/specdec-period
specdec generate --proposer period "1, 2, 1, 2, 1,"
"""

from collections.abc import Sequence

from spec_local.core.calls import Logits
from spec_local.core.proposal import Limit, Proposal

LONGEST = 32  # tokens of a period
CONFIDENCE = 0.8  # that a period which occurred twice goes on with its next token


class PeriodLookup:
    """Proposes the next period of a text whose last two periods are equal."""

    name, needs_logits = "period", False

    @classmethod
    def create(cls, calibrated: bool) -> "PeriodLookup":
        """Called for each answer."""
        return cls()

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        last = list(history[-2 * LONGEST :])
        for n in range(1, len(last) // 2 + 1):
            if last[-n:] == last[-2 * n : -n]:
                tokens = last[-n:][: min(limit.depth, limit.nodes)]
                confidence = [CONFIDENCE] * len(tokens)
                return Proposal.chain(tokens, source=self.name, confidence=confidence)
        return Proposal()

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        """Called with the main model's logits where `needs_logits` is True."""
