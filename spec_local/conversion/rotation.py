"""Rotary position embeddings: from config.json to llama.cpp's fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from spec_local.conversion.head import Value
from spec_local.conversion.settings import STRICT, Number, Positive, Size, read_settings, unsupported

_OUTER = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Settings that older configurations have beside the others."""
_PLAIN = (None, "default", "mrope")
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


class _Settings(BaseModel):
    """``rope_parameters`` or ``rope_scaling``. What it does not list cannot be converted."""

    model_config = STRICT | {"extra": "forbid"}

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Annotated[Number, Field(ge=1)] | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    attn_factor: Positive | None = None
    extrapolation_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    low_freq_factor: Positive = 1.0  # as published with Llama 3.1
    high_freq_factor: Positive = 4.0
    # Of models that read images; the main model's file decides.
    mrope_section: Any = None
    mrope_interleaved: Any = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a head rotates queries and keys.

    Attributes:
        n_rotated: number of the dimensions of an attention head that are rotated, the first ones.
        fields: of the GGUF header, without the architecture.
        factors: by which the angles are divided (half of an attention head's dimensions); None: by 1.
    """

    n_rotated: int
    fields: Mapping[str, Value] = field(default_factory=dict)
    factors: NDArray[np.float32] | None = None


def read_rotation(config: Mapping[str, Any], head_dim: int, folder: Path) -> Rotation:
    """Read how queries and keys are rotated.

    Args:
        config: that of the head; layers of different kinds must be rotated alike.
        head_dim: dimensions of an attention head.
        folder: for messages.

    Raises:
        ModelFileError: a setting is wrong or cannot be converted; the message names it.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    found = config.get(name) or {}
    if isinstance(found, dict) and found and all(isinstance(value, dict) for value in found.values()):
        by_layers = list(found.values())
        if any(other != by_layers[0] for other in by_layers):
            raise unsupported(folder, name, "it differs between layers")
        found = by_layers[0]
    if not isinstance(found, dict):
        raise unsupported(folder, name, "it is not an object")
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    settings = read_settings(_Settings, {**outer, **found}, folder)
    fields: dict[str, Value] = {}
    n_rotated = head_dim
    if settings.rope_theta is not None:
        fields["rope.freq_base"] = float(settings.rope_theta)
    if settings.partial_rotary_factor is not None:
        n_rotated = int(head_dim * settings.partial_rotary_factor)
        fields["rope.dimension_count"] = n_rotated
    if not n_rotated or n_rotated % 2:
        raise unsupported(folder, "partial_rotary_factor", f"it rotates {n_rotated} dimensions")
    kind, factor = settings.rope_type or settings.type, settings.factor
    original = settings.original_max_position_embeddings
    if kind in _PLAIN:
        return Rotation(n_rotated, fields)
    if kind not in ("linear", "yarn", "llama3"):
        raise unsupported(folder, f"{name}.rope_type", f"it is {kind!r}")
    if factor is None:
        raise unsupported(folder, f"{name}.factor", "it is missing")
    if kind == "linear":
        return Rotation(n_rotated, fields | _prefixed({"type": "linear", "factor": float(factor)}))
    if original is None:
        raise unsupported(folder, f"{name}.original_max_position_embeddings", "it is missing")
    if kind == "yarn":
        return Rotation(n_rotated, fields | _prefixed(_yarn(settings, factor, original)))
    low, high = settings.low_freq_factor, settings.high_freq_factor
    if low >= high:
        raise unsupported(folder, f"{name}.low_freq_factor", "it must be below the high one")
    theta = settings.rope_theta or 10_000.0  # the default of transformers
    frequencies = theta ** (-np.arange(0, n_rotated, 2) / n_rotated)
    # The share of each frequency that is kept, from 0 (long waves) to 1 (short ones).
    kept = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    factors = np.ones(head_dim // 2, np.float32)
    factors[: n_rotated // 2] = 1 / ((1 - kept) / factor + kept)
    return Rotation(n_rotated, fields, factors)


def _yarn(settings: _Settings, factor: float, original: int) -> dict[str, Value]:
    scaling: dict[str, Value] = {
        "type": "yarn",
        "factor": float(factor),
        "original_context_length": original,
    }
    for name, known in _YARN.items():
        if (value := getattr(settings, name)) is not None:
            scaling[known] = float(value)
    wanted = settings.attention_factor or settings.attn_factor
    if wanted is not None:
        # llama.cpp reads the first one, and computes its own instead; it is multiplied by the second one.
        scaling["yarn_attn_factor"] = float(wanted)
        scaling["attn_factor"] = wanted / (0.1 * math.log(factor) + 1)
    return scaling


def _prefixed(scaling: Mapping[str, Value]) -> dict[str, Value]:
    return {f"rope.scaling.{name}": value for name, value in scaling.items()}
