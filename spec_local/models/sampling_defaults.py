"""The sampling settings that a model's file recommends, which are defaults, as in llama.cpp."""

import contextlib
import math
from pathlib import Path
from typing import Any

from spec_local.core.sampling_settings import SETTINGS
from spec_local.errors import InvalidRequest
from spec_local.llama.gguf_header import read_metadata


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Fields of `SamplingSettings` by name, without those that the file does not have or that are wrong."""
    metadata, found = read_metadata(path), dict[str, Any]()
    for setting in SETTINGS:
        value = metadata.get(f"general.sampling.{setting.gguf}")
        if isinstance(value, int | float) and math.isfinite(value):
            value = setting.foreign(setting.kind(round(value, 6)))  # 0.6 as float32 is 0.60000002…
            if setting.field == "temperature":
                value = max(0.0, value)
            with contextlib.suppress(InvalidRequest):
                found[setting.field] = setting.check(setting.field, value)
    return found
