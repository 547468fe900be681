"""Measure plain decoding and drafts with several numbers of threads and instruction sets, and print a table.

    python benchmarks/many_cores.py MAIN.gguf … --draft DRAFT.gguf [--threads 2,4,8,16]
        [--sets avx512_vnni,avx2]

Two cores cannot read the memory as fast as it is, so that more of them help; with many cores, the memory is
the limit, as on laptops. Each row is a process of its own: `specdec tune` for the costs of calls, and then
`specdec bench` for the speeds. With a lesser instruction set, specdec's kernels use it; llama.cpp's use what
they were compiled for.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import machine, note, numbers, parser, table

from spec_local import kernels
from spec_local.kernels import INSTRUCTION_SET
from spec_local.system.machine import default_threads

_SIZES = ("2", "4", "8", "16")  # tokens of a call, compared with one token
_SHOWN = ("plain, tokens/s", "with drafts, tokens/s", "times as fast")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("mains", type=Path, nargs="+")
    arguments.add_argument("--draft", type=Path, required=True)
    arguments.add_argument("--threads", type=numbers(int), default=sorted({1, 2, default_threads()}))
    arguments.add_argument("--sets", type=numbers(str), default=[kernels.status().instruction_set])
    arguments.add_argument("--per-category", type=int, default=1)
    arguments.add_argument("--n", type=int, default=128)
    options = arguments.parse_args()
    print(machine(), end="\n\n")
    rows = []
    for main_file in options.mains:
        for used in options.sets:
            for threads in options.threads:
                note(f"{main_file.name}, {used}, {threads} threads")
                cells = _measured(main_file, used, threads, options)
                rows.append([main_file.name, used, str(threads), *cells])
    note("")
    table(["main model", "kernels", "threads", *_SHOWN, *(f"T({n}) / T(1)" for n in _SIZES)], rows)


def _measured(main_file: Path, used: str, threads: int, options: argparse.Namespace) -> list[str]:
    """The cells of a row."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {INSTRUCTION_SET: used, "XDG_CACHE_HOME": folder}
        pair = [str(main_file), str(options.draft), "--threads", str(threads), "--ctx", "2048"]
        costs = _run("tune", *pair, environment=environment)
        results = Path(folder) / "results.json"
        limits = ["--per-category", str(options.per_category), "-n", str(options.n), "-o", str(results)]
        _run("bench", *pair, *limits, environment=environment)
        return [*_speeds(json.loads(results.read_text())["variants"]), *_multiples(costs)]


def _run(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "specdec_cli", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _speeds(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    plain, drafts = variants
    speeds = [f"{each['tokens_per_second']:.1f}" for each in (plain, drafts)]
    return [*speeds, f"{drafts['speedup']['value']:.2f}"]


def _multiples(costs: str) -> list[str]:
    """From the first table of `specdec tune`: milliseconds of calls by number of tokens."""
    first = costs.partition("## ")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| +(\d+) \| +([\d.]+) \|", first, re.MULTILINE))
    return [f"{float(found[n]) / float(found['1']):.2f}" for n in _SIZES]


if __name__ == "__main__":
    main()
