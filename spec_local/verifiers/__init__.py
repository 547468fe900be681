"""Acceptance rules that preserve the main model's distribution, as pure functions with an explicit rng.

A verifier receives a proposal and the distributions p (main model) and q (draft model), and returns the
accepted path and the token after it. The output then has exactly the distribution p, whatever q is. To add a
verifier, write a module here that defines `VERIFIER`, and add a line to `VERIFIERS` in `spec_local.registry`.
The tests enumerate every verifier of that table.
"""

from spec_local import registry
from spec_local.verifiers.base import Verifier

VERIFIERS: dict[str, Verifier] = {name: registry.load(target) for name, target in registry.VERIFIERS.items()}

__all__ = ["VERIFIERS", "Verifier"]
