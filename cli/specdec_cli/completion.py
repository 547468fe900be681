"""Shell completion of names. The shell completes paths itself."""

import contextlib
from pathlib import Path

from spec_local.errors import SpecLocalError


def names(incomplete: str) -> list[str]:
    """Return the matching names of models and pairs, and of models that other programs keep."""
    from spec_local.models import catalog

    with contextlib.suppress(SpecLocalError):  # a damaged models.toml is reported where it is used
        stored = (model.name for model in catalog.stored_models())
        return [n for n in (*catalog.models(), *catalog.pairs(), *stored) if n.startswith(incomplete)]
    return []


def models(incomplete: str) -> list[str]:
    """Return the matching names, and model files in the current folder."""
    files: list[str] = []
    with contextlib.suppress(OSError):
        files = sorted(p.name for p in Path().glob("*.gguf") if p.name.startswith(incomplete))
    return names(incomplete) + files


def devices(incomplete: str) -> list[str]:
    """Return the matching names of devices."""
    from spec_local.llama.devices import AUTO, CPU, GPU, gpus

    return [name for name in (AUTO, GPU, CPU, *(gpu.name for gpu in gpus())) if name.startswith(incomplete)]


def proposers(incomplete: str) -> list[str]:
    """Return the matching names of proposers, those of other packages last."""
    from spec_local.installed import known_names

    return [name for name in known_names() if name.startswith(incomplete)]
