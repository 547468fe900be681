"""Texts that are kept across sessions as a source of draft tokens."""
