"""Work that ends when nobody waits for its result any more: its loops call `check_wanted`.

The client of a server goes, or the server ends, while a thread decompresses, renders or tokenizes for it.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar


class Abandoned(BaseException):
    """Nobody waits for the result of this work any more; no error, so that nothing handles it as one."""


_is_abandoned: ContextVar[Callable[[], bool]] = ContextVar("is_abandoned", default=lambda: False)


@contextlib.contextmanager
def abandoned_if(is_abandoned: Callable[[], bool]) -> Iterator[None]:
    """Let the work of this thread end as soon as a function returns True, which is called often."""
    previous = _is_abandoned.set(is_abandoned)
    try:
        yield
    finally:
        _is_abandoned.reset(previous)


def check_wanted() -> None:
    """Raise Abandoned if nobody waits for the result of this work."""
    if _is_abandoned.get()():
        raise Abandoned
