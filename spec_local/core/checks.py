"""Checks of values, with errors of one line that say what to give instead."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_local.errors import InvalidRequest


def shown(value: object) -> str:
    """The value, or its type if it can be long."""
    if isinstance(value, str):
        return ascii(value[:40])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64):
        return f"{value}"
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `least` to `most`; an integer is a valid float, True is not a number."""

    kind: type[int] | type[float]
    least: float = -math.inf
    most: float = math.inf

    def __call__(self, name: str, value: Any) -> int | float:
        is_number = isinstance(value, int if self.kind is int else int | float)
        if not is_number or isinstance(value, bool):
            raise _refusal(name, value, "an integer" if self.kind is int else "a number")
        if not value <= self.most:  # also NaN
            raise _refusal(name, value, f"at most {self.most:.10g}")
        if value < self.least:
            raise _refusal(name, value, f"{self.least:.10g} or more")
        try:
            return self.kind(value)
        except OverflowError:
            raise _refusal(name, value, "a number") from None


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of up to `n` texts of up to `length` bytes each."""

    n: int
    length: int

    def __call__(self, name: str, value: Any) -> Sequence[str]:
        if not isinstance(value, list | tuple):
            raise _refusal(name, value, "a list")
        if len(value) > self.n:
            raise _refusal(name, value, f"up to {self.n} texts")
        for i, text in enumerate(value):
            if not isinstance(text, str):
                raise _refusal(f"{name}[{i}]", text, "text")
            if len(text.encode(errors="replace")) > self.length:
                raise _refusal(f"{name}[{i}]", text, f"up to {self.length} bytes")
        return tuple(value)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A mapping, whose keys and values are numbers."""

    key: Number
    value: Number

    def __call__(self, name: str, value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise _refusal(name, value, "a mapping")
        return {
            self.key(f"a key of {name}", key): self.value(f"{name}[{shown(key)}]", each)
            for key, each in value.items()
        }


def _refusal(name: str, value: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shown(value)}: give {expected}")
