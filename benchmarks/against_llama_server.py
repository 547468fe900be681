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
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from common import geometric_mean, interval, machine, model_options, note, numbers, ratio, table
from servers import Answer, Server

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


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of all clients together, and the median time to the first token in seconds."""

    rate: float
    first: float


def measure(server: Server, prompts: Sequence[str], n_clients: int, n: int) -> Round:
    """Let so many clients send the prompts."""
    left, answers, lock = list(prompts), list[Answer](), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                prompt = left.pop()
            answer = server.answer(prompt, n)
            with lock:
                answers.append(answer)

    with server.running():
        threads = [threading.Thread(target=client) for _ in range(n_clients)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
    if len(answers) < len(prompts):
        sys.exit("an answer failed")
    return Round(sum(a.n for a in answers) / seconds, median(a.first_s for a in answers))


def _servers(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Server]]:
    n_parallel, threads = str(max(options.clients)), str(options.threads)
    with_draft = ("-md", str(options.draft)) if options.draft else ()
    for name, more in LLAMA_SERVER.items():
        if ("draft" in name and not options.draft) or name not in options.variants:
            continue
        command = [
            *(options.llama_server, "-m", options.main, "-np", n_parallel),
            *("-c", options.ctx * max(options.clients), "-t", threads, "-kvu", "--no-webui", *more),
            *(with_draft if "draft" in name else ()),
        ]
        yield f"llama-server, {name}", Server(command, folder / f"llama-server-{name}.log")
    for name, more in {"plain": ("--draft", "none"), "adaptive": with_draft}.items():
        command = [
            *(sys.executable, "-m", "specdec_cli", "serve", options.main),
            *("--parallel", n_parallel, "-c", options.ctx, "-t", threads, *more),
            *(("--no-spec",) if name == "plain" else ()),
        ]
        yield f"specdec, {name}", Server(command, folder / f"specdec-{name}.log")


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
    with contextlib.ExitStack() as stack:
        for name, server in _servers(given, given.logs):
            servers[name] = server
            stack.callback(server.close)
            measure(server, prompts[:2], 1, 8)  # warms it up, and stops it
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
                    found = measure(server, texts, n_clients, given.n)
                    rounds.setdefault((name, n_clients), []).append(found)
                    note(f"{number} {n_clients} {name}: {found.rate:.1f} tokens/s, first {found.first:.2f} s")
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
