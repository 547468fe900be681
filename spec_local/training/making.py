"""From a main to its draft: writing, choosing the tokens, choosing the model, learning, exporting, trying it out.

Each stage begins with what is there of it, so that a run that was killed goes on. Needs PyTorch.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from spec_local.bench.figures import VariantFigures
from spec_local.errors import ModelError
from spec_local.files import sha256
from spec_local.llama.context import Context
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.machine import default_threads
from spec_local.policies.cost_model import measure
from spec_local.training import distil, precision, scoring, tokenizer, trial
from spec_local.training.cutting import calmed, from_main, from_scratch
from spec_local.training.distil import Plan
from spec_local.training.export import write_draft
from spec_local.training.material import Material
from spec_local.training.model_shape import ModelShape, Weights
from spec_local.training.production import Production
from spec_local.training.production import Progress as Written
from spec_local.training.questions import FromFiles
from spec_local.training.recipe import (
    RACE,
    TOKENS,
    WIDTHS,
    WRITING,
    Journal,
    Recipe,
    Size,
    asking,
    journal,
)
from spec_local.training.scoring import Figures

N_TEXTS = 64
"""Answers that main writes side by side, where memory allows it."""
KIND, EMBEDDING_KIND = "Q8_0", "Q8_0"
_LARGEST = 60_000_000  # weights that are trained on a laptop
_N_CTX = 768  # tokens of a question and its answer
_CHECKPOINT = "checkpoint.pt"
_PACE = 8.0  # seconds, to learn how fast the learning is
_NEW = "2 new layers"
_CUTS = {"2 of main's layers": (0, -1), "1 of main's layers": (0,)}
_NEW_RATE, _CUT_RATE = 3e-3, 1e-3
_MEASURED = 24  # times in the learning
_GUESSES = 7  # a step, at most, of those that are compared


@dataclass(frozen=True, slots=True)
class Stage:
    """Something begins; name: what."""

    name: str


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second that a copy of main in this precision would write."""

    kind: str
    rate: float


@dataclass(frozen=True, slots=True)
class Writing:
    """Main writes."""

    written: Written
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Learning:
    """A model learns; name: which."""

    name: str
    progress: distil.Progress


@dataclass(frozen=True, slots=True)
class Raced:
    """What a model reached in the short run that decides which one is trained.

    agreement: share of main's tokens, held out, that it foretells. step: its cost, of a step of main's. gain: see `speed`.
    """

    name: str
    agreement: float
    step: float
    gain: float


Event = Stage | Rate | Writing | Learning | Raced


@dataclass(frozen=True, slots=True)
class Made:
    """A finished draft.

    n_written: tokens of main's that it was made from. n_learned: those that it has read, all rounds together.
    coverage: share of main's tokens that it can say. figures: of how it guesses on texts held out. step: cost of one of its
    calls, of a call of main's. gain: times plain decoding that guessing with it would be at best, at temperature 0, by these
    costs and figures; below 1 it does not pay. runs: what it did on the benchmark's prompts. size: bytes of its file. curve: as in
    `Journal`.
    """

    path: Path
    name: str
    shape: ModelShape
    n_written: int
    n_learned: int
    coverage: float
    figures: Figures
    step: float
    gain: float
    runs: Sequence[VariantFigures]
    size: int
    sha256: str
    curve: Sequence[Mapping[str, Any]]


def check(recipe: Recipe) -> None:
    """Refuse what would fail after an hour of work.

    Raises:
        ModelFileError, ModelError: main cannot be read, needs no draft, or has a tokenizer that cannot be trimmed.
        InvalidRequest: PyTorch cannot use this device here.
    """
    model = open_header(recipe.main)
    model.check_can_roll_back()
    tokenizer.read(model, tokenizer.metadata(recipe.main))
    model.close()
    distil.check_device(recipe.device)


def make(recipe: Recipe, own: FromFiles, told: Callable[[Event], None]) -> Made:
    """Make a draft, from where an earlier run was left on.

    Args:
        own: what `questions.from_files` found in the recipe's texts.
        told: hears of all that happens.

    Raises:
        InvalidRequest: another main or size was begun in the same folder, or something there is damaged.
        ModelError: main's tokenizer is of a kind that cannot be trimmed.
        OSError: no room on the disk.
    """
    with journal(recipe) as log:
        _write(recipe, own, log, told)
        told(Stage("choosing tokens"))
        data = Material(recipe.main, recipe.folder / "data", TOKENS[recipe.size])
        start = _race(recipe, data, log, told)
        return _learn(recipe, data, start, log, told)


