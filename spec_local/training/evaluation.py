"""Evaluate a draft model on held-out answers of the main model.

The draft model reads the main model's answers and predicts each next token once, so that every position
counts equally, as after a step in which all draft tokens were accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from spec_local.training import network
from spec_local.training.corpus import Corpus, batches
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, Weights

CONFIDENCES = (0.3, 0.5, 0.7, 0.9)
POSITIONS = (0, 8, 16, 32, 64, 128, 256)
"""First position of each range of answer positions that is reported separately."""
_BATCH = 8192  # tokens
_ROWS = 512  # number of positions whose logits are copied at a time

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The draft model's predictions for all targets of a corpus, in order.

    Attributes:
        agrees: bool (n,), whether the most probable tokens of both models are the same; False if the draft
            model lacks the token.
        overlap: float32 (n,), Σ min(p, q) over the main model's candidates: the acceptance probability at
            temperature 1 (Leviathan et al. 2023, section 3.2), slightly too low because p is cut off.
        confidence: float32 (n,), the draft model's probability of its most probable token.
    """

    agrees: NDArray[np.bool_]
    overlap: NDArray[np.float32]
    confidence: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """Averages over some positions.

    n: number of positions. agreement: share of the positions where the most probable tokens are the same.
    acceptance: mean overlap.
    """

    n: int
    agreement: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all positions, by category, and by range of answer positions (its first position).

    by_confidence: number of predictions above each confidence, and the share of them that agrees.
    """

    overall: Score
    by_category: Mapping[str, Score]
    by_position: Mapping[int, Score]
    by_confidence: Mapping[float, tuple[int, float]]


def evaluate(weights: network.Parameters | Weights, shape: ModelShape, corpus: Corpus) -> Evaluation:
    """Evaluate in float32, on the device of the weights."""
    parameters = {name: torch.as_tensor(values) for name, values in weights.items()}
    return summarize(corpus, predict(parameters, shape, corpus))


def predict(parameters: network.Parameters, shape: ModelShape, corpus: Corpus) -> Predictions:
    """Predict every target of a corpus, in float32, on the device of the parameters."""
    n = len(corpus.positions)
    agrees, overlap, confidence = np.zeros(n, bool), np.zeros(n, np.float32), np.zeros(n, np.float32)
    embeddings = parameters[EMBEDDINGS]
    device = embeddings.device
    with torch.inference_mode():
        for batch in batches(corpus, _BATCH):
            tokens = torch.from_numpy(batch.tokens).to(device)
            states = network.hidden_states(parameters, shape, tokens).flatten(0, 1)
            for start in range(0, len(batch.positions), _ROWS):
                targets = batch.targets[start : start + _ROWS]
                positions = torch.from_numpy(batch.positions[start : start + _ROWS]).to(device)
                q = torch.softmax(states[positions] @ embeddings.T, -1)
                top_ids = torch.from_numpy(corpus.top_ids[targets].astype(np.int64)).to(device)
                p = torch.from_numpy(corpus.top_probs[targets].astype(np.float32)).to(device)
                best, token = q.max(1)
                agrees[targets] = ((token == top_ids[:, 0]) & (p[:, 0] > 0)).cpu().numpy()
                overlap[targets] = torch.minimum(p, q.gather(1, top_ids)).sum(1).cpu().numpy()
                confidence[targets] = best.cpu().numpy()
    return Predictions(agrees, overlap, confidence)


def summarize(corpus: Corpus, predictions: Predictions) -> Evaluation:
    """Average predictions on a corpus, overall and by part."""
    n_targets = np.diff(corpus.first_targets)
    categories = np.repeat(corpus.text_categories, n_targets)
    position = np.arange(len(categories)) - np.repeat(corpus.first_targets[:-1], n_targets)
    ranges = np.searchsorted(POSITIONS, position, "right") - 1
    by_confidence = {}
    for threshold in CONFIDENCES:
        above = predictions.confidence > threshold
        share = float(predictions.agrees[above].mean()) if above.any() else 0.0
        by_confidence[threshold] = (int(above.sum()), share)
    return Evaluation(
        overall=_score(predictions, np.ones(len(categories), bool)),
        by_category=_scores(predictions, categories, corpus.categories),
        by_position=_scores(predictions, ranges, POSITIONS),
        by_confidence=by_confidence,
    )


def _scores(
    predictions: Predictions, part: NDArray[np.integer], names: Sequence[_Name]
) -> dict[_Name, Score]:
    return {name: _score(predictions, part == i) for i, name in enumerate(names) if (part == i).any()}


def _score(predictions: Predictions, mask: NDArray[np.bool_]) -> Score:
    agreement, acceptance = predictions.agrees[mask].mean(), predictions.overlap[mask].mean()
    return Score(int(mask.sum()), float(agreement), float(acceptance))
