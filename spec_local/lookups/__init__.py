"""Proposers that need no model: they predict the next tokens from earlier tokens or earlier logits.

To add one: write a module here with a class that implements `Lookup`, and add its line to `LOOKUPS`.
"""

from typing import Any

from spec_local.core.lazy_table import LazyTable

LOOKUPS: LazyTable[Any] = LazyTable(
    {
        "suffix": "spec_local.lookups.suffixes:SuffixLookup",
        "lookup": "spec_local.lookups.prompt_lookup:PromptLookup",
        "recycling": "spec_local.lookups.recycling:Recycling",
    }
)
"""Implementations of `Lookup` with a classmethod ``create(calibrated)``, which is called for each answer.
Recycling is one object per slot, and is not created so."""
