"""A training of a second: short answers and no measurements; time advances with the main model's calls."""

from itertools import count
from types import SimpleNamespace

from spec_local.training import data_stage, distillation, measurement, precision
from spec_local.training.recipe import Recipe, RunLimits

LIMITS = RunLimits(n_parallel=16, answer=48, built_in=6, evaluations=6)


def shorten(patch):
    """Let all trainings of this process be quick, also those of the command; patch: a `MonkeyPatch`."""
    ticks = count()
    patch.setitem(Recipe.__init__.__kwdefaults__, "limits", LIMITS)
    patch.setattr(precision, "fastest_copy", lambda main, *_, **__: main)
    patch.setattr(data_stage, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
    patch.setattr(distillation, "steps_per_second", lambda *_, **__: 20.0)
    patch.setattr(measurement, "measure_calls", lambda *_, **__: None)
    patch.setattr(measurement, "expected_gain", lambda *_, **__: measurement.HeadGain(0.1, 2, 1.25, 50.0))
    patch.setattr(measurement, "benchmark", lambda *_, **__: [])
