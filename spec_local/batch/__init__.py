"""Answer many prompts from a file."""

from spec_local.batch.answers import Entry
from spec_local.batch.runner import Outcome, read_entries, run

__all__ = ["Entry", "Outcome", "read_entries", "run"]
