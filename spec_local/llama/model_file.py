"""Tell what a file is before llama.cpp opens it as a model, and what to do where llama.cpp cannot."""

import re
from pathlib import Path

from spec_local.errors import ModelFileError
from spec_local.llama import gguf_header
from spec_local.llama.gguf_header import OTHER_TYPES
from spec_local.system.files import NotRegular, opened

_BEGINNING = 24  # bytes, of which eight from the eighth on are the number of tensors
_LFS = b"version https://git-lfs"
_ADVICE = {  # by what llama.cpp's reason contains
    "unknown model architecture": "use a model that generates text; if it is one, update llama-cpp-python",
    "unknown pre-tokenizer|invalid ggml type|up to version": "the file is newer than llama.cpp here: update "
    "llama-cpp-python",
    "no longer supported": "the file is too old: download a newer one, or convert the model again",
    "endian": "the file is for machines with another byte order: download another one",
    "failed to open GGUF|split": "put all parts of the model into one folder, and give the first one",
    "file bounds|corrupted|failed to read": "the file is incomplete: download it again",
    "remaining file size": "the file is incomplete or damaged: download it again",
}
_UNKNOWN = "the file may be damaged or in a newer format; download it again or update llama-cpp-python"


def check_header(path: Path) -> None:
    """Check that a file exists, is readable and starts like a GGUF file of a model.

    Raises:
        ModelFileError: one of these checks failed; the message says what the file is, if that is known.
    """
    check_gguf(path)
    if what := _no_model(path):
        raise ModelFileError(f"{path} is {what}")


def check_gguf(path: Path) -> None:
    """Check that a file exists, is readable and starts like a GGUF file; raises as `check_header`."""
    try:
        if path.is_dir():
            if any(path.glob("*.safetensors")):
                raise ModelFileError(_not_converted(path, path))
            raise ModelFileError(f"{path} is a folder, not a model file: give the path of a .gguf file")
        with opened(path) as file:
            start = file.read(_BEGINNING)
    except NotRegular:
        raise ModelFileError(f"{path} is not a regular file: give the path of a .gguf file") from None
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path} cannot be read ({why}): check its permissions") from None
    if not start:
        raise ModelFileError(f"{path} is empty: download it again")
    if path.suffix == ".safetensors" or start[8:9] == b"{":  # the length of a header, and its JSON
        raise ModelFileError(_not_converted(path, path.parent))
    if start.startswith(_LFS):
        raise ModelFileError(f"{path} stands for a file in Git LFS: run git lfs pull in its folder")
    if start[:4] != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file: give a model in GGUF format")


def failure(path: Path, reason: str) -> ModelFileError:
    """The error for a file that llama.cpp did not load, with its reason and what to do."""
    with opened(path) as file:
        if file.read(_BEGINNING)[8:16] == bytes(8):
            return ModelFileError(f"{path} is a vocabulary without weights: give a complete model")
    advice = next((advice for part, advice in _ADVICE.items() if re.search(part, reason)), _UNKNOWN)
    return ModelFileError(f"{path} cannot be loaded ({reason}): {advice}")


def _no_model(path: Path) -> str | None:
    """What a GGUF file is that is no model, and what to give instead; None: it may be a model."""
    known = gguf_header.read_metadata(path)
    if isinstance(part := known.get("split.no"), int) and part:
        return f"part {part + 1} of {known.get('split.count', '?')} of a model: give the first part"
    kind, architecture = (str(known.get(f"general.{key}", "")) for key in ("type", "architecture"))
    if what := OTHER_TYPES.get(kind) or OTHER_TYPES.get(architecture):
        return what
    if gguf_header.NO_TEXT.search(architecture):
        return (
            f"a model that does not generate text ({architecture}): use one that does, such as Qwen or Llama"
        )
    return None


def _not_converted(path: Path, folder: Path) -> str:
    return (
        f"{path} has weights in safetensors format, not GGUF: convert it with llama.cpp's "
        f"convert_hf_to_gguf.py {folder} --outfile model.gguf, a head with specdec draft convert {folder}, "
        "or pull a GGUF file of this model from the Hub"
    )
