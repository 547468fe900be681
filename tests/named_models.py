"""The user's models.toml, with models and pairs of a test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_local.models import catalog


def write_catalog(
    folder: Path, models: Mapping[str, Mapping[str, Any]], pairs: Mapping[str, tuple[str, str]] = {}
) -> None:
    """Write it into the user's folder for configuration; pairs: main and draft, by name."""
    tables = {
        f"models.{name}": {"description": "d", "licence": "l"} | entry for name, entry in models.items()
    }
    for name, (main, draft) in pairs.items():
        tables[f"pairs.{name}"] = {"main": main, "draft": draft, "note": "n"}
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        line
        for name, table in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()))
    ]
    (folder / "models.toml").write_text("\n".join(lines))
    catalog._catalog.cache_clear()
