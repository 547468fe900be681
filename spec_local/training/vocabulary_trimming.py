"""Select which of the main model's tokens the draft model has.

Small models spend most of their time on the vocabulary, and a few thousand of a main model's 49,000 to
262,000 tokens cover nearly all of its text. The draft model reads each of the other tokens as several of its
own (see `spec_local.proposers.vocabulary_map`).
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.training import tokenizer
from spec_local.training.tokenizer import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer


def select_tokens(main_path: Path, counts: NDArray[np.integer], size: int) -> NDArray[np.uint32]:
    """Select special tokens and single bytes, then the most frequent tokens.

    A token is kept together with the shorter ones that the tokenizer merges into it: without them, no text
    would ever be tokenized as that token.

    Args:
        counts: integers (n_main,), number of occurrences of each token. Tokens that never occur are kept only
            if required.
        size: maximum number of tokens to keep.

    Returns:
        Token ids of the main model, ascending.

    Raises:
        InvalidRequest: the required tokens exceed `size`.
        ModelFileError, ModelError: the main model cannot be read, or its tokenizer cannot be trimmed.
    """
    model = Model(main_path, weights=False)
    main = tokenizer.read(model, tokenizer.read_metadata(main_path))
    model.close()
    kept = _required(main, counts)
    if len(kept) > size:
        raise InvalidRequest(f"{size} tokens are too few for {main_path.name}: give at least {len(kept)}")
    texts = [text.decode("utf-8", "surrogateescape") for text in main.texts]
    ids = {text: token for token, text in enumerate(texts)}
    rank = _merge_rank(main, ids)
    by_count = np.argsort(-counts.astype(np.int64), kind="stable")
    for token in by_count[: np.count_nonzero(counts)].tolist():
        if len(kept) == size:
            break
        closure = {token}
        if main.types[token] == NORMAL:
            closure |= {ids[text] for text in merge_sequence(texts[token], rank) if text in ids}
        if len(kept | closure) <= size:
            kept |= closure
    return np.array(sorted(kept), np.uint32)


def merge_sequence(text: str, rank: Callable[[str, str], float]) -> list[str]:
    """Return the results, in order, of the merges that turn `text` into one token; empty if they do not.

    A trimmed vocabulary that contains all of these results merges the text in the same way.

    rank: returns the rank of two neighbours; the lowest is merged first, and the leftmost of equal ones. inf:
    never merged.
    """
    symbols, merged = list(text), []
    while len(symbols) > 1:
        ranks = [rank(left, right) for left, right in itertools.pairwise(symbols)]
        best = min(ranks)
        if best == math.inf:
            return []
        i = ranks.index(best)
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
        merged.append(symbols[i])
    return merged


def _required(main: Tokenizer, counts: NDArray[np.integer]) -> set[int]:
    """Return special tokens, those in the chat template, and all that are needed for single bytes."""
    occurred = counts > 0
    by_type = np.isin(main.types, (BYTE, UNKNOWN)) | np.isin(main.types, (CONTROL, USER_DEFINED)) & occurred
    template = (main.chat_template or "").encode()
    required = {*main.special_ids.values(), *main.end_ids, *np.flatnonzero(by_type).tolist()}
    required |= {t for t in np.flatnonzero(main.types == CONTROL).tolist() if main.texts[t] in template}
    if main.kind == BPE:  # which writes every byte as one character
        required |= {
            token
            for token, text in enumerate(main.texts)
            if len(text) <= 2 and len(text.decode("utf-8", "replace")) == 1
        }
    return required


def _merge_rank(main: Tokenizer, ids: dict[str, int]) -> Callable[[str, str], float]:
    if main.kind == BPE:
        order: dict[str, int] = {}
        for i, pair in enumerate(main.merges):
            order.setdefault(pair.decode("utf-8", "surrogateescape"), i)
        return lambda left, right: order.get(f"{left} {right}", math.inf)
    scores = main.scores.tolist()

    def rank(left: str, right: str) -> float:
        token = ids.get(left + right)
        return math.inf if token is None else -scores[token]

    return rank
