"""Estimate the memory of a session before it is opened, from the headers of its models' files.

They are read in a child process, since a damaged header can crash llama.cpp, and nothing of it then stays in
the memory of a server.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_local.errors import ModelFileError
from spec_local.models.names import FOUND_DRAFT, FOUND_PROJECTOR, NO_DRAFT
from spec_local.system.child_process import child_main, run_child


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """n_parallel: answers at the same time. needed: bytes of the models, of their caches, and of the rest.

    memory: bytes that are there for the session.
    """

    n_parallel: int
    needed: int
    memory: int = 0


def plan_memory(session: Mapping[str, Any], memory: int | None) -> MemoryPlan:
    """Choose the number of answers at the same time, and estimate the memory that all of it needs.

    Args:
        session: arguments of `Session.open`. If `parallel` is None, caches take up to half of the memory that
            the weights leave.
        memory: bytes that are there for the session; None: half of those that are free where it runs.

    Raises:
        ModelFileError: a file cannot be used.
    """
    arguments = json.dumps(dict(session), default=str), json.dumps(memory)
    result = run_child("spec_local.opening.memory_plan", *arguments)
    if not result.works and session["draft"] == FOUND_DRAFT:  # what is found may be damaged: it is not used
        return plan_memory({**session, "draft": NO_DRAFT}, memory)
    if result.crash:
        raise ModelFileError(
            f"{session['main']} crashes llama.cpp ({result.crash}): download it again; if other models crash "
            "too, run specdec doctor"
        )
    if result.error:
        raise ModelFileError(result.error)
    return MemoryPlan(**result.facts)


def _plan(session: Mapping[str, Any], memory: int | None) -> dict[str, int]:
    from itertools import islice

    from spec_local.calibration.cost_store import Conditions
    from spec_local.llama.devices import AUTO, offload_of
    from spec_local.llama.fitting import free_bytes
    from spec_local.llama.heads.choose import choose_head
    from spec_local.llama.model import Model
    from spec_local.models.pairs import OVERHEAD
    from spec_local.models.projectors import resolve_projector
    from spec_local.opening.drafters import find_drafters
    from spec_local.opening.loading import DEFAULT_CONTEXT, sequence_bytes, sequences_that_fit

    draft, wanted = session["draft"], session["n_ctx"] or DEFAULT_CONTEXT
    offload = offload_of(session.get("device", AUTO), session["gpu_layers"])
    memory = free_bytes(offload) // 2 if memory is None else memory
    main = Model(session["main"], weights=False, load_mtp=draft == FOUND_DRAFT)
    models = [main]
    if draft == FOUND_DRAFT and not choose_head(main):
        conditions = Conditions.of_file(main.path, offload, wanted, session["threads"], session["cache_type"])
        found = islice(find_drafters(conditions, sys.maxsize), 1)
        models += [Model(drafter.path, weights=False) for drafter in found]
    elif draft not in (FOUND_DRAFT, NO_DRAFT):
        models.append(Model(draft, weights=False))
    projector = resolve_projector(main.path, session.get("mmproj", FOUND_PROJECTOR))
    fixed = sum(model.size for model in models) + (projector.memory if projector else 0) + OVERHEAD
    size = sequence_bytes(models, [model.n_ctx(wanted) for model in models], session["cache_type"])
    n_parallel = session["parallel"] or sequences_that_fit(size, memory - fixed)
    return {"n_parallel": n_parallel, "needed": fixed + n_parallel * size, "memory": memory}


if __name__ == "__main__":
    child_main(lambda: _plan(json.loads(sys.argv[1]), json.loads(sys.argv[2])))
