"""The training data of a head: the main model's answers with its states and candidates, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local import bfloat16
from spec_local.errors import InvalidRequest
from spec_local.training import shards
from spec_local.training.initial_weights import Samples
from spec_local.training.shards import Document

COVERAGE = 0.96
"""Share of the main model's tokens that a head should be able to draft."""
DEPTH = 3
"""Number of successive draft tokens that a head learns."""
CONTEXT = DEPTH - 1
"""Number of positions before an answer at which draft tokens are computed, too: later ones read them."""
OWN = "your answers"
"""Category of the answers that the user has received before."""
_JITTER = 0.1  # of lengths, so that documents are batched differently in each epoch
_SAMPLE = 12_000  # number of held-out tokens; enough to resolve one percentage point
_OWN_SAMPLE = 4_000  # of the user's held-out answers, and of others, where a training has both: it is short
_PARTS = 12  # of the other documents, at most: each epoch that repeats the user's answers has another part


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Documents, padded with zeros on the right, and the predictions to learn.

    Position i of a document predicts the token after token i, from the tokens up to it and the main model's
    states up to that of token i − 1.

    Attributes:
        tokens: int64 (n_documents, length).
        states: bfloat16 (see `bfloat16`) (n_documents, length, width), of the token before each position.
        windows: int64 (n_documents, length of the longest), consecutive positions of each document: those to
            predict at, after `CONTEXT` others, and before padding.
        positions: int64 (n,), indices of the positions to predict at in the flattened windows: those of the
            answers.
        top_ids: int64 (n, TOP_K), the main model's candidates there, as indices of the drafted tokens; 0 if
            the head cannot draft the token.
        top_probs: float32 (n, TOP_K), their probabilities; 0 if the head cannot draft the token.
        documents: int64 (n,), number of the document of each position.
    """

    tokens: NDArray[np.int64]
    states: NDArray[np.uint16]
    windows: NDArray[np.int64]
    positions: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_probs: NDArray[np.float32]
    documents: NDArray[np.int64]


class Dataset:
    """Documents for training and for evaluation.

    Args:
        folder: folder of the shards.
        n_vocab: size of the main model's vocabulary.
        sizes: numbers of tokens that the head may draft, ascending. The first with `COVERAGE` is used, or the
            last.
        own: the user's own answers, of the category `OWN`.

    Attributes:
        drafted: int64, the main model's tokens that the head can draft, ascending.
        train, own: documents to train on, the user's own separately.
        held_out: documents for evaluation, including the user's own.
        held_out_sample: a part of `held_out`, for evaluation during training.
        n_generated: number of tokens in all answers but the user's own.
        coverage: share of the held-out positions whose most probable token can be drafted.

    Raises:
        InvalidRequest: there is no document for training or evaluation, or a shard is damaged.
    """

    def __init__(
        self,
        folder: Path,
        n_vocab: int,
        sizes: Sequence[int],
        own: Sequence[Document] = (),
        n_sample: int = _SAMPLE,
    ) -> None:
        documents = shards.read_documents(folder)
        self.train, held_out = _split(documents)
        self.own, own_held_out = _split(own)
        self.held_out = held_out + own_held_out
        if not self.train or not held_out:
            raise InvalidRequest("too little training data: give more `minutes` or `tokens` to continue")
        groups = [each for each in (self.train, self.own) if each]
        counts = [_expected_counts(each, n_vocab) for each in groups]
        shares = np.sum([each / each.sum() for each in counts], axis=0)  # both groups count the same
        best = [
            np.concatenate([document.top_ids[:, 0] for document in each])
            for each in (held_out, own_held_out)
            if each
        ]
        for size in sizes:
            self.draft(select_tokens(shares, size), n_vocab)
            if min(float(np.mean(self._drafted_ids[tokens] >= 0)) for tokens in best) >= COVERAGE:
                break
        self.coverage = float(np.mean(self._drafted_ids[np.concatenate(best)] >= 0))
        n_sample = _OWN_SAMPLE if own_held_out else n_sample
        self.held_out_sample = _sample(held_out, n_sample) + _sample(own_held_out, n_sample)
        self.n_generated = sum(len(document.top_ids) for document in documents)

    def draft(self, tokens: NDArray[np.int64], n_vocab: int) -> None:
        """Change the tokens that the head can draft; they are ascending."""
        self.drafted = tokens
        self._drafted_ids = np.full(n_vocab, -1, np.int64)
        self._drafted_ids[tokens] = np.arange(len(tokens))

    def epoch(self, number: int, seed: int) -> Sequence[Document]:
        """Return the documents of an epoch: all of them, or all of the user's own and as many others.

        The others take turns, so that what the head knows is not forgotten while it learns from few answers.
        """
        if not self.own:
            return self.train
        n_own, n_others = (sum(len(each.top_ids) for each in group) for group in (self.own, self.train))
        n_parts = max(1, min(_PARTS, len(self.train), n_others // n_own))
        reading, part = divmod(number, n_parts)
        order = np.random.default_rng([seed, reading]).permutation(len(self.train))
        return [*self.own, *(self.train[i] for i in order[part::n_parts].tolist())]

    def batch(self, documents: Sequence[Document]) -> TrainingBatch:
        """Combine documents."""
        length = max(len(document.tokens) for document in documents)
        width = documents[0].states.shape[1]
        tokens = np.zeros((len(documents), length), np.int64)
        states = np.zeros((len(documents), length, width), np.uint16)
        starts = np.array([max(0, document.n_prompt - 1 - CONTEXT) for document in documents])
        n_columns = max(len(each.tokens) - 1 - start for each, start in zip(documents, starts, strict=True))
        positions = []
        for i, document in enumerate(documents):
            n = len(document.tokens)
            tokens[i, :n] = document.tokens
            states[i, 1:n] = document.states
            positions.append(i * n_columns + np.arange(document.n_prompt - 1, n - 1) - starts[i])
        top_ids = self._drafted_ids[np.concatenate([document.top_ids for document in documents])]
        probs = np.exp(np.concatenate([document.top_logprobs for document in documents]), dtype=np.float32)
        return TrainingBatch(
            tokens,
            states,
            np.minimum(starts[:, None] + np.arange(n_columns), length - 1),
            np.concatenate(positions),
            np.maximum(top_ids, 0),
            np.where(top_ids >= 0, probs, 0),
            np.repeat(np.arange(len(documents)), [len(each) for each in positions]),
        )

    def samples(self, n: int, embeddings: NDArray[np.uint16], rng: np.random.Generator) -> Samples:
        """Return about `n` positions of training answers, for the regression.

        embeddings: bfloat16 (n_vocab, n_embd), the main model's.
        """
        width = embeddings.shape[1]
        parts: list[tuple[NDArray[np.uint16], ...]] = []
        for i in rng.permutation(len(self.train)).tolist():
            document = self.train[i]
            before = slice(max(0, document.n_prompt - 2), len(document.states) - 1)
            after = slice(before.start + 1, before.stop + 1)
            around = (document.tokens[before.start + i : before.stop + i] for i in range(3))
            states, targets = document.states[before], document.states[after, -width:]
            parts.append((states, *(embeddings[tokens] for tokens in around), targets))
            if sum(len(part[0]) for part in parts) >= n:
                break
        return Samples(*(bfloat16.decode(np.concatenate(each)) for each in zip(*parts, strict=True)))


def _split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on, and those that are held out."""
    return (
        [document for document in documents if not document.held_out],
        [document for document in documents if document.held_out],
    )


