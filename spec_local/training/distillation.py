"""Train a draft model on the main model's soft targets, and evaluate it during training.

The learning rate warms up, stays constant and decays to zero in the last part (Hägele et al. 2024, "Scaling
Laws and Compute-Optimal Training Beyond Fixed Training Durations"). The decay starts early once the held-out
agreement stops improving. A run is determined by its data, hyperparameters and step, so one that was killed
resumes from its last checkpoint exactly.
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
from spec_local.training.evaluation import Evaluation, evaluate
from spec_local.training.loss import cross_entropy
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, Weights

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1  # for matrices only
_MAX_GRAD_NORM = 1.0
_SMOOTHING = 0.95  # weight of the earlier steps in the reported loss
_SAVE_EVERY = 60.0  # minimum number of seconds between checkpoints


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of a training run.

    Attributes:
        n_steps: maximum number of steps.
        batch_tokens: maximum number of tokens per step.
        learning_rate: peak learning rate.
        warmup_steps: number of steps during which the learning rate rises.
        decay_share: share of the steps during which the learning rate falls.
        eval_every: number of steps between evaluations.
        patience: number of consecutive evaluations without improvement after which the decay starts.
        token_weight: weight of the main model's sampled token, relative to its candidates.
        prompt_weight: weight of prompt tokens, relative to answer tokens.
        seed: random seed for the order of the data.
    """

    n_steps: int
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay_share: float = 0.3
    eval_every: int = 100
    patience: int = 4
    token_weight: float = 0.1
    prompt_weight: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """State of a run after a step.

    step, n_steps: number of finished steps, and of all steps; the latter decreases if the decay starts early.
    n_tokens: number of tokens read so far. loss: in nats, smoothed. seconds_left: estimated from the speed of
    this process. evaluation: on held-out data, if there was one after this step. best_agreement: maximum over
    all evaluations.
    """

    step: int
    n_steps: int
    n_tokens: int
    loss: float
    seconds_left: float
    evaluation: Evaluation | None
    best_agreement: float


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a training run.

    weights, step, evaluation: those of the best evaluation. n_steps, n_tokens: totals of the training.
    """

    weights: Weights
    step: int
    evaluation: Evaluation
    n_steps: int
    n_tokens: int


@dataclass(slots=True)
class _State:
    """The content of a checkpoint apart from weights and moments.

    epoch, batch: position of the next step in the data. decay_from, end: steps. stale: number of evaluations
    since the best one.
    """

    end: int
    decay_from: int
    step: int = 0
    epoch: int = 0
    batch: int = 0
    n_tokens: int = 0
    loss: float = math.nan
    best: float = -1.0
    best_step: int = 0
    stale: int = 0


def train(
    start: Weights,
    shape: ModelShape,
    corpus: Corpus,
    held_out: Corpus,
    hyperparameters: Hyperparameters,
    *,
    device: str = "cpu",
    threads: int | None = None,
    checkpoint: Path | None = None,
    on_progress: Callable[[TrainingProgress], None] = lambda progress: None,
) -> Result:
    """Train from the initial weights, or from the checkpoint if there is one.

    Args:
        start: initial weights; not modified.
        held_out: data for evaluation.
        device: ``cpu``, ``cuda`` or ``mps``.
        threads: number of PyTorch's threads in the whole process; None: unchanged.
        checkpoint: file that is written about once a minute and kept at the end.
        on_progress: called after every step.

    Raises:
        InvalidRequest: the device is not available, or the checkpoint is damaged or from another run.
        OSError: the checkpoint cannot be written.
    """
    run = _Run(start, shape, corpus, hyperparameters, device, threads)
    fingerprint = _fingerprint(start, shape, corpus, held_out, hyperparameters) if checkpoint else ""
    if checkpoint and checkpoint.exists():
        run.restore(_load(checkpoint), fingerprint, checkpoint)
    state = run.state
    first_step, started = state.step, time.monotonic()
    saved = started
    while state.step < state.end:
        evaluation = run.evaluate(held_out) if state.best < 0 else None  # of the initial weights
        run.step()
        if state.step % hyperparameters.eval_every == 0 or state.step == state.end:
            evaluation = run.evaluate(held_out)
        now = time.monotonic()
        if checkpoint and (now - saved > _SAVE_EVERY or state.step == state.end):
            run.save(checkpoint, fingerprint)
            saved = time.monotonic()
        left = (now - started) / (state.step - first_step) * (state.end - state.step)
        on_progress(
            TrainingProgress(state.step, state.end, state.n_tokens, state.loss, left, evaluation, state.best)
        )
    weights = {name: value.cpu().numpy() for name, value in run.best.items()}
    best = evaluate(run.best, shape, held_out)
    return Result(weights, state.best_step, best, state.step, state.n_tokens)


def steps_per_second(
    start: Weights,
    shape: ModelShape,
    corpus: Corpus,
    hyperparameters: Hyperparameters,
    *,
    device: str = "cpu",
    threads: int | None = None,
    seconds: float = 10.0,
) -> float:
    """Measure the training speed, without evaluations, in a run that is then discarded.

    Raises InvalidRequest: the device is not available.
    """
    run = _Run(start, shape, corpus, hyperparameters, device, threads)
    run.step()  # the first one allocates memory
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        run.step()
    return (run.state.step - 1) / (time.monotonic() - started)


class _Run:
    """Weights, optimizer and data order of a training run."""

    def __init__(
        self,
        start: Weights,
        shape: ModelShape,
        corpus: Corpus,
        hyperparameters: Hyperparameters,
        device: str,
        threads: int | None,
    ) -> None:
        check_device(device)
        if threads:
            torch.set_num_threads(threads)
        self.shape, self.corpus, self.hyperparameters = shape, corpus, hyperparameters
        self._device, self._dtype = device, network.fast_dtype(device)
        self.parameters = {
            name: torch.tensor(value, device=device, requires_grad=True) for name, value in start.items()
        }
        self.best = self._copy()
        n_steps = hyperparameters.n_steps
        self.state = _State(n_steps, round(n_steps * (1 - hyperparameters.decay_share)))
        matrices = [value for value in self.parameters.values() if value.ndim > 1]
        vectors = [value for value in self.parameters.values() if value.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": _WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=_BETAS,
            fused=True,
        )
        self._batches = self._remaining_batches()

    def step(self) -> None:
        """Train on one batch."""
        state, hyperparameters = self.state, self.hyperparameters
        batch = next(self._batches)
        factor = _rate_factor(state.step, hyperparameters.warmup_steps, state.decay_from, state.end)
        for group in self._optimizer.param_groups:
            group["lr"] = hyperparameters.learning_rate * factor
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.batch += 1
        state.n_tokens += batch.n_tokens
        value = float(loss.detach())
        state.loss = value if math.isnan(state.loss) else _SMOOTHING * state.loss + (1 - _SMOOTHING) * value

    def evaluate(self, held_out: Corpus) -> Evaluation:
        """Evaluate; keep the weights if they are the best, or start the decay if patience has run out."""
        state, share = self.state, self.hyperparameters.decay_share
        evaluation = evaluate(self.parameters, self.shape, held_out)
        agreement = evaluation.overall.agreement
        state.stale += 1
        if agreement > state.best:
            state.best, state.best_step, state.stale = agreement, state.step, 0
            self.best = self._copy()
        elif state.stale >= self.hyperparameters.patience and state.step < state.decay_from:
            decay = round(state.step * share / (1 - share))
            state.decay_from, state.end = state.step, min(state.end, state.step + max(1, decay))
        return evaluation

    def save(self, path: Path, fingerprint: str) -> None:
        content = {
            "fingerprint": fingerprint,
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "best": self.best,
            "optimizer": self._optimizer.state_dict(),
            "state": asdict(self.state),
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # PyTorch raises this if the disk is full
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def restore(self, content: dict[str, Any], fingerprint: str, path: Path) -> None:
        if content["fingerprint"] != fingerprint:
            raise InvalidRequest(
                f"{path} is from a run with other data or settings: use the same ones, or delete it"
            )
        with torch.no_grad():
            for name, value in content["parameters"].items():
                self.parameters[name].copy_(value)
        self.best = {name: value.to(self._device) for name, value in content["best"].items()}
        self._optimizer.load_state_dict(content["optimizer"])
        self.state = _State(**content["state"])
        self._batches = self._remaining_batches()

    def _remaining_batches(self) -> Iterator[Batch]:
        """Yield batches endlessly, starting at the state's position; the caller updates the state."""
        state = self.state
        while True:
            rng = np.random.default_rng([self.hyperparameters.seed, state.epoch])
            yield from islice(batches(self.corpus, self.hyperparameters.batch_tokens, rng), state.batch, None)
            state.epoch, state.batch = state.epoch + 1, 0

    def _loss(self, batch: Batch) -> torch.Tensor:
        hyperparameters, device = self.hyperparameters, self._device
        ids, weights = targets(
            self.corpus, batch, hyperparameters.token_weight, hyperparameters.prompt_weight
        )
        tokens = torch.from_numpy(batch.tokens).to(device)
        positions = np.concatenate((batch.positions, batch.prompt_positions))
        states = network.hidden_states(self.parameters, self.shape, tokens, self._dtype)
        return cross_entropy(
            states.flatten(0, 1).index_select(0, torch.from_numpy(positions).to(device)),
            self.parameters[EMBEDDINGS],
            torch.from_numpy(ids).to(device),
            torch.from_numpy(weights).to(device),
        )

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}


