"""Policies that stop a draft where it is unsure: no costs, one number."""

import math
from collections.abc import Sequence

from spec_local.policies.base import DraftOutput, Policy


class Confidence(Policy):
    """Stops before a guess that the draft is not sure enough of, as llama.cpp's --draft-p-min does.

    Args:
        p_min: least confidence, 0 to 1.
    """

    name = "confidence"

    def __init__(self, p_min: float = 0.75, may_cut: bool = True, n_staged: int = 0) -> None:
        super().__init__(may_cut, n_staged)
        self._p_min = p_min

    def takes(self, opinion: DraftOutput) -> bool:
        return opinion.confidence >= self._p_min


class Entropy(Policy):
    """AdaEDL (Agrawal et al. 2024, arXiv 2410.18351): 1 − √(γ·H(q)) bounds the chance of acceptance from below.

    A draft ends where the bound falls below a threshold, which moves so that the wanted share of the
    guesses is accepted (section 3.2 of the paper, and its constants).

    Args:
        wanted: share of guesses to be accepted.
    """

    name = "entropy"

    def __init__(self, wanted: float = 0.9, may_cut: bool = True, n_staged: int = 0) -> None:
        super().__init__(may_cut, n_staged)
        self._wanted = wanted
        self._threshold, self._rate = 0.5, wanted

    def takes(self, opinion: DraftOutput) -> bool:
        return 1.0 - math.sqrt(0.2 * opinion.entropy) >= self._threshold

    def learn(self, guesses: Sequence[int], said: Sequence[int], n_tested: int) -> None:
        if not guesses:
            # A threshold that stops every draft would never hear of one again.
            self._threshold = max(0.0, self._threshold - 0.01)
            return
        stood = next((i for i, (g, s) in enumerate(zip(guesses, said, strict=False)) if g != s), len(guesses))
        self._rate = 0.5 * self._rate + 0.5 * stood / len(guesses)
        moved = self._threshold + math.copysign(0.01, self._wanted - self._rate)
        self._threshold = min(1.0, max(0.0, 0.9 * self._threshold + 0.1 * moved))