def _sample(documents: list[Document], n_tokens: int) -> list[Document]:
    """Return the first documents that have so many tokens of answers."""
    ends = np.cumsum([len(document.top_ids) for document in documents])
    return documents[: 1 + int(np.searchsorted(ends, n_tokens))]


def batches(
    documents: Sequence[Document], n_tokens: int, rng: np.random.Generator | None = None
) -> Iterator[Sequence[Document]]:
    """Yield every document once, in batches of documents of similar length.

    Args:
        n_tokens: maximum number of tokens in a batch, including padding; a batch has at least one document.
        rng: shuffles the batches and varies which documents are batched together; None: shortest first.
    """
    lengths = np.array([len(document.tokens) for document in documents])
    jitter = rng.uniform(1 - _JITTER, 1 + _JITTER, len(lengths)) if rng else np.ones(len(lengths))
    parts: list[list[Document]] = []
    longest = 0
    for i in np.argsort(lengths * jitter, kind="stable").tolist():
        longest = max(longest, int(lengths[i]))
        if not parts or (len(parts[-1]) + 1) * longest > n_tokens:
            parts.append([])
            longest = int(lengths[i])
        parts[-1].append(documents[i])
    if rng:
        rng.shuffle(parts)
    yield from parts


def _expected_counts(documents: Sequence[Document], n_vocab: int) -> NDArray[np.float64]:
    """Return the frequency of each token in answers, averaged over what the main model could have sampled."""
    counts = np.zeros(n_vocab)
    for document in documents:
        probs = np.exp(document.top_logprobs.astype(np.float64))
        counts += np.bincount(document.top_ids.ravel(), probs.ravel(), n_vocab)
    return counts


def select_tokens(counts: NDArray[np.floating], size: int) -> NDArray[np.int64]:
    """Return the most frequent tokens, ascending: those that a head drafts.

    A small head spends a large part of its time on the output matrix, and a few thousand of a main model's
    49,000 to 262,000 tokens cover nearly all of its text. Tokens that do not occur fill the rest in the order
    of their ids: tokenizers number the tokens that they merge by their frequency in the tokenizer's own
    training text, which is larger and more general.

    Args:
        counts: float (n_vocab,), expected number of occurrences of each token.
        size: maximum number of tokens.
    """
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size])
