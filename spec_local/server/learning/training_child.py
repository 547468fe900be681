"""The process that trains a head while the server is idle: its priority, its pauses, and its end.

It reads one line of JSON, trains for one round, and writes lines of JSON; see `spec_local.training.learn`. It
ends when its standard input closes, as it does when this process is killed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from spec_local.system.files import write_atomically
from spec_local.system.json_file import read_record

COMMAND = (sys.executable, "-P", "-m", "spec_local.training.learn")
_LAST_NICE = 19  # the lowest priority there is
_STOP_S = 0.3  # for the process to end by itself; it loses nothing when it is killed
_LONGEST_LINE = 1 << 20  # bytes
_END_OF_PIPES_S = 1.0  # for the rest of its output after its end
_MAX_BYTES = 1 << 10  # of the record of a child
_Pid = Annotated[int, Field(gt=1, lt=1 << 31)]
_SAME_S = 1.0  # between two readings of the time at which a process began


class TrainingChild:
    """A process of lowest priority, in a process group of its own.

    If this process is killed while the child is paused, the kernel wakes the child, as its group has become
    an orphan, and its closed input ends it.

    Attributes:
        last_error: the last line that it wrote to standard error.
        is_paused: `pause` has been called, and not `resume`.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.last_error = ""
        self.is_paused = False
        self._errors = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, job: Mapping[str, Any], command: Sequence[str] = COMMAND) -> "TrainingChild":
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # otherwise ggml starts a debugger after a crash
            process_group=0,  # Ctrl-C reaches the server only, and one signal reaches the child's children
            limit=_LONGEST_LINE,
        )
        _lower_priority(process.pid)
        assert process.stdin
        process.stdin.write(json.dumps(job).encode() + b"\n")  # it stays open: see above
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None: it runs, or is paused."""
        return self._process.returncode

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The objects that it writes, until it has ended; other lines are skipped."""
        assert self._process.stdout
        with contextlib.suppress(ValueError):  # a line is too long
            async for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
        await self.end()

    async def _read_errors(self) -> None:
        assert self._process.stderr
        with contextlib.suppress(ValueError):
            async for line in self._process.stderr:
                self.last_error = line.decode("utf-8", "replace").strip() or self.last_error

    def pause(self) -> None:
        """Stop it at once, wherever it is; nothing is lost."""
        if not self.is_paused and self.exit_code is None:
            self.is_paused = True
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        if self.is_paused and self.exit_code is None:
            self.is_paused = False
            self._signal(signal.SIGCONT)

    def private_memory(self) -> int:
        """Bytes that it and its children take beside mapped files, such as the main model's weights."""
        n = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    memory = each.memory_info()
                    n += memory.rss - getattr(memory, "shared", 0)
        return n

    async def end(self) -> None:
        """End it, and all its children; also if it has ended by itself."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()
        # A process that the child has left behind may hold the other end open.
        await asyncio.wait([self._errors], timeout=_END_OF_PIPES_S)
        self._errors.cancel()
        # Without this, asyncio closes the pipes only after all their other ends; its `Process` cannot do it.
        self._process._transport.close()  # type: ignore[attr-defined]

    def _signal(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
            os.killpg(self._process.pid, signum)


def end_abandoned(record: Path) -> None:
    """End a child that a server has left behind that was killed, where the kernel has not; see `remember`."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        pid, created = read_record(record, tuple[_Pid, float], _MAX_BYTES)
        if abs(psutil.Process(pid).create_time() - created) < _SAME_S:
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        record.unlink()


def remember(child: TrainingChild, record: Path) -> None:
    """Write down which process a child is, for `end_abandoned`."""
    with contextlib.suppress(OSError, psutil.Error):
        created = psutil.Process(child.pid).create_time()
        write_atomically(record, json.dumps([child.pid, created]).encode())


def _lower_priority(pid: int) -> None:
    """Give a process the time only that no other one wants; its later threads and children inherit that."""
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).nice(_LAST_NICE)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
