"""A benchmark as a picture. Needs matplotlib, which is an extra of its own."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_local.errors import SpecLocalError

if TYPE_CHECKING:
    from spec_local.bench.figures import VariantFigures


def check() -> None:
    """Say that matplotlib is missing before anything has been measured for it.

    Raises:
        SpecLocalError: it is.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise SpecLocalError("--plot needs matplotlib: run pip install 'spec-local[plot]'")


def draw(variants: Sequence["VariantFigures"], path: Path) -> None:
    """Write a PNG: speed-up of each category, and how often guesses were accepted at each position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, whatever the user's settings say
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    categories = [*variants[0].by_category, "all"]
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        estimates = [*variant.by_category.values(), variant.speedup]
        values = [e.value for e in estimates]
        below = [e.value - e.low for e in estimates]
        above = [e.high - e.value for e in estimates]
        places = [at + (i + 0.5) * width - 0.4 for at in range(len(categories))]
        left.bar(places, values, width, yerr=[below, above], capsize=2, label=variant.name)
        rates = [a / t for a, t in zip(variant.accepted_at, variant.tested_at, strict=True) if t]
        right.plot(range(1, len(rates) + 1), rates, marker="o", label=variant.name)
    left.axhline(1.0, color="black", linewidth=1)
    left.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    left.set_ylabel("tokens/s against plain")
    right.set_xlabel("position of the guess")
    right.set_ylabel("accepted of those tested")
    right.set_ylim(0, 1.02)
    left.legend()
    figure.savefig(path, format="png", dpi=150)


def draw_learning(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: what a draft foretells on texts held out, by the tokens that it has read.

    curve: as `spec_local.training.recipe.Journal` has it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    read = [point["n_read"] for point in curve]
    for name in curve[0]["by_category"] if curve else ():
        axes.plot(read, [point["by_category"][name]["agreement"] for point in curve], linewidth=1, label=name)
    axes.plot(read, [point["all"]["agreement"] for point in curve], color="black", linewidth=2, label="all")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("main's tokens foretold")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
