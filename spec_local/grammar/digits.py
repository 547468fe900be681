"""Numbers within bounds as grammars over their digits, in GBNF."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from spec_local.errors import InvalidRequest

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_UNBOUNDED_DIGITS = 16  # before the point; a bound that is longer moves it
_BOUND_DIGITS = {"integer": 20, "number": 15}  # integers of 64 bits; decimals that 64-bit floats tell apart


def within(kind: str, bounds: Mapping[str, Any], where: str) -> str:
    """The numbers that keep to some bounds of a JSON schema, as an expression.

    Args:
        kind: integer or number. A number has as many decimals as are left of 15 digits by its longest bound: read as a float
            it then keeps to an exclusive bound too.
        bounds: at least one of BOUNDS, with its value.
        where: names the part of the schema.

    Raises:
        InvalidRequest: a bound is no number or has too many digits, or no number keeps to them.
    """
    exact = {key: _exact(bound, kind, f"{key} of {where}") for key, bound in bounds.items()}
    longest = max(max(bound.adjusted(), 0) for bound in exact.values()) + 1  # before the point
    decimals = _BOUND_DIGITS[kind] - longest if kind == "number" else 0
    high = 10 ** (max(_UNBOUNDED_DIGITS, longest + 1) + decimals) - 1
    low = -high
    for key, bound in exact.items():
        scaled = bound.scaleb(decimals)
        if kind == "number" and scaled % 1:
            raise InvalidRequest(
                f"{key} of {where} has more decimals than the {decimals} that its longest bound leaves of 15 digits: round it"
            )
        if key == "minimum":
            low = max(low, math.ceil(scaled))
        elif key == "exclusiveMinimum":
            low = max(low, math.floor(scaled) + 1)
        elif key == "maximum":
            high = min(high, math.floor(scaled))
        else:
            high = min(high, math.ceil(scaled) - 1)
    if low > high:
        raise InvalidRequest(f"no {kind} keeps to all bounds of {where}: mend them")
    return numerals(low, high, decimals)


def _exact(bound: Any, kind: str, where: str) -> Decimal:
    # The shortest text of a float is the one that the schema has, up to 15 digits.
    exact = Decimal(str(bound) if type(bound) in (int, float) else "NaN").normalize()
    if not exact.is_finite() or exact.adjusted() >= _BOUND_DIGITS[kind]:
        raise InvalidRequest(f"{where} is no number of up to {_BOUND_DIGITS[kind]} digits: give one")
    return exact


def numerals(low: int, high: int, decimals: int = 0) -> str:
    """Every n / 10**decimals with low ≤ n ≤ high, as JSON writes it without an exponent; the expression grows with the digits.

    No numeral has leading zeros, and zero has no sign. Zeros at the end of the decimals may be written or not.

    Raises:
        ValueError: there is none (low > high).
    """
    if low > high:
        raise ValueError(f"nothing lies between {low} and {high}")
    signs = []
    if low < 0:
        signs.append(f'"-" ({_magnitudes(max(1, -high), -low, decimals)})')
    if high >= 0:
        signs.append(_magnitudes(max(0, low), high, decimals))
    return "(" + " | ".join(signs) + ")"


def _magnitudes(low: int, high: int, decimals: int) -> str:
    first, last = (str(n).zfill(decimals + 1) for n in (low, high))
    if len(first) == len(last):
        return _between(first, last, decimals)
    parts = [
        _between(first, "9" * len(first), decimals),
        _between("1" + "0" * (len(last) - 1), last, decimals),
    ]
    longer = len(first) - decimals, len(last) - 2 - decimals  # digits after the first one, before the point
    if longer[0] <= longer[1]:
        parts.append(f"[1-9] [0-9]{{{longer[0]},{longer[1]}}} {_any(decimals, decimals)}")
    return " | ".join(parts)


def _between(low: str, high: str, decimals: int) -> str:
    """The digits from low to high, as many as these have; the last `decimals` are those behind the point."""
    n = len(low)
    zeros, nines = "0" * n, "9" * n
    if (low, high) == (zeros, nines):
        return _any(n, decimals)
    if low[0] == high[0]:
        digits = f'"{low[0]}" {_between(low[1:], high[1:], decimals)}'
    else:
        parts, start, end = [], int(low[0]), int(high[0])
        if low[1:] != zeros[1:]:
            parts.append(f'"{start}" {_between(low[1:], nines[1:], decimals)}')
            start += 1
        if high[1:] != nines[1:]:
            parts.append(f'"{end}" {_between(zeros[1:], high[1:], decimals)}')
            end -= 1
        if start <= end:
            parts.append(f"[{start}-{end}] {_any(n - 1, decimals)}")
        digits = f"({' | '.join(parts)})"
    if n == decimals:
        digits = f'"." {digits}'
    return f"({digits})?" if n <= decimals and low == zeros else digits


def _any(n: int, decimals: int) -> str:
    """The last n digits, without bounds."""
    if n < decimals:
        return f"[0-9]{{0,{n}}}" if n else ""
    whole = f"[0-9]{{{n - decimals}}}" if n > decimals else ""
    return f'{whole} ("." [0-9]{{1,{decimals}}})?' if decimals else whole
