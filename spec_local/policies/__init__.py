"""Draft-length policies: what drafts in each step, and how many tokens.

To add one, subclass `Policy` in a module here and add its line to `spec_local.registry.POLICIES`.
"""

from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import DraftOutput, Offer, Policy, PolicyOptions, Source
from spec_local.policies.experience import Experience
from spec_local.policies.thresholds import Confidence, Entropy

__all__ = [
    "Adaptive",
    "Confidence",
    "DraftOutput",
    "Entropy",
    "Experience",
    "Offer",
    "Policy",
    "PolicyOptions",
    "Source",
]