def _write(recipe: Recipe, own: FromFiles, log: Journal, told: Callable[[Event], None]) -> None:
    left = WRITING * recipe.minutes * 60 - log.spent.get("writing", 0.0)
    if left <= 0:
        _drop_copies(recipe)  # a kill may have come before
        return
    log.plan, log.gains, log.chosen = {}, {}, ""  # there will be more to learn from, and other tokens
    (recipe.folder / _CHECKPOINT).unlink(missing_ok=True)
    begun = time.monotonic()
    source = _writer(recipe, log, told)
    told(Stage("writing"))
    model = Model(source, gpu_layers=recipe.gpu_layers)
    writer = Production(
        model,
        recipe.folder / "data",
        asking(recipe.seed, own),
        n_texts=_n_texts(source),
        n_ctx=_N_CTX,
        seed=recipe.seed,
        threads=recipe.threads,
    )
    running = writer.run()
    before, n_files = log.spent.get("writing", 0.0), -1
    try:
        for written in running:
            spent = before + time.monotonic() - begun
            log.spent["writing"] = spent
            if written.n_files != n_files:  # time counts when what it brought is kept
                log.save(recipe)
                n_files = written.n_files
            if spent >= before + left:
                break
            told(Writing(written, before + left - spent))
    finally:
        running.close()
        log.save(recipe)
    model.close()
    _drop_copies(recipe)


def _writer(recipe: Recipe, log: Journal, told: Callable[[Event], None]) -> Path:
    """Main or the copy of it that writes quickest: found out once."""
    known = recipe.main if log.writer == "main" else recipe.folder / log.writer
    if log.writer and known.exists():
        return known
    _drop_copies(recipe)  # a kill may have left half of one
    told(Stage("measuring"))

    def hear(kind: str, rate: float) -> None:
        log.rates[kind] = rate
        told(Rate(kind, rate))

    source = precision.quickest(
        recipe.main,
        recipe.folder,
        n_texts=_n_texts(recipe.main),
        threads=recipe.threads,
        gpu_layers=recipe.gpu_layers,
        told=hear,
    )
    log.writer = "main" if source == recipe.main else source.name
    log.save(recipe)
    return source


def _n_texts(path: Path) -> int:
    """As many texts side by side as their caches, with the model, leave half of the free memory to others."""
    model = Model(path, weights=False)
    n, room = N_TEXTS, 0.5 * psutil.virtual_memory().available - model.size
    while n > 1 and model.kv_bytes(n * _N_CTX) > room:
        n //= 2
    model.close()
    return n


def _drop_copies(recipe: Recipe) -> None:
    """They may be twice as large as main."""
    for copy in recipe.folder.glob("main-*.gguf"):
        copy.unlink()


@dataclass(frozen=True, slots=True)
class _Start:
    """A model before it learns, and how far a step of its learning goes."""

    name: str
    shape: ModelShape
    weights: Weights
    rate: float


def _candidates(recipe: Recipe, data: Material, names: Collection[str]) -> list[_Start]:
    """Those among the models of these names that can be the draft: of main's parts, where it can be cut, and they are small enough."""
    found = []
    for name, layers in _CUTS.items():
        if name not in names:
            continue
        try:
            shape, weights = from_main(recipe.main, data.kept, layers)
        except ModelError:  # its architecture is another one
            break
        if sum(values.size for values in weights.values()) <= _LARGEST:
            found.append(_Start(name, shape, calmed(shape, weights), _CUT_RATE))
    if _NEW in names:
        shape = _new_shape(recipe.size, len(data.kept), data.n_ctx)
        found.append(_Start(_NEW, shape, from_scratch(shape, recipe.seed), _NEW_RATE))
    return found


