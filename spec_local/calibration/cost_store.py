"""Cost tables on disk, so that a pair of models is measured once on a machine and known better with every answer."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from spec_local.files import write_atomically
from spec_local.llama.context import Context
from spec_local.llama.runtime import fingerprint
from spec_local.policies.cost_model import CostModel


class _File(BaseModel):
    """model: for people who look. seconds: of a call, by its tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    seconds: dict[PositiveInt, PositiveFloat]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a model's costs depend on, besides the machine: of a context, or of one that could be made.

    path: the model's file. threads: as the context has them. max_tokens: most tokens a call; a context has no more than
    n_ctx. branching: whether it reads trees.
    """

    path: Path
    gpu_layers: int
    threads: int
    n_ctx: int
    cache_type: str = "f16"
    max_tokens: int = 96
    branching: bool = False

    @classmethod
    def of(cls, context: Context) -> "Conditions":
        """Those of a context."""
        return cls(
            context.model.path,
            context.model.gpu_layers,
            context.threads,
            context.n_ctx,
            context.cache_type,
            context.max_tokens,
            context.max_branches > 1,
        )


def path_of(conditions: Context | Conditions) -> Path:
    """Where costs are kept: by all that they depend on.

    Raises:
        OSError: the model's file is gone.
    """
    known = _described(conditions)
    name = fingerprint(
        known.path,
        known.gpu_layers,
        known.threads,
        known.n_ctx,
        known.cache_type,
        min(known.max_tokens, known.n_ctx),
        known.branching,
    )
    return Path(platformdirs.user_cache_dir("specdec")) / "costs" / f"{name}.json"


def load(conditions: Context | Conditions) -> CostModel | None:
    """What is known of costs; None: nothing, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, ValidationError):
        known = _File.model_validate_json(path_of(conditions).read_bytes())
        if known.seconds:
            return CostModel(known.seconds)
    return None


def save(conditions: Context | Conditions, table: CostModel) -> None:
    """Keep a table for the next time; a cache folder that cannot be written to is no reason to fail."""
    known = _File(model=_described(conditions).path.name, seconds=table.costs)
    with contextlib.suppress(OSError):
        write_atomically(path_of(conditions), known.model_dump_json().encode())


def _described(conditions: Context | Conditions) -> Conditions:
    return conditions if isinstance(conditions, Conditions) else Conditions.of(conditions)
