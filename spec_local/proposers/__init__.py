"""Where guesses come from.

To add a proposer: a module here with a class of `Proposer`'s form, a branch in
`spec_local.session.Session._proposer`, and its name in ``tests/unit/test_decoding.py``, which proves for each
that it changes nothing of what is said.
"""

from spec_local.proposers.base import Proposal, Proposer
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "PromptLookup", "Proposal", "Proposer"]
