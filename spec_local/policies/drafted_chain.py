"""A chain that the draft model drafts: whether its next token is worth a call."""

from dataclasses import replace

import numpy as np

from spec_local.core.proposal import Proposal
from spec_local.policies.base import DraftOutput
from spec_local.policies.choice import best_prefix
from spec_local.policies.cost_model import CallCosts, Floats
from spec_local.policies.sharing import StepCosts


class DraftedChain:
    """The chain of one step, as far as it has been drafted.

    Args:
        costs, draft: seconds of the main and the draft model's calls.
        rate: acceptance rate of tokens that have not been drafted yet.
        n_max: maximum number of draft tokens.
        may_lose: plain steps that the step may cost beyond a plain one.
        may_truncate: see `Policy`.

    Attributes:
        spent: seconds of drafting up to now that this step must repay; negative: what later steps repay.
        confidence: of each output of the draft model.
        values: probability that draft tokens 1 … i are all accepted.
    """

    def __init__(
        self,
        costs: StepCosts,
        draft: CallCosts,
        rate: float,
        n_max: int,
        may_lose: float,
        may_truncate: bool,
        spent: float,
    ) -> None:
        self._costs, self._draft, self._rate = costs, draft, rate
        self._n_max, self._may_lose, self._may_truncate = n_max, may_lose, may_truncate
        self.spent = spent
        self.confidence: list[float] = []
        self.values: list[float] = []

    def wants_call(self) -> bool:
        """Return whether more tokens promise more tokens per second than those that there are."""
        value = self.values[-1] if self.values else 1.0
        return not self.confidence or self._gains_by(self._ahead(value, 1), 1)

    def wants_token(self, output: DraftOutput, acceptance: float) -> bool:
        """Note an output of the draft model, and return whether to draw a token from it.

        acceptance: of such a token.
        """
        if output.n_read:
            self.spent += self._draft.seconds(output.n_read)
        self.confidence.append(output.confidence)
        value = acceptance * (self.values[-1] if self.values else 1.0)
        # What is drawn must be verified, if it must not be truncated: see that it pays before.
        if not self._may_truncate and not self._gains_by(np.append(value, self._ahead(value, 0)), 0):
            return False
        self.values.append(value)
        return True

    def best_part(self, proposal: Proposal) -> Proposal:
        """The part of the drafted tokens to verify."""
        n = len(proposal.tokens)
        values = np.array(self.values[:n])
        if self._may_truncate:
            n = best_prefix(values, self.spent + self._costs.verifying).n
        return replace(proposal, values=values.tolist()).first(n)

    @property
    def _later(self) -> float:
        """Seconds of another call of the draft model; 0: the first one has drafted all."""
        return 0.0 if self._draft.drafts_blocks else self._draft.seconds(1)

    def _ahead(self, value: float, n_calls: int) -> Floats:
        """Values of further tokens, as far as the budget allows; the first one needs n_calls more calls."""
        affordable = self._costs.affordable(self._may_lose, self.spent + n_calls * self._later)
        n = min(self._n_max, affordable) - len(self.values)
        found: Floats = value * self._rate ** np.arange(1.0, n + 1.0)
        return found

    def _gains_by(self, ahead: Floats, n_calls: int) -> bool:
        """Return whether tokens of these values gain, the first one of which needs n_calls more calls."""
        n = len(self.values)
        least = 0 if self._may_truncate else n  # tokens that are verified in any case
        values = np.concatenate((self.values, ahead))
        seconds = self.spent + self._costs.verifying[: len(values) + 1]
        seconds[n + 1 :] += self._later * np.arange(n_calls, n_calls + len(seconds) - n - 1)
        best = best_prefix(values[least:], seconds[least:], 1.0 + sum(self.values[:least]))
        return least + best.n > n
