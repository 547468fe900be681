"""Servers under test: `specdec serve` and others that answer the same requests. They take turns.

A server that is not measured is stopped by a signal, so that it takes no time while others are.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOAD_S = 300
ANSWER_S = 600
"""Seconds that an answer may take."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the client saw it; and what the server said of it.

    first_s, whole_s: seconds to the first token and to the end. n: tokens. prompt_n: tokens that were read.
    prompt_s, answer_s: seconds of reading them, and after.
    """

    text: str
    first_s: float
    whole_s: float
    n: int
    prompt_n: int
    prompt_s: float
    answer_s: float
    n_drafted: int
    n_accepted: int


class Server:
    """A server until `close`.

    Args:
        command: that starts it; its port is added.
        log: file for its output, in the folder that it runs in.
    """

    def __init__(self, command: Sequence[object], log: Path) -> None:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            self.port = int(opened.getsockname()[1])
        named = [str(each.resolve() if isinstance(each, Path) else each) for each in command]
        self._command = [*named, "--port", str(self.port)]
        with log.open("w") as file:  # some programs write more files into the current folder
            self._process = subprocess.Popen(
                self._command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=log.parent
            )
        deadline = time.monotonic() + _LOAD_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                sys.exit(f"{self._command[0]} did not start: see {log}")
            time.sleep(0.2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the server run; it is stopped before and after, but not while it starts."""
        self._signal(stopped=False)
        try:
            yield
        finally:
            self._signal(stopped=True)

    def _signal(self, stopped: bool) -> None:
        for process in self._processes():
            (process.suspend if stopped else process.resume)()

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def processor_s(self) -> float:
        """Seconds of all cores that the server has used."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def answer(self, prompt: str, n: int) -> Answer:
        """Ask for up to n tokens, greedy and streamed."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": n,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        started, first, text, n_tokens, timings = time.monotonic(), 0.0, "", 0, {}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(response.read().decode())
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if text and not first:
                first = time.monotonic() - started
            timings = event.get("timings") or timings
            if usage := event.get("usage"):
                n_tokens = usage["completion_tokens"]
        whole = time.monotonic() - started
        connection.close()
        return Answer(
            text,
            first,
            whole,
            n_tokens,
            timings.get("prompt_n", 0),
            timings.get("prompt_ms", 0.0) / 1000,
            timings.get("predicted_ms", 0.0) / 1000,
            timings.get("draft_n", 0),
            timings.get("draft_n_accepted", 0),
        )

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._signal(stopped=False)
        self._process.terminate()
        self._process.wait(60)
