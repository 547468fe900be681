"""Ranges of numbers as grammars over their digits, in GBNF."""


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
