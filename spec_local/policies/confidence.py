"""A policy that stops drafting where the draft model is unsure; it looks at no costs."""

from typing import Self

from spec_local.policies.base import DraftOutput, Policy, PolicyOptions


class Confidence(Policy):
    """Stops before a draft token of too little confidence, as llama.cpp's ``--draft-p-min`` does.

    Args:
        p_min: minimum confidence, 0 to 1.
        may_truncate: see `Policy`.
    """

    draft_max = 16

    def __init__(self, p_min: float = 0.75, may_truncate: bool = True) -> None:
        super().__init__(may_truncate)
        self._p_min = p_min

    @classmethod
    def create(cls, options: PolicyOptions) -> Self:
        return cls(options.p_min, options.may_truncate)

    def wants_token(self, output: DraftOutput) -> bool:
        return output.confidence >= self._p_min
