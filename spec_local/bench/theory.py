"""The best that any choice of how much to guess could have done, given what could have been guessed rightly.

An answer has been said. Afterwards it is known, at every place of it, how many of a source's guesses in a row
would have been right; with measured costs the quickest division of the answer into steps follows exactly. A policy
that decides without knowing can only come near.

The guesses are chosen ones: the draft's most probable tokens, and what prompt lookup copies. At temperature 0 these
are the guesses that are made, and the figure is a bound for chains. Above it a draft may draw its guesses instead, and
be luckier or less lucky than this. Trees test several guesses for one place, and are not bounded by it at all.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_local.core.language_model import LanguageModel, prefill
from spec_local.core.proposal import Limit
from spec_local.lookups.base import Lookup


def best_seconds(
    runs: Mapping[str, Sequence[int]],
    main: Callable[[int], float],
    draft_step: Mapping[str, float],
    n: int,
    most: int,
) -> float:
    """Least time in which n tokens can be said.

    Args:
        runs: by source and place (0 to n − 1): how many of its guesses in a row are right, starting there.
        main: seconds of a call of main, by its tokens.
        draft_step: seconds a guess takes, by source.
        n: tokens of the answer.
        most: most guesses a step.

    Returns:
        seconds, by dynamic programming from the end: a step says k right guesses of one source and a token of
        main's own, and takes k guesses and a call of k + 1 tokens.
    """
    call = [main(k + 1) for k in range(min(most, n) + 1)]
    best = [0.0] * (n + 1)
    for place in range(n - 1, -1, -1):
        best[place] = call[0] + best[place + 1]
        for source, lengths in runs.items():
            for k in range(1, min(most, lengths[place]) + 1):
                step = k * draft_step[source] + call[k]
                best[place] = min(best[place], step + best[min(n, place + k + 1)])
    return best[0]


def run_lengths(right: Sequence[bool]) -> list[int]:
    """How many in a row are true, starting at each place."""
    lengths = [0] * (len(right) + 1)
    for place in range(len(right) - 1, -1, -1):
        lengths[place] = lengths[place + 1] + 1 if right[place] else 0
    return lengths[:-1]


def draft_run_lengths(
    draft: LanguageModel, prompt: Sequence[int], answer: Sequence[int], n_vocab: int
) -> list[int]:
    """Run lengths of the draft model's favourites: reads the answer once, in as few calls as rows of logits allow.

    Args:
        n_vocab: main's tokens; a draft may have columns for more.

    Raises:
        BackendError: the draft failed.
    """
    text = [*prompt, *answer]
    start = len(prompt) - 1  # the token after which the first guess is made
    right = [False] * len(answer)  # and so it stays where the draft's context is too short
    if start < draft.n_ctx:
        for _ in prefill(draft, text[:start]):
            pass
    size = min(draft.max_logits, draft.max_tokens)
    for first in range(start, min(len(text) - 1, draft.n_ctx), size):
        chunk = text[first : min(first + size, len(text) - 1, draft.n_ctx)]
        guesses = draft.evaluate(chunk, len(chunk))[:, :n_vocab].argmax(axis=1)
        wanted = np.asarray(text[first + 1 : first + 1 + len(chunk)])
        right[first - start : first - start + len(chunk)] = (guesses == wanted).tolist()
    return run_lengths(right)


def lookup_run_lengths(lookup: Lookup, prompt: Sequence[int], answer: Sequence[int], most: int) -> list[int]:
    """Run lengths of what a lookup would have guessed, at most `most` tokens a step."""
    text, lengths = list(prompt), []
    limit = Limit(most, most, 1)
    for place, token in enumerate(answer):
        guesses = lookup.find(text, limit).tokens
        right = [guess == said for guess, said in zip(guesses, answer[place:], strict=False)]
        lengths.append(run_lengths([*right, False])[0])
        text.append(token)
    return lengths
