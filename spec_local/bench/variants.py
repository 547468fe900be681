"""The variants of decoding that a benchmark compares: plain, and every combination of what was asked for."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.settings import GenerationSettings

PLAIN = "plain"

SWEPT: Mapping[str, Callable[[str], Any]] = {
    "draft-max": int,
    "tree-nodes": int,
    "beam-width": int,
    "shape": str,
    "verifier": str,
}
"""What a sweep may vary, and how its values are read."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings under a name; ``plain`` decodes without guesses."""

    name: str
    settings: GenerationSettings


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Read ``draft-max=1,2,4``.

    Raises:
        InvalidRequest: it is of another form, names nothing that varies, or has no values.
    """
    name, _, values = text.partition("=")
    if name not in SWEPT:
        raise InvalidRequest(f"sweep {text!r} varies nothing that is known: give {', '.join(SWEPT)} = values")
    try:
        return name, [SWEPT[name](value) for value in parse_list(values)]
    except ValueError:
        raise InvalidRequest(
            f"sweep {text!r} is not understood: give a name and values, as draft-max=1,2,4"
        ) from None


def parse_list(text: str) -> list[str]:
    """The parts of ``a,b,c``, each once.

    Raises:
        InvalidRequest: one of them is empty.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidRequest(f"the list {text!r} has an empty part: give values as a,b,c")
    return list(dict.fromkeys(parts))


def variants(base: GenerationSettings, varied: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Plain, then all combinations of what is varied (by field of the settings); each is named by its values.

    Raises:
        InvalidRequest: a value is impossible, or a variant would be plain decoding once more.
    """
    found = [Variant(PLAIN, replace(base, proposer="none"))]
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        settings = replace(base, **{name.replace("-", "_"): value for name, value in chosen.items()})
        if settings.proposer == "none":
            raise InvalidRequest("plain decoding is always measured: leave --no-spec and proposer none out")
        parts = [
            v if isinstance(v, str) else f"{name}={v}" for name, v in chosen.items() if len(varied[name]) > 1
        ]
        found.append(Variant(" ".join(parts) or "speculative", settings))
    return found
