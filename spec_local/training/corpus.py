"""Main's texts as a draft reads them, with what it shall think after each token: rows of numbers, no objects.

A draft of fewer tokens reads a token that it does not know in several pieces, and is asked only at the end of the last
one: there alone a guess can be used. What main thought is cut down to what the draft can say, as when it guesses.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.training.shards import TOP, Document

LONGEST = 512
"""Tokens of a row; a longer text becomes several, each of which begins with the half of the one before."""

Numbers = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Texts one after another, and a target for each token of main's answers.

    Attributes:
        ids: uint16 or uint32: all texts, in the draft's tokens.
        starts: int64 (n_texts + 1,): where in `ids` each begins.
        kinds: int64 (n_texts,): its category, as an index of `categories`.
        first: int64 (n_texts + 1,): the number of each text's first target.
        places: int64 (n_targets,): where in `ids` the guess is made: the last token before main's.
        said: int64 (n_targets,): main's token, or -1 where the draft does not know it.
        top: like `ids`, (n_targets, TOP): main's candidates, best first; 0 where the draft does not know one.
        chances: float16 (n_targets, TOP): main's probability of each; 0 where the draft does not know it.
    """

    categories: Sequence[str]
    ids: Numbers
    starts: NDArray[np.int64]
    kinds: NDArray[np.int64]
    first: NDArray[np.int64]
    places: NDArray[np.int64]
    said: NDArray[np.int32]
    top: Numbers
    chances: NDArray[np.float16]

    def beginning(self, share: float) -> "Corpus":
        """The first so many of the texts."""
        n = round(share * len(self.kinds))
        end, targets = self.starts[n], self.first[n]
        return replace(
            self,
            ids=self.ids[:end],
            starts=self.starts[: n + 1],
            kinds=self.kinds[:n],
            first=self.first[: n + 1],
            places=self.places[:targets],
            said=self.said[:targets],
            top=self.top[:targets],
            chances=self.chances[:targets],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of texts and the targets in them.

    Attributes:
        tokens: int64 (n_rows, length), filled up with 0 at the right.
        n_tokens: without what fills up.
        places: int64 (n,): of the targets, in the flattened tokens.
        numbers: int64 (n,): of the targets, in the corpus.
        asides: int64 (m,): places of the prompts, where only the next token is known.
        following: int64 (m,): these next tokens.
    """

    tokens: NDArray[np.int64]
    n_tokens: int
    places: NDArray[np.int64]
    numbers: NDArray[np.int64]
    asides: NDArray[np.int64]
    following: NDArray[np.int64]


class Reader:
    """How the draft reads main's tokens, and which of them it can say.

    Args:
        spellings: of each of main's tokens, the draft's (one or more).
        kept: main's tokens that the draft can say: those that it reads as one of its own that stands for the same.
        n_vocab: the draft's tokens.
    """

    def __init__(self, spellings: Sequence[Sequence[int]], kept: NDArray[np.integer], n_vocab: int) -> None:
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self._lengths = np.array([len(ids) for ids in spellings], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._flat = np.array([token for ids in spellings for token in ids], self.dtype)
        self.draft_of = np.full(len(spellings), -1, np.int32)
        self.draft_of[kept] = self._flat[self._starts[kept]]

    def read(self, tokens: NDArray[np.integer]) -> tuple[Numbers, NDArray[np.int64]]:
        """The draft's ids of main's, and where in them each of main's tokens ends."""
        lengths = self._lengths[tokens]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return self._flat[np.repeat(self._starts[tokens], lengths) + inside], ends


def build(documents: Iterable[Document], reader: Reader) -> Corpus:
    """What is to be learned, or measured, of some documents.

    Raises:
        InvalidRequest: there is none.
    """
    categories: dict[str, int] = {}
    starts, kinds, first = [0], [], [0]
    ids, places, said, top, chances = [], [], [], [], []
    for document in documents:
        if document.n_prompt < 1 or document.n_prompt >= len(document.tokens):
            continue  # nothing before the answer, or no answer
        own, ends = reader.read(document.tokens)
        candidates = reader.draft_of[document.top_ids]
        known = candidates >= 0
        ids.append(own)
        places.append(starts[-1] + ends[document.n_prompt - 1 : -1] - 1)
        said.append(reader.draft_of[document.tokens[document.n_prompt :]])
        top.append(np.where(known, candidates, 0).astype(reader.dtype))
        chances.append(np.where(known, np.exp(document.top_logprobs, dtype=np.float32), 0).astype(np.float16))
        kinds.append(categories.setdefault(document.category, len(categories)))
        starts.append(starts[-1] + len(own))
        first.append(first[-1] + len(candidates))
    if not kinds:
        raise InvalidRequest("main has written nothing to learn from yet: let it write for longer")
    return Corpus(
        categories=list(categories),
        ids=np.concatenate(ids),
        starts=np.array(starts),
        kinds=np.array(kinds),
        first=np.array(first),
        places=np.concatenate(places),
        said=np.concatenate(said),
        top=np.concatenate(top),
        chances=np.concatenate(chances),
    )


def batches(corpus: Corpus, n_tokens: int, rng: np.random.Generator | None = None) -> Iterator[Batch]:
    """Every target once, in batches of rows of like length.

    Args:
        n_tokens: of a batch, at most, with what fills it up; never less than one row.
        rng: they order the batches, and choose which rows go together; None: the shortest come first.
    """
    rows = _rows(corpus)
    # Neighbours in length are not always the same; some more is filled up for it.
    stretch = rng.uniform(0.95, 1.05, len(rows)) if rng else np.ones(len(rows))
    order = rows[np.argsort((rows[:, 1] - rows[:, 0]) * stretch, kind="stable")]
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
    corpus: Corpus, batch: Batch, said: float, prompts: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What is wanted at the places of a batch, and then at its asides.

    Of main's candidates, those that the draft can say are taken for all there are, as when it guesses: an acceptance rule
    sees a draft's distribution over these only. Where it can say none, nothing is wanted of it.

    Args:
        said: weight of main's very token beside its candidates.
        prompts: weight of an aside beside a place.

    Returns:
        ids (n + m, TOP + 1), and the share of each, the sum of which is 1.
    """
    chances = corpus.chances[batch.numbers].astype(np.float32)
    known = chances.sum(1, keepdims=True)
    own = corpus.said[batch.numbers]
    n, n_all = len(own), len(own) + len(batch.asides)
    ids, shares = np.zeros((n_all, TOP + 1), np.int64), np.zeros((n_all, TOP + 1), np.float32)
    ids[:n, :TOP], ids[:n, TOP] = corpus.top[batch.numbers], np.maximum(own, 0)
    ids[n:, TOP] = batch.following
    shares[:n, :TOP] = np.divide((1 - said) * chances, known, out=chances, where=known > 0)
    shares[:n, TOP] = said * (own >= 0)
    shares[n:, TOP] = prompts
    return ids, shares / max(float(shares.sum()), 1e-9)


def _rows(corpus: Corpus) -> NDArray[np.int64]:
    """(n_rows, 4): where each row begins and ends in the ids, and its first target and the end of them."""
    rows = []
    starts, firsts = corpus.starts.tolist(), corpus.first.tolist()
    for (start, end), (first, last) in zip(pairwise(starts), pairwise(firsts), strict=True):
        while end - start > LONGEST:
            done = first + int(np.searchsorted(corpus.places[first:last], start + LONGEST))
            rows.append((start, start + LONGEST, first, done))
            start, first = start + LONGEST // 2, done
        rows.append((start, end, first, last))
    return np.array([row for row in rows if row[2] < row[3]], np.int64).reshape(-1, 4)


def _batch(corpus: Corpus, rows: NDArray[np.int64]) -> Batch:
    length = int((rows[:, 1] - rows[:, 0]).max())
    tokens = np.zeros((len(rows), length), np.int64)
    places, numbers, asides, following = [], [], [], []
    for i, (start, end, first, last) in enumerate(rows.tolist()):
        tokens[i, : end - start] = corpus.ids[start:end]
        numbers.append(np.arange(first, last))
        places.append(corpus.places[first:last] - start + i * length)
        before = int(corpus.places[first]) - start
        asides.append(i * length + np.arange(before))
        following.append(tokens[i, 1 : before + 1])
    return Batch(
        tokens=tokens,
        n_tokens=int((rows[:, 1] - rows[:, 0]).sum()),
        places=np.concatenate(places),
        numbers=np.concatenate(numbers),
        asides=np.concatenate(asides),
        following=np.concatenate(following),
    )
