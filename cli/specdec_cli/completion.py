"""What a shell may complete a model to. Anything else, and paths, it completes by itself."""

import contextlib
from pathlib import Path

from spec_local.errors import SpecLocalError


def names(incomplete: str) -> list[str]:
    """Models and pairs that have a name."""
    from spec_local.models import catalog

    with contextlib.suppress(SpecLocalError):  # a damaged models.toml is told where it is used
        return [n for n in (*catalog.models(), *catalog.pairs()) if n.startswith(incomplete)]
    return []


def models(incomplete: str) -> list[str]:
    """Those, and model files in this folder."""
    files: list[str] = []
    with contextlib.suppress(OSError):
        files = sorted(p.name for p in Path().glob("*.gguf") if p.name.startswith(incomplete))
    return names(incomplete) + files
