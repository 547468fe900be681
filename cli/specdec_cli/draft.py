"""`specdec draft`: make draft models by quantization or training, and choose among the versions of a head."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from spec_local.errors import SpecLocalError
from spec_local.models.names import resolve
from spec_local.system.files import format_size
from spec_local.text import counted
from specdec_cli import completion, draft_train, draft_versions, exits, progress, render, terminal
from specdec_cli.options import CacheChoice, DeviceOption, GpuLayersOption, KernelsOption, gpu_layers_of

if TYPE_CHECKING:
    from spec_local.models.quantized_copy import CopyPlan

app = typer.Typer(
    help="Make drafts for a main model: quantize a draft model, or train a head and choose its version.",
    no_args_is_help=True,
)
app.command()(draft_train.train)
app.command()(draft_versions.versions)
app.command()(draft_versions.rollback)


KindChoice = Literal["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16"]


@app.command()
def quantize(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="Model to quantize, main or draft: a file or a name.",
            autocompletion=completion.models,
        ),
    ],
    main: Annotated[
        str | None,
        Option(
            "--for",
            metavar="MAIN",
            help="Main model that the copy will draft for (default: MODEL itself).",
            autocompletion=completion.models,
        ),
    ] = None,
    kind: Annotated[
        KindChoice, Option("--type", case_sensitive=False, help="Precision of the copy.")
    ] = "Q4_0",
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Output file (default: beside the model).")
    ] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Make the copy even if it would not pay off.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    ctx: Annotated[int, Option(min=1, max=1 << 24, help="Context size of later sessions, in tokens.")] = 4096,
    threads: Annotated[
        int | None,
        Option(
            min=1,
            max=512,
            help="Number of threads, now and in later sessions (default: one per usable core).",
        ),
    ] = None,
    device: DeviceOption = "auto",
    gpu_layers: GpuLayersOption = None,
    cache_type: Annotated[CacheChoice, Option(help="Precision of the KV caches.")] = "f16",
    kernels: KernelsOption = "auto",
) -> None:
    """Quantize a model for use as a draft model, and print the path of the copy.

    A Q4_0 copy of a draft model (with --for MAIN) can be twice as fast, at nearly
    the same acceptance rate. A copy of the main model can be its draft model: this
    pays off if the main model is F16, but hardly if it is Q8_0. The command first
    shows the expected speed-up.

    Examples:

      specdec draft quantize draft.gguf --for main.gguf
      specdec draft quantize main-f16.gguf --type Q2_K --output main-q2.gguf
    """
    with exits.guarded():
        from spec_local.models import quantized_copy
        from spec_local.system.files import expanded

        copy = quantized_copy.plan(
            resolve(model),
            kind,
            expanded(output) if output else None,
            main=resolve(main) if main else None,
            force=force,
            n_ctx=ctx,
            threads=threads,
            gpu_layers=gpu_layers_of(device, gpu_layers),
            cache_type=cache_type,
        )
        render.notes(_expectation(copy, [main, model] if main else [model]))
        if copy.expectation.cannot_pay and not yes:
            reason = "the copy would be slower than decoding without a draft model, even at 95% acceptance"
            advice = "give a --type with fewer bits, or pass --yes to make it anyway"
            question = f"{reason.capitalize()}. Make it anyway?"
            if not render.confirmed(question, SpecLocalError(f"{reason}: {advice}")):
                raise typer.Exit(exits.FAILURE)
        with _busy(f"writing {copy.target}"):
            quantized_copy.make(copy, threads=threads)
        render.write(f"{copy.target}\n")


@contextlib.contextmanager
def _busy(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, otherwise print one line."""
    if sys.stderr is None or not sys.stderr.isatty():
        render.note(what)
        yield
        return
    from rich.text import Text

    with progress.live(render.console(sys.stderr).status(Text(terminal.visible(what)))):
        yield


def _expectation(copy: "CopyPlan", pair: list[str]) -> list[str]:
    sizes = (
        f"{format_size(copy.size)}, {copy.size_ratio:.2f} times the model's {format_size(copy.source_size)}"
    )
    lines = [f"{copy.kind} copy: {sizes}"]
    for s in copy.expectation.speedups:
        speedup = "none"
        if s.draft_length:
            per_step = f"{counted(s.draft_length, 'draft token')} per step"
            speedup = f"{s.speedup:.2f} times plain decoding at best ({per_step})"
        lines.append(f"expected speed-up at {s.acceptance_rate:.0%} acceptance: {speedup}")
    if not copy.expectation.is_measured:
        lines.append(f"estimated from the sizes; to measure it, run specdec tune {shlex.join(pair)}")
    return lines
