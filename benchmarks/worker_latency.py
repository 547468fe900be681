"""Speculation with a main model on a worker, over a network with a given round-trip time.

    python benchmarks/worker_latency.py --main MAIN.gguf --draft DRAFT.gguf --latency 0.2,2,20

The worker runs on this machine, behind a proxy on loopback that delays what it passes on in each direction by
half of the round-trip time. Plain and speculative answers alternate. A network also has a bandwidth, which
is not simulated; hidden states of a token take a few kB.
"""

import contextlib
import heapq
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from common import interval, machine, model_options, note, numbers, ratio, table

from spec_local import Done, GenerationSettings, SamplingSettings, Session
from spec_local.bench.prompts import load
from spec_local.chat.template import ChatTemplate
from spec_local.llama.workers import silent

_PART = 1 << 16


class Proxy:
    """Passes bytes on to a port, each after a delay."""

    def __init__(self, port: int, delay: float) -> None:
        self._target, self._delay = port, delay
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listening.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
                for a, b in ((ours, theirs), (theirs, ours)):
                    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    _Direction(a, b, self._delay)

    def close(self) -> None:
        self._listening.close()


class _Direction:
    """One direction of a connection: one thread receives, another one sends what is due."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float) -> None:
        self._source, self._target, self._delay = source, target, delay
        self._due: list[tuple[float, int, bytes]] = []
        self._changed = threading.Condition()
        for work in (self._receive, self._send):
            threading.Thread(target=work, daemon=True).start()

    def _receive(self) -> None:
        part, number = b"x", 0
        while part:
            try:
                part = self._source.recv(_PART)
            except OSError:
                part = b""
            with self._changed:
                heapq.heappush(self._due, (time.monotonic() + self._delay, number, part))
                self._changed.notify()
            number += 1

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    while not self._due:
                        self._changed.wait()
                    when, _, part = heapq.heappop(self._due)
                if (left := when - time.monotonic()) > 0:
                    time.sleep(left)
                if not part:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._target.sendall(part)


@contextlib.contextmanager
def worker(threads: int) -> Iterator[int]:
    """A worker on loopback; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec_cli", "worker", "--port", str(port), "--threads", str(threads)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while silent([f"127.0.0.1:{port}"]):
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    options = model_options(__doc__, draft="optional", n=48)
    options.add_argument(
        "--latency", type=numbers(float), default=[0.2, 2.0, 20.0], help="ms of a round trip"
    )
    options.add_argument("--prompts", type=int, default=8, help="number of prompts")
    given = options.parse_args()
    print(machine() + "\n")
    every = load()
    prompts = every[:: max(1, len(every) // given.prompts)][: given.prompts]
    rows: list[list[object]] = []
    for latency in given.latency:
        with worker(given.threads) as port:
            proxy = Proxy(port, latency / 2e3)
            address = f"127.0.0.1:{proxy.port}"
            with Session.open(
                given.main, given.draft, n_ctx=given.ctx, threads=given.threads, workers=[address]
            ) as session:
                session.costs()
                rates: dict[str, list[float]] = {"off": [], "adaptive": []}
                for prompt in prompts:
                    question = [{"role": "user", "content": prompt.text}]
                    text = ChatTemplate(session.main.model).render(question)
                    tokens = text.tokens(session.main.model.vocabulary)
                    for policy, found in rates.items():
                        settings = GenerationSettings(
                            SamplingSettings(temperature=0), max_tokens=given.n, policy=policy
                        )
                        for event in session.generate(tokens, settings):
                            if isinstance(event, Done):
                                found.append(event.statistics.tokens_per_second)
                        note(f"{latency} ms, {policy}: {found[-1]:.1f} tokens/s")
            proxy.close()
        plain, adaptive = rates["off"], rates["adaptive"]
        rows.append(
            [
                latency,
                sum(plain) / len(plain),
                sum(adaptive) / len(adaptive),
                interval(ratio(adaptive, plain)),
            ]
        )
    table(["round trip (ms)", "plain tokens/s", "adaptive tokens/s", "ratio"], rows)


if __name__ == "__main__":
    main()
