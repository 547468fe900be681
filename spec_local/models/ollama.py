"""Find the GGUF files of ollama by the names that its users type, such as ``llama3.2:3b``.

    manifests/HOST/NAMESPACE/MODEL/TAG      JSON with the layers of a model; one of them is the GGUF file
    blobs/sha256-HASH                       a layer

A name without a host is of ollama's own registry, one without a namespace is of its library, and one without
a tag has the tag ``latest``. A name with a namespace but no host looks like a file of the Hugging Face Hub
(``user/repo:quant``): it needs the prefix ``ollama:``, which all others may have.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from spec_local.models import program_folders
from spec_local.system.folders import user_folder

PROGRAM = "ollama"
PREFIX = "ollama:"
PROJECTOR = ".mmproj"
"""In the name of a link to a projector."""
_REGISTRY, _LIBRARY, _LATEST = "registry.ollama.ai", "library", "latest"
_PART = r"\w[\w.-]*"
_NAME = re.compile(rf"((?:{_PART}/){{0,2}}{_PART})(?::({_PART}))?")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_PROJECTOR_LAYER = "application/vnd.ollama.image.projector"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def is_name(name: str) -> bool:
    """Return whether a name can only be one of ollama: with a tag or the prefix, not user/repo:quant."""
    if name.startswith(PREFIX):
        return _NAME.fullmatch(name.removeprefix(PREFIX)) is not None
    return ":" in name and name.count("/") != 1 and _NAME.fullmatch(name) is not None


def find(name: str) -> Path | None:
    """The file of a model by its name in ollama; the tag may be missing. None if ollama does not have it."""
    blob = _find_blob(name)
    return linked(name, blob) if blob else None


def _find_blob(name: str) -> Path | None:
    plain = name.removeprefix(PREFIX)
    match = _NAME.fullmatch(plain)
    if not match or (plain == name and name.count("/") == 1):
        return None
    parts = [*[_REGISTRY, _LIBRARY][: 2 - match[1].count("/")], *match[1].split("/")]
    files = (
        _file(folder, folder.joinpath("manifests", *parts, match[2] or _LATEST))
        for folder in program_folders.ollama()
    )
    return next(filter(None, files), None)


def projector(path: Path) -> tuple[str, Path] | None:
    """The name of a model and its projector's blob, given its own blob or a link to it; None: it has none.

    Models that ollama runs by its own programs, such as its gemma3, have all in one file, and no projector.
    """
    blob = path.resolve()
    for name, folder, manifest in _manifests():
        model = _file(folder, manifest)
        if model and model.resolve() == blob and (found := _file(folder, manifest, _PROJECTOR_LAYER)):
            return name, found
    return None


def linked(name: str, blob: Path, kind: str = "") -> Path:
    """A link to a blob, or the blob if the link cannot be made.

    Answers, messages and the names of derived files contain the file's name: that of a blob is a hash.

    kind: what comes between the model's name and the suffix, such as PROJECTOR.
    """
    plain = name.removeprefix(PREFIX)
    tag = "" if ":" in plain else f":{_LATEST}"
    link = user_folder("cache") / PROGRAM / f"{plain}{tag}{kind}.gguf"
    try:
        # Another target: ollama has pulled a new version.
        if not link.is_symlink() or link.readlink() != blob.absolute():
            link.parent.mkdir(parents=True, exist_ok=True)
            new = link.with_name(f".{link.name}.{os.getpid()}")
            new.symlink_to(blob.absolute())
            new.replace(link)
    except OSError:
        return blob
    return link


def models() -> Iterator[tuple[str, Path]]:
    """The name and the file of every model, with its tag."""
    for name, folder, manifest in _manifests():
        if path := _file(folder, manifest):
            yield name, path


def _manifests() -> Iterator[tuple[str, Path, Path]]:
    """Every model's name with its tag, the folder of its blobs, and its manifest."""
    for folder in program_folders.ollama():
        for manifest in program_folders.content(folder / "manifests", "*/*/*/*"):
            host, namespace, model, tag = manifest.relative_to(folder / "manifests").parts
            name = f"{model}:{tag}"
            if host != _REGISTRY:
                name = f"{host}/{namespace}/{name}"
            elif namespace != _LIBRARY:
                name = f"{PREFIX}{namespace}/{name}"
            if is_name(name):
                yield name, folder, manifest


def keeps(path: Path) -> bool:
    """Return whether a file is one of ollama's blobs, or a link to one."""
    blob = path.resolve()
    return blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name) is not None


def _file(folder: Path, manifest: Path, layer_type: str = _MODEL_LAYER) -> Path | None:
    """The file of a manifest's model, or of another layer; None if one is missing, unreadable or damaged."""
    try:
        layers = program_folders.read_json(manifest)["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == layer_type)
        blob = folder / "blobs" / f"sha256-{_DIGEST.fullmatch(digest)[1]}"  # type: ignore[index]
    except (LookupError, TypeError, StopIteration):
        return None
    return None if program_folders.size_of(blob) is None else blob
