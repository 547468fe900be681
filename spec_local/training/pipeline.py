"""Train a head: generate data, read the user's answers, select the tokens to draft, train, export, measure.

Each stage continues from the results of an earlier run, so that a run can be stopped and resumed. Requires
PyTorch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spec_local.bench.figures import VariantFigures
from spec_local.datastore.answer_store import AnswerStore, KeptAnswer
from spec_local.errors import SpecLocalError
from spec_local.llama.model import Model
from spec_local.system.files import sha256
from spec_local.system.machine import default_threads
from spec_local.training import distillation, measurement
from spec_local.training.dataset import OWN, Dataset, batches
from spec_local.training.distillation import Hyperparameters, Result, TrainingProgress
from spec_local.training.evaluation import Evaluation
from spec_local.training.events import Event, Stage
from spec_local.training.head_file import export_head
from spec_local.training.head_shape import Weights, head_shape, layers_read
from spec_local.training.initial_weights import initial_weights
from spec_local.training.main_weights import MainWeights, read_feed_forward, read_main_weights
from spec_local.training.material import BUILT_IN, Material, gather
from spec_local.training.measurement import HeadGain
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Journal, Recipe, open_journal

N_DRAFTED = (4096, 8192, 16384, 32768)
"""Numbers of tokens that a head may draft; the least that covers enough is used."""
_MIN_OWN_EPOCHS = 6  # fewer teach too little to be worth the reading, however slow this machine is now
_OWN_PATIENCE = 6  # evaluations without improvement: a tenth of few answers shows it late
_SPEED_TEST = 10.0  # maximum number of seconds for measuring the training speed
_RATE_TIMES_WIDTH = 0.3  # of the peak learning rate, at most: the more inputs add up, the less each changes
_CONTINUED_RATE = 0.5  # of the peak learning rate, for weights that are trained already
_SAMPLES_PER_CHANNEL = 8  # positions of the regression for each channel that the head reads


class AnswersDeleted(SpecLocalError):
    """The user's answers that a head was learning from have been deleted."""


