"""Train a draft model: generate data, trim the vocabulary, select a model, train, export, benchmark.

Each stage continues from the results of an earlier run, so that a run can be stopped and resumed. Requires
PyTorch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from spec_local.bench.figures import VariantFigures
from spec_local.calibration.measure import measure
from spec_local.files import sha256
from spec_local.llama.context import open_context
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.machine import default_threads
from spec_local.training import distillation, draft_benchmark, precision, tokenizer
from spec_local.training.candidates import Candidate, candidates
from spec_local.training.dataset import Dataset
from spec_local.training.distillation import Hyperparameters, Result, TrainingProgress
from spec_local.training.evaluation import Evaluation, evaluate
from spec_local.training.export import write_draft
from spec_local.training.generation import DataGenerator, GenerationProgress
from spec_local.training.model_shape import ModelShape, Weights
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import (
    GENERATION_SHARE,
    N_VOCAB,
    SELECTION_SHARE,
    Journal,
    Recipe,
    open_journal,
    prompt_source,
)

N_PARALLEL = 64
"""Number of sequences that the main model generates at a time, if memory allows."""
_KIND = "Q8_0"
_N_CTX = 768  # maximum number of tokens in a prompt and its answer
_SPEED_TEST = 8.0  # maximum number of seconds for measuring the training speed
_EVALUATIONS = 24  # number of evaluations during the training
_MAX_DRAFT = 7  # maximum number of draft tokens per step for the expected speed-up


@dataclass(frozen=True, slots=True)
class Stage:
    """The start of a stage."""

    name: str


@dataclass(frozen=True, slots=True)
class GenerationRate:
    """Tokens per second of a copy of the main model; kind: its precision, or "main" for its own file."""

    kind: str
    rate: float


@dataclass(frozen=True, slots=True)
class Generating:
    """Progress of the data generation."""

    progress: GenerationProgress
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Training:
    """Progress of the training of the model `name`."""

    name: str
    progress: TrainingProgress


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of a candidate model's short run.

    agreement: on held-out data. cost: cost of a call, as a share of the main model's. speedup: expected
    speed-up over plain decoding.
    """

    name: str
    agreement: float
    cost: float
    speedup: float


