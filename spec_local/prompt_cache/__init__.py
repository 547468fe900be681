"""Keep what a model computed for the beginnings of prompts, in memory and on disk.

Pure storage: bytes by the tokens that they depend on, and by an identity of the model. `cache` is the entry
point.
"""
