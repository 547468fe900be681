"""The implementations of all lookups, policies and verifiers. To add one, write its module and a line here.

Values are `module:attribute`. Nothing is imported before it is used, so that `specdec --help` can list the
names without loading NumPy or llama.cpp.
"""

import importlib
from collections.abc import Mapping
from typing import Any

LOOKUPS: Mapping[str, str] = {
    "suffix": "spec_local.lookups.suffixes:SuffixLookup",
    "lookup": "spec_local.lookups.prompt_lookup:PromptLookup",
    "recycling": "spec_local.lookups.recycling:Recycling",
}
"""Proposers that need no model: implementations of `spec_local.lookups.base.Lookup` with a classmethod
``create(calibrated)``, which is called for each answer. Recycling is one object per session."""

POLICIES: Mapping[str, str] = {
    "adaptive": "spec_local.policies.adaptive:Adaptive",
    "fixed": "spec_local.policies.base:Policy",
    "confidence": "spec_local.policies.thresholds:Confidence",
    "entropy": "spec_local.policies.thresholds:Entropy",
}
"""Draft-length policies: subclasses of `spec_local.policies.base.Policy`."""

VERIFIERS: Mapping[str, str] = {
    "token": "spec_local.verifiers.token:VERIFIER",
    "block": "spec_local.verifiers.block:VERIFIER",
    "exact-match": "spec_local.verifiers.exact_match:VERIFIER",
    "specinfer": "spec_local.verifiers.specinfer:VERIFIER",
    "sequoia": "spec_local.verifiers.sequoia:VERIFIER",
    "spectr": "spec_local.verifiers.spectr:VERIFIER",
    "top-one": "spec_local.verifiers.top_one:VERIFIER",
    "traversal": "spec_local.verifiers.traversal:VERIFIER",
}
"""Acceptance rules: instances of `spec_local.verifiers.base.Verifier`."""

PROPOSER_NAMES = ("auto", "draft", *LOOKUPS, "none")
POLICY_NAMES = (*POLICIES, "off")
VERIFIER_NAMES = ("auto", *VERIFIERS)
SHAPE_NAMES = ("chain", "tree", "beam", "auto")
CROSS_VOCAB_NAMES = ("auto", "tli", "slem")


def load(target: str) -> Any:
    """Import the object that a value of one of the tables refers to."""
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)
