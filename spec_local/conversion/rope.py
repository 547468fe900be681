"""Rotary position embedding: from config.json to the fields of a GGUF header."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from spec_local.conversion.head import Value
from spec_local.errors import ModelError, ModelFileError
from spec_local.validation import describe


class _Rope(BaseModel):
    """``rope_scaling``, or ``rope_parameters`` of transformers 5; the defaults are those of transformers."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str = "default"
    rope_theta: PositiveFloat = 10000.0
    factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt = 8192
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None


def rope(settings: Mapping[str, Any], width: int) -> tuple[dict[str, Value], NDArray[np.float32] | None]:
    """The fields of the header, and the divisors of the frequencies (``rope_freqs``), if there are any.

    Args:
        settings: the config.json, or that of one layer.
        width: of an attention head; all of it is rotated.

    Raises:
        ModelFileError: a value is invalid.
        ModelError: llama.cpp has no such scaling for heads.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    try:
        values = {"rope_theta": settings.get("rope_theta"), "rope_type": given.get("type")}
        values |= given
        found = _Rope.model_validate({key: value for key, value in values.items() if value is not None})
    except (AttributeError, TypeError, ValidationError) as error:
        why = describe(error) if isinstance(error, ValidationError) else "it is not an object"
        raise ModelFileError(f"config.json has an invalid `rope_scaling` ({why}): correct it") from None
    fields: dict[str, Value] = {"rope.dimension_count": width, "rope.freq_base": found.rope_theta}
    match found.rope_type:
        case "default" | "mrope":  # the positions of text are the same on all axes
            return fields, None
        case "llama3":
            return fields, _llama3(found, width)
        case "linear" | "yarn" as kind:
            fields |= {"rope.scaling.type": kind, "rope.scaling.factor": found.factor}
        case other:
            raise ModelError(
                f"`rope_scaling` of the type {other} cannot be converted (llama.cpp does not support it for "
                "heads): use another head"
            )
    if found.rope_type == "yarn":
        fields["rope.scaling.original_context_length"] = found.original_max_position_embeddings
        names = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        for name, attribute in names.items():
            if (value := getattr(found, attribute)) is not None:
                fields[f"rope.scaling.yarn_{name}"] = float(value)
    return fields, None


def _llama3(rope: _Rope, width: int) -> NDArray[np.float32]:
    """The divisors of the frequencies in Llama 3.1 (transformers, ``_compute_llama3_parameters``)."""
    frequencies = rope.rope_theta ** -(np.arange(0, width, 2) / width)
    lengths = 2 * math.pi / frequencies  # in tokens
    low, high = rope.low_freq_factor, rope.high_freq_factor
    n = rope.original_max_position_embeddings
    if low == high:
        raise ModelFileError(
            "config.json has an invalid `rope_scaling` (its two factors are equal): correct it"
        )
    part = np.clip((n / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - part) / rope.factor + part)).astype(np.float32)
