"""Where to keep states of a model that cannot roll back to any length: recurrent and hybrid models.

Such a model continues a prompt only from a kept state. A later prompt is likely to leave an earlier one where
a message begins (the last message is edited, the template drops reasoning, another conversation has the same
system prompt), or where prompts have parted before.
"""

from collections.abc import Iterable, Sequence

NEAR = 16
"""Tokens before the end of a prompt that need no call of their own: the first step evaluates them, too."""
_SAME = 4  # tokens between the boundaries that end one message and begin the next
_GAP = 32  # tokens that are read in the time of the call that a stop adds
_LONG_GAP = 256  # the same for stops that later prompts rarely need
_N_RECENT = 3  # boundaries before the end that they often need
_MOST = 12  # states of one history; a state takes megabytes


def stops(n_known: int, boundaries: Iterable[int], parting: int, n: int) -> list[int]:
    """Return the lengths of a prompt at which to keep its state, ascending; the last one ends its reading.

    Args:
        n_known: number of tokens that need not be read.
        boundaries: lengths after which a message may begin.
        parting: length up to which another prompt was the same; 0: none was.
        n: number of tokens of the prompt, without the last one.
    """
    starts: list[int] = []
    for boundary in sorted(boundaries):
        if starts and boundary - starts[-1] <= _SAME:
            starts.pop()
        starts.append(boundary)
    last = starts[-1] if starts and n - starts[-1] <= NEAR else n
    often = {*starts[:1], *starts[-_N_RECENT:], parting}
    found: list[int] = []
    previous = n_known
    for start in sorted({*starts, parting}):
        if n_known < start < last and start - previous >= (_GAP if start in often else _LONG_GAP):
            found.append(start)
            previous = start
    return [*found, last] if last > n_known else found


def superfluous(lengths: Sequence[int]) -> list[int]:
    """Return which states of a history to give up, so that few are left, denser towards its end.

    The first one, which other conversations share, and the last ones stay.

    Args:
        lengths: of the states, ascending.
    """
    left, dropped = list(lengths), list[int]()
    while len(left) > _MOST:
        end = left[-1]

        def density(i: int, end: int = end) -> float:
            return (left[i + 1] - left[i - 1]) / (end - left[i])

        densest = min(range(1, len(left) - _N_RECENT), key=density)
        dropped.append(left.pop(densest))
    return dropped
