"""Exact-match verification: the main model samples, and a draft token is accepted if it is that sample.

A draft token is accepted with probability p. Sampling depends on the position (`Rng.choose_at`), so that a
seed gives the same output whatever was drafted. Lossless for nodes selected in any way.
"""

from spec_local.verifiers.base import Verifier

VERIFIER = Verifier("chosen")
