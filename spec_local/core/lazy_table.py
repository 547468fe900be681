"""A table of objects that are imported on first use: listing the names imports nothing."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class LazyTable(Mapping[str, T]):
    """A read-only mapping of names to objects. `specdec --help` lists the names without loading NumPy.

    Args:
        targets: ``module:attribute`` of each object, by name.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets

    def __getitem__(self, name: str) -> T:
        module, attribute = self._targets[name].split(":")
        found: T = getattr(importlib.import_module(module), attribute)
        return found

    def __contains__(self, name: Any) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
