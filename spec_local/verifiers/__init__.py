"""Acceptance rules that preserve the main model's distribution, as pure functions with an explicit rng.

A verifier receives a proposal and the distributions p (main model) and q (draft model), and returns the
accepted path and the token after it. The output then has exactly the distribution p, whatever q is. To add a
verifier, write a module here that defines `VERIFIER`, and add a line to `VERIFIERS`. The tests enumerate
every verifier of that table.
"""

from typing import TYPE_CHECKING

from spec_local.core.lazy_table import LazyTable

if TYPE_CHECKING:
    from spec_local.verifiers.base import Verifier

VERIFIERS: LazyTable["Verifier"] = LazyTable(
    {
        "token": "spec_local.verifiers.chain:TOKEN",
        "block": "spec_local.verifiers.chain:BLOCK",
        "exact-match": "spec_local.verifiers.base:EXACT_MATCH",
        "spectr": "spec_local.verifiers.tree:SPECTR",
        "traversal": "spec_local.verifiers.traversal:VERIFIER",
    }
)
VERIFIER_NAMES = ("auto", *VERIFIERS)
