"""Select the tokens that a head drafts.

A small head spends a large part of its time on the output matrix, and a few thousand of a main model's 49,000
to 262,000 tokens cover nearly all of its text.
"""

import numpy as np
from numpy.typing import NDArray


def select_tokens(counts: NDArray[np.floating], size: int) -> NDArray[np.int64]:
    """Return the most frequent tokens, ascending.

    Tokens that do not occur fill the rest in the order of their ids: tokenizers number the tokens that they
    merge by their frequency in the tokenizer's own training text, which is larger and more general.

    Args:
        counts: float (n_vocab,), expected number of occurrences of each token.
        size: maximum number of tokens.
    """
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size])
