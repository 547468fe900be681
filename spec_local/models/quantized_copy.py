"""A copy of a model in fewer bits, as a draft: of main for itself, or of a draft that shall guess quicker.

A copy of main has its vocabulary and mostly its opinion, and reads less. A call of one token is mostly reading the weights, so
that the copy's calls are taken to cost the model's in the proportion of their bytes. A copy of half of main's size cannot win
much, and one that says nonsense cannot either: see docs/pairs.md.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.child_process import run_child
from spec_local.errors import BackendError, InvalidRequest, ModelError, SpecLocalError
from spec_local.files import format_size, replacing
from spec_local.llama.headers import open_header
from spec_local.machine import default_threads
from spec_local.models.pairs import ExpectedSpeedup, expected_speedups
from spec_local.policies.cost_model import CostModel

ACCEPTANCE_RATES = (0.8, 0.9, 0.95)
"""That a guess of the copy stands: usual ones, and one that few copies reach."""
_PROGRAM = "spec_local.llama.quantize"
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a split model, which becomes one file
_SMALLER = 0.98  # of the model's bytes, at most; the size to expect is known to some kB only


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """A copy that could be made.

    size: bytes of the file to expect. source_size: bytes of the model that is copied. expected_speedups: None where main, or that
    model, was never measured here.
    """

    source: Path
    target: Path
    kind: str
    size: int
    source_size: int
    expected_speedups: Sequence[ExpectedSpeedup] | None

    @property
    def size_ratio(self) -> float:
        """Of the model's bytes, those that the copy has."""
        return self.size / self.source_size

    @property
    def cannot_pay(self) -> bool:
        """Whether it is known that guessing with it would not pay even if nearly every guess stood."""
        return self.expected_speedups is not None and not self.expected_speedups[-1].draft_length


def plan(
    source: Path,
    kind: str,
    target: Path | None = None,
    *,
    main: Path | None = None,
    force: bool = False,
    n_ctx: int = 4096,
    threads: int | None = None,
    gpu_layers: int = -1,
    cache_type: str = "f16",
) -> CopyPlan:
    """See whether a copy can be made, and what it would bring; nothing is written.

    Args:
        source: the model that is copied.
        kind: one of `spec_local.llama.quantize.KINDS`.
        target: the copy's file; None: the model's name and the kind, beside the model.
        main: whom the copy shall guess for; None: the model itself.
        force: overwrite what is there.
        n_ctx, threads, gpu_layers, cache_type: of the sessions to come, whose costs are looked up.

    Raises:
        InvalidRequest: the target is there already, or is the model itself.
        ModelFileError, ModelError: a model cannot be read or cannot take guesses back, or this one is as small already.
        BackendError: llama.cpp cannot make such a copy.
        SpecLocalError: there is no room on the disk.
    """
    target = target or source.with_name(f"{_PART.sub('', source.stem)}-{kind}.gguf")

    def looked_up(path: Path) -> tuple[int, CostModel | None]:
        with closing(open_header(path)) as model:
            model.check_can_roll_back()
            size, length = model.size, model.n_ctx(n_ctx)
        conditions = Conditions(path, gpu_layers, threads or default_threads(), length, cache_type)
        return size, cost_store.load(conditions)

    source_size, costs = looked_up(source)
    mains = looked_up(main)[1] if main else costs
    header = max(0, source.stat().st_size - source_size)  # of a split model: nothing
    check_target(target, source, force=force)
    size = quantize(source, kind)["size"]
    if size > _SMALLER * source_size:
        raise ModelError(
            f"{source.name} has {format_size(source_size)} already and a {kind} copy would have {format_size(size)}: "
            "give a --type of fewer bits"
        )
    known = None
    if costs and mains:
        share = size / source_size
        copy = CostModel({n: seconds * share for n, seconds in costs.costs.items()})
        known = expected_speedups(mains, copy, ACCEPTANCE_RATES)
    _check_room(target, size + header)
    return CopyPlan(source, target, kind, size + header, source_size + header, known)


def check_target(target: Path, source: Path, *, force: bool) -> None:
    """Refuse to write a draft over the model that it is made of, a folder or, without force, whatever is there.

    Raises:
        InvalidRequest: it would be.
    """
    if target.exists():
        if target.samefile(source):
            raise InvalidRequest(f"{target} is the model itself: give another --output")
        if target.is_dir():
            raise InvalidRequest(f"{target} is a folder: give the path of a file")
        if not force:
            raise InvalidRequest(
                f"{target} is there already: give another --output, or --force to replace it"
            )


def make(copy: CopyPlan, *, threads: int | None = None) -> Path:
    """Make the copy; its file appears whole or not at all.

    Raises:
        BackendError: llama.cpp could not do it; the message quotes its reason.
        OSError: the folder cannot be written to.
    """
    with replacing(copy.target) as temporary:
        quantize(copy.source, copy.kind, temporary, threads)
        shutil.copymode(copy.source, temporary)  # a temporary file is for its owner only
    return copy.target


def quantize(
    source: Path, kind: str, target: Path | None = None, threads: int | None = None
) -> dict[str, int]:
    """Quantize in a child process, which may die of it; without a target nothing is written, and the size is told.

    Raises:
        BackendError: llama.cpp could not do it, or died; the message quotes its reason.
    """
    more = [str(target), str(threads or default_threads())] if target else []
    verdict = run_child(_PROGRAM, str(source), kind, *more)
    if verdict.error:
        raise BackendError(verdict.error)
    if verdict.crash:
        raise BackendError(
            f"llama.cpp's quantizer died on {source} ({verdict.crash}): free some memory, give another --type, or run specdec doctor"
        )
    return verdict.facts


def _check_room(target: Path, size: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise SpecLocalError(
            f"the copy takes {format_size(size)} and {folder} has {format_size(free)} free: make room, or give --output on another disk"
        )
