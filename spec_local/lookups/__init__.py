"""Proposers that need no model: they predict the next tokens from earlier tokens or earlier logits.

To add one: write a module here with a class that implements `spec_local.lookups.base.Lookup`, and add its
line to `LOOKUPS` in `spec_local.registry`.
"""

from spec_local.lookups.base import Candidates, Lookup
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup

__all__ = ["Candidates", "Lookup", "PromptLookup", "Recycling", "SuffixLookup"]
