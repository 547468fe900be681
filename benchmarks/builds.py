"""Compare the times of calls in two environments whose llama.cpp was compiled differently.

    python benchmarks/builds.py MODEL.gguf --other OTHER/bin/python [--sizes 1,2,4,8,64] [--rounds 9]

For example, this environment's llama.cpp was compiled for this processor, and that of the other one for all
processors with AVX2, as in the wheels. Each environment is a process that has loaded the model with and
without the CPU kernels; they take turns. Figures are the time in the other environment, relative to this
one, with a 95 % interval: 1.10 means that the other one is 10 % slower.
"""

import argparse
import sys
from pathlib import Path

from common import Child, interval, machine, note, numbers, parser, ratio, table
from kernels import open_with_and_without, seconds_of_call, text_of

from spec_local import kernels
from spec_local.llama import runtime
from spec_local.system.machine import default_threads


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--other", type=Path, help="the other environment's Python", required=True)
    arguments.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 64])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        time_calls(options)
    else:
        compare(options)


def time_calls(options: argparse.Namespace) -> None:
    """For each line of stdin, with a mode of the kernels and a number of tokens, print the seconds."""
    contexts = open_with_and_without(options.model, max(options.sizes), options.threads)
    text = text_of(contexts["auto"].model, max(options.sizes))
    print("llama.cpp uses", *runtime.features(), flush=True)
    print(flush=True)
    for line in sys.stdin:
        name, n = line.split()
        mode = next(each for each in kernels.MODES if each == name)
        kernels.use(mode)
        print(seconds_of_call(contexts[mode], text[: int(n)]), flush=True)


class Environment(Child):
    """A process that times calls when asked."""

    def __init__(self, python: Path | str) -> None:
        super().__init__("--child", python=python)
        print(f"{python}:")
        while line := self.line():
            print(line)


def compare(options: argparse.Namespace) -> None:
    """Print the table."""
    environments = [Environment(options.other), Environment(sys.executable)]
    seconds: dict[tuple[Environment, kernels.Mode, int], list[float]] = {}
    try:
        for round_ in range(-1, options.rounds):  # the first is the warm-up
            for mode in kernels.MODES:
                for n in options.sizes:
                    note(f"round {round_ + 1}/{options.rounds}: {n} tokens, {mode}")
                    for each in environments if round_ % 2 else environments[::-1]:
                        took = each.ask(mode, n)
                        if round_ >= 0:
                            seconds.setdefault((each, mode, n), []).append(took)
    finally:
        for each in environments:
            each.close()
    note("")
    other, this = environments
    rows = [
        [n, *(interval(ratio(seconds[other, mode, n], seconds[this, mode, n])) for mode in ("off", "auto"))]
        for n in options.sizes
    ]
    table(["tokens", "without kernels", "with kernels"], rows)
    print(machine())


if __name__ == "__main__":
    main()
