"""Train a head: generate data, read the user's answers, select the tokens to draft, train, export, measure.

Each stage continues from the results of an earlier run, so that a run can be stopped and resumed. Requires
PyTorch.
"""

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from spec_local.bench.figures import VariantFigures
from spec_local.datastore.answer_store import KeptAnswer
from spec_local.errors import BackendError, InvalidRequest, ModelError
from spec_local.llama.headers import open_header
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_row
from spec_local.system.files import format_size, sha256
from spec_local.system.machine import default_threads
from spec_local.training import distillation, measurement, own_answers
from spec_local.training.built_in import answers_to_built_in
from spec_local.training.data_stage import DataStage
from spec_local.training.dataset import OWN, Dataset, batches
from spec_local.training.distillation import Hyperparameters, Result, TrainingProgress
from spec_local.training.evaluation import Evaluation
from spec_local.training.events import Answering, Event, Stage, Training
from spec_local.training.export import write_head
from spec_local.training.head_file import TrainedWeights, read_head
from spec_local.training.head_shape import Weights, head_shape, layers_read
from spec_local.training.initial_weights import initial_weights
from spec_local.training.main_weights import (
    MainWeights,
    check_main_weights,
    read_feed_forward,
    read_main_weights,
)
from spec_local.training.measurement import Gain
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Journal, Recipe, open_journal
from spec_local.training.shards import Document

BUILT_IN = "built-in prompts"
"""Name of the answers to the prompts of `specdec bench`."""
N_DRAFTED = (4096, 8192, 16384, 32768)
"""Numbers of tokens that a head may draft; the least that covers enough is used."""
MAX_EPOCHS = 8
"""Maximum number of times that the training data is read: more has not helped."""
MAX_OWN_EPOCHS = 24
"""Maximum number of times that the user's answers are read, each time with others beside them."""
_SPEED_TEST = 10.0  # maximum number of seconds for measuring the training speed
_EVALUATIONS = 24  # number of evaluations during the training
_RATE_TIMES_WIDTH = 0.3  # of the peak learning rate, at most: the more inputs add up, the less each changes
_CONTINUED_RATE = 0.5  # of the peak learning rate, for weights that are trained already
_SAMPLES_PER_CHANNEL = 8  # positions of the regression for each channel that the head reads
_MIN_TOKENS = 20_000  # the least data worth training on


