"""Answer many prompts from a file."""

from spec_local.batch.answers import BatchPrompt
from spec_local.batch.runner import BatchOutcome, read_entries, run

__all__ = ["BatchOutcome", "BatchPrompt", "read_entries", "run"]
