"""A child process that renders chat templates, with limits of time and memory.

A template is a program that comes with a model. It can loop for hours or fill the memory in a single
operation, which nothing but the end of its process interrupts for certain.
"""

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from typing import Any

import psutil

from spec_local.system.cancellation import check_wanted

MAX_CPU_S = 5
"""Seconds of processor time for each request; templates take milliseconds."""
MAX_MEMORY = 1 << 30
"""Bytes of memory of the child; a conversation of 64 MiB takes less."""
_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
"""What Python needs of the environment, besides PYTHON*, and the time zone; keys are not for templates."""
_CHECK_INTERVAL_S = 0.02
"""Time between two looks at the child: it can fill some hundred MB more before it is killed."""


class TemplateFailed(Exception):
    """A template is invalid, raised an error, or exceeded a limit; the message is the reason."""


class TemplateRefused(TemplateFailed):
    """A template ran and raised an error."""


class TemplateProcess:
    """Renders templates in a child process, which is started when it is needed.

    Threads can share it: one that would wait for the child gets another child, until it has its reply.

    Args:
        max_cpu_s, max_memory: limits of seconds and bytes.
    """

    def __init__(self, max_cpu_s: float = MAX_CPU_S, max_memory: int = MAX_MEMORY) -> None:
        self.max_cpu_s, self.max_memory = max_cpu_s, max_memory
        self._idle: list[subprocess.Popen[bytes]] = []  # at most one

    def start(self) -> None:
        """Start the child without waiting until it is ready, for example while a model loads."""
        with contextlib.suppress(OSError):  # the first request reports it
            self._give_back(self._take())

    def request(self, **arguments: Any) -> dict[str, Any]:
        """Call `spec_local.chat.jinja_renderer.render` in the child.

        Raises:
            TemplateRefused: the template raised an error.
            TemplateFailed: it failed otherwise; the next request starts another child if necessary.
        """
        try:
            text = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            raise TemplateFailed("a tool or a call is nested too deeply") from None
        line = text.encode("utf-8", "surrogatepass") + b"\n"
        try:
            child = self._take()
        except OSError as error:
            raise TemplateFailed(f"its process cannot be started: {error.strerror}") from None
        try:
            answer = self._exchange(child, line)
        except BaseException:  # after Ctrl-C, its answer must not be taken for that to the next request
            _end(child)
            raise
        self._give_back(child)
        reply: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
        if "error" in reply:
            raise TemplateRefused(reply["error"])
        return reply

    def stop(self) -> None:
        """End the child, if there is one."""
        while self._idle:
            with contextlib.suppress(IndexError):
                _end(self._idle.pop())

    def forget(self) -> None:
        """Do not use the child any more: after a fork, it belongs to the parent process."""
        self._idle = []

    def _take(self) -> subprocess.Popen[bytes]:
        """A child that nobody uses."""
        with contextlib.suppress(IndexError):  # of a list, which needs no lock
            while True:
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                _end(child)
        # -P: a file in the working directory must not shadow one of this package's modules.
        command = [sys.executable, "-P", "-m", "spec_local.chat.jinja_renderer"]
        return subprocess.Popen(
            [*command, str(self.max_cpu_s), str(self.max_memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={k: v for k, v in os.environ.items() if k in _VARIABLES or k.startswith("PYTHON")},
            process_group=0,  # Ctrl-C is not meant for the child
        )

    def _give_back(self, child: subprocess.Popen[bytes]) -> None:
        if self._idle:
            _end(child)
        else:
            self._idle.append(child)

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Send a request and return the answer.

        Raises:
            TemplateFailed: the child exceeded a limit, or died.
        """
        assert child.stdin
        assert child.stdout
        unsent = memoryview(request)
        with contextlib.suppress(BrokenPipeError):  # its end is read below
            while unsent:
                unsent = unsent[child.stdin.write(unsent) :]
        answer, watched, start = bytearray(), None, 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                check_wanted()
                if selector.select(_CHECK_INTERVAL_S):
                    part = os.read(child.stdout.fileno(), 1 << 20)
                    if not part:
                        raise TemplateFailed(_cause_of_death(child.wait(), self.max_cpu_s))
                    answer += part
                    continue
                with contextlib.suppress(psutil.Error):  # it has died: see above
                    if not watched:
                        watched = psutil.Process(child.pid)
                        start = _cpu_seconds(watched)
                    if _cpu_seconds(watched) > start + self.max_cpu_s:
                        raise TemplateFailed(_too_slow(self.max_cpu_s))
                    if watched.memory_info().rss > self.max_memory:
                        raise TemplateFailed(f"it needs more than {self.max_memory >> 20} MiB of memory")
        return bytes(answer)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _too_slow(max_cpu_s: float) -> str:
    return f"it takes more than {max_cpu_s} s"


def _cause_of_death(code: int, max_cpu_s: float) -> str:
    if code == -signal.SIGXCPU:
        return _too_slow(max_cpu_s)
    return f"its process ended with code {code}"


process = TemplateProcess()
"""The only one, for all models."""
atexit.register(process.stop)
os.register_at_fork(after_in_child=process.forget)
