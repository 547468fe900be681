"""What a person sees of the training of a draft: how far it is, and what came of it."""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from spec_local.files import format_size
from specdec_cli import render

if TYPE_CHECKING:
    from spec_local.bench.figures import VariantFigures
    from spec_local.training.making import Event, Made
    from spec_local.training.recipe import Recipe

_EVERY = 30.0  # seconds between lines where nobody watches


@contextlib.contextmanager
def told(recipe: "Recipe") -> "Iterator[Callable[[Event], None]]":
    """Who hears of what happens: a line that changes on a terminal, else a line now and then."""
    line = _Lines(60 * recipe.minutes)
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False, no_color="NO_COLOR" in os.environ)
        with console.status("") as status:

            def show(event: "Event") -> None:
                said, stays = line(event)
                if stays:
                    console.print(Text(said, "dim"))
                else:
                    text = Text(said)
                    text.truncate(max(1, console.width - 2), overflow="ellipsis")  # beside what moves
                    status.update(text)

            yield show
        return
    last = ("", 0.0)

    def say(event: "Event") -> None:
        nonlocal last
        said, stays = line(event)
        if stays or line.stage != last[0] or time.monotonic() - last[1] > _EVERY:
            render.note(said)
            last = line.stage, time.monotonic()

    yield say


class _Lines:
    """What to say of an event, and whether it stays. seconds: for all stages."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.stage, self._begun = seconds, "", 0.0

    def __call__(self, event: "Event") -> tuple[str, bool]:
        from spec_local.training import making, recipe

        if isinstance(event, making.Stage):
            self.stage, self._begun = event.name, time.monotonic()
            return event.name, False
        if isinstance(event, making.Rate):
            who = "main" if event.kind == "main" else f"a {event.kind} copy of it"
            return f"{who} would write {event.rate:,.0f} tokens a second", True
        if isinstance(event, making.Raced):
            e = event
            return (
                f"tried {e.name}: foretells {e.agreement:.1%}, costs {e.step:.2f} of main: {e.gain:.2f} times plain",
                True,
            )
        if isinstance(event, making.Writing):
            w, left = event.written, event.seconds_left
            in_all = left + (1 - recipe.WRITING) * self._seconds
            said = f"main writes: {w.tokens:,} tokens, {w.rate:,.0f} a second"
            return f"{said} · {_clock(left)} left, {_clock(in_all)} in all", False
        p = event.progress
        share = f"foretells {max(0.0, p.agreement):.1%}"
        if self.stage == "learning":
            said = f"learning: step {p.step:,} of {p.n_steps:,}, loss {p.loss:.2f}, {share}"
            return f"{said} · {_clock(p.seconds_left)} left", False
        left = max(0.0, recipe.RACE * self._seconds - (time.monotonic() - self._begun))
        in_all = left + (1 - recipe.WRITING - recipe.RACE) * self._seconds
        return f"trying {event.name}: {share} · {_clock(left)} left, {_clock(in_all)} in all", False


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(max(0, round(seconds or 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report(made: "Made", recipe: "Recipe") -> list[str]:
    """What came of it, as lines: what the draft is and costs, whether it pays, and how it guesses."""
    figures, pair = made.figures, [str(recipe.main), str(made.path)]
    if made.gain > 1:
        pays = f"at best {made.gain:.2f} times plain at temperature 0; {shlex.join(['specdec', 'bench', '--main', pair[0], '--draft', pair[1]])} measures it"
    else:
        pays = f"none, at best {made.gain:.2f} times plain: it does not pay here; {shlex.join(['specdec', 'tune', *pair])} shows what would"
    scores = [
        ("of main's tokens", figures.all),
        *figures.by_category.items(),
        *((f"from token {start + 1}", score) for start, score in figures.by_position.items()),
    ]
    kept = sum(path.stat().st_size for path in recipe.folder.rglob("*") if path.is_file())
    return [
        f"{'draft':<9} {made.name}, {format_size(made.size)}, {made.shape.n_vocab:,} tokens ({made.coverage:.1%} of what main writes)",
        f"{'learned':<9} {made.n_learned:,} tokens, of {made.n_written:,} that main wrote",
        f"{'cost':<9} a call takes {made.step:.3f} of main's",
        f"{'speed-up':<9} {pays}",
        *(f"{'tried':<9} {_tried(variant)}" for variant in made.runs),
        f"{'kept':<9} {recipe.folder} ({format_size(kept)}), to go on with more --minutes: else delete it",
        "",
        f"{'on texts held out':<18} {'foretold':>9} {'at temperature 1':>17} {'tokens':>9}",
        *(f"{name:<18} {s.agreement:>9.1%} {s.acceptance:>17.1%} {s.n:>9,}" for name, s in scores),
        *(
            f"{f'surer than {level:.0%}':<18} {share:>9.1%} {'':>17} {n:>9,}"
            for level, (n, share) in figures.sure.items()
        ),
    ]


def _tried(variant: "VariantFigures") -> str:
    """What a variant did on the benchmark's prompts, which the draft has never seen."""
    said = f"{variant.name}: {variant.speedup.value:.2f} times plain on {variant.speedup.n} prompts of the benchmark"
    if variant.acceptance is None:
        return f"{said}, no guess was worth a test"
    shares = [a / t for a, t in zip(variant.accepted_at, variant.tested_at, strict=True) if t]
    places = ", ".join(f"{share:.0%}" for share in shares[:4])
    return f"{said}, accepted {variant.draft_n_accepted:,} of {variant.draft_n:,} guesses ({variant.acceptance:.0%}; by place {places})"
