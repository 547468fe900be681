"""Lossless acceptance rules: pure functions that take their dice.

A rule gets p and q of a proposal and says which of its tokens stand, and which token comes after them, so
that what is emitted has exactly main's distribution, whatever q is. To add one: a module here with a
function of `Verifier`'s form, its name in `VERIFIERS`, and its exact enumeration in
``tests/unit/test_verifiers.py``.
"""

from spec_local.verifiers.block import verify_block
from spec_local.verifiers.chain import Verdict, Verifier
from spec_local.verifiers.token import verify_tokens

VERIFIERS: dict[str, Verifier] = {"block": verify_block, "token": verify_tokens}

__all__ = ["VERIFIERS", "Verdict", "Verifier", "verify_block", "verify_tokens"]
