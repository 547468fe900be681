"""Texts kept across sessions, as a source of draft tokens."""
