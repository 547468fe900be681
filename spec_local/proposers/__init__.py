"""Proposers: everything that drafts tokens for the main model to verify.

`combined.CombinedProposer` chooses in each step among lookups (`spec_local.lookups`) and a draft model, as a
policy (`spec_local.policies`) decides. A draft model drafts a chain or a tree: `shapes`.

To add a lookup, a policy or a verifier, write one module and add one line to the table of its package;
``tests/unit/test_decoding.py`` then checks that it leaves the output distribution unchanged.
"""

from spec_local.lookups import LOOKUPS

PROPOSER_NAMES = ("auto", "draft", *LOOKUPS, "none")
SHAPE_NAMES = ("chain", "tree", "beam", "auto")
