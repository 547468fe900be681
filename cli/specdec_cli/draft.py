"""`specdec draft`: making a draft where there is none."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from spec_local.errors import SpecLocalError
from spec_local.files import format_size
from specdec_cli import completion, draft_train, exits, render
from specdec_cli.options import CacheChoice, KernelsOption, resolve

if TYPE_CHECKING:
    from spec_local.models.quantized_copy import CopyPlan

app = typer.Typer(
    help="Make a draft: a model in fewer bits, or one that learns from main.", no_args_is_help=True
)
app.command()(draft_train.train)


class KindChoice(StrEnum):
    Q2_K = "Q2_K"
    Q3_K_M = "Q3_K_M"
    Q4_0 = "Q4_0"
    Q4_K_M = "Q4_K_M"
    Q5_K_M = "Q5_K_M"
    Q6_K = "Q6_K"
    Q8_0 = "Q8_0"
    F16 = "F16"


@app.command()
def quantize(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="The model to copy, main or a draft: a file or a name.",
            autocompletion=completion.models,
        ),
    ],
    main: Annotated[
        str | None,
        Option(
            "--for",
            metavar="MAIN",
            help="The model that the copy shall guess for (default: MODEL itself).",
            autocompletion=completion.models,
        ),
    ] = None,
    kind: Annotated[
        KindChoice, Option("--type", case_sensitive=False, help="Precision of the copy.")
    ] = KindChoice.Q4_0,
    output: Annotated[
        Path | None, Option("--output", "-o", help="The copy's file (default: beside the model).")
    ] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Make it even if it would not pay.")] = False,
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
    ctx: Annotated[int, Option(min=1, max=1 << 24, help="Tokens of context of the sessions to come.")] = 4096,
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Threads, now and then (default: one per physical core).")
    ] = None,
    gpu_layers: Annotated[int, Option(help="Layers on the GPU of the sessions to come.")] = -1,
    cache_type: Annotated[CacheChoice, Option(help="Precision of their KV caches.")] = "f16",
    kernels: KernelsOption = "auto",
) -> None:
    """Make a copy of a model in fewer bits, as a draft; prints the copy's path.

    A small draft in Q4_0 can guess in half the time, nearly as well (--for MAIN). A copy of main as its own draft has main's vocabulary and
    often its opinion: that pays where main is F16, and little where it is Q8_0. What to expect is said first, from costs if specdec tune
    has measured them.

    Examples:

      specdec draft quantize draft.gguf --for main.gguf

      specdec draft quantize main-f16.gguf --type Q2_K --output draft.gguf
    """
    with exits.guarded():
        from spec_local.files import expanded
        from spec_local.models import quantized_copy

        copy = quantized_copy.plan(
            resolve(model),
            kind.value,
            expanded(output) if output else None,
            main=resolve(main) if main else None,
            force=force,
            n_ctx=ctx,
            threads=threads,
            gpu_layers=gpu_layers,
            cache_type=cache_type,
        )
        for line in _expectation(copy, [main, model] if main else [model]):
            render.note(line)
        if copy.cannot_pay and not yes:
            _confirm()
        with _busy(f"writing {copy.target}"):
            quantized_copy.make(copy, threads=threads)
        render.prepare_stdout()
        render.write(f"{copy.target}\n")


@contextlib.contextmanager
def _busy(what: str) -> Iterator[None]:
    """Minutes may pass: something moves where a person can see it."""
    if sys.stderr is None or not sys.stderr.isatty():
        render.note(what)
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, no_color="NO_COLOR" in os.environ)
    with console.status(escape(what)):
        yield


def _expectation(copy: "CopyPlan", pair: list[str]) -> list[str]:
    lines = [
        f"{copy.kind} copy: {format_size(copy.size)}, {copy.size_ratio:.2f} of the model's {format_size(copy.source_size)}"
    ]
    if copy.expected_speedups is None:
        return [*lines, f"gain: unknown; after specdec tune {shlex.join(pair)} it is said here"]
    for p in copy.expected_speedups:
        best = (
            f"{p.speedup:.2f} times plain at best ({p.draft_length} guesses a step)"
            if p.draft_length
            else "none"
        )
        lines.append(f"gain, if {p.acceptance_rate:.0%} of its guesses stand: {best}")
    return lines


def _confirm() -> None:
    what = "This draft would be slower than none, even if 95 % of its guesses stood"
    if sys.stdin is None or not sys.stdin.isatty():
        raise SpecLocalError(f"{what}: give a --type of fewer bits, or --yes to make it all the same")
    try:
        wanted = typer.confirm(f"{what}. Make it all the same?", err=True)
    except typer.Abort:  # Ctrl-C, Ctrl-D
        raise KeyboardInterrupt from None
    if not wanted:
        raise typer.Exit(exits.FAILURE)
