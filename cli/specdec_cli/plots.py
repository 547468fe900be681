"""Plots of benchmarks and of training. They need matplotlib, an optional dependency."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_local.bench.figures import VariantFigures
from spec_local.system import extras


def check() -> None:
    """Check that matplotlib is installed, before anything slow.

    Raises:
        SpecLocalError: it is missing.
    """
    extras.check("matplotlib", "plot", "--plot")


def draw(variants: Sequence[VariantFigures], path: Path) -> None:
    """Write a PNG: the speed-up by category, and the acceptance rate by position in the draft."""
    figure = _figure(11)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    categories = [*variants[0].by_category, "all"]
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        estimates = [*variant.by_category.values(), variant.speedup]
        values = [e.value for e in estimates]
        below = [e.value - e.low for e in estimates]
        above = [e.high - e.value for e in estimates]
        positions = [at + (i + 0.5) * width - 0.4 for at in range(len(categories))]
        left.bar(positions, values, width, yerr=[below, above], capsize=2, label=variant.name)
        rates = [a / t for a, t in zip(variant.accepted_at, variant.tested_at, strict=True) if t]
        right.plot(range(1, len(rates) + 1), rates, marker="o", label=variant.name)
    left.axhline(1.0, color="black", linewidth=1)
    left.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    left.set_ylabel("speed-up over plain decoding")
    right.set_xlabel("position in the draft")
    right.set_ylabel("acceptance rate")
    right.set_ylim(0, 1.02)
    left.legend()
    figure.savefig(path, format="png", dpi=150)


def draw_training_curve(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of the acceptance rate on held-out data, by category, over the tokens read.

    curve: as in `spec_local.training.recipe.Journal`.
    """
    figure = _figure(7)
    axes = figure.subplots()
    read = [point["n_read"] for point in curve]
    for name in curve[0]["by_category"] if curve else ():
        axes.plot(read, [point["by_category"][name]["agreement"] for point in curve], linewidth=1, label=name)
    axes.plot(
        read, [point["overall"]["agreement"] for point in curve], color="black", linewidth=2, label="all"
    )
    axes.set_xlabel("tokens read")
    axes.set_ylabel("acceptance rate of the first draft token, held-out data")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _figure(width: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display, whatever the user's settings are
    return figure
