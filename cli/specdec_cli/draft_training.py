"""A run of `specdec draft train`, whose options have been checked. Needs PyTorch."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_local.datastore.answer_store import AnswerStore, answer_store_of
from spec_local.errors import SpecLocalError
from spec_local.system.files import saving
from spec_local.text import counted
from spec_local.training import material, pipeline
from spec_local.training.own_answers import usable
from spec_local.training.prompts import UserTexts, read_user_texts
from spec_local.training.recipe import Recipe
from specdec_cli import draft_view, plots, render


def run(recipe: Recipe, texts: Sequence[Path], plot: Path | None) -> None:
    """Train a head, and print the report and the path.

    Args:
        texts: files of the user to learn from.
        plot: file for a picture of the training curve.
    """
    answers = _kept_answers(recipe)
    render.note(draft_view.plan(recipe, material.check(recipe)))
    user_texts = _user_texts(texts)
    with _resumable(recipe), draft_view.progress(recipe) as on_progress:
        trained = pipeline.run(recipe, user_texts, on_progress, answers)
        measured = pipeline.measure(recipe, trained, on_progress)
    render.notes(draft_view.report(trained, measured, recipe))
    if plot:
        with saving(plot) as picture:
            plots.draw_training_curve(trained.curve, picture)
    render.write(f"{trained.path}\n")


def _user_texts(texts: Sequence[Path]) -> UserTexts:
    user_texts = read_user_texts(texts)
    for reason, skipped in user_texts.skipped.items():
        render.note(f"skipped, {reason}: {', '.join(map(str, skipped))}")
    if texts:
        n_prompts, n_passages = len(user_texts.prompts), len(user_texts.passages)
        prompts = counted(n_prompts, "prompt", separator=",")
        render.note(f"your texts: {prompts}, {counted(n_passages, 'passage', separator=',')}")
    return user_texts


def _kept_answers(recipe: Recipe) -> AnswerStore | None:
    """The store of the answers to learn from, if the run learns.

    Raises:
        InvalidRequest: there are too few.
    """
    if not recipe.learns:
        return None
    store = answer_store_of(recipe.main, render.note)
    render.note(f"your answers: {len(usable(store.answers())):,}")
    return store


@contextlib.contextmanager
def _resumable(recipe: Recipe) -> Iterator[None]:
    """Explain how to resume if the run is stopped or a file cannot be written."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, SIGHUP
        render.note(f"stopped: run the same command again to resume from {recipe.folder}")
        raise
    except OSError as error:
        raise SpecLocalError(
            f"{recipe.folder} cannot be written ({error.strerror or error}): "
            "fix that and run the same command again to resume, or give another --output"
        ) from None
