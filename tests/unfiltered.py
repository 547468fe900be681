"""Sampling settings for tests of exactness: no token is filtered out, unless a setting says so."""

from dataclasses import replace

from spec_local.core.sampling_settings import UNCHANGED


def unfiltered(temperature=1.0, **changes):
    return replace(UNCHANGED, temperature=temperature, **changes)
