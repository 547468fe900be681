"""Train a head on the main model's soft targets, and evaluate it during training.

The learning rate warms up, stays constant and decays to zero in the last part (Hägele et al. 2024, "Scaling
Laws and Compute-Optimal Training Beyond Fixed Training Durations"). The decay starts early once all data has
been read and the held-out agreement stops improving: at a constant rate, it hardly rises, and the decay shows
what has been learned. A run is determined by its data, hyperparameters and step, so one that was killed
resumes from its last checkpoint exactly.
"""

import errno
import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_local.errors import InvalidRequest
from spec_local.system.files import replacing
from spec_local.training import network
from spec_local.training.dataset import OWN, Dataset, TrainingBatch, batches
from spec_local.training.evaluation import Evaluation, evaluate, predictions
from spec_local.training.head_shape import HeadShape, Weights
from spec_local.training.loss import cross_entropy
from spec_local.training.main_weights import MainWeights
from spec_local.training.recipe import LIMITS
from spec_local.training.shards import Document

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.05  # for matrices only
_MAX_GRAD_NORM = 1.0
_DEPTH_WEIGHT = 0.6  # weight of a draft token's loss, relative to the one before it
_SMOOTHING = 0.95  # weight of the earlier steps in the reported loss
_LEAST_TIMED = 5  # minimum number of steps whose time is measured
_USUAL_STEP = 0.4  # quantile of their times: steps differ in their numbers of tokens
_INTERPOLATED = (0.8, 0.65, 0.5)  # shares of the last weights, the rest from the initial ones
_MAX_LOSS = 0.01  # of the acceptance rate on other texts, while a head learns from the user's answers


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
        patience: number of consecutive evaluations without improvement after which the decay starts, from the
            second epoch on.
        seed: random seed for the order of the data.
    """

    n_steps: int
    batch_tokens: int = 1024
    learning_rate: float = 7e-4
    warmup_steps: int = 30
    decay_share: float = 0.5
    eval_every: int = 100
    patience: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """State of a run after a step.

    step, n_steps: number of finished steps, and of all steps; the latter decreases if the decay starts early.
    n_tokens: number of tokens of answers read so far. loss: of the first draft token, in nats, smoothed.
    seconds_left: estimated from the speed of this process. evaluation: on held-out data, if there was one
    after this step. best_agreement: that of the best weights, on the user's answers if there are any.
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

    weights, step: those of the best evaluation. evaluation: of all held-out data. n_steps, n_tokens: totals
    of the training.
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
    since the best one. others: agreement of the initial weights on all but the user's answers.
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
    others: float = 0.0


def train(
    run: "TrainingRun",
    *,
    checkpoint: Path | None = None,
    save_every: float = LIMITS.unsaved,
    on_progress: Callable[[TrainingProgress], None] = lambda progress: None,
) -> Result:
    """Train from the initial weights, or from the checkpoint if there is one.

    Args:
        checkpoint: file that is kept at the end. save_every: seconds after which it is written again.
        on_progress: called after every step.

    Raises:
        InvalidRequest: the checkpoint is damaged or from another run.
        OSError: the checkpoint cannot be written.
    """
    hyperparameters = run.hyperparameters
    fingerprint = run.fingerprint() if checkpoint else ""
    if checkpoint and checkpoint.exists():
        run.restore(_load(checkpoint), fingerprint, checkpoint)
    state = run.state
    first_step, started = state.step, time.monotonic()
    saved = started
    while state.step < state.end:
        evaluation = run.evaluate() if state.best < 0 else None  # of the initial weights
        run.step()
        if state.step % hyperparameters.eval_every == 0 or state.step == state.end:
            evaluation = run.evaluate()
        now = time.monotonic()
        if checkpoint and (now - saved > save_every or state.step == state.end):
            run.save(checkpoint, fingerprint)
            saved = time.monotonic()
        left = (now - started) / (state.step - first_step) * (state.end - state.step)
        on_progress(
            TrainingProgress(state.step, state.end, state.n_tokens, state.loss, left, evaluation, state.best)
        )
    if run.dataset.own:
        run.interpolate()
    weights = {name: value.cpu().numpy() for name, value in run.best.items()}
    best = run.evaluate_weights(run.best, run.dataset.held_out)
    return Result(weights, state.best_step, best, state.step, state.n_tokens)


