"""The proposer of an answer, assembled from its settings."""

import pytest

from spec_local.answers.assembly import ProposerFactory, Slot
from spec_local.core.proposal import Limit
from spec_local.lookups.recycling import Recycling
from spec_local.settings import GenerationSettings


@pytest.mark.parametrize(("policy", "shortest"), [("adaptive", 2), ("fixed", 3), ("confidence", 3)])
def test_prompt_lookup_accepts_short_matches_only_with_a_policy_that_calibrates_them(policy, shortest):
    slots = [Slot(None, None, None, Recycling())]
    factory = ProposerFactory(slots, costs=lambda: (None, None))
    [lookup] = factory.lookups(GenerationSettings(policy=policy, proposer="lookup"))
    for match in (1, 2, 3):
        history = [7, 8, 9, 1, *[7, 8, 9][3 - match :]]
        assert bool(lookup.find(history, Limit(8, 8, 1)).tokens) == (match >= shortest)
