"""An event loop whose time passes at once: pauses and deadlines have no length, and come in their order."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    """Lets the time pass instead of waiting, unless a thread or a socket has something to say."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self):
        return self._passing.now


def run(coroutine):
    """Run a coroutine, and return its result. What it waits for must not happen in other threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
