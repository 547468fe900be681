"""A policy that stops drafting where the draft model is unsure; it looks at no costs."""

from spec_local.policies.base import DraftOutput, Policy, PolicyOptions


class Confidence(Policy):
    """Stops before a draft token of too little confidence, as llama.cpp's ``--draft-p-min`` does."""

    draft_max = 16

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._p_min = options.p_min

    def wants_token(self, output: DraftOutput) -> bool:
        return output.confidence >= self._p_min
