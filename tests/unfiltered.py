"""Sampling settings for tests of exactness, and values that are not the defaults."""

from dataclasses import replace

from spec_local.core.sampling_settings import SETTINGS, UNCHANGED, SamplingSettings


def unfiltered(temperature=1.0, **changes):
    """Settings with which no token is filtered out, unless a change does so."""
    return replace(UNCHANGED, temperature=temperature, **changes)


def changed_values():
    """Each setting that options and bodies have, with a value that is not its default."""
    for setting in SETTINGS:
        if setting.kind:
            value = ["x"] if setting.kind == list[str] else setting.check.least
            yield setting, value + 1 if value == getattr(SamplingSettings(), setting.field) else value
