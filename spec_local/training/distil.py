"""Teaching a draft to think as main does, and measuring meanwhile how well it guesses.

Warm-up, a constant rate, and a fall to zero over the last part (Hägele et al. 2024, "Scaling Laws and Compute-Optimal
Training Beyond Fixed Training Durations"). As soon as the draft gets no better on what it does not learn from, the fall
begins, so that a run on few texts ends early. All that happens follows from the texts, the plan and the step, so that a run
that was killed goes on from its last checkpoint as if nothing had happened.
"""

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_local.errors import InvalidRequest
from spec_local.files import replacing
from spec_local.training import network
from spec_local.training.corpus import Batch, Corpus, batches, targets
from spec_local.training.loss import cross_entropy
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, Weights
from spec_local.training.scoring import Figures, figures, guesses

_BETAS = (0.9, 0.95)
_DECAY = 0.1  # of the matrices, towards zero
_STEEPEST = 1.0  # norm of a step's gradient, at most
_SMOOTH = 0.95  # of the loss that is told, what the steps before weigh
_SAVE_EVERY = 60.0  # seconds, at least


@dataclass(frozen=True, slots=True)
class Plan:
    """How to learn.

    Attributes:
        n_steps: of all, if it does not end early.
        n_tokens: of a step, at most.
        rate: how far a step goes, in the middle of the run.
        warm_up: steps in which the rate rises.
        fall: share of the steps in which it falls again.
        measure_every: steps between measurements.
        patience: measurements in a row without a gain, after which the fall begins.
        said: weight of main's very token beside its candidates.
        prompts: weight of the prompts' tokens beside the answers'.
        seed: of the order of the texts.
    """

    n_steps: int
    n_tokens: int = 4096
    rate: float = 1e-3
    warm_up: int = 50
    fall: float = 0.3
    measure_every: int = 100
    patience: int = 4
    said: float = 0.1
    prompts: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    step: steps done. n_steps: of all, which become fewer when the draft gets no better. n_tokens: read in all of them.
    loss: cross-entropy in nats, a mean of the last steps. seconds_left: at the pace of this run; None at its start.
    measured: on the texts held out, where that was just done. agreement: the best that was measured.
    """

    step: int
    n_steps: int
    n_tokens: int
    loss: float
    seconds_left: float | None
    measured: Figures | None
    agreement: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """weights: the best that were measured, and at which step. measured: how these guess on the texts held out.
    n_steps, n_tokens: that were learned from in all.
    """

    weights: Weights
    step: int
    measured: Figures
    n_steps: int
    n_tokens: int


@dataclass(slots=True)
class _Place:
    """What a checkpoint has beside weights and moments.

    epoch, batch: of the next step. fall_from, end: steps. n_worse: measurements since the best one.
    """

    end: int
    fall_from: int
    step: int = 0
    epoch: int = 0
    batch: int = 0
    n_tokens: int = 0
    loss: float = math.nan
    best: float = -1.0
    best_step: int = 0
    n_worse: int = 0


def train(
    start: Weights,
    shape: ModelShape,
    learned: Corpus,
    held_out: Corpus,
    plan: Plan,
    *,
    device: str = "cpu",
    threads: int | None = None,
    checkpoint: Path | None = None,
    told: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Learn, from the last checkpoint on if there is one.

    Args:
        start: weights to begin with; they stay as they are.
        learned, held_out: texts to learn from, and others to measure with.
        device: ``cpu``, ``cuda`` or ``mps``.
        threads: of PyTorch, in this whole process; None: as it is.
        checkpoint: a file that is written every minute or so, and stays at the end.
        told: hears of every step.

    Raises:
        InvalidRequest: there is no such device, or the checkpoint is damaged or of another run.
        OSError: the checkpoint cannot be written.
    """
    run = _Run(start, shape, learned, plan, _prepared(device, threads))
    mark = _mark(start, shape, learned, held_out, plan) if checkpoint else ""
    if checkpoint and checkpoint.exists():
        run.restore(_load(checkpoint), mark, checkpoint)
    place = run.place
    first, begun = place.step, time.monotonic()
    saved = begun
    while place.step < place.end:
        measured = run.judge(held_out) if place.best < 0 else None  # of the weights to begin with
        run.step()
        if place.step % plan.measure_every == 0 or place.step == place.end:
            measured = run.judge(held_out)
        now = time.monotonic()
        if checkpoint and (now - saved > _SAVE_EVERY or place.step == place.end):
            run.save(checkpoint, mark)
            saved = time.monotonic()
        left = (now - begun) / (place.step - first) * (place.end - place.step)
        told(Progress(place.step, place.end, place.n_tokens, place.loss, left, measured, place.best))
    weights = {name: value.cpu().numpy() for name, value in run.best.items()}
    made = figures(held_out, guesses(run.best, shape, held_out))
    return Outcome(weights, place.best_step, made, place.step, place.n_tokens)


def pace(
    start: Weights,
    shape: ModelShape,
    learned: Corpus,
    plan: Plan,
    *,
    device: str = "cpu",
    threads: int | None = None,
    seconds: float = 10.0,
) -> float:
    """Steps a second, without measurements: of a run that is thrown away after some `seconds`.

    Raises InvalidRequest: there is no such device.
    """
    run = _Run(start, shape, learned, plan, _prepared(device, threads))
    run.step()  # the first one makes room, which takes long
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        run.step()
    return (run.place.step - 1) / (time.monotonic() - begun)


