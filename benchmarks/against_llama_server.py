"""Compare `specdec serve` with llama.cpp's `llama-server`: tokens per second and time to the first token.

    python benchmarks/against_llama_server.py --llama-server BUILD/bin/llama-server --main MAIN.gguf
    --draft DRAFT.gguf --clients 1,2,4,8

All servers are running, and take turns: in each round, each of them answers the same prompts, sent by the
same number of clients over HTTP, each of which sends its next prompt when it has its answer. Answers are
greedy, streamed, and of the same length; prompts are new in each round, so that none is in a cache. Both
programs use the same files, threads, context and number of rows. Of llama-server's drafting settings, the one
with the best mean over all numbers of clients is taken, chosen in hindsight.
"""

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from common import geometric_mean, interval, machine, model_options, note, numbers, ratio, table

from spec_local.bench.figures import Estimate
from spec_local.bench.prompts import load

LLAMA_SERVER: Mapping[str, Sequence[str]] = {
    "plain": (),
    "draft 3": ("--spec-type", "draft-simple", "--spec-draft-n-max", "3"),
    "draft 8, p-min 0.75": (
        *("--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75"),
    ),
    "ngram-mod": ("--spec-type", "ngram-mod"),
}
_LOAD_S = 120
_ROUND_S = 600


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of all clients together, and the median time to the first token in seconds."""

    rate: float
    first: float


class Server:
    """A server under test, until `stop`."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port = port
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _LOAD_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start: see {log}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def pause(self, paused: bool) -> None:
        """Stop or continue the process: it takes no time while others are measured."""
        main = psutil.Process(self._process.pid)
        for process in [main, *main.children(recursive=True)]:
            (process.suspend if paused else process.resume)()

    def answer(self, prompt: str, n: int) -> tuple[int, float]:
        """Number of tokens of an answer, and the seconds to the first one."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": n,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ROUND_S)
        started, first, n_tokens = time.monotonic(), 0.0, 0
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
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.monotonic() - started
            if usage := event.get("usage"):
                n_tokens = usage["completion_tokens"]
        connection.close()
        return n_tokens, first

    def measure(self, prompts: Sequence[str], n_clients: int, n: int) -> Round:
        """Let so many clients send the prompts."""
        left, answers, lock = list(prompts), list[tuple[int, float]](), threading.Lock()

        def client() -> None:
            while True:
                with lock:
                    if not left:
                        return
                    prompt = left.pop()
                answer = self.answer(prompt, n)
                with lock:
                    answers.append(answer)

        self.pause(False)
        threads = [threading.Thread(target=client) for _ in range(n_clients)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        self.pause(True)
        if len(answers) < len(prompts):
            sys.exit("an answer failed")
        return Round(
            sum(n_tokens for n_tokens, _ in answers) / seconds, median(first for _, first in answers)
        )


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _servers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Server]]:
    n_rows, threads = str(max(options.clients)), str(options.threads)
    with_draft = ("-md", str(options.draft)) if options.draft else ()
    for name, more in LLAMA_SERVER.items():
        if ("draft" in name and not options.draft) or name not in options.variants:
            continue
        port = _free_port()
        command = [
            *(str(options.llama_server), "-m", str(options.main), "--port", str(port), "-np", n_rows),
            *("-c", str(options.ctx * max(options.clients)), "-t", threads, "-kvu", "--no-webui", *more),
            *(with_draft if "draft" in name else ()),
        ]
        yield f"llama-server, {name}", Server(command, port, folder / f"llama-server-{name}.log")
    for name, more in {"plain": ("--draft", "none"), "adaptive": with_draft}.items():
        port = _free_port()
        command = [
            *(sys.executable, "-m", "specdec_cli", "serve", str(options.main), "--port", str(port)),
            *("--parallel", n_rows, "-c", str(options.ctx), "-t", threads, *more),
            *(("--no-spec",) if name == "plain" else ()),
        ]
        yield f"specdec, {name}", Server(command, port, folder / f"specdec-{name}.log")


def main() -> None:
    options = model_options(__doc__, draft="optional", n=64)
    options.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's program")
    options.add_argument("--clients", type=numbers(int), default=[1, 2, 4, 8], help="numbers of clients")
    options.add_argument("--rounds", type=int, default=4, help="rounds for each number of clients")
    options.add_argument(
        "--variants", nargs="+", default=list(LLAMA_SERVER), choices=LLAMA_SERVER, help="of llama-server"
    )
    options.add_argument("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    given = options.parse_args()
    prompts = [prompt.text for prompt in load()]
    n_prompts = max(given.clients)
    servers: dict[str, Server] = {}
    rounds: dict[tuple[str, int], list[Round]] = {}
    try:
        for name, server in _servers(given, given.logs):
            servers[name] = server
            server.measure(prompts[:2], 1, 8)  # warms it up, and pauses it
        note(machine())
        used = 0
        for number in range(given.rounds):
            for n_clients in given.clients:
                texts = [
                    f"{prompts[(used + i) % len(prompts)]}\n(Question {number}.{n_clients}.{i})"
                    for i in range(n_prompts)
                ]
                used += n_prompts
                for name, server in servers.items():
                    found = server.measure(texts, n_clients, given.n)
                    rounds.setdefault((name, n_clients), []).append(found)
                    note(f"{number} {n_clients} {name}: {found.rate:.1f} tokens/s, first {found.first:.2f} s")
    finally:
        for server in servers.values():
            server.pause(False)
            server.stop()
    _report(rounds, list(servers), given.clients)


def _report(
    rounds: Mapping[tuple[str, int], Sequence[Round]], names: Sequence[str], clients: Sequence[int]
) -> None:
    def compared(ours: str, theirs: str, n: int) -> Estimate:
        return ratio([r.rate for r in rounds[ours, n]], [r.rate for r in rounds[theirs, n]])

    def mean(ours: str, theirs: str) -> float:
        return geometric_mean([compared(ours, theirs, n).value for n in clients])

    rows: list[Sequence[object]] = [
        [name, n, median(r.rate for r in rounds[name, n]), median(r.first for r in rounds[name, n])]
        for name in names
        for n in clients
    ]
    table(["server", "clients", "tokens/s", "first token (s)"], rows)
    plain = "llama-server, plain"
    peers = [name for name in names if name.startswith("llama")]
    best = max(peers, key=lambda name: mean(name, plain))
    pairs = [("specdec, plain", plain), ("specdec, adaptive", best), ("specdec, adaptive", "specdec, plain")]
    rows = [
        [f"{a} / {b}", *(interval(compared(a, b, n)) for n in clients), mean(a, b)]
        for a, b in dict.fromkeys(pairs)
    ]
    table(["ratio of tokens/s", *(f"{n} clients" for n in clients), "mean"], rows)


if __name__ == "__main__":
    main()