def _rate_factor(step: int, warmup_steps: int, decay_from: int, end: int) -> float:
    """Return the learning rate of a step as a share of the peak."""
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    decayed = max(0, step - decay_from) / max(1, end - decay_from)
    return warmup * (1 - math.sqrt(decayed))


def check_device(device: str) -> None:
    """Raise InvalidRequest if PyTorch cannot use the device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        raise InvalidRequest(f"PyTorch cannot use {device!r} here ({why}): give --device cpu") from None


def _fingerprint(
    start: Weights, shape: ModelShape, corpus: Corpus, held_out: Corpus, hyperparameters: Hyperparameters
) -> str:
    """Return a hash of everything that determines a run."""
    digest = hashlib.sha256(repr((shape, hyperparameters)).encode())
    for name in sorted(start):
        digest.update(np.ascontiguousarray(start[name]).data)
    for each in (corpus, held_out):
        for array in (each.ids, each.positions, each.top_ids, each.top_probs):
            digest.update(array.data)
    return digest.hexdigest()


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if {"fingerprint", "parameters", "best", "optimizer", "state"} <= content.keys():
            return content
    except (RuntimeError, EOFError, pickle.UnpicklingError, AttributeError):
        pass
    raise InvalidRequest(f"{path} is damaged: delete it to restart the training from the beginning")