def steps_per_second(run: "TrainingRun", seconds: float = 10.0) -> float:
    """Measure the training speed, without evaluations, in a run that is then discarded.

    It is that of the faster steps, of five at least: the process may be suspended for a while.
    """
    run.step()  # the first one allocates memory
    times = [time.monotonic()]
    while len(times) <= _LEAST_TIMED or times[-1] - times[0] < seconds:
        run.step()
        times.append(time.monotonic())
    return 1 / float(np.quantile(np.diff(times), _USUAL_STEP))


class TrainingRun:
    """Weights, optimizer and data order of a training run.

    Args:
        start: initial weights; not modified.
        main: weights of the main model that stay as they are.
        device: ``cpu``, ``cuda`` or ``mps``.
        threads: number of PyTorch's threads in the whole process; None: unchanged.
        evaluate: as `spec_local.training.evaluation.evaluate`.

    Raises:
        InvalidRequest: the device is not available.
    """

    def __init__(
        self,
        start: Weights,
        shape: HeadShape,
        main: MainWeights,
        dataset: Dataset,
        hyperparameters: Hyperparameters,
        *,
        device: str = "cpu",
        threads: int | None = None,
        evaluate: Callable[..., Evaluation] = evaluate,
    ) -> None:
        check_device(device)
        if threads:
            torch.set_num_threads(threads)
        self.shape, self.dataset, self.hyperparameters = shape, dataset, hyperparameters
        self._initial, self._evaluate = start, evaluate
        self._device, self._dtype = device, network.fast_dtype(device)
        self._embeddings = torch.from_numpy(main.embeddings.view(np.int16)).view(torch.bfloat16).to(device)
        self._output = torch.from_numpy(main.output).to(device, self._dtype)
        self.parameters = {
            name: torch.tensor(value, device=device, requires_grad=True) for name, value in start.items()
        }
        self.best = self._copy()
        n_steps = hyperparameters.n_steps
        self.state = _State(n_steps, round(n_steps * (1 - hyperparameters.decay_share)))
        matrices = [value for value in self.parameters.values() if value.ndim > 1]
        vectors = [value for value in self.parameters.values() if value.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            betas=_BETAS,
            fused=True,
        )
        self._batches = self._remaining_batches()

    def step(self) -> None:
        """Train on one batch."""
        state, hyperparameters = self.state, self.hyperparameters
        batch = self.dataset.batch(next(self._batches))
        factor = _rate_factor(state.step, hyperparameters.warmup_steps, state.decay_from, state.end)
        for group in self._optimizer.param_groups:
            group["lr"] = hyperparameters.learning_rate * factor
        losses = self._losses(batch)
        torch.stack([_DEPTH_WEIGHT**depth * loss for depth, loss in enumerate(losses)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.batch += 1
        state.n_tokens += len(batch.positions)
        value = float(losses[0].detach())
        state.loss = value if math.isnan(state.loss) else _SMOOTHING * state.loss + (1 - _SMOOTHING) * value

    def evaluate(self) -> Evaluation:
        """Evaluate; keep the weights if they are the best, or start the decay if patience has run out."""
        state, share = self.state, self.hyperparameters.decay_share
        evaluation = self.evaluate_weights(self.parameters, self.dataset.held_out_sample)
        agreement = self._score(evaluation)
        state.stale += 1
        if agreement > state.best:
            state.best, state.best_step, state.stale = agreement, state.step, 0
            self.best = self._copy()
        elif state.epoch and state.stale >= self.hyperparameters.patience and state.step < state.decay_from:
            decay = round(state.step * share / (1 - share))
            state.decay_from, state.end = state.step, min(state.end, state.step + max(1, decay))
        return evaluation

    def interpolate(self) -> None:
        """Keep the best weights between the initial and the last ones, if they are better than those kept.

        On the way, what is learned is gained sooner than what was known is lost (Wortsman et al. 2022,
        "Robust fine-tuning of zero-shot models").
        """
        last = self._copy()
        for share in _INTERPOLATED:
            for name, value in self._initial.items():
                start = torch.from_numpy(value).to(self._device)
                with torch.no_grad():
                    self.parameters[name].copy_(torch.lerp(start, last[name], share))
            self.evaluate()
        with torch.no_grad():
            for name, value in last.items():
                self.parameters[name].copy_(value)

    def _score(self, evaluation: Evaluation) -> float:
        """The agreement to maximize: on the user's answers, if there are any and no other text suffers."""
        overall, own = evaluation.overall, evaluation.by_category.get(OWN)
        if not own:
            return overall.agreement
        others = (overall.n * overall.agreement - own.n * own.agreement) / (overall.n - own.n)
        if self.state.best < 0:
            self.state.others = others
        return own.agreement if others >= self.state.others - _MAX_LOSS else 0.0

    def evaluate_weights(self, weights: network.Parameters, documents: Sequence[Document]) -> Evaluation:
        """Evaluate some weights on some documents."""
        return self._evaluate(weights, self.shape, self._output, self._embeddings, self.dataset, documents)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the run."""
        digest = hashlib.sha256(repr((self.shape, self.hyperparameters)).encode())
        for name in sorted(self._initial):
            digest.update(np.ascontiguousarray(self._initial[name]).data)
        digest.update(self.dataset.drafted.data)
        for document in (*self.dataset.train, *self.dataset.own, *self.dataset.held_out):
            digest.update(np.ascontiguousarray(document.tokens).data)
        return digest.hexdigest()

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

    def _remaining_batches(self) -> Iterator[Sequence[Document]]:
        """Yield batches endlessly, starting at the state's position; the caller updates the state."""
        state, n_tokens = self.state, self.hyperparameters.batch_tokens
        while True:
            rng = np.random.default_rng([self.hyperparameters.seed, state.epoch])
            documents = self.dataset.epoch(state.epoch, self.hyperparameters.seed)
            yield from islice(batches(documents, n_tokens, rng), state.batch, None)
            state.epoch, state.batch = state.epoch + 1, 0

    def _losses(self, batch: TrainingBatch) -> list[torch.Tensor]:
        """The mean loss of each successive draft token."""
        ids, weights = (each.to(self._device) for each in _targets(batch))
        states = predictions(self.parameters, self.shape, self._embeddings, batch, self._dtype)
        return [cross_entropy(state, self._output, ids, weights) for state in states]

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}


def _targets(batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets at the positions of a batch.

    The main model's candidates are renormalized over the tokens that the head can draft, because verification
    uses no others of its distribution. If it can draft none of them, the weights are zero.

    Returns:
        int64 ids and float32 weights (n, TOP_K); all weights sum to 1 or less.
    """
    total = batch.top_probs.sum(1, keepdims=True)
    weights = np.divide(batch.top_probs, total, out=np.zeros_like(batch.top_probs), where=total > 0)
    return torch.from_numpy(batch.top_ids), torch.from_numpy(weights / np.float32(len(weights)))


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
        raise InvalidRequest(f"PyTorch cannot use {device!r} here ({why}): give `torch_device=cpu`") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if {"fingerprint", "parameters", "best", "optimizer", "state"} <= content.keys():
            return content
    except (RuntimeError, EOFError, pickle.UnpicklingError, AttributeError):
        pass
    except OSError as error:
        if error.errno != errno.EINVAL:  # which PyTorch raises for a file that ends early
            raise
    raise InvalidRequest(f"{path} is damaged: delete it to restart the training from the beginning")
