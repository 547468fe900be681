"""Quantized copies for drafting: of the main model itself, or of a draft model.

A copy of the main model has its vocabulary and mostly agrees with it. Calls of one token mostly read the
weights, so the cost of the copy's calls is assumed to be proportional to its size. A copy of half the size
gains little, and so does a copy that rarely agrees: see docs/pairs.md.
"""

import re
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from spec_local.calibration.cost_store import Conditions
from spec_local.errors import BackendError, InvalidRequest, ModelError, SpecLocalError
from spec_local.llama.devices import OFFLOADED, Offload
from spec_local.llama.headers import open_header
from spec_local.models import ollama
from spec_local.models.pairs import Expectation, expectation
from spec_local.system.child_process import DEADLINE_S, run_child
from spec_local.system.files import check_target, format_size, replacing
from spec_local.system.machine import default_threads

ACCEPTANCE_RATES = (0.8, 0.9, 0.95)
"""Usual acceptance rates of copies, and one that few of them reach."""
_PROGRAM = "spec_local.llama.quantize"
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a split model, whose copy is one file
_MAX_RATIO = 0.98  # of the model's bytes; the expected size is only accurate to a few kB


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """A possible copy.

    size: expected bytes of the file. source_size: bytes of the source model.
    """

    source: Path
    target: Path
    kind: str
    size: int
    source_size: int
    expectation: Expectation

    @property
    def size_ratio(self) -> float:
        """Bytes of the copy over those of the source."""
        return self.size / self.source_size


def plan(
    source: Path,
    kind: str,
    target: Path | None = None,
    *,
    main: Path | None = None,
    force: bool = False,
    n_ctx: int = 4096,
    threads: int | None = None,
    offload: Offload = OFFLOADED,
    cache_type: str = "f16",
) -> CopyPlan:
    """Check whether a copy is possible, and estimate its gain; nothing is written.

    Args:
        source: the model to copy.
        kind: one of `spec_local.llama.quantize.KINDS`.
        target: the file to write; None: beside the source, named after it and the kind.
        main: the model that the copy drafts for; None: the source.
        force: overwrite an existing file.
        n_ctx, threads, offload, cache_type: settings of the sessions whose measured costs are used.

    Raises:
        InvalidRequest: the target exists, or is the source; or ollama keeps the source, which deletes files
            beside its own, and there is no target.
        ModelFileError: a model cannot be read.
        ModelError: the copy would not be smaller than the source.
        BackendError: llama.cpp cannot make such a copy.
        SpecLocalError: the disk is too full.
    """
    if target is None and ollama.keeps(source):
        raise InvalidRequest(f"{source} belongs to ollama: give the copy another place with `target`")
    target = target or source.with_name(f"{_PART.sub('', source.stem)}-{kind}.gguf")

    def size_and_conditions(path: Path) -> tuple[int, Conditions]:
        with closing(open_header(path)) as model:
            size, length = model.size, model.n_ctx(n_ctx)
        return size, Conditions(path, offload, threads or default_threads(), length, cache_type)

    source_size, drafting = size_and_conditions(source)
    main_size, verifying = size_and_conditions(main) if main else (source_size, drafting)
    header = max(0, source.stat().st_size - source_size)  # 0 for a split model
    check_target(target, source, force=force)
    size = quantize(source, kind)["size"]
    if size > _MAX_RATIO * source_size:
        raise ModelError(
            f"{source.name} has {format_size(source_size)} and a {kind} copy would have {format_size(size)}: "
            "give a `kind` with fewer bits"
        )
    expected = expectation(verifying, drafting, size / main_size, ACCEPTANCE_RATES, copied=size / source_size)
    assert expected  # it can be estimated
    _check_room(target, size + header)
    return CopyPlan(source, target, kind, size + header, source_size + header, expected)


def make(copy: CopyPlan, *, threads: int | None = None) -> Path:
    """Write the copy; on failure, no file is left behind.

    Raises:
        BackendError: llama.cpp failed; the message gives the reason.
        OSError: the folder is not writable.
    """
    with replacing(copy.target) as temporary:
        quantize(copy.source, copy.kind, temporary, threads)
        shutil.copymode(copy.source, temporary)  # temporary files are readable only by their owner
    return copy.target


def quantize(
    source: Path, kind: str, target: Path | None = None, threads: int | None = None
) -> dict[str, int]:
    """Quantize in a child process, since llama.cpp may crash; without a target, only compute the size.

    Raises:
        BackendError: llama.cpp failed or crashed; the message gives the reason.
    """
    writing = [str(target), str(threads or default_threads())] if target else []
    # quantizing takes hours for the largest models; Ctrl-C ends it
    result = run_child(_PROGRAM, str(source), kind, *writing, deadline=None if target else DEADLINE_S)
    if result.error:
        raise BackendError(result.error)
    if result.crash:
        raise BackendError(
            f"llama.cpp crashed while quantizing {source} ({result.crash}): "
            "free some memory, give another `kind`, or run specdec doctor"
        )
    return result.facts


def _check_room(target: Path, size: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise SpecLocalError(
            f"the copy needs {format_size(size)} and {folder} has {format_size(free)} free: "
            "free some space, or give a `target` on another disk"
        )
