"""Costs on disk, per model, machine and settings: measured, or estimated until answers have shown them."""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from spec_local.calibration.measure import without_falls
from spec_local.llama.devices import Offload, usable_gpus
from spec_local.llama.draft_vocabulary import USUAL_FIRST
from spec_local.llama.gguf_header import read_metadata
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.runtime import fingerprint
from spec_local.llama.sequence import LlamaSequence
from spec_local.policies.cost_model import CostModel
from spec_local.system.files import write_atomically
from spec_local.system.folders import user_folder
from spec_local.system.json_file import JsonRecord, read_record
from spec_local.system.machine import default_threads
from spec_local.text import printable

_MAX_BYTES = 1 << 16  # of a file; one for every call of up to 512 tokens has 15 kB
_Size = Annotated[int, Field(ge=1, le=1 << 16)]  # the largest batch
_Seconds = Annotated[float, Field(gt=0, lt=86_400)]  # a day
_Multiple = Annotated[float, Field(ge=1, le=1 << 16)]  # of a call of one token


class _CostFile(JsonRecord):
    """model: file name, for people who look. seconds: of a call, by its number of tokens.

    estimates: see `CostModel`; empty if all has been measured. checked: when a call of several tokens was
    last timed to see whether the costs still hold, in seconds since 1970. others: cores that other programs
    used on average meanwhile.
    """

    model: str
    # the time to build a `CostModel` grows with the cube of the sizes: 1 s for 512
    seconds: Annotated[dict[_Size, _Seconds], Field(max_length=512)]
    estimates: Annotated[dict[_Size, _Multiple], Field(max_length=64, default_factory=dict)]
    checked: Annotated[float, Field(ge=0)] = 0.0
    others: Annotated[float, Field(ge=0)] = 0.0


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """Costs of earlier sessions; checked, others: see `_CostFile`."""

    costs: CostModel
    checked: float
    others: float


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions that a model's costs depend on, besides the machine.

    path: the model's file. branching: whether the context can evaluate trees. is_head: whether it evaluates a
    head, whose layer may be in the main model's file. workers: the other machines that hold its layers.
    n_first: the tokens whose output rows all calls compute; 0: all.
    """

    path: Path
    offload: Offload
    threads: int
    n_ctx: int
    cache_type: str = "f16"
    branching: bool = False
    is_head: bool = False
    workers: tuple[str, ...] = ()
    n_first: int = 0

    @classmethod
    def of_file(
        cls,
        path: Path,
        offload: Offload,
        wanted: int,
        threads: int | None = None,
        cache_type: str = "f16",
        workers: tuple[str, ...] = (),
    ) -> "Conditions":
        """The conditions of one answer with the model in a file, of which only the header is read.

        Args:
            wanted: context length in tokens, limited to that of the training. threads: None: the default.
        """
        header = read_metadata(path)
        trained = header.get(f"{header.get('general.architecture')}.context_length")
        n_ctx = min(wanted, trained) if isinstance(trained, int) and trained > 0 else wanted
        return cls(path, offload, threads or default_threads(), n_ctx, cache_type, workers=workers)

    @classmethod
    def of(cls, sequence: LlamaSequence | HeadSequence) -> "Conditions":
        """The conditions of a context."""
        return cls(
            sequence.model.path,
            sequence.model.offload,
            sequence.threads,
            sequence.n_ctx,
            sequence.cache_type,
            sequence.limits.max_branches > 1,
            isinstance(sequence, HeadSequence),
            sequence.model.workers,
            sequence.draft_vocabulary.n_first if sequence.draft_vocabulary else 0,
        )


def path_of(conditions: LlamaSequence | HeadSequence | Conditions) -> Path:
    """The file for costs measured under these conditions.

    Raises:
        OSError: the model's file no longer exists.
    """
    known = _conditions(conditions)
    name = fingerprint(
        known.path,
        str(known.offload),
        *(gpu.description for gpu in usable_gpus(known.offload)),
        known.threads,
        known.n_ctx,
        known.cache_type,
        known.branching,
        *["head"] * known.is_head,
        *known.workers,
        *[f"first {known.n_first} tokens"] * (known.n_first > 0),
    )
    return user_folder("cache") / "costs" / f"{name}.json"


def read(conditions: LlamaSequence | HeadSequence | Conditions) -> StoredCosts | None:
    """Costs of earlier sessions, without what is impossible.

    None if there are none or their file is damaged.
    """
    with contextlib.suppress(OSError, ValueError):
        known = read_record(path_of(conditions), _CostFile, _MAX_BYTES)
        if known.seconds:
            costs = CostModel(without_falls(known.seconds), known.estimates)
            return StoredCosts(costs, known.checked, known.others)
    return None


def measured(conditions: LlamaSequence | HeadSequence | Conditions) -> StoredCosts | None:
    """Costs of earlier sessions if all have been measured, and none are estimates."""
    found = read(conditions)
    return found if found and not found.costs.estimates else None


def measured_drafting(conditions: Conditions) -> StoredCosts | None:
    """`measured` for a model that drafts: with the usual part of its vocabulary, or else with all of it."""
    parts = (measured(replace(conditions, n_first=n)) for n in (*USUAL_FIRST, conditions.n_first))
    return next(filter(None, parts), None)


def save(
    conditions: LlamaSequence | HeadSequence | Conditions,
    costs: CostModel,
    checked: float | None = None,
    others: float = 0.0,
) -> None:
    """Write costs for later sessions, without what is impossible (`without_falls`).

    Nothing happens if the cache folder is not writable, or some of the costs are estimates and others have
    been measured since they were checked.

    Args:
        checked: see `_CostFile`; None: now.
        others: see `_CostFile`.
    """
    estimates, checked = costs.estimates, time.time() if checked is None else checked
    there = read(conditions) if estimates else None
    if there and not there.costs.estimates and there.checked > checked:
        return
    observed = {n: seconds for n, seconds in costs.costs.items() if n not in estimates}
    content = _CostFile(
        model=printable(_conditions(conditions).path.name),
        seconds=without_falls(observed),
        estimates=estimates,
        checked=checked,
        others=others,
    )
    with contextlib.suppress(OSError):
        write_atomically(path_of(conditions), content.model_dump_json().encode())


def _conditions(conditions: LlamaSequence | HeadSequence | Conditions) -> Conditions:
    return conditions if isinstance(conditions, Conditions) else Conditions.of(conditions)
