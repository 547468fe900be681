"""Guesses that cost no call of a model: what stood after text like this before.

To add one: a module here with a class of `Lookup`'s form, a branch in `spec_local.assembly.ProposerFactory.lookups`, and its name in
``tests/unit/test_decoding.py``, which proves for each that it changes nothing of what is said.
"""

from spec_local.datastore.lookup import DatastoreLookup
from spec_local.lookups.base import Candidates, Lookup
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup

__all__ = ["Candidates", "DatastoreLookup", "Lookup", "PromptLookup", "Recycling", "SuffixLookup"]
