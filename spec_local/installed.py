"""Lookups of other packages, each of which is an entry point of the group ``specdec.proposers``:

    [project.entry-points."specdec.proposers"]
    same-again = "specdec_same_again:SameAgain"

They are looked for only where a name is not built in, or all names are listed: reading the metadata of a
hundred packages takes 30 ms.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from spec_local.core.calls import Logits
from spec_local.core.proposal import Limit, Proposal
from spec_local.errors import InvalidRequest
from spec_local.proposers import PROPOSER_NAMES


@functools.cache
def _found() -> Mapping[str, EntryPoint]:
    return {each.name: each for each in entry_points(group="specdec.proposers")}


def known_names() -> Sequence[str]:
    """The names of all proposers: those that are built in, and those of other packages."""
    return [*PROPOSER_NAMES, *sorted(_found().keys() - set(PROPOSER_NAMES))]


@functools.cache
def load(name: str) -> Any:
    """The class of a lookup: a `Lookup` with a classmethod ``create(calibrated)``.

    Raises:
        InvalidRequest: it cannot be imported, or is something else.
    """
    with _naming_package(name):
        kind = _found()[name].load()
        for method in ("create", "find", "observe"):
            getattr(kind, method)
        return kind


class InstalledLookup:
    """A lookup of another package, for one answer.

    Raises (also from its methods):
        InvalidRequest: the package has raised an error; the message names it.
    """

    def __init__(self, name: str, calibrated: bool) -> None:
        self.name = name
        with _naming_package(name):
            self._lookup = load(name).create(calibrated)
            self.needs_logits = bool(self._lookup.needs_logits)

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        """See `Lookup.find`."""
        with _naming_package(self.name):
            found = self._lookup.find(history, limit)
            if not isinstance(found, Proposal):
                raise TypeError(f"find returned {found!r:.40}")
            n = len(found.tokens)
            if n > limit.nodes or found.depth > limit.depth or len(found.confidence) != n:
                raise ValueError("find exceeded its limit, or a token has no confidence")
            return found

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        """See `Lookup.observe`."""
        with _naming_package(self.name):
            self._lookup.observe(tokens, logits)


@contextmanager
def _naming_package(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        distribution = _found()[name].dist
        package = distribution.name if distribution else "another package"
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidRequest(
            f"proposer {name} of the package {package} failed ({why}): update or uninstall it"
        ) from error
