"""Draft-length policies: what drafts in each step, and how many tokens.

To add one, subclass `Policy` in a module here and add its line to `POLICIES`.
"""

from typing import TYPE_CHECKING

from spec_local.core.lazy_table import LazyTable

if TYPE_CHECKING:
    from spec_local.policies.base import Policy

POLICIES: LazyTable["type[Policy]"] = LazyTable(
    {
        "adaptive": "spec_local.policies.adaptive:Adaptive",
        "fixed": "spec_local.policies.base:Policy",
        "confidence": "spec_local.policies.base:Confidence",
    }
)
POLICY_NAMES = (*POLICIES, "off")
