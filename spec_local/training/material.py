"""Gather what a head is made from: general data, a head to continue, and the user's own answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_local.bench import prompts
from spec_local.core.calls import run
from spec_local.datastore.answer_store import KeptAnswer
from spec_local.errors import BackendError, InvalidRequest, ModelError
from spec_local.llama.fitting import load_fitting
from spec_local.llama.headers import open_header
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.system.files import format_size
from spec_local.training import distillation
from spec_local.training.data_stage import DataStage
from spec_local.training.dataset import OWN
from spec_local.training.events import Answering, Event
from spec_local.training.generation import answers_to
from spec_local.training.head_file import TrainedWeights, read_head
from spec_local.training.head_shape import layers_read
from spec_local.training.main_weights import check_main_weights
from spec_local.training.own_answers import answer_again, read_again, usable
from spec_local.training.prompts import TrainingPrompt, UserTexts
from spec_local.training.recipe import Journal, Recipe
from spec_local.training.shards import Document

BUILT_IN = "built-in prompts"
"""Name of the answers to the prompts of `specdec bench`."""
_MIN_TOKENS = 20_000  # the least data worth training on
_N_CTX, _N_PARALLEL = 4096, 4  # for built-in prompts, some of which are long; more texts take more memory


@dataclass(frozen=True, slots=True)
class Material:
    """What a head is made from.

    general: folder of the general data. continued: the head to continue. own, further, built_in: the user's
    answers, further ones to the same prompts, and those to the built-in prompts; empty if the run does not
    learn. last_answer: number of the user's last one.
    """

    general: Path
    continued: TrainedWeights | None
    own: Sequence[Document] = ()
    further: Sequence[Document] = ()
    built_in: Sequence[Document] = ()
    last_answer: int = 0


def check(recipe: Recipe) -> int:
    """Check for errors that would otherwise occur only after an hour of work.

    Returns:
        the size of the training data in bytes per token of prompts and answers.

    Raises:
        ModelFileError, ModelError: the main model cannot be read, or no head can be trained for it.
        InvalidRequest: the device is not available, or there is too little disk space.
    """
    distillation.check_device(recipe.device)
    header = open_header(recipe.main)
    if header.is_head:
        raise ModelError(f"{recipe.main.name} is a head: give the model that it is for")
    layers = layers_read(header.n_layers)
    check_main_weights(header)
    bytes_per_token = len(layers) * header.n_embd * np.dtype(np.uint16).itemsize
    header.close()
    if recipe.max_bytes < bytes_per_token * _MIN_TOKENS:
        raise InvalidRequest(
            f"{format_size(recipe.max_bytes)} of disk space are too little for training data: "
            f"free some, or give `disk={1.1e-9 * bytes_per_token * _MIN_TOKENS:.2g}` or more"
        )
    model = load_fitting(recipe.main, recipe.offload, 64)
    row = open_sequence(model, n_ctx=64, threads=recipe.threads, hidden=HiddenStates(layers))
    try:
        run(row.call([0] * 8, n_logits=1))
        why = "" if np.isfinite(row.states(range(8))).all() else "they are not finite"
    except BackendError as error:
        why = str(error).partition(": ")[0]  # what to do there is not what to do here
    row.close()
    model.close()
    if why:
        raise ModelError(
            f"the hidden states of {recipe.main.name} cannot be used ({why}): give another main model"
        )
    return bytes_per_token


def gather(
    recipe: Recipe,
    journal: Journal,
    user_texts: UserTexts,
    answers: Sequence[KeptAnswer],
    on_progress: Callable[[Event], None],
) -> Material:
    """Generate training data unless it exists, and read the user's answers if the recipe learns.

    Raises:
        InvalidRequest: there are too few answers, or training data is damaged.
        ModelError: the head that is to be continued is damaged or not one of this main model.
        OSError: the disk is full.
    """
    header = Model(recipe.main, weights=False)
    layers = layers_read(header.n_layers)
    continued = read_head(recipe.continued, header) if recipe.continued else None
    header.close()
    answers = _to_learn_from(recipe, journal, answers) if recipe.learns else ()
    journal.general = str(recipe.general.absolute()) if recipe.general else ""
    if not recipe.general:
        DataStage(recipe, journal, layers, on_progress).run(user_texts)
    general = recipe.general or recipe.folder / "data"
    if not answers:
        return Material(general, continued)

    def progress(what: str) -> Callable[[int, int], None]:
        return lambda n_done, n: on_progress(Answering(what, n_done, n))

    limits = recipe.limits
    common: dict[str, Any] = {"layers": layers, "threads": recipe.threads}
    model = load_fitting(recipe.main, recipe.offload, _N_PARALLEL * _N_CTX)
    built_in = answers_to_built_in(
        model,
        recipe.folder / "built-in",
        max_tokens=limits.built_in,
        on_progress=progress(f"answering {BUILT_IN}"),
        **common,
    )
    reading = progress(f"reading {OWN}")
    own = read_again(answers, model, recipe.own, limits=limits, on_progress=reading, **common)
    further = answer_again(
        [answer for answer, document in zip(answers, own, strict=True) if not document.held_out],
        model,
        recipe.own / "further",
        seconds=recipe.further_seconds,
        seed=recipe.seed,
        limits=limits,
        on_progress=progress("answering your prompts again"),
        **common,
    )
    model.close()
    return Material(general, continued, own, further, built_in, answers[-1].number)


def answers_to_built_in(
    model: Model, folder: Path, questions: Sequence[prompts.Prompt] | None = None, **options: Any
) -> list[Document]:
    """Return the main model's answers at temperature 0 to the prompts of `specdec bench`.

    No head was trained for these texts. See `answers_to` for the other arguments and the errors.
    """
    return answers_to(
        [TrainingPrompt(each.category, each.text, True) for each in questions or prompts.load()],
        model,
        folder,
        whole=True,
        n_parallel=_N_PARALLEL,
        n_ctx=model.n_ctx(_N_CTX),
        temperatures=(0.0,),
        **options,
    )


def _to_learn_from(recipe: Recipe, journal: Journal, answers: Sequence[KeptAnswer]) -> Sequence[KeptAnswer]:
    """Return the latest answers; a training that has begun goes on with those that it began with."""
    last = journal.data.get("last_answer")
    if last and recipe.checkpoint.exists():
        answers = [answer for answer in answers if answer.number <= last] or answers
    return usable(answers, recipe.limits)
