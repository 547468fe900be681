"""The training data in the draft model's tokens, with soft targets, and batches of it.

A draft model with a trimmed vocabulary reads a token that it lacks as several of its own tokens, and predicts
only after the last of these, where decoding can use a prediction. As in decoding, the main model's
distribution is restricted to the tokens that the draft model has.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.training.shards import TOP_K, Document

MAX_ROW = 512
"""Maximum length of a row in tokens; longer texts become several rows, each overlapping the last by half."""

TokenIds = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Concatenated texts, with a target for each token of the main model's answers.

    Attributes:
        ids: uint16 or uint32, all texts in the draft model's tokens.
        text_starts: int64 (n_texts + 1,), offsets of the texts in `ids`.
        text_categories: int64 (n_texts,), indices into `categories`.
        first_targets: int64 (n_texts + 1,), index of each text's first target.
        positions: int64 (n_targets,), index in `ids` of the token before each target.
        next_tokens: int64 (n_targets,), the main model's token, or -1 if the draft model lacks it.
        top_ids: dtype of `ids`, (n_targets, TOP_K), the main model's candidates, the most probable first; 0
            if the draft model lacks the token.
        top_probs: float16 (n_targets, TOP_K), their probabilities; 0 if the draft model lacks the token.
    """

    categories: Sequence[str]
    ids: TokenIds
    text_starts: NDArray[np.int64]
    text_categories: NDArray[np.int64]
    first_targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    next_tokens: NDArray[np.int32]
    top_ids: TokenIds
    top_probs: NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of text and their targets.

    Attributes:
        tokens: int64 (n_rows, length), padded with 0 on the right.
        n_tokens: number of tokens without padding.
        positions: int64 (n,), positions of the targets in the flattened tokens.
        targets: int64 (n,), indices of the targets in the corpus.
        prompt_positions: int64 (m,), positions in prompts, where only the next token is known.
        prompt_targets: int64 (m,), the next tokens at these positions.
    """

    tokens: NDArray[np.int64]
    n_tokens: int
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    prompt_positions: NDArray[np.int64]
    prompt_targets: NDArray[np.int64]


class TokenMap:
    """Maps the main model's tokens to the draft model's.

    Args:
        spellings: for each token of the main model, the draft model's tokens (one or more).
        kept: tokens of the main model that the draft model has.
        n_vocab: size of the draft model's vocabulary.
    """

    def __init__(self, spellings: Sequence[Sequence[int]], kept: NDArray[np.integer], n_vocab: int) -> None:
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self._lengths = np.array([len(ids) for ids in spellings], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._flat = np.array([token for ids in spellings for token in ids], self.dtype)
        self.draft_ids = np.full(len(spellings), -1, np.int32)
        self.draft_ids[kept] = self._flat[self._starts[kept]]

    def convert(self, tokens: NDArray[np.integer]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Return the draft model's ids, and the offset in them where each token of the main model ends."""
        lengths = self._lengths[tokens]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return self._flat[np.repeat(self._starts[tokens], lengths) + inside], ends


def build(documents: Iterable[Document], token_map: TokenMap) -> Corpus:
    """Build a corpus from the documents that have a prompt and an answer.

    Raises:
        InvalidRequest: there is no such document.
    """
    categories: dict[str, int] = {}
    starts, text_categories, first_targets = [0], [], [0]
    ids, positions, next_tokens, top_ids, top_probs = [], [], [], [], []
    for document in documents:
        if document.n_prompt < 1 or document.n_prompt >= len(document.tokens):
            continue
        text, ends = token_map.convert(document.tokens)
        candidates = token_map.draft_ids[document.top_ids]
        known = candidates >= 0
        ids.append(text)
        positions.append(starts[-1] + ends[document.n_prompt - 1 : -1] - 1)
        next_tokens.append(token_map.draft_ids[document.tokens[document.n_prompt :]])
        top_ids.append(np.where(known, candidates, 0).astype(token_map.dtype))
        probs = np.where(known, np.exp(document.top_logprobs, dtype=np.float32), 0)
        top_probs.append(probs.astype(np.float16))
        text_categories.append(categories.setdefault(document.category, len(categories)))
        starts.append(starts[-1] + len(text))
        first_targets.append(first_targets[-1] + len(candidates))
    if not text_categories:
        raise InvalidRequest("there is no training data yet: give more --minutes to continue")
    return Corpus(
        categories=list(categories),
        ids=np.concatenate(ids),
        text_starts=np.array(starts),
        text_categories=np.array(text_categories),
        first_targets=np.array(first_targets),
        positions=np.concatenate(positions),
        next_tokens=np.concatenate(next_tokens),
        top_ids=np.concatenate(top_ids),
        top_probs=np.concatenate(top_probs),
    )


