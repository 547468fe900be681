"""How well a draft guesses on main's answers that it has not learned from.

The draft reads what main wrote and guesses each next token once: so each position counts alike, as after a step of
which everything stood.
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
"""Where ranges of positions in the answer begin."""
_BATCH = 8192
_ROWS = 512  # places at a time, of whose logits a copy is made

_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """One for each target of a corpus, in its order.

    Attributes:
        agrees: bool (n,): the draft's best token is main's; where the draft does not know main's best, it is not.
        overlap: float32 (n,): Σ min(p, q) over main's candidates, the chance that a token of the draft's is accepted
            at temperature 1 (Leviathan et al. 2023, section 3.2), a little less for what main's further candidates add.
        confidence: float32 (n,): the draft's probability of its best token.
    """

    agrees: NDArray[np.bool_]
    overlap: NDArray[np.float32]
    confidence: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """n: positions. agreement: share of them where the best tokens are one. acceptance: mean overlap."""

    n: int
    agreement: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Figures:
    """all: of every position. by_category, by_position: of a part of them, the latter by where its range begins.
    sure: by confidence, how many guesses had more of it, and the share of these that agree.
    """

    all: Score
    by_category: Mapping[str, Score]
    by_position: Mapping[int, Score]
    sure: Mapping[float, tuple[int, float]]


def guesses(parameters: network.Parameters, shape: ModelShape, corpus: Corpus) -> Guesses:
    """What the draft guesses, reckoned in float32 on the device of the parameters."""
    n = len(corpus.places)
    agrees, overlap, confidence = np.zeros(n, bool), np.zeros(n, np.float32), np.zeros(n, np.float32)
    matrix = parameters[EMBEDDINGS]
    with torch.inference_mode():
        for batch in batches(corpus, _BATCH):
            tokens = torch.from_numpy(batch.tokens).to(matrix.device)
            states = network.states(parameters, shape, tokens).flatten(0, 1)
            for start in range(0, len(batch.places), _ROWS):
                numbers = batch.numbers[start : start + _ROWS]
                places = torch.from_numpy(batch.places[start : start + _ROWS]).to(matrix.device)
                q = torch.softmax(states[places] @ matrix.T, -1)
                top = torch.from_numpy(corpus.top[numbers].astype(np.int64)).to(matrix.device)
                p = torch.from_numpy(corpus.chances[numbers].astype(np.float32)).to(matrix.device)
                best, token = q.max(1)
                agrees[numbers] = ((token == top[:, 0]) & (p[:, 0] > 0)).cpu().numpy()
                overlap[numbers] = torch.minimum(p, q.gather(1, top)).sum(1).cpu().numpy()
                confidence[numbers] = best.cpu().numpy()
    return Guesses(agrees, overlap, confidence)


def measure(weights: Weights, shape: ModelShape, corpus: Corpus) -> Figures:
    """How a draft of these weights guesses, reckoned on the CPU."""
    parameters = {name: torch.from_numpy(values) for name, values in weights.items()}
    return figures(corpus, guesses(parameters, shape, corpus))


def figures(corpus: Corpus, made: Guesses) -> Figures:
    """Means of guesses on a corpus."""
    per_text = np.diff(corpus.first)
    kinds = np.repeat(corpus.kinds, per_text)
    position = np.arange(len(kinds)) - np.repeat(corpus.first[:-1], per_text)
    ranges = np.searchsorted(POSITIONS, position, "right") - 1
    everywhere = np.ones(len(kinds), bool)
    sure = {}
    for least in CONFIDENCES:
        chosen = made.confidence > least
        sure[least] = (int(chosen.sum()), float(made.agrees[chosen].mean()) if chosen.any() else 0.0)
    return Figures(
        all=_score(made, everywhere),
        by_category=_scores(made, kinds, corpus.categories),
        by_position=_scores(made, ranges, POSITIONS),
        sure=sure,
    )


def _scores(made: Guesses, part: NDArray[np.integer], names: Sequence[_Name]) -> dict[_Name, Score]:
    return {name: _score(made, part == i) for i, name in enumerate(names) if (part == i).any()}


def _score(made: Guesses, chosen: NDArray[np.bool_]) -> Score:
    return Score(int(chosen.sum()), float(made.agrees[chosen].mean()), float(made.overlap[chosen].mean()))
