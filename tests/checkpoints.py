"""Folders in the layout of the Hugging Face Hub: config.json, and tensors in a safetensors file."""

import json
from pathlib import Path

import numpy as np

from spec_local import bfloat16

NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL", "uint16": "BF16"}
"""Of the types; uint16 has the bits of bfloat16."""


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Write a folder.

    kind: F32, or BF16, to which matrices and vectors in float32 are rounded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "BF16":
        tensors = {
            name: bfloat16.encode(values) if values.dtype == np.float32 else values
            for name, values in tensors.items()
        }
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The content of a safetensors file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": NAMES[str(values.dtype)],
            "shape": list(values.shape),
            "data_offsets": offsets,
        }
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
