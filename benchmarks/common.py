"""Functions shared by the benchmarks: options, prompts as tokens, ratios with intervals, and tables.

On a shared machine, calls can be 10 times slower for seconds. Absolute times are therefore not reported:
the variants that are compared alternate, and each ratio has a 95 % interval.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from spec_local.bench import report
from spec_local.bench.figures import Estimate
from spec_local.chat.template import ChatTemplate
from spec_local.kernels import Mode
from spec_local.llama.model import Model
from spec_local.system.machine import default_threads

T = TypeVar("T")


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def model_options(
    description: str | None, *, draft: Literal["none", "optional", "required"], n: int | None = None
) -> argparse.ArgumentParser:
    """A parser with the options for models; n: default maximum number of tokens in an answer."""
    options = parser(description)
    options.add_argument("--main", type=Path, required=True, help="GGUF file of the main model")
    if draft != "none":
        options.add_argument(
            "--draft", type=Path, required=draft == "required", help="GGUF file of the draft model"
        )
    if n:
        options.add_argument("--n", type=int, default=n, help="maximum number of tokens to generate")
    options.add_argument("--ctx", type=int, default=2048, help="context length")
    options.add_argument("--threads", type=int, default=default_threads())
    return options


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """For argparse: parse ``3,7`` into a list."""

    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = "comma-separated numbers"
    return parse


def chat_text(model: Model, question: str) -> str:
    """The question in the model's chat template, up to where the answer begins."""
    return str(ChatTemplate(model).render([{"role": "user", "content": question}]))


def tokens_of(model: Model, text: str) -> list[int]:
    """Tokenize a prompt as llama.cpp's own programs do."""
    return model.vocabulary.tokenize(text, add_special=True, parse_special=True)


def note(text: str) -> None:
    """Print a line to stderr that the next one overwrites, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


class Child:
    """This benchmark in another process, which prints a number for each line that it reads.

    Args:
        arguments: beside those of this process.
        env: variables beside those of this process.
    """

    def __init__(
        self, *arguments: str, python: Path | str = sys.executable, env: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [python, *sys.argv, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(env or {}),
        )

    def line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a process of this benchmark has ended: see above")
        return line.strip()

    def ask(self, *question: object) -> float:
        assert self._process.stdin
        print(*question, file=self._process.stdin, flush=True)
        return float(self.line())

    def close(self) -> None:
        self._process.kill()


def ratio(ours: Sequence[float], theirs: Sequence[float], draws: int = 4000) -> Estimate:
    """Ratio of the medians of paired runs, with its 95 % bootstrap interval over pairs."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    picks = np.random.default_rng(0).integers(0, len(a), (draws, len(a)))
    low, high = np.percentile(np.median(a[picks], axis=1) / np.median(b[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(a) / np.median(b)), float(low), float(high), len(a))


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.log(values).mean()))


def interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


COSTS = ("tokens", "T(n) / T(1), without", "with", "speed-up")
"""Head of the columns of `costs`."""


def costs(seconds: Mapping[tuple[Mode, int], Sequence[float]], n: int, first: int) -> list[str]:
    """A line of a table of calls of n tokens, relative to calls of `first`, without and with the kernels.

    Args:
        seconds: of paired runs, by the mode of the kernels and the number of tokens.
    """
    without, with_ = (ratio(seconds[mode, n], seconds[mode, first]).value for mode in ("off", "auto"))
    return [str(n), f"{without:.2f}", f"{with_:.2f}", interval(ratio(seconds["off", n], seconds["auto", n]))]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    cells = [
        [c if isinstance(c, str) else f"{c:.3g}" if isinstance(c, float) else str(c) for c in r] for r in rows
    ]
    print(report.table(head, cells) + "\n", flush=True)


def machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()}{load}"