@dataclass(frozen=True, slots=True)
class Learned:
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
    learned: Learned | None
    size: int
    sha256: str
    curve: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A head on this machine.

    gain: expected on held-out data. benchmark: figures on the benchmark's prompts. rates: expected tokens per
    second by the names in `Learned`, before and after; before is 0 for a new head.
    """

    gain: Gain
    benchmark: Sequence[VariantFigures]
    rates: Mapping[str, tuple[float, float]]


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
            f"free some, or give --disk {1.1e-9 * bytes_per_token * _MIN_TOKENS:.2g} or more"
        )
    model = Model(recipe.main, gpu_layers=recipe.gpu_layers)
    row = open_row(model, n_ctx=64, threads=recipe.threads, hidden=HiddenStates(layers))
    try:
        row.evaluate([0] * 8, 1)
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


def run(
    recipe: Recipe,
    user_texts: UserTexts,
    on_progress: Callable[[Event], None],
    answers: Sequence[KeptAnswer] = (),
) -> TrainedHead:
    """Train a head, resuming an earlier run of the same recipe.

    Args:
        answers: the user's own, if the recipe learns from them.

    Raises:
        InvalidRequest: the folder belongs to another main model or other settings, or is damaged; or there
            are too few answers.
        ModelError: the head that is to be continued is damaged or not one of this main model.
        OSError: the disk is full.
    """
    with open_journal(recipe) as journal:
        return _Pipeline(recipe, journal, on_progress).run(user_texts, answers)


def measure(recipe: Recipe, head: TrainedHead, on_progress: Callable[[Event], None]) -> Measured:
    """Measure a head on this machine, and compute what it gains."""
    on_progress(Stage("measuring the head"))
    pair, threads, gpu_layers = (recipe.main, head.path), recipe.threads, recipe.gpu_layers
    calls = measurement.measure_calls(*pair, threads=threads, gpu_layers=gpu_layers)

    def rate(evaluations: Mapping[str, Evaluation], name: str) -> float:
        found = evaluations.get(name)
        return measurement.expected_gain(calls, found.chain).rate if found else 0.0

    learned = head.learned
    return Measured(
        measurement.expected_gain(calls, head.evaluation.chain),
        measurement.benchmark(*pair, threads=threads, gpu_layers=gpu_layers),
        {name: (rate(learned.before, name), rate(learned.after, name)) for name in learned.after}
        if learned
        else {},
    )


@dataclass(slots=True)
class _Material:
    """What a head is made from.

    own, built_in: the user's answers and those to the built-in prompts; empty if the run does not learn.
    """

    general: Path
    continued: TrainedWeights | None = None
    own: Sequence[Document] = ()
    last_answer: int = 0
    built_in: Sequence[Document] = field(default=())


class _Pipeline:
    def __init__(self, recipe: Recipe, journal: Journal, on_progress: Callable[[Event], None]) -> None:
        self._recipe, self._journal, self._on_progress = recipe, journal, on_progress
        self._checkpoint = recipe.folder / "checkpoint.pt"
        self._threads = recipe.threads or default_threads()
        header = Model(recipe.main, weights=False)
        self._layers = layers_read(header.n_layers)
        self._n_vocab, self._shape = header.vocabulary.n_tokens, head_shape(header.n_embd)
        header.close()

    def run(self, user_texts: UserTexts, answers: Sequence[KeptAnswer]) -> TrainedHead:
        recipe = self._recipe
        material = self._material(user_texts, answers)
        self._on_progress(Stage("reading the training data"))
        dataset = Dataset(material.general, self._n_vocab, self._sizes(material), material.own)
        model = Model(recipe.main, weights=False)
        main = read_main_weights(model, dataset.drafted)
        model.close()
        result = self._train(dataset, main, material)
        learned = self._compared(dataset, main, material, result) if material.own else None
        self._on_progress(Stage("exporting"))
        self._export(dataset, main, result)
        shutil.rmtree(self._own_folder, ignore_errors=True)
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

    @property
    def _own_folder(self) -> Path:
        return self._recipe.folder / "own"

    def _material(self, user_texts: UserTexts, answers: Sequence[KeptAnswer]) -> _Material:
        """Generate training data unless it exists, and read the user's answers."""
        recipe = self._recipe
        usable = self._usable(answers) if recipe.learns else []
        material = _Material(recipe.general or recipe.folder / "data")
        self._journal.general = str(recipe.general.absolute()) if recipe.general else ""
        header = Model(recipe.main, weights=False)
        if recipe.continued:
            material.continued = read_head(recipe.continued, header)
        header.close()
        if not recipe.general:
            DataStage(recipe, self._journal, self._layers, self._on_progress).run(user_texts)
        if usable:
            model = Model(recipe.main, gpu_layers=recipe.gpu_layers)
            layers, threads = self._layers, recipe.threads
            material.built_in = answers_to_built_in(
                model,
                recipe.folder / "built-in",
                layers=layers,
                threads=threads,
                on_progress=self._answering(BUILT_IN),
            )
            material.own = own_answers.read_again(
                usable,
                model,
                self._own_folder,
                layers=layers,
                threads=threads,
                on_progress=self._answering(OWN),
            )
            material.last_answer = usable[-1].number
            model.close()
        return material

    def _usable(self, answers: Sequence[KeptAnswer]) -> Sequence[KeptAnswer]:
        """The answers to learn from; a training that has begun goes on with those that it began with."""
        last = self._journal.data.get("last_answer")
        if last and self._checkpoint.exists():
            answers = [answer for answer in answers if answer.number <= last] or answers
        return own_answers.usable(answers)

    def _answering(self, what: str) -> Callable[[int, int], None]:
        return lambda n_done, n: self._on_progress(Answering(what, n_done, n))

    def _sizes(self, material: _Material) -> Sequence[int]:
        """Numbers of tokens to draft; a head that is continued does not draft fewer than before."""
        if self._recipe.n_drafted:
            return (self._recipe.n_drafted,)
        least = len(material.continued.drafted) if material.continued else 0
        return [n for n in N_DRAFTED if n >= least] or [least]

    def _train(self, dataset: Dataset, main: MainWeights, material: _Material) -> Result:
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
            self._on_progress(Training(progress))

        training = self._run(start, main, dataset, Hyperparameters(**journal.hyperparameters))
        return distillation.train(training, checkpoint=self._checkpoint, on_progress=on_progress)

    def _run(
        self, start: Weights, main: MainWeights, dataset: Dataset, hyperparameters: Hyperparameters
    ) -> distillation.Run:
        device, threads = self._recipe.device, self._threads
        return distillation.Run(
            start, self._shape, main, dataset, hyperparameters, device=device, threads=threads
        )

    def _compared(self, dataset: Dataset, main: MainWeights, material: _Material, result: Result) -> Learned:
        """Evaluate the head that was continued, with its own tokens, and the new one."""
        self._on_progress(Stage("evaluating"))
        before: Mapping[str, Evaluation] = {}
        if material.continued:
            model = Model(self._recipe.main, weights=False)
            drafted = material.continued.drafted
            earlier = copy.copy(dataset)
            earlier.draft(drafted, self._n_vocab)
            weights = replace(main, output=read_main_weights(model, drafted).output)
            model.close()
            before = self._evaluated(material.continued.weights, weights, earlier, material)
        after = self._evaluated(result.weights, main, dataset, material)
        return Learned(len(material.own), material.last_answer, before, after)

    def _evaluated(
        self, weights: Weights, main: MainWeights, dataset: Dataset, material: _Material
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
        model = Model(self._recipe.main, weights=False)
        feed_forward = read_feed_forward(model)
        model.close()
        n_samples = _SAMPLES_PER_CHANNEL * len(self._layers) * self._shape.n_embd
        samples = dataset.samples(n_samples, main.embeddings, np.random.default_rng(self._recipe.seed))
        return initial_weights(self._shape, samples, main.norm, feed_forward, self._recipe.seed)

    def _schedule(self, dataset: Dataset, main: MainWeights, start: Weights) -> Hyperparameters:
        """Return hyperparameters with as many steps as the time and the data allow."""
        recipe = self._recipe
        base = Hyperparameters(n_steps=1, seed=recipe.seed)
        rate = min(base.learning_rate, _RATE_TIMES_WIDTH / self._shape.n_embd)
        base = replace(base, learning_rate=rate * (_CONTINUED_RATE if recipe.continued else 1))
        n_epochs = MAX_OWN_EPOCHS if dataset.own else MAX_EPOCHS
        n_steps = n_epochs * sum(1 for _ in batches(dataset.epoch(0, recipe.seed), base.batch_tokens))
        seconds = recipe.training_seconds
        if seconds < float("inf"):
            training = self._run(start, main, dataset, base)
            speed = distillation.steps_per_second(training, min(_SPEED_TEST, seconds / 10))
            n_steps = min(n_steps, max(2, round(speed * seconds * 0.9)))  # evaluations take the rest
        return replace(
            base,
            n_steps=n_steps,
            warmup_steps=min(base.warmup_steps, n_steps // 10),
            eval_every=-(-n_steps // _EVALUATIONS),
        )

    def _export(self, dataset: Dataset, main: MainWeights, result: Result) -> None:
        recipe = self._recipe
        provenance: dict[str, str | int | float] = {
            "tokens_generated": dataset.n_generated,
            "tokens_trained": result.n_tokens,
            "agreement": result.evaluation.overall.agreement,
            "seed": recipe.seed,
        }
        write_head(
            recipe.target,
            recipe.main,
            self._shape,
            result.weights,
            main.output,
            layers=self._layers,
            drafted=dataset.drafted,
            provenance=provenance,
        )
