"""Evaluate a head on held-out answers of the main model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spec_local.training.dataset import DEPTH, Dataset, TrainingBatch, batches
from spec_local.training.head_shape import HeadShape
from spec_local.training.network import Parameters, draft_states
from spec_local.training.shards import Document


@dataclass(frozen=True, slots=True)
class Score:
    """Averages over positions in answers.

    n: number of positions. agreement: share of the positions where the most probable tokens of the head and
    of the main model are the same: its acceptance rate as the first draft token at temperature 0.
    acceptance: mean Σ min(p, q) over the main model's candidates: the acceptance rate at temperature 1
    (Leviathan et al. 2023, section 3.2), slightly too low because p is cut off.
    """

    n: int
    agreement: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all positions and by category, and the acceptance rates of successive draft tokens.

    chain: at temperature 0, the acceptance rate of the first, second, … draft token, given that those before
    it were accepted; on answers that were generated at temperature 0, or else estimated as `agreement`.
    """

    overall: Score
    by_category: Mapping[str, Score]
    chain: Sequence[float]


def evaluate(
    parameters: Parameters,
    shape: HeadShape,
    output: torch.Tensor,
    embeddings: torch.Tensor,
    dataset: Dataset,
    documents: Sequence[Document],
    batch_tokens: int = 4096,
) -> Evaluation:
    """Evaluate a head, in the arithmetic of `output`.

    Args:
        parameters: by GGUF name. output, embeddings: the head's output rows, and the main model's embeddings.
        documents: of the dataset.
        batch_tokens: maximum number of tokens at a time.
    """
    agrees: list[NDArray[np.bool_]] = []
    overlaps: list[NDArray[np.float32]] = []
    categories: list[str] = []
    tested, accepted = np.zeros(DEPTH, np.int64), np.zeros(DEPTH, np.int64)
    with torch.inference_mode():
        for part in batches(documents, batch_tokens):
            batch = dataset.batch(part)
            best = _most_probable(parameters, shape, output, embeddings, batch, overlaps)
            # −1 is neither a draft token nor one of the main model's.
            wanted = np.where(batch.top_probs[:, 0] > 0, batch.top_ids[:, 0], -1)
            hits = [tokens == wanted for tokens in best]
            agrees.append(hits[0])
            categories += [part[i].category for i in batch.documents.tolist()]
            greedy = np.array([document.temperature == 0 for document in part])[batch.documents]
            _count_chains(hits, greedy, batch.documents, tested, accepted)
    agreement, overlap = np.concatenate(agrees), np.concatenate(overlaps)
    names = np.array(categories)
    return Evaluation(
        _score(agreement, overlap),
        {str(name): _score(agreement[names == name], overlap[names == name]) for name in np.unique(names)},
        np.where(tested, accepted / np.maximum(tested, 1), agreement.mean()).tolist(),
    )


def predictions(
    parameters: Parameters,
    shape: HeadShape,
    embeddings: torch.Tensor,
    batch: TrainingBatch,
    dtype: torch.dtype,
) -> Iterator[torch.Tensor]:
    """Compute the states of successive draft tokens at the positions to predict at: see `draft_states`.

    Args:
        embeddings: bfloat16 (n_vocab, n_embd), the main model's.

    Yields:
        `dtype` (n, n_embd) for each of `DEPTH` draft tokens.
    """
    states = torch.from_numpy(batch.states.view(np.int16)).view(torch.bfloat16)
    device = embeddings.device
    tokens, windows, positions = (
        torch.from_numpy(each).to(device) for each in (batch.tokens, batch.windows, batch.positions)
    )
    inputs = states.to(device, dtype), embeddings[tokens].to(dtype)
    for found in draft_states(parameters, shape, *inputs, DEPTH, windows):
        yield found.flatten(0, 1).index_select(0, positions)


def _most_probable(
    parameters: Parameters,
    shape: HeadShape,
    output: torch.Tensor,
    embeddings: torch.Tensor,
    batch: TrainingBatch,
    overlaps: list[NDArray[np.float32]],
) -> list[NDArray[np.int64]]:
    """Return the most probable tokens of each depth; add the overlaps of the first one."""
    device = output.device
    best = []
    states = predictions(parameters, shape, embeddings, batch, output.dtype)
    for depth, state in enumerate(states):
        logits = state @ output.T
        best.append(logits.argmax(1).cpu().numpy())
        if depth == 0:
            ids, p = torch.from_numpy(batch.top_ids).to(device), torch.from_numpy(batch.top_probs).to(device)
            q = torch.softmax(logits.float(), 1).gather(1, ids)
            overlaps.append(torch.minimum(p, q).sum(1).cpu().numpy())
    return best


def _count_chains(
    hits: Sequence[NDArray[np.bool_]],
    greedy: NDArray[np.bool_],
    documents: NDArray[np.int64],
    tested: NDArray[np.int64],
    accepted: NDArray[np.int64],
) -> None:
    """Count the draft tokens that follow accepted ones, in chains that start at every position.

    hits: for each depth, whether the prediction of each position is right. greedy: which positions count.
    """
    alive, n = greedy, len(greedy)
    for depth, hit in enumerate(hits):
        alive = alive[: n - depth] & (documents[: n - depth] == documents[depth:])
        tested[depth] += alive.sum()
        alive = alive & hit[depth:]
        accepted[depth] += alive.sum()


def _score(agreement: NDArray[np.bool_], overlap: NDArray[np.float32]) -> Score:
    return Score(len(agreement), float(agreement.mean()), float(overlap.mean()))
