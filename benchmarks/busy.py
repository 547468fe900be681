"""Tokens per second beside other programs that use the processor.

    python benchmarks/busy.py --main MAIN.gguf --draft DRAFT.gguf --llama-cpp-bin BIN --beside "make -j2"

Each variant is a process that has loaded its models: plain decoding and drafts, each with the number of
threads that follows the load, and plain decoding with all threads always. `llama-bench` is started each time.
In each round, they answer in turns on the idle machine, then beside one and two endless loops, then beside a
command, which is repeated. Those that do not follow the load take minutes beside it: of these, only
`llama-bench` answers, and only beside loops. Figures are medians with the lowest and the highest, in tokens
per second, and relative to the idle machine.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from common import Child, machine, model_options, note, table

from spec_local import Done, GenerationSettings, SamplingSettings, Session

QUESTION = "Write a Python class for a least recently used cache, and explain how it works."
LOOP = [sys.executable, "-c", "while True: pass"]
FOLLOW = ("plain", "drafts")  # variants whose number of threads follows the load
# libgomp's own value; that it is set turns ours off
WAITS = {"plain, all threads": {"GOMP_SPINCOUNT": "300000"}}


def answer_when_asked(options: argparse.Namespace) -> None:
    """Answer once for each line of stdin, and print the rate."""
    draft = str(options.draft) if options.variant == "drafts" else "none"
    settings = GenerationSettings(
        sampling=SamplingSettings(temperature=0),
        max_tokens=options.n,
        proposer="auto" if options.variant == "drafts" else "none",
    )
    with Session.open(
        options.main, draft, n_ctx=options.ctx, threads=options.threads, prompt_cache="off"
    ) as session:
        print(flush=True)
        for _ in sys.stdin:
            *_, done = session.chat([{"role": "user", "content": QUESTION}], settings)
            assert isinstance(done, Done)
            print(done.statistics.tokens_per_second, flush=True)


class Variant(Child):
    """A process that answers when asked."""

    def __init__(self, name: str) -> None:
        super().__init__("--variant", name, env=WAITS.get(name))
        self.line()
        self.rate()  # warms up: the costs are measured, and the weights packed

    def rate(self) -> float:
        return self.ask()


class LlamaBench:
    """llama.cpp's own program, which loads the model each time and does not count that."""

    def __init__(self, options: argparse.Namespace) -> None:
        program = str(options.llama_cpp_bin / "llama-bench")
        model = ("-m", str(options.main), "-t", str(options.threads))
        self._command = [program, *model, "-p", "0", "-n", str(options.n), "-r", "1", "-o", "json"]

    def rate(self) -> float:
        output = subprocess.run(self._command, capture_output=True, check=True).stdout
        return float(json.loads(output)[0]["avg_ts"])

    def close(self) -> None:
        pass


@contextlib.contextmanager
def beside(commands: list[list[str]]) -> Iterator[None]:
    """Within the block, these commands run, each in a process group of its own."""
    started = [subprocess.Popen(c, stdout=subprocess.DEVNULL, start_new_session=True) for c in commands]
    time.sleep(0.3 if started else 0)
    try:
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = model_options(__doc__, draft="optional", n=64)
    parser.add_argument("--llama-cpp-bin", type=Path, help="folder of llama.cpp's own llama-bench")
    parser.add_argument(
        "--beside", metavar="COMMAND", help="also answer beside this command, again and again"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        answer_when_asked(options)
    else:
        # Ends what it has started, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Print the table."""
    loads: dict[str, list[list[str]]] = {"idle": [], "one loop": [LOOP], "two loops": [LOOP, LOOP]}
    if options.beside:
        loads[options.beside] = [
            ["sh", "-c", f"while {shlex.join(['sh', '-c', options.beside])}; do :; done"]
        ]
    variants: dict[str, Variant | LlamaBench] = {}
    rates: dict[tuple[str, str], list[float]] = {}
    try:
        for name in (*FOLLOW[: 2 if options.draft else 1], "plain, all threads"):
            variants[name] = Variant(name)
        if options.llama_cpp_bin:
            variants["llama-bench"] = LlamaBench(options)
        for i in range(options.rounds):
            for load, commands in loads.items():
                with beside(commands):
                    for name, variant in variants.items():
                        beside_loops = name == "llama-bench" and load != options.beside
                        if name in FOLLOW or load == "idle" or beside_loops:
                            note(f"round {i + 1} of {options.rounds}: {name}, {load}")
                            rates.setdefault((name, load), []).append(variant.rate())
    finally:
        for variant in variants.values():
            variant.close()
    print(machine() + "\n")
    rows = []
    for name in variants:
        idle = median(rates[name, "idle"])
        rows.append([name, *(_cell(rates.get((name, load), []), idle) for load in loads)])
    table(["tokens per second (relative to idle)", *loads], rows)


def _cell(rates: list[float], idle: float) -> str:
    if not rates:
        return "-"
    middle = median(rates)
    return f"{middle:.1f} [{min(rates):.1f}, {max(rates):.1f}] ({middle / idle:.2f})"


if __name__ == "__main__":
    main()
