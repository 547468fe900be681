"""Progress and report of `specdec draft train`."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from spec_local.files import format_size
from specdec_cli import render, terminal
from specdec_cli.progress import live

if TYPE_CHECKING:
    from spec_local.bench.figures import VariantFigures
    from spec_local.training.pipeline import Event, TrainedDraft
    from spec_local.training.recipe import Recipe

_INTERVAL = 30.0  # seconds between progress lines where stderr is not a terminal


@contextlib.contextmanager
def progress(recipe: "Recipe") -> "Iterator[Callable[[Event], None]]":
    """Show events: on a terminal in one line that is updated, otherwise in new lines at intervals."""
    lines = _Lines(60 * recipe.minutes)
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.text import Text

        console = render.console(sys.stderr)
        status = console.status("")
        with live(status):

            def show(event: "Event") -> None:
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

    def print_line(event: "Event") -> None:
        nonlocal last
        line, is_permanent = lines(event)
        if is_permanent or lines.stage != last[0] or time.monotonic() - last[1] > _INTERVAL:
            render.note(line)
            last = lines.stage, time.monotonic()

    yield print_line


class _Lines:
    """Formats an event as a line; also returns whether it stays on the screen. seconds: of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.stage, self._started = seconds, "", 0.0

    def __call__(self, event: "Event") -> tuple[str, bool]:
        from spec_local.training import pipeline
        from spec_local.training.recipe import GENERATION_SHARE, SELECTION_SHARE

        if isinstance(event, pipeline.Stage):
            self.stage, self._started = event.name, time.monotonic()
            return event.name, False
        if isinstance(event, pipeline.GenerationRate):
            model = "the main model" if event.kind == "main" else f"a {event.kind} copy of it"
            return f"{model} generates {event.rate:,.0f} tokens/s", True
        if isinstance(event, pipeline.CandidateResult):
            line = f"tried {event.name}: agreement {event.agreement:.1%}, cost {event.cost:.2f}"
            return f"{line}, at best {event.speedup:.2f} times plain decoding", True
        if isinstance(event, pipeline.Generating):
            p, left = event.progress, event.seconds_left
            total = left + (1 - GENERATION_SHARE) * self._seconds
            line = f"generated {p.n_tokens:,} tokens, {p.rate:,.0f} tokens/s"
            return f"{line} · {_clock(left)} left, {_clock(total)} in all", False
        step = event.progress
        agreement = f"agreement {max(0.0, step.best_agreement):.1%}"
        if self.stage == "training":
            line = f"training: step {step.step:,} of {step.n_steps:,}, loss {step.loss:.2f}, {agreement}"
            return f"{line} · {_clock(step.seconds_left)} left", False
        left = max(0.0, SELECTION_SHARE * self._seconds - (time.monotonic() - self._started))
        total = left + (1 - GENERATION_SHARE - SELECTION_SHARE) * self._seconds
        return f"trying {event.name}: {agreement} · {_clock(left)} left, {_clock(total)} in all", False


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report(draft: "TrainedDraft", recipe: "Recipe") -> list[str]:
    """Return the lines of the report on a trained draft: size, cost, expected speed-up, evaluation."""
    evaluation, pair = draft.evaluation, [str(recipe.main), str(draft.path)]
    if draft.speedup > 1:
        command = shlex.join(["specdec", "bench", "--main", pair[0], "--draft", pair[1]])
        pays = (
            f"at best {draft.speedup:.2f} times plain decoding at temperature 0; to measure it, run {command}"
        )
    else:
        command = shlex.join(["specdec", "tune", *pair])
        pays = f"none, at best {draft.speedup:.2f} times plain decoding; to see the costs, run {command}"
    scores = [
        ("all tokens", evaluation.overall),
        *evaluation.by_category.items(),
        *((f"from token {start + 1}", score) for start, score in evaluation.by_position.items()),
    ]
    size = sum(path.stat().st_size for path in recipe.folder.rglob("*") if path.is_file())
    coverage = f"{draft.coverage:.1%} of the main model's output"
    return [
        f"{'draft':<9} {draft.name}, {format_size(draft.size)}, {draft.shape.n_vocab:,} tokens ({coverage})",
        f"{'trained':<9} on {draft.n_trained:,} tokens, from {draft.n_generated:,} generated tokens",
        f"{'cost':<9} a call takes {draft.cost:.3f} times as long as one of the main model",
        f"{'speed-up':<9} {pays}",
        *(f"{'benchmark':<9} {_benchmark(variant)}" for variant in draft.benchmark),
        f"{'files':<9} {recipe.folder} ({format_size(size)}): needed to continue with more --minutes",
        "",
        f"{'held-out data':<18} {'agreement':>9} {'at temperature 1':>17} {'tokens':>9}",
        *(f"{name:<18} {s.agreement:>9.1%} {s.acceptance:>17.1%} {s.n:>9,}" for name, s in scores),
        *(
            f"{f'confidence > {level:.0%}':<18} {share:>9.1%} {'':>17} {n:>9,}"
            for level, (n, share) in evaluation.by_confidence.items()
        ),
    ]


def _benchmark(variant: "VariantFigures") -> str:
    """Figures of a variant on the benchmark's prompts."""
    line = f"{variant.name}: {variant.speedup.value:.2f} times plain decoding on {variant.speedup.n} prompts"
    if variant.acceptance is None:
        return f"{line}, no draft tokens verified"
    rates = [a / t for a, t in zip(variant.accepted_at, variant.tested_at, strict=True) if t]
    positions = ", ".join(f"{rate:.0%}" for rate in rates[:4])
    return (
        f"{line}, accepted {variant.draft_n_accepted:,} of {variant.draft_n:,} draft tokens "
        f"({variant.acceptance:.0%}; by position {positions})"
    )
