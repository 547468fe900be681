"""The variants that a benchmark compares: plain decoding, and every combination of the varied settings."""

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
"""The settings that a sweep may vary, and the parsers of their values."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Named settings; ``plain`` decodes without drafting."""

    name: str
    settings: GenerationSettings


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Parse ``draft-max=1,2,4``.

    Raises:
        InvalidRequest: another form, an unknown setting, or no values.
    """
    name, _, values = text.partition("=")
    if name not in SWEPT:
        raise InvalidRequest(f"sweep {text!r} has an unknown setting: give one of {', '.join(SWEPT)}")
    try:
        return name, [SWEPT[name](value) for value in parse_list(values)]
    except ValueError:
        raise InvalidRequest(
            f"sweep {text!r} is invalid: give a setting and values, for example draft-max=1,2,4"
        ) from None


def parse_list(text: str) -> list[str]:
    """The distinct parts of ``a,b,c``.

    Raises:
        InvalidRequest: a part is empty.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidRequest(f"the list {text!r} has an empty part: give values in the form a,b,c")
    return list(dict.fromkeys(parts))


def variants(base: GenerationSettings, varied: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Plain decoding, then all combinations of the varied values (by setting), named by these values.

    Raises:
        InvalidRequest: a value is invalid, or a variant would be plain decoding again.
    """
    found = [Variant(PLAIN, replace(base, proposer="none"))]
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        settings = replace(base, **{name.replace("-", "_"): value for name, value in chosen.items()})
        if settings.proposer == "none":
            raise InvalidRequest("plain decoding is always measured: remove `no_spec` and proposer none")
        parts = [
            v if isinstance(v, str) else f"{name}={v}" for name, v in chosen.items() if len(varied[name]) > 1
        ]
        found.append(Variant(" ".join(parts) or "speculative", settings))
    return found
