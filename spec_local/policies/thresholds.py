"""Policies that stop drafting where the draft model is unsure; they look at no costs."""

import math
from collections.abc import Sequence
from typing import Self

from spec_local.policies.base import DraftOutput, Policy, PolicyOptions


class Confidence(Policy):
    """Stops before a draft token of too little confidence, as llama.cpp's ``--draft-p-min`` does.

    Args:
        p_min: minimum confidence, 0 to 1.
        may_truncate, n_staged: see `Policy`.
    """

    draft_max = 16

    def __init__(self, p_min: float = 0.75, may_truncate: bool = True, n_staged: int = 0) -> None:
        super().__init__(may_truncate, n_staged)
        self._p_min = p_min

    @classmethod
    def create(cls, options: PolicyOptions) -> Self:
        return cls(options.p_min, options.may_truncate, options.n_staged or 0)

    def should_draft(self, output: DraftOutput) -> bool:
        return output.confidence >= self._p_min


class Entropy(Policy):
    """AdaEDL (Agrawal et al. 2024, arXiv 2410.18351): 1 − √(γ·H(q)) is a lower bound of the acceptance rate.

    Drafting stops where the bound falls below a threshold, which moves so that the wanted share of draft
    tokens is accepted (section 3.2 of the paper, with its constants).

    Args:
        wanted: share of draft tokens to be accepted.
        may_truncate, n_staged: see `Policy`.
    """

    draft_max = 16

    def __init__(self, wanted: float = 0.9, may_truncate: bool = True, n_staged: int = 0) -> None:
        super().__init__(may_truncate, n_staged)
        self._wanted = wanted
        self._threshold, self._rate = 0.5, wanted

    @classmethod
    def create(cls, options: PolicyOptions) -> Self:
        return cls(may_truncate=options.may_truncate, n_staged=options.n_staged or 0)

    def should_draft(self, output: DraftOutput) -> bool:
        return 1.0 - math.sqrt(0.2 * output.entropy) >= self._threshold

    def observe(self, drafted: Sequence[int], output: Sequence[int], n_verified: int) -> None:
        if not drafted:
            # A threshold that stops every draft would never learn of another one.
            self._threshold = max(0.0, self._threshold - 0.01)
            return
        pairs = enumerate(zip(drafted, output, strict=False))
        n_accepted = next((i for i, (token, generated) in pairs if token != generated), len(drafted))
        self._rate = 0.5 * self._rate + 0.5 * n_accepted / len(drafted)
        moved = self._threshold + math.copysign(0.01, self._wanted - self._rate)
        self._threshold = min(1.0, max(0.0, 0.9 * self._threshold + 0.1 * moved))
