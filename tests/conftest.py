"""Property tests try the same examples in every run: a new defect must not stop an unrelated change.

To search with other examples: ``pytest --hypothesis-profile=default``.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
