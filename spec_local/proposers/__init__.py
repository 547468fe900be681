"""Where guesses come from.

`guided` chooses among them step by step, as a length policy (`spec_local.policies`) says. To add a proposer: a module here with
a class of `Proposer`'s form, a branch in `spec_local.session.Session._proposer`, and its name in ``tests/unit/test_decoding.py``, which proves for each
that it changes nothing of what is said. What a draft model is asked to read is a shape: `shapes`.
"""

from spec_local.proposers.base import Limit, Proposer
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Beam, BestFirst, Chain, Drawn, Shape
from spec_local.proposers.string_level import StringLevelDraft

__all__ = [
    "Beam",
    "BestFirst",
    "Chain",
    "CombinedProposer",
    "DraftModel",
    "Drawn",
    "Limit",
    "Proposer",
    "Shape",
    "StringLevelDraft",
]
