"""Cost tables on disk, so that a pair of models is measured once on a machine and known better with every answer."""

import contextlib
import hashlib
import json
from pathlib import Path

import platformdirs
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from spec_local.costs import CostTable
from spec_local.files import write_atomically
from spec_local.llama import runtime
from spec_local.llama.build import processor_features
from spec_local.llama.context import Context


class _File(BaseModel):
    """model: for people who look. seconds: of a call, by its tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    seconds: dict[PositiveInt, PositiveFloat]


def path_of(context: Context) -> Path:
    """Where the costs of a context are kept: by all that they depend on."""
    file = context.model.path
    stat = file.stat()
    facts = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, context.model.gpu_layers]
    facts += [
        context.threads,
        context.n_ctx,
        context.cache_type,
        context.max_tokens,
        context.max_branches > 1,
    ]
    facts += [runtime.build_identity(), *sorted(processor_features())]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return Path(platformdirs.user_cache_dir("specdec")) / "costs" / f"{name}.json"


def load(context: Context) -> CostTable | None:
    """What is known of a context's costs; None: nothing, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, ValidationError):
        known = _File.model_validate_json(path_of(context).read_bytes())
        if known.seconds:
            return CostTable(known.seconds)
    return None


def save(context: Context, table: CostTable) -> None:
    """Keep a table for the next time; a cache folder that cannot be written to is no reason to fail."""
    known = _File(model=context.model.path.name, seconds=table.costs)
    with contextlib.suppress(OSError):
        write_atomically(path_of(context), known.model_dump_json().encode())
