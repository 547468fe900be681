"""Proposers: everything that drafts tokens for the main model to verify.

`CombinedProposer` chooses in each step among lookups (`spec_local.lookups`) and a draft model, as a policy
(`spec_local.policies`) decides. A draft model drafts a chain or a tree: `shapes`.

To add a lookup, a policy or a verifier, write one module and add one line to `spec_local.registry`;
``tests/unit/test_decoding.py`` then checks that it leaves the output distribution unchanged.
"""

from spec_local.proposers.base import Limit, Proposer
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Beam, BestFirst, Chain, Coupled, Drawn, Shape
from spec_local.proposers.string_level import StringLevelDraft

__all__ = [
    "Beam",
    "BestFirst",
    "Chain",
    "CombinedProposer",
    "Coupled",
    "DraftModel",
    "Drawn",
    "Limit",
    "Proposer",
    "Shape",
    "StringLevelDraft",
]
