"""The sampling settings that a model's file recommends, which are defaults, as in llama.cpp."""

import contextlib
import math
from pathlib import Path
from typing import Any

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.llama.gguf_header import read_metadata

_WHOLE_CONTEXT = 2**31 - 1  # llama.cpp's -1
_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
    "penalty_window": "penalty_last_n",
}
"""Fields of `SamplingSettings`, and their keys after ``general.sampling.``; there are other samplers, too."""


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Fields of `SamplingSettings` by name, without those that the file does not have or that are wrong."""
    metadata, found = read_metadata(path), dict[str, Any]()
    for name, key in _KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and math.isfinite(value):
            value = round(value, 6)  # 0.6 as float32 is 0.60000002…
            if name == "penalty_window":
                value = _WHOLE_CONTEXT if value == -1 else int(value)
            elif name == "top_k":
                value = max(0, int(value))
            elif name == "temperature":
                value = max(0.0, value)
            given: dict[str, Any] = {name: value}
            with contextlib.suppress(InvalidRequest):
                SamplingSettings(**given)
                found |= given
    return found