def batches(corpus: Corpus, n_tokens: int, rng: np.random.Generator | None = None) -> Iterator[Batch]:
    """Yield every target once, in batches of rows of similar length.

    Args:
        n_tokens: maximum number of tokens in a batch, including padding; a batch has at least one row.
        rng: shuffles the batches and varies which rows are batched together; None: shortest rows first.
    """
    rows = _rows(corpus)
    # Jitter, so that rows are combined differently in each epoch, at the cost of a little padding.
    jitter = rng.uniform(0.95, 1.05, len(rows)) if rng else np.ones(len(rows))
    order = rows[np.argsort((rows[:, 1] - rows[:, 0]) * jitter, kind="stable")]
    longest = np.maximum.accumulate(order[:, 1] - order[:, 0])
    cuts = [0]
    for i, length in enumerate(longest.tolist()):
        if (i + 1 - cuts[-1]) * length > n_tokens and i > cuts[-1]:
            cuts.append(i)
    spans = list(pairwise([*cuts, len(order)]))
    if rng:
        rng.shuffle(spans)
    for start, end in spans:
        yield _batch(corpus, order[start:end])


def targets(
    corpus: Corpus, batch: Batch, token_weight: float, prompt_weight: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the targets at the positions of a batch, then at its prompt positions.

    The main model's candidates are renormalized over the tokens that the draft model has, because
    verification uses no others of its distribution. If the draft model has none of them, the weights are
    zero.

    Args:
        token_weight: weight of the main model's sampled token, relative to its candidates.
        prompt_weight: weight of a prompt position, relative to an answer position.

    Returns:
        ids and float32 weights (n + m, TOP_K + 1); all weights sum to 1.
    """
    probs = corpus.top_probs[batch.targets].astype(np.float32)
    total = probs.sum(1, keepdims=True)
    sampled = corpus.next_tokens[batch.targets]
    n, n_all = len(sampled), len(sampled) + len(batch.prompt_positions)
    ids, weights = np.zeros((n_all, TOP_K + 1), np.int64), np.zeros((n_all, TOP_K + 1), np.float32)
    ids[:n, :TOP_K], ids[:n, TOP_K] = corpus.top_ids[batch.targets], np.maximum(sampled, 0)
    ids[n:, TOP_K] = batch.prompt_targets
    weights[:n, :TOP_K] = np.divide((1 - token_weight) * probs, total, out=probs, where=total > 0)
    weights[:n, TOP_K] = token_weight * (sampled >= 0)
    weights[n:, TOP_K] = prompt_weight
    return ids, weights / max(float(weights.sum()), 1e-9)


def _rows(corpus: Corpus) -> NDArray[np.int64]:
    """Return (n_rows, 4): start and end of each row in the ids, and start and end of its targets."""
    rows = []
    text_starts, first_targets = corpus.text_starts.tolist(), corpus.first_targets.tolist()
    for (start, end), (first, last) in zip(pairwise(text_starts), pairwise(first_targets), strict=True):
        while end - start > MAX_ROW:
            done = first + int(np.searchsorted(corpus.positions[first:last], start + MAX_ROW))
            rows.append((start, start + MAX_ROW, first, done))
            start, first = start + MAX_ROW // 2, done
        rows.append((start, end, first, last))
    return np.array([row for row in rows if row[2] < row[3]], np.int64).reshape(-1, 4)


def _batch(corpus: Corpus, rows: NDArray[np.int64]) -> Batch:
    length = int((rows[:, 1] - rows[:, 0]).max())
    tokens = np.zeros((len(rows), length), np.int64)
    positions, targets, prompt_positions, prompt_targets = [], [], [], []
    for i, (start, end, first, last) in enumerate(rows.tolist()):
        tokens[i, : end - start] = corpus.ids[start:end]
        targets.append(np.arange(first, last))
        positions.append(corpus.positions[first:last] - start + i * length)
        n_prompt = int(corpus.positions[first]) - start
        prompt_positions.append(i * length + np.arange(n_prompt))
        prompt_targets.append(tokens[i, 1 : n_prompt + 1])
    return Batch(
        tokens=tokens,
        n_tokens=int((rows[:, 1] - rows[:, 0]).sum()),
        positions=np.concatenate(positions),
        targets=np.concatenate(targets),
        prompt_positions=np.concatenate(prompt_positions),
        prompt_targets=np.concatenate(prompt_targets),
    )