class _Run:
    """The weights, the optimizer, and the texts in their order."""

    def __init__(self, start: Weights, shape: ModelShape, corpus: Corpus, plan: Plan, device: str) -> None:
        self.shape, self.corpus, self.plan = shape, corpus, plan
        self._device = device
        self._dtype = network.fast_dtype(device)
        self.parameters = {
            name: torch.tensor(value, device=device, requires_grad=True) for name, value in start.items()
        }
        self.best = self._copy()
        self.place = _Place(plan.n_steps, round(plan.n_steps * (1 - plan.fall)))
        every = list(self.parameters.values())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [value for value in every if value.ndim > 1], "weight_decay": _DECAY},
                {"params": [value for value in every if value.ndim == 1], "weight_decay": 0.0},
            ],
            betas=_BETAS,
            fused=True,
        )
        self._batches = self._order()

    def step(self) -> None:
        """Learn from one batch."""
        place, plan = self.place, self.plan
        batch = next(self._batches)
        for group in self._optimizer.param_groups:
            group["lr"] = plan.rate * _share(place.step, plan.warm_up, place.fall_from, place.end)
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), _STEEPEST)
        self._optimizer.step()
        self._optimizer.zero_grad()
        place.step += 1
        place.batch += 1
        place.n_tokens += batch.n_tokens
        told = float(loss.detach())
        place.loss = told if math.isnan(place.loss) else _SMOOTH * place.loss + (1 - _SMOOTH) * told

    def judge(self, held_out: Corpus) -> Figures:
        """Measure; keep the weights if none were better, or let the rate fall if none have been for long."""
        place, plan = self.place, self.plan
        found = figures(held_out, guesses(self.parameters, self.shape, held_out))
        place.n_worse += 1
        if found.all.agreement > place.best:
            place.best, place.best_step, place.n_worse = found.all.agreement, place.step, 0
            self.best = self._copy()
        elif place.n_worse >= plan.patience and place.step < place.fall_from:
            fall = round(place.step * plan.fall / (1 - plan.fall))
            place.fall_from, place.end = place.step, min(place.end, place.step + max(1, fall))
        return found

    def save(self, path: Path, mark: str) -> None:
        content = {
            "mark": mark,
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "best": self.best,
            "optimizer": self._optimizer.state_dict(),
            "place": asdict(self.place),
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # PyTorch's word for a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def restore(self, content: dict[str, Any], mark: str, path: Path) -> None:
        if content["mark"] != mark:
            raise InvalidRequest(
                f"{path} is of a run with other texts or settings: give the same ones, or delete it"
            )
        with torch.no_grad():
            for name, value in content["parameters"].items():
                self.parameters[name].copy_(value)
        self.best = {name: value.to(self._device) for name, value in content["best"].items()}
        self._optimizer.load_state_dict(content["optimizer"])
        self.place = _Place(**content["place"])
        self._batches = self._order()

    def _order(self) -> Iterator[Batch]:
        """From the place on, epoch by epoch; whoever takes a batch counts it."""
        place = self.place
        while True:
            rng = np.random.default_rng([self.plan.seed, place.epoch])
            yield from islice(batches(self.corpus, self.plan.n_tokens, rng), place.batch, None)
            place.epoch, place.batch = place.epoch + 1, 0

    def _loss(self, batch: Batch) -> torch.Tensor:
        ids, shares = targets(self.corpus, batch, self.plan.said, self.plan.prompts)
        tokens, places = torch.from_numpy(batch.tokens), np.concatenate((batch.places, batch.asides))
        states = network.states(self.parameters, self.shape, tokens.to(self._device), self._dtype)
        return cross_entropy(
            states.flatten(0, 1).index_select(0, torch.from_numpy(places).to(self._device)),
            self.parameters[EMBEDDINGS],
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(shares).to(self._device),
        )

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}


def _share(step: int, warm_up: int, fall_from: int, end: int) -> float:
    """Of the full rate, after so many steps."""
    rise = min(1.0, (step + 1) / max(1, warm_up))
    done = max(0, step - fall_from) / max(1, end - fall_from)
    return rise * (1 - math.sqrt(done))


def check_device(device: str) -> None:
    """Raises InvalidRequest: PyTorch cannot use it here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        raise InvalidRequest(f"PyTorch cannot use {device!r} here ({why}): give --device cpu") from None


def _prepared(device: str, threads: int | None) -> str:
    check_device(device)
    if threads:
        torch.set_num_threads(threads)
    return device


def _mark(start: Weights, shape: ModelShape, learned: Corpus, held_out: Corpus, plan: Plan) -> str:
    """One for each run that is another from its start."""
    digest = hashlib.sha256(repr((shape, plan)).encode())
    for name in sorted(start):
        digest.update(np.ascontiguousarray(start[name]).data)
    for corpus in (learned, held_out):
        for array in (corpus.ids, corpus.places, corpus.top, corpus.chances):
            digest.update(array.data)
    return digest.hexdigest()


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if {"mark", "parameters", "best", "optimizer", "place"} <= content.keys():
            return content
    except (RuntimeError, EOFError, pickle.UnpicklingError, AttributeError):
        pass
    raise InvalidRequest(f"{path} is damaged: delete it, and the training begins anew")
