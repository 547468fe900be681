"""Write models where other programs keep theirs, with nothing but a GGUF header."""

import hashlib
import json
from pathlib import Path

import gguf


def write_header(path: Path, architecture: str = "llama", **general: str | int) -> Path:
    """Write a GGUF file without tensors; general: metadata such as name="…", type="…"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in general.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"general.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_to_ollama(folder: Path, name: str, file: Path) -> Path:
    """Move a file into ollama's folder, as HOST/NAMESPACE/MODEL/TAG; return its new path."""
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
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def add_to_hub_cache(folder: Path, repo: str, *names: str) -> list[Path]:
    """Write files into the Hub's cache; return their paths in the snapshot."""
    place = folder / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text("c" * 40)
    return [write_header(place / "snapshots" / ("c" * 40) / name) for name in names]
