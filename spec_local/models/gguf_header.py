"""Read the first metadata of a GGUF file without llama.cpp: fast, and safe for a damaged file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from io import BytesIO
from pathlib import Path

Metadata = dict[str, str | int | float]

_READ = 1 << 16  # bytes; what describes a model comes before its vocabulary, which is larger than this
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # for struct
_STRING, _ARRAY = 8, 9
_OTHER_TYPES = ("adapter", "mmproj", "imatrix")
_NO_TEXT = re.compile(r"bert|clip|encoder|embedding|vae|whisper")  # architectures


def read_metadata(path: Path) -> Metadata:
    """Numbers and texts up to the vocabulary, by their full names; none if it is no readable GGUF file."""
    try:
        if not path.is_file():  # opening a pipe would block
            return {}
        with path.open("rb") as file:
            data = BytesIO(file.read(_READ))
        if data.read(4) != b"GGUF" or _number(data, "I") < 2:
            return {}
        _number(data, "Q")  # number of tensors
        n = int(_number(data, "Q"))
    except (OSError, ValueError, struct.error):
        return {}
    found: Metadata = {}
    try:
        for _ in range(n):
            key = _text(data)
            if key.startswith("tokenizer."):
                break
            value = _value(data, int(_number(data, "I")))
            if value is not None:
                found[key] = value
    except (EOFError, KeyError, ValueError, struct.error):  # the end of what was read, or damage
        pass
    return found


def generates_text(metadata: Metadata) -> bool:
    """Return whether it is a model or a head, not an adapter, image projector or embedding model."""
    architecture = str(metadata.get("general.architecture", ""))
    return bool(
        architecture
        and metadata.get("general.type") not in _OTHER_TYPES
        and not _NO_TEXT.search(architecture)
        and not metadata.get(f"{architecture}.pooling_type")
    )


def describe(metadata: Metadata) -> str:
    """The model's name and quantization, such as ``Llama 3.2 3B Instruct, Q4_K_M``, in one line."""
    import gguf  # takes 0.1 s

    words = [str(metadata.get(f"general.{key}", "")) for key in ("architecture", "size_label")]
    name = str(metadata.get("general.name", "")) or " ".join(filter(None, words))
    try:
        kind = gguf.LlamaFileType(metadata.get("general.file_type")).name
    except ValueError:
        kind = ""
    quantization = re.sub("^(MOSTLY|ALL)_", "", kind)
    return ", ".join(filter(None, [" ".join(name.split()), quantization]))


def _value(data: BytesIO, kind: int) -> str | int | float | None:
    """Read a value; None for an array, which is skipped."""
    if kind == _STRING:
        return _text(data)
    if kind != _ARRAY:
        return _number(data, _SCALARS[kind])
    kind, n = int(_number(data, "I")), int(_number(data, "Q"))
    if kind == _STRING:
        for _ in range(n):
            _text(data)
    else:
        data.seek(min(n, _READ) * struct.calcsize(_SCALARS[kind]), 1)
    return None


def _number(data: BytesIO, form: str) -> int | float:
    value: int | float = struct.unpack(f"<{form}", data.read(struct.calcsize(form)))[0]
    return value


def _text(data: BytesIO) -> str:
    n = int(_number(data, "Q"))
    if n > _READ or len(text := data.read(n)) < n:
        raise EOFError
    return text.decode("utf-8", "replace")
