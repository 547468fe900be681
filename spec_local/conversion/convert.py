"""Convert the folder of a published head, whatever its layout, into a GGUF file for its main model."""

import glob
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from spec_local.conversion import block, eagle, mtp
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.writer import write_head
from spec_local.errors import ModelError
from spec_local.llama.headers import open_header
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import size_label
from spec_local.system.files import check_target

_LAYOUTS = (eagle, block, mtp)
"""Each with `recognizes` and `convert`; the first that recognizes a folder converts it."""
_OF_HEADS = (
    *("draft_vocab_size", "eagle_config", "dflash_config", "speculators_model_type"),
    *("ptd_token_id", "parallel_drafting"),
)
_NAMES = re.compile(r"eagle|dflash|dspark|speculator", re.IGNORECASE)  # in the names of architectures
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # at the end of the name of a part of a split model


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a head, as far as it says."""
    is_named = any(key in config for key in _OF_HEADS) or _NAMES.search(str(config.get("architectures")))
    return bool(is_named) or config.get("num_hidden_layers") == 1


def converted(main: Path, name: str) -> Path | None:
    """The file that `convert_head` has written for a head beside its main model; None: there is none."""
    return next(main.parent.glob(f"*-{glob.escape(_ending(main, name))}"), None)


def _ending(main: Path, name: str) -> str:
    return f"{_PART.sub('', main.stem)}-{name}.gguf"


def convert_head(
    folder: Path,
    main: Path,
    output: Path | None = None,
    kind: str = "Q8_0",
    *,
    name: str | None = None,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the GGUF file of a head, and return its path; it is checked with llama.cpp.

    Args:
        folder: contains config.json and ``*.safetensors``.
        main: the main model that the head was trained for.
        output: the file to write; None: beside the main model, where sessions find it.
        kind: type of the matrices, one of `spec_local.conversion.writer.KINDS`.
        name: of the head; None: that of the folder.
        force: replace an existing file.
        log: called with one line that says what is converted.

    Raises:
        InvalidRequest: an unknown `kind`, or the output exists or cannot be written.
        ModelFileError: a file of the folder is missing or damaged.
        ModelError: the head does not fit the main model, or has a part that llama.cpp does not evaluate.
    """
    checkpoint = Checkpoint(folder)
    layout = next((each for each in _LAYOUTS if each.recognizes(checkpoint)), None)
    if not layout:
        named = checkpoint.config.get("architectures") or checkpoint.config.get("model_type")
        raise ModelError(
            f"{folder} has no layout that can be converted (architectures: {named}): give an EAGLE-3, "
            "DFlash or DSpark head, or a model with layers for multi-token prediction"
        )
    with closing(open_header(main)) as model:
        choose_head(model)  # refuses a head in its place
        head = layout.convert(checkpoint, model)
        name = name or folder.absolute().name
        output = output or main.with_name(f"{head.architecture}-{_ending(main, name)}")
        check_target(output, main, force=force)
        log(f"converting {name} ({head.layout}) for {main.name} to {kind}")
        origin = {"general.name": name}
        if head.rest:  # which llama.cpp does not count
            origin["general.size_label"] = size_label(head.n_parameters)
        return write_head(output, head, model, kind, origin)
