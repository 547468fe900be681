"""Fixtures and settings of all tests.

Property tests try the same examples in every run: a new defect must not stop an unrelated change. To search
with other examples: ``pytest --hypothesis-profile=default``.

Threads of llama.cpp that wait for each other sleep. By default they spin, and where several tests share the
cores, each spins through the time that the others need: tests of two threads took 80 times as long.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the OpenMP library is loaded

settings.register_profile("repeatable", derandomize=True, max_examples=50)
settings.load_profile("repeatable")
