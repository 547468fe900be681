"""`specdec draft quantize` and `convert`: make a draft model or a head of files that exist."""

import shlex

import typer

from spec_local.errors import SpecLocalError
from spec_local.llama.devices import offload_of
from spec_local.models import published_heads, quantized_copy
from spec_local.models.names import resolve
from spec_local.models.quantized_copy import CopyPlan
from spec_local.system.files import expanded, format_size
from spec_local.text import counted
from specdec_cli import exits, progress, render
from specdec_cli.models import download_progress
from specdec_cli.signatures.drafts import DraftConvertOptions, DraftQuantizeOptions


def quantize(options: DraftQuantizeOptions) -> None:
    copy = quantized_copy.plan(
        resolve(options.model),
        options.kind,
        expanded(options.output) if options.output else None,
        main=resolve(options.main) if options.main else None,
        force=options.force,
        n_ctx=options.ctx,
        threads=options.threads,
        offload=offload_of(options.device, options.gpu_layers),
        cache_type=options.cache_type,
    )
    render.notes(_expectation(copy, [options.main, options.model] if options.main else [options.model]))
    if copy.expectation.cannot_pay and not options.yes:
        reason = "the copy would be slower than decoding without a draft model, even at 95% acceptance"
        advice = "give a --type with fewer bits, or pass --yes to make it anyway"
        question = f"{reason.capitalize()}. Make it anyway?"
        if not render.confirmed(question, SpecLocalError(f"{reason}: {advice}")):
            raise typer.Exit(exits.FAILURE)
    with progress.busy(f"writing {copy.target}"):
        quantized_copy.make(copy, threads=options.threads)
    render.write(f"{copy.target}\n")


def _expectation(copy: CopyPlan, pair: list[str]) -> list[str]:
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


def convert(options: DraftConvertOptions) -> None:
    output = expanded(options.output) if options.output else None
    folder = expanded(options.head)
    if not folder.is_dir():
        with download_progress() as on_progress:
            folder = published_heads.fetch(options.head, render.note, on_progress)
    main = resolve(options.main) if options.main else published_heads.find_main(folder, options.head)
    path = published_heads.convert(
        folder, options.head, main, output, options.kind, force=options.force, log=render.note
    )
    render.write(f"{path}\n")
