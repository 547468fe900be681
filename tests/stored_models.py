"""Write models where other programs keep theirs, with nothing but a GGUF header."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np


def write_header(path: Path, architecture: str = "llama", *, width: int = 0, **general: str | int) -> Path:
    """Write a GGUF file without tensors.

    width: of the embeddings; 0: it is not given. general: metadata such as name="…", type="…".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if width:
        writer.add_embedding_length(width)
    for key, value in general.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"general.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_projector(
    path: Path,
    width: int = 64,
    *,
    kind: str = "idefics3",
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    keys: Mapping[str, str | int | bool] | None = None,
    **general: str | int,
) -> Path:
    """Write a projector of 256 × 256 pixels, with tensors of zeros.

    Args:
        width: of its vectors. kind: its type.
        tensors: shapes by name, with the first dimension as in ggml; None: a matrix of Idefics 3.
        keys: further metadata below ``clip.``, or in place of the usual.
        general: metadata such as name="…", file_type=1.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "clip")
    values = {
        "has_vision_encoder": True, "projector_type": kind, "vision.image_size": 256, "vision.patch_size": 16,
        "vision.embedding_length": 48, "vision.feed_forward_length": 96, "vision.projection_dim": width,
    } | dict(keys or {})  # fmt: skip
    named = {f"general.{key}": value for key, value in general.items()}
    for key, value in {**named, **{f"clip.{key}": value for key, value in values.items()}}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    for name, shape in ({"mm.model.fc.weight": (32, width)} if tensors is None else tensors).items():
        writer.add_tensor(name, np.zeros(shape[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_to_ollama(folder: Path, name: str, file: Path, projector: Path | None = None) -> Path:
    """Move a file into ollama's folder, as HOST/NAMESPACE/MODEL/TAG; return its new path.

    projector: a file that becomes another layer.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    file.rename(blob)
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'0' * 64}", "size": 3},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 4},
    ]
    if projector:
        digest = hashlib.sha256(f"{name} projector".encode()).hexdigest()
        projector.rename(blob.with_name(f"sha256-{digest}"))
        media_type = "application/vnd.ollama.image.projector"
        layers.append({"mediaType": media_type, "digest": f"sha256:{digest}", "size": 5})
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def add_to_hub_cache(folder: Path, repo: str, *names: str) -> list[Path]:
    """Write files into the Hub's cache; return their paths in the snapshot."""
    place = folder / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text("c" * 40)
    return [write_header(place / "snapshots" / ("c" * 40) / name) for name in names]