@dataclass(frozen=True, slots=True)
class LearnedAnswers:
    """The user's answers that a head has learned from, and what that has changed.

    n_answers: number of answers, a tenth of which are held out. last_answer: number of the last one. before,
    after: evaluations on the held-out ones and on the built-in prompts, by name, of the head that was
    continued and of the new one; before is empty for a new head.
    """

    n_answers: int
    last_answer: int
    before: Mapping[str, Evaluation]
    after: Mapping[str, Evaluation]


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A finished head.

    n_generated: number of tokens of training data. n_trained: number of tokens read in training, in all
    epochs together. n_drafted: number of tokens that it can draft. coverage: share of the main model's tokens
    that it can draft. evaluation: on held-out data. learned: None: not from the user's answers. size: file
    size in bytes. curve: as in `Journal`.
    """

    path: Path
    n_generated: int
    n_trained: int
    n_drafted: int
    coverage: float
    evaluation: Evaluation
    learned: LearnedAnswers | None
    size: int
    sha256: str
    curve: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class MeasuredHead:
    """A head on this machine.

    gain: expected on held-out data. benchmark: figures on the benchmark's prompts. rates: expected tokens per
    second by the names in `LearnedAnswers`, before and after; before is 0 for a new head.
    """

    gain: HeadGain
    benchmark: Sequence[VariantFigures]
    rates: Mapping[str, tuple[float, float]]


def run(
    recipe: Recipe,
    user_texts: UserTexts,
    on_progress: Callable[[Event], None],
    answers: AnswerStore | None = None,
) -> TrainedHead:
    """Train a head, resuming an earlier run of the same recipe.

    Args:
        answers: the user's own; needed if the recipe learns from them.

    Raises:
        AnswersDeleted: they were deleted in the meantime; nothing of them is left.
        InvalidRequest: the folder belongs to another main model or other settings, or is damaged; or there
            are too few answers.
        ModelError: the head that is to be continued is damaged or not one of this main model.
        OSError: the disk is full.
    """
    with open_journal(recipe) as journal:
        if not (recipe.learns and answers):
            return _Pipeline(recipe, journal, on_progress).run(user_texts, ())

        def checked(event: Event) -> None:
            if not recipe.own.exists():
                raise AnswersDeleted
            on_progress(event)

        kept = answers.answers_to_copy(recipe.own)
        try:
            trained = _Pipeline(recipe, journal, checked).run(user_texts, kept)
        except (OSError, SpecLocalError):
            if recipe.own.exists():
                raise
            recipe.checkpoint.unlink(missing_ok=True)
            raise AnswersDeleted(
                "the answers that this head was learning from were deleted, and nothing of them is left: "
                "train again when there are new ones"
            ) from None
        answers.end_copy(recipe.own, recipe.target)
        return trained


def measure(recipe: Recipe, head: TrainedHead, on_progress: Callable[[Event], None]) -> MeasuredHead:
    """Measure a head on this machine, and compute what it gains."""
    on_progress(Stage("measuring the head"))
    pair, threads, offload = (recipe.main, head.path), recipe.threads, recipe.offload
    calls = measurement.measure_calls(*pair, threads=threads, offload=offload)

    def rate(evaluations: Mapping[str, Evaluation], name: str) -> float:
        found = evaluations.get(name)
        return measurement.expected_gain(calls, found.chain).rate if found else 0.0

    learned = head.learned
    return MeasuredHead(
        measurement.expected_gain(calls, head.evaluation.chain),
        measurement.benchmark(*pair, threads=threads, offload=offload),
        {name: (rate(learned.before, name), rate(learned.after, name)) for name in learned.after}
        if learned
        else {},
    )


class _Pipeline:
    def __init__(self, recipe: Recipe, journal: Journal, on_progress: Callable[[Event], None]) -> None:
        self._recipe, self._journal, self._on_progress = recipe, journal, on_progress
        self._checkpoint = recipe.checkpoint
        self._threads = recipe.threads or default_threads()
        with closing(Model(recipe.main, weights=False)) as header:
            self._layers = layers_read(header.n_layers)
            self._n_vocab, self._shape = header.vocabulary.n_tokens, head_shape(header.n_embd)

    def run(self, user_texts: UserTexts, answers: Sequence[KeptAnswer]) -> TrainedHead:
        recipe = self._recipe
        material = gather(recipe, self._journal, user_texts, answers, self._on_progress)
        self._on_progress(Stage("reading the training data"))
        own = [*material.own, *material.further]
        dataset = Dataset(material.general, self._n_vocab, self._sizes(material), own)
        main = self._main_weights(dataset)
        result = self._train(dataset, main, material)
        learned = self._compared(dataset, main, material, result) if material.own else None
        self._on_progress(Stage("exporting"))
        self._export(dataset, main, result)
        return TrainedHead(
            path=recipe.target,
            n_generated=dataset.n_generated,
            n_trained=result.n_tokens,
            n_drafted=len(dataset.drafted),
            coverage=dataset.coverage,
            evaluation=result.evaluation,
            learned=learned,
            size=recipe.target.stat().st_size,
            sha256=sha256(recipe.target),
            curve=self._journal.curve,
        )

    def _main_weights(self, dataset: Dataset) -> MainWeights:
        with closing(Model(self._recipe.main, weights=False)) as model:
            return read_main_weights(model, dataset.drafted)

    def _sizes(self, material: Material) -> Sequence[int]:
        """Numbers of tokens to draft; a head that is continued does not draft fewer than before."""
        if self._recipe.n_drafted:
            return (self._recipe.n_drafted,)
        least = len(material.continued.drafted) if material.continued else 0
        return [n for n in N_DRAFTED if n >= least] or [least]

    def _train(self, dataset: Dataset, main: MainWeights, material: Material) -> Result:
        recipe, journal = self._recipe, self._journal
        continued = material.continued
        if not continued:
            self._on_progress(Stage("fitting the start"))
        start = continued.weights if continued else self._start(dataset, main)
        self._on_progress(Stage("training"))
        data = {
            "n_generated": dataset.n_generated,
            "n_drafted": len(dataset.drafted),
            "last_answer": material.last_answer,
            "continued": sha256(recipe.continued) if recipe.continued else "",
        }
        if journal.data != data or not self._checkpoint.exists():  # no step of an earlier run is kept
            journal.data, journal.curve = data, []
            journal.hyperparameters = asdict(self._schedule(dataset, main, start))
            self._checkpoint.unlink(missing_ok=True)  # it is for other data
            journal.save(recipe)

        def on_progress(progress: TrainingProgress) -> None:
            if progress.evaluation:
                # A run that resumes from a checkpoint repeats the evaluations after it.
                journal.curve = [point for point in journal.curve if point["n_read"] < progress.n_tokens]
                journal.curve.append({"n_read": progress.n_tokens, **asdict(progress.evaluation)})
                journal.save(recipe)
            self._on_progress(progress)

        training = self._run(start, main, dataset, Hyperparameters(**journal.hyperparameters))
        return distillation.train(
            training, checkpoint=self._checkpoint, save_every=recipe.limits.unsaved, on_progress=on_progress
        )

    def _run(
        self, start: Weights, main: MainWeights, dataset: Dataset, hyperparameters: Hyperparameters
    ) -> distillation.TrainingRun:
        device, threads = self._recipe.device, self._threads
        return distillation.TrainingRun(
            start, self._shape, main, dataset, hyperparameters, device=device, threads=threads
        )

    def _compared(
        self, dataset: Dataset, main: MainWeights, material: Material, result: Result
    ) -> LearnedAnswers:
        """Evaluate the head that was continued, with its own tokens, and the new one."""
        self._on_progress(Stage("evaluating"))
        before: Mapping[str, Evaluation] = {}
        if material.continued:
            earlier = copy.copy(dataset)
            earlier.draft(material.continued.drafted, self._n_vocab)
            weights = replace(main, output=self._main_weights(earlier).output)
            before = self._evaluated(material.continued.weights, weights, earlier, material)
        after = self._evaluated(result.weights, main, dataset, material)
        return LearnedAnswers(len(material.own), material.last_answer, before, after)

    def _evaluated(
        self, weights: Weights, main: MainWeights, dataset: Dataset, material: Material
    ) -> Mapping[str, Evaluation]:
        """Evaluate a head on texts that it was not trained for."""
        run = self._run(weights, main, dataset, Hyperparameters(n_steps=1))
        own = [document for document in material.own if document.held_out]
        return {
            name: run.evaluate_weights(run.best, documents)
            for name, documents in ((OWN, own), (BUILT_IN, material.built_in))
        }

    def _start(self, dataset: Dataset, main: MainWeights) -> Weights:
        """Fit the initial weights; what that needs, some GB for a large model, is free afterwards."""
        with closing(Model(self._recipe.main, weights=False)) as model:
            feed_forward = read_feed_forward(model)
        n_samples = _SAMPLES_PER_CHANNEL * len(self._layers) * self._shape.n_embd
        samples = dataset.samples(n_samples, main.embeddings, np.random.default_rng(self._recipe.seed))
        return initial_weights(self._shape, samples, main.norm, feed_forward, self._recipe.seed)

    def _schedule(self, dataset: Dataset, main: MainWeights, start: Weights) -> Hyperparameters:
        """Return hyperparameters with as many steps as the time and the data allow."""
        recipe, limits = self._recipe, self._recipe.limits
        base = Hyperparameters(n_steps=1, seed=recipe.seed)
        rate = min(base.learning_rate, _RATE_TIMES_WIDTH / self._shape.n_embd)
        base = replace(base, learning_rate=rate * (_CONTINUED_RATE if recipe.continued else 1))
        if dataset.own:
            base = replace(base, patience=_OWN_PATIENCE)
        n_batches = sum(1 for _ in batches(dataset.epoch(0, recipe.seed), base.batch_tokens))
        least, most = (_MIN_OWN_EPOCHS, limits.own_epochs) if dataset.own else (0, limits.epochs)
        n_steps, seconds = most * n_batches, recipe.training_seconds
        if seconds < float("inf"):
            training = self._run(start, main, dataset, base)
            speed = distillation.steps_per_second(training, min(_SPEED_TEST, seconds / 10))
            possible = max(2, round(speed * seconds * 0.9))  # evaluations take the rest
            n_steps = min(n_steps, max(possible, least * n_batches))
        return replace(
            base,
            n_steps=n_steps,
            warmup_steps=min(base.warmup_steps, n_steps // 10),
            eval_every=-(-n_steps // limits.evaluations),
        )

    def _export(self, dataset: Dataset, main: MainWeights, result: Result) -> None:
        recipe = self._recipe
        provenance: dict[str, int | float] = {
            "tokens_generated": dataset.n_generated,
            "tokens_trained": result.n_tokens,
            "agreement": result.evaluation.overall.agreement,
            "seed": recipe.seed,
        }
        export_head(
            recipe.target,
            recipe.main,
            self._shape,
            {"output.weight": main.output, **result.weights},
            layers=self._layers,
            drafted=dataset.drafted,
            provenance=provenance,
        )
