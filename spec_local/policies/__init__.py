"""Length policies: who guesses in a step, and how far.

To add one: a subclass of `Policy` in a module here, and its name in `spec_local/settings.py`, a branch in `Session._policy` and
`PolicyChoice` (`cli/specdec_cli/options.py`). The whole losslessness suite runs it from one line in `WAYS` of
``tests/unit/test_policies.py``.
"""

from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import DraftOutput, Offer, Policy, Source
from spec_local.policies.experience import Experience
from spec_local.policies.thresholds import Confidence, Entropy

__all__ = ["Adaptive", "Confidence", "DraftOutput", "Entropy", "Experience", "Offer", "Policy", "Source"]