def _new_shape(size: Size, n_vocab: int, n_ctx: int) -> ModelShape:
    width, n_head = WIDTHS[size]
    return ModelShape(
        n_vocab=n_vocab,
        n_embd=width,
        n_layers=2,
        n_head=n_head,
        n_head_kv=n_head,
        head_dim=width // n_head,
        n_ff=-(-8 * width // 3 // 64) * 64,
        n_ctx=n_ctx or 2048,
    )


def _race(recipe: Recipe, data: Material, log: Journal, told: Callable[[Event], None]) -> _Start:
    """The model that gains most after a short run of each."""
    starts = _candidates(recipe, data, [log.chosen] if log.chosen else [*_CUTS, _NEW])
    if not log.chosen:
        told(Stage("choosing the model"))
        for start in starts:
            if start.name in log.gains:
                continue
            seconds = RACE * recipe.minutes * 60 / len(starts)
            plan = _plan(recipe, data, start, seconds, 1)  # more often would take longer than to learn
            outcome = distil.train(
                start.weights,
                start.shape,
                data.learned,
                data.sample,
                plan,
                device=recipe.device,
                threads=recipe.threads or default_threads(),
                told=partial(_tell, told, start.name),
            )
            path = recipe.folder / "candidate.gguf"
            _export(path, recipe, data, start.shape, outcome.weights, {})
            step, gain = _speed(recipe, path, outcome.measured.all.agreement)
            path.unlink()
            log.gains[start.name] = gain
            log.save(recipe)
            told(Raced(start.name, outcome.measured.all.agreement, step, gain))
        log.chosen = max(log.gains, key=lambda name: log.gains[name])
        log.save(recipe)
    return next(start for start in starts if start.name == log.chosen)


def _tell(told: Callable[[Event], None], name: str, progress: distil.Progress) -> None:
    told(Learning(name, progress))


def _plan(recipe: Recipe, data: Material, start: _Start, seconds: float, n_measured: int) -> Plan:
    """As many steps as the time allows, measured so many times."""
    plan = Plan(n_steps=1, rate=start.rate, seed=recipe.seed)
    pace = distil.pace(
        start.weights,
        start.shape,
        data.learned,
        plan,
        device=recipe.device,
        threads=recipe.threads or default_threads(),
        seconds=min(_PACE, seconds / 10),
    )
    n_steps = max(2, round(pace * seconds * 0.9))  # measuring takes the rest
    return replace(
        plan,
        n_steps=n_steps,
        warm_up=min(plan.warm_up, n_steps // 10),
        measure_every=-(-n_steps // n_measured),
    )


def _learn(
    recipe: Recipe, data: Material, start: _Start, log: Journal, told: Callable[[Event], None]
) -> Made:
    told(Stage("learning"))
    checkpoint = recipe.folder / _CHECKPOINT
    if not log.plan:
        left = recipe.minutes * 60 * (1 - WRITING - RACE)
        log.plan, log.curve = asdict(_plan(recipe, data, start, left, _MEASURED)), []
        log.save(recipe)

    def hear(progress: distil.Progress) -> None:
        if progress.measured:
            # A run that goes on from a checkpoint measures once more what came after it.
            log.curve = [point for point in log.curve if point["n_read"] < progress.n_tokens]
            log.curve.append({"n_read": progress.n_tokens, **asdict(progress.measured)})
            log.save(recipe)
        told(Learning(start.name, progress))

    outcome = distil.train(
        start.weights,
        start.shape,
        data.learned,
        data.sample,
        Plan(**log.plan),
        device=recipe.device,
        threads=recipe.threads or default_threads(),
        checkpoint=checkpoint,
        told=hear,
    )
    told(Stage("exporting"))
    measured = scoring.measure(outcome.weights, start.shape, data.held_out)
    about: dict[str, str | int | float] = {
        "made_from": start.name,
        "tokens_written": data.n_written,
        "tokens_learned": outcome.n_tokens,
        "agreement": measured.all.agreement,
        "seed": recipe.seed,
        "minutes": recipe.minutes,
    }
    _export(recipe.target, recipe, data, start.shape, outcome.weights, about)
    step, gain = _speed(recipe, recipe.target, measured.all.agreement)
    told(Stage("answering the benchmark's prompts"))
    runs = trial.run(recipe.main, recipe.target, threads=recipe.threads, gpu_layers=recipe.gpu_layers)
    return Made(
        path=recipe.target,
        name=start.name,
        shape=start.shape,
        n_written=data.n_written,
        n_learned=outcome.n_tokens,
        coverage=data.coverage,
        figures=measured,
        step=step,
        gain=gain,
        runs=runs,
        size=recipe.target.stat().st_size,
        sha256=sha256(recipe.target),
        curve=log.curve,
    )


def _export(
    path: Path,
    recipe: Recipe,
    data: Material,
    shape: ModelShape,
    weights: Weights,
    about: dict[str, str | int | float],
) -> None:
    write_draft(
        path,
        recipe.main,
        data.kept,
        shape,
        weights,
        kind=KIND,
        embedding_kind=EMBEDDING_KIND,
        provenance=about,
    )


def _speed(recipe: Recipe, draft: Path, agreement: float) -> tuple[float, float]:
    """Cost of a draft's call, of one of main's, and how many times as fast as plain decoding guessing would be at best,
    at least one guess a step: the tokens of a step (Leviathan et al. 2023, equation 1) by its cost."""
    tables = []
    for path, gpu_layers, sizes in (
        (recipe.main, recipe.gpu_layers, range(1, _GUESSES + 2)),
        (draft, recipe.gpu_layers, (1,)),
    ):
        model = Model(path, gpu_layers=gpu_layers)
        context = Context(model, n_ctx=256, threads=recipe.threads)
        tables.append(measure(context, list(sizes), rounds=7))
        context.close()
        model.close()
    main, step = tables[0], tables[1].seconds(1)
    plain = main.seconds(1)
    gain = max(
        plain * sum(agreement**i for i in range(k + 1)) / (main.seconds(k + 1) + k * step)
        for k in range(1, _GUESSES + 1)
    )
    return step / plain, gain
