"""Which of main's tokens the draft knows.

Most of a small model's time goes into its vocabulary: of 49 to 262 thousand tokens a few thousand make nearly all of a
text. What is left out the draft can still read, spelled with what is left (see `spec_local.proposers.vocabulary_map`), so that it
must be able to spell well.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.training import tokenizer
from spec_local.training.tokenizer import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer


def choose(main_path: Path, counts: NDArray[np.integer], size: int) -> NDArray[np.uint32]:
    """Main's tokens that the draft keeps.

    They are those that have a role or that spell single bytes, and then the most frequent ones. A token is built by
    joining shorter ones: these are kept with it, or no text would ever be read as that token.

    Args:
        counts: integers (n_main,), how often each of main's tokens occurred. Those that did not are not kept, but for
            the ones named.
        size: how many to keep at most.

    Returns:
        ascending.

    Raises:
        InvalidRequest: not even those that have to be kept fit.
        ModelFileError, ModelError: main cannot be read, or has a tokenizer of another kind.
    """
    model = Model(main_path, weights=False)
    main = tokenizer.read(model, tokenizer.metadata(main_path))
    model.close()
    kept = _needed(main, counts)
    if len(kept) > size:
        raise InvalidRequest(f"{size} tokens are too few for {main_path.name}: give at least {len(kept)}")
    texts = [text.decode("utf-8", "surrogateescape") for text in main.texts]
    ids = {text: token for token, text in enumerate(texts)}
    rank = _rank(main, ids)
    by_count = np.argsort(-counts.astype(np.int64), kind="stable")
    for token in by_count[: np.count_nonzero(counts)].tolist():
        if len(kept) == size:
            break
        whole = {token}
        if main.types[token] == NORMAL:
            whole |= {ids[text] for text in joined(texts[token], rank) if text in ids}
        if len(kept | whole) <= size:
            kept |= whole
    return np.array(sorted(kept), np.uint32)


def joined(text: str, rank: Callable[[str, str], float]) -> list[str]:
    """What the tokenizer joins, in order, to make one token of a text; the last is the text. Empty: it does not.

    What it would never join on its way is not needed for it: of a trimmed vocabulary that has all of these, the
    tokenizer joins the same.

    rank: of two neighbours; the lowest are joined first, and of equal ones the first. inf: they are never joined.
    """
    symbols, made = list(text), []
    while len(symbols) > 1:
        ranks = [rank(left, right) for left, right in itertools.pairwise(symbols)]
        best = min(ranks)
        if best == math.inf:
            return []
        i = ranks.index(best)
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
        made.append(symbols[i])
    return made


def _needed(main: Tokenizer, counts: NDArray[np.integer]) -> set[int]:
    occurred = counts > 0
    always = np.isin(main.types, (BYTE, UNKNOWN)) | np.isin(main.types, (CONTROL, USER_DEFINED)) & occurred
    template = (main.chat_template or "").encode()
    needed = {*main.roles.values(), *main.ends, *np.flatnonzero(always).tolist()}
    needed |= {t for t in np.flatnonzero(main.types == CONTROL).tolist() if main.texts[t] in template}
    if main.kind == BPE:
        needed |= set(_single_bytes(main.texts))
    return needed


def _single_bytes(texts: list[bytes]) -> Iterable[int]:
    """A BPE spells every byte as a character of its own."""
    return (
        token
        for token, text in enumerate(texts)
        if len(text) <= 2 and len(text.decode("utf-8", "replace")) == 1
    )


def _rank(main: Tokenizer, ids: dict[str, int]) -> Callable[[str, str], float]:
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
