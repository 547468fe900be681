"""Operating system calls that fail: a full disk, a broken one, and a process that is killed."""

import _pyio
import builtins
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

_CHANGING = ("open", "write", "fsync", "ftruncate", "replace", "mkdir", "unlink")
_UNDOING = ("unlink", "ftruncate")  # fail only after the process was killed


class Failure:
    """Lets the n-th call that changes a file fail, or all calls from then on, which is like a kill.

    A write that fails has written half of its bytes. calls: number of calls so far.
    """

    def __init__(self, n: int, code: int, killed: bool) -> None:
        self._n, self._code, self._killed, self.calls = n, code, killed, 0

    @property
    def happened(self) -> bool:
        return self.calls >= self._n

    @contextmanager
    def active(self) -> Iterator["Failure"]:
        """Within the block, files are opened by Python's own code, whose calls can be replaced."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (io, builtins):
                patch.setattr(module, "open", _pyio.open)
            for name in _CHANGING:
                patch.setattr(os, name, self._call(name, getattr(os, name)))
            yield self

    def _call(self, name, real):
        def call(*args, **kwargs):
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)
            if not reads and (self._killed or name not in _UNDOING):
                self.calls += 1
                if self.calls == self._n or (self._killed and self.calls > self._n):
                    if name == "write" and self.calls == self._n:
                        real(args[0], args[1][: len(args[1]) // 2])
                    path = [] if isinstance(args[0], int) else [os.fspath(args[0])]
                    raise OSError(self._code, os.strerror(self._code), *path)
            return real(*args, **kwargs)

        return call


def failures(code: int, killed: bool) -> Iterator[Failure]:
    """Failures of the first call, the second and so on, until one does not happen."""
    for n in count(1):
        failure = Failure(n, code, killed)
        yield failure
        if not failure.happened:
            assert n > 3
            return


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """As if there were no space for files of more than `size` bytes; nor for what Python compiles."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # it would be cut, and be read later
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = before
        signal.signal(signal.SIGXFSZ, previous)