Event = Stage | GenerationRate | Generating | Training | CandidateResult


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A finished draft model.

    name: name of the selected candidate. n_generated: number of tokens of training data. n_trained: number of
    tokens read in training, in all epochs together. coverage: share of the main model's tokens that the draft
    model has. evaluation: on held-out data. cost, speedup: as in `CandidateResult`; with a speedup below 1,
    the draft model does not pay. benchmark: figures on the benchmark's prompts. size: file size in bytes.
    curve: as in `Journal`.
    """

    path: Path
    name: str
    shape: ModelShape
    n_generated: int
    n_trained: int
    coverage: float
    evaluation: Evaluation
    cost: float
    speedup: float
    benchmark: Sequence[VariantFigures]
    size: int
    sha256: str
    curve: Sequence[Mapping[str, Any]]


def check(recipe: Recipe) -> None:
    """Check for errors that would otherwise occur only after an hour of work.

    Raises:
        ModelFileError, ModelError: the main model cannot be read, or has a tokenizer that cannot be
            trimmed.
        InvalidRequest: the device is not available.
    """
    model = open_header(recipe.main)
    tokenizer.read(model, tokenizer.read_metadata(recipe.main))
    model.close()
    distillation.check_device(recipe.device)


def run(recipe: Recipe, user_texts: UserTexts, on_progress: Callable[[Event], None]) -> TrainedDraft:
    """Train a draft model, resuming an earlier run of the same recipe.

    Raises:
        InvalidRequest: the folder belongs to another main model or other settings, or is damaged.
        ModelError: the main model's tokenizer cannot be trimmed.
        OSError: the disk is full.
    """
    with open_journal(recipe) as journal:
        return _Pipeline(recipe, journal, on_progress).run(user_texts)


class _Pipeline:
    def __init__(self, recipe: Recipe, journal: Journal, on_progress: Callable[[Event], None]) -> None:
        self._recipe, self._journal, self._on_progress = recipe, journal, on_progress
        self._checkpoint = recipe.folder / "checkpoint.pt"
        self._threads = recipe.threads or default_threads()

    def run(self, user_texts: UserTexts) -> TrainedDraft:
        recipe = self._recipe
        self._generate(user_texts)
        self._on_progress(Stage("selecting tokens"))
        dataset = Dataset(recipe.main, recipe.folder / "data", N_VOCAB[recipe.size])
        candidate = self._select(dataset)
        result = self._train(dataset, candidate)
        self._on_progress(Stage("exporting"))
        evaluation = evaluate(result.weights, candidate.shape, dataset.held_out)
        provenance: dict[str, str | int | float] = {
            "made_from": candidate.name,
            "tokens_generated": dataset.n_generated,
            "tokens_trained": result.n_tokens,
            "agreement": evaluation.overall.agreement,
            "seed": recipe.seed,
            "minutes": recipe.minutes,
        }
        self._export(recipe.target, dataset, candidate.shape, result.weights, provenance)
        cost, speedup = _cost_and_speedup(recipe, recipe.target, evaluation.overall.agreement)
        self._on_progress(Stage("running the benchmark"))
        return TrainedDraft(
            path=recipe.target,
            name=candidate.name,
            shape=candidate.shape,
            n_generated=dataset.n_generated,
            n_trained=result.n_tokens,
            coverage=dataset.coverage,
            evaluation=evaluation,
            cost=cost,
            speedup=speedup,
            benchmark=draft_benchmark.run(
                recipe.main, recipe.target, threads=recipe.threads, gpu_layers=recipe.gpu_layers
            ),
            size=recipe.target.stat().st_size,
            sha256=sha256(recipe.target),
            curve=self._journal.curve,
        )

    def _generate(self, user_texts: UserTexts) -> None:
        recipe, journal = self._recipe, self._journal
        before, budget = journal.generation_seconds, GENERATION_SHARE * recipe.minutes * 60
        if before >= budget:
            self._delete_copies()  # in case an earlier run was killed before this
            return
        journal.hyperparameters, journal.speedups, journal.selected = {}, {}, ""  # these were for less data
        self._checkpoint.unlink(missing_ok=True)
        started = time.monotonic()
        source = self._fastest_copy()
        self._on_progress(Stage("generating training data"))
        model = Model(source, gpu_layers=recipe.gpu_layers)
        running = DataGenerator(
            model,
            recipe.folder / "data",
            prompt_source(recipe.seed, user_texts),
            n_parallel=_n_parallel(source),
            n_ctx=_N_CTX,
            seed=recipe.seed,
            threads=recipe.threads,
        ).run()
        n_shards = -1
        try:
            for progress in running:
                journal.generation_seconds = before + time.monotonic() - started
                if progress.n_shards != n_shards:  # time counts only once its data is on disk
                    journal.save(recipe)
                    n_shards = progress.n_shards
                if journal.generation_seconds >= budget:
                    break
                self._on_progress(Generating(progress, budget - journal.generation_seconds))
        finally:
            running.close()
            journal.save(recipe)
        model.close()
        self._delete_copies()

    def _fastest_copy(self) -> Path:
        """Return the main model or its fastest copy, measured once."""
        recipe, journal = self._recipe, self._journal
        known = recipe.main if journal.generator == "main" else recipe.folder / journal.generator
        if journal.generator and known.exists():
            return known
        self._delete_copies()  # a killed run may have left a partial copy
        self._on_progress(Stage("measuring"))
        source = precision.fastest_copy(
            recipe.main,
            recipe.folder,
            n_parallel=_n_parallel(recipe.main),
            threads=recipe.threads,
            gpu_layers=recipe.gpu_layers,
            on_progress=lambda kind, rate: self._on_progress(GenerationRate(kind, rate)),
        )
        journal.generator = "main" if source == recipe.main else source.name
        journal.save(recipe)
        return source

    def _delete_copies(self) -> None:
        for copy in self._recipe.folder.glob("main-*.gguf"):
            copy.unlink()

    def _select(self, dataset: Dataset) -> Candidate:
        """Train each candidate for a short time, and return the one with the highest expected speed-up."""
        recipe, journal = self._recipe, self._journal
        if journal.selected:
            return candidates(recipe, dataset, [journal.selected])[0]
        found = candidates(recipe, dataset)
        self._on_progress(Stage("selecting the model"))
        for candidate in found:
            if candidate.name in journal.speedups:
                continue
            seconds = SELECTION_SHARE * recipe.minutes * 60 / len(found)
            result = self._distil(dataset, candidate, self._schedule(dataset, candidate, seconds, 1))
            path, agreement = recipe.folder / "candidate.gguf", result.evaluation.overall.agreement
            self._export(path, dataset, candidate.shape, result.weights, {})
            cost, speedup = _cost_and_speedup(recipe, path, agreement)
            path.unlink()
            journal.speedups[candidate.name] = speedup
            journal.save(recipe)
            self._on_progress(CandidateResult(candidate.name, agreement, cost, speedup))
        journal.selected = max(journal.speedups, key=lambda name: journal.speedups[name])
        journal.save(recipe)
        return next(candidate for candidate in found if candidate.name == journal.selected)

    def _train(self, dataset: Dataset, candidate: Candidate) -> Result:
        recipe, journal = self._recipe, self._journal
        self._on_progress(Stage("training"))
        if not journal.hyperparameters:
            seconds = recipe.minutes * 60 * (1 - GENERATION_SHARE - SELECTION_SHARE)
            journal.hyperparameters = asdict(self._schedule(dataset, candidate, seconds, _EVALUATIONS))
            journal.curve = []
            journal.save(recipe)

        def record(progress: TrainingProgress) -> None:
            if progress.evaluation:
                # A run that resumes from a checkpoint repeats the evaluations after it.
                journal.curve = [point for point in journal.curve if point["n_read"] < progress.n_tokens]
                journal.curve.append({"n_read": progress.n_tokens, **asdict(progress.evaluation)})
                journal.save(recipe)

        return self._distil(
            dataset, candidate, Hyperparameters(**journal.hyperparameters), self._checkpoint, record
        )

    def _distil(
        self,
        dataset: Dataset,
        candidate: Candidate,
        hyperparameters: Hyperparameters,
        checkpoint: Path | None = None,
        record: Callable[[TrainingProgress], None] = lambda progress: None,
    ) -> Result:
        def on_progress(progress: TrainingProgress) -> None:
            record(progress)
            self._on_progress(Training(candidate.name, progress))

        return distillation.train(
            candidate.weights,
            candidate.shape,
            dataset.train,
            dataset.held_out_sample,
            hyperparameters,
            checkpoint=checkpoint,
            on_progress=on_progress,
            device=self._recipe.device,
            threads=self._threads,
        )

    def _schedule(
        self, dataset: Dataset, candidate: Candidate, seconds: float, n_evaluations: int
    ) -> Hyperparameters:
        """Return hyperparameters with as many steps as the time allows, and this number of evaluations."""
        base = Hyperparameters(n_steps=1, learning_rate=candidate.learning_rate, seed=self._recipe.seed)
        rate = distillation.steps_per_second(
            candidate.weights,
            candidate.shape,
            dataset.train,
            base,
            seconds=min(_SPEED_TEST, seconds / 10),
            device=self._recipe.device,
            threads=self._threads,
        )
        n_steps = max(2, round(rate * seconds * 0.9))  # evaluations take the rest
        return replace(
            base,
            n_steps=n_steps,
            warmup_steps=min(base.warmup_steps, n_steps // 10),
            eval_every=-(-n_steps // n_evaluations),
        )

    def _export(
        self,
        path: Path,
        dataset: Dataset,
        shape: ModelShape,
        weights: Weights,
        provenance: Mapping[str, str | int | float],
    ) -> None:
        main, kept = self._recipe.main, dataset.kept
        write_draft(path, main, kept, shape, weights, kind=_KIND, embedding_kind=_KIND, provenance=provenance)


def _n_parallel(path: Path) -> int:
    """Return how many sequences fit, together with the model, into half of the free memory."""
    model = Model(path, weights=False)
    n, room = N_PARALLEL, 0.5 * psutil.virtual_memory().available - model.size
    while n > 1 and model.kv_bytes(n * _N_CTX) > room:
        n //= 2
    model.close()
    return n


def _cost_and_speedup(recipe: Recipe, draft: Path, agreement: float) -> tuple[float, float]:
    """Measure the relative cost of a draft model call, and compute the expected speed-up over plain decoding.

    The speed-up is tokens per step (Leviathan et al. 2023, equation 1) divided by cost per step, at the best
    draft length.
    """
    costs = []
    for path, sizes in ((recipe.main, range(1, _MAX_DRAFT + 2)), (draft, (1,))):
        model = Model(path, gpu_layers=recipe.gpu_layers)
        context = open_context(model, n_ctx=256, threads=recipe.threads)
        costs.append(measure(context, list(sizes), rounds=7))
        context.close()
        model.close()
    main, draft_call = costs[0], costs[1].seconds(1)
    plain = main.seconds(1)
    speedup = max(
        plain * sum(agreement**i for i in range(k + 1)) / (main.seconds(k + 1) + k * draft_call)
        for k in range(1, _MAX_DRAFT + 1)
    )
    return draft_call / plain, speedup
