"""Progress and report of `specdec draft train`."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.text import Text

from spec_local.bench.figures import VariantFigures
from spec_local.system.files import format_size
from spec_local.text import counted
from spec_local.training import events
from spec_local.training.events import Event
from spec_local.training.pipeline import MeasuredHead, TrainedHead
from spec_local.training.recipe import Recipe
from specdec_cli import render, terminal
from specdec_cli.progress import LINE_INTERVAL, clock, live


@contextlib.contextmanager
def progress(recipe: Recipe) -> Iterator[Callable[[Event], None]]:
    """Show events: on a terminal in one line that is updated, otherwise in new lines at intervals."""
    lines = _Lines(recipe)
    if sys.stderr is not None and sys.stderr.isatty():
        console = render.console(sys.stderr)
        status = console.status("")
        with live(status):

            def show(event: Event) -> None:
                line, is_permanent = lines(event)
                line = terminal.visible(line)
                if is_permanent:
                    console.print(Text(line, "dim"))
                else:
                    text = Text(line)
                    text.truncate(
                        max(1, console.width - 2), overflow="ellipsis"
                    )  # leave room for the spinner
                    status.update(text)

            yield show
        return
    last = ("", 0.0)

    def print_line(event: Event) -> None:
        nonlocal last
        line, is_permanent = lines(event)
        if is_permanent or lines.stage != last[0] or time.monotonic() - last[1] > LINE_INTERVAL:
            render.note(line)
            last = lines.stage, time.monotonic()

    yield print_line


class _Lines:
    """Formats an event as a line; also returns whether it stays on the screen."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.stage = recipe, ""

    def __call__(self, event: Event) -> tuple[str, bool]:
        if isinstance(event, events.Stage):
            self.stage = event.name
            return event.name, False
        if isinstance(event, events.GenerationRate):
            model = "the main model" if event.kind == "main" else f"a {event.kind} copy of it"
            return f"{model} generates {event.rate:,.0f} tokens/s", True
        if isinstance(event, events.Generating):
            p, left = event.progress, event.seconds_left
            total = left + self._recipe.training_seconds
            in_all = f", {clock(total)} in all" if total < float("inf") else ""
            line = f"generated {p.n_tokens:,} tokens, {p.rate:,.0f} tokens/s, {format_size(p.n_bytes)}"
            return f"{line} · {clock(left)} left{in_all}", False
        if isinstance(event, events.Answering):
            self.stage = event.what
            return f"{event.what}: {event.n_done:,} of {event.n:,}", False
        agreement = f"accepted {max(0.0, event.best_agreement):.1%}"
        line = f"training: step {event.step:,} of {event.n_steps:,}, loss {event.loss:.2f}, {agreement}"
        return f"{line} · {clock(event.seconds_left)} left", False


def plan(recipe: Recipe, bytes_per_token: int) -> str:
    """Describe what a run will put on the disk."""
    if recipe.general:
        return f"training data: {recipe.general}"
    n = recipe.max_bytes // bytes_per_token
    return (
        f"training data: at most {format_size(recipe.max_bytes)} in {recipe.folder}, "
        f"{format_size(1000 * bytes_per_token)} for 1,000 tokens of prompts and answers ({n:,} tokens)"
    )


def report(head: TrainedHead, measured: MeasuredHead, recipe: Recipe) -> list[str]:
    """Return the lines of the report on a trained head: size, cost, expected speed-up, evaluation."""
    evaluation, gain = head.evaluation, measured.gain
    rows = [("all tokens", evaluation.overall), *evaluation.by_category.items()]
    size = sum(path.stat().st_size for path in recipe.folder.rglob("*") if path.is_file())
    chain = ", ".join(f"{rate:.0%}" for rate in evaluation.chain)
    return [
        f"{'head':<9} {format_size(head.size)}, drafts {head.n_drafted:,} tokens "
        f"({head.coverage:.1%} of the main model's output)",
        f"{'trained':<9} on {head.n_trained:,} tokens, from {head.n_generated:,} generated tokens",
        f"{'cost':<9} a call takes {gain.cost:.3f} times as long as one of the main model",
        f"{'accepted':<9} {chain} of the first, second and third draft token, if those before it were",
        f"{'expected':<9} {gain.speedup:.2f} times plain decoding, "
        f"with {counted(gain.n_draft, 'draft token')} per step",
        *(f"{'benchmark':<9} {_benchmark(variant)}" for variant in measured.benchmark),
        f"{'verdict':<9} {_verdict(head.path, measured, recipe)}",
        *_learned(head, measured),
        f"{'files':<9} {recipe.folder} ({format_size(size)}): needed only to continue the training",
        "",
        f"{'held-out data':<18} {'accepted':>9} {'at temperature 1':>17} {'tokens':>9}",
        *(f"{name:<18} {s.agreement:>9.1%} {s.acceptance:>17.1%} {s.n:>9,}" for name, s in rows),
    ]


def _learned(head: TrainedHead, measured: MeasuredHead) -> list[str]:
    """Lines on what a head has learned from the user's answers: acceptance and speed, before and after."""
    if not (learned := head.learned):
        return []
    lines = [
        f"{'learned':<9} from {learned.n_answers:,} of your answers, the last tenth of which is held out"
    ]
    for name, after in learned.after.items():
        before, (rate_before, rate_after) = learned.before.get(name), measured.rates[name]
        accepted, rate = f"{after.overall.agreement:.1%}", f"{rate_after:.1f} tokens/s"
        if before:
            accepted, rate = f"{before.overall.agreement:.1%} → {accepted}", f"{rate_before:.1f} → {rate}"
        lines.append(f"{'':<9} {name}: accepted {accepted} of the first draft tokens; expected {rate}")
    return lines


def _verdict(head: Path, measured: MeasuredHead, recipe: Recipe) -> str:
    """Say whether the head pays, by the benchmark with the adaptive policy if it ran, and what to do next.

    The benchmark counts more than the expected speed-up: its prompts are new to the head, and its steps
    include everything.
    """
    pair = [str(recipe.main), str(head)]
    bench = shlex.join(["specdec", "bench", "--main", pair[0], "--draft", pair[1]])
    low = high = measured.gain.speedup
    if measured.benchmark:
        low, high = measured.benchmark[-1].speedup.low, measured.benchmark[-1].speedup.high
    if low > 1:
        return f"it pays on this machine; for a longer measurement, run {bench}"
    if high < 1:
        tune = shlex.join(["specdec", "tune", *pair])
        return f"it does not pay on this machine: train longer, or see the costs with {tune}"
    return f"it makes little difference on this machine: train longer, or measure more prompts with {bench}"


def _benchmark(variant: VariantFigures) -> str:
    """Figures of a variant on the benchmark's prompts."""
    prompts = counted(variant.speedup.n, "prompt")
    line = f"{variant.name}: {variant.speedup.value:.2f} times plain decoding on {prompts}"
    if variant.acceptance is None:
        return f"{line}, no draft tokens verified"
    rates = [a / t for a, t in zip(variant.accepted_at, variant.tested_at, strict=True) if t]
    positions = ", ".join(f"{rate:.0%}" for rate in rates[:4])
    return (
        f"{line}, accepted {variant.draft_n_accepted:,} of {variant.draft_n:,} draft tokens "
        f"({variant.acceptance:.0%}; by position {positions})"
    )
