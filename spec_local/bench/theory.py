"""The best possible speed-up of any draft length, computed in hindsight.

Once an answer is known, the number of consecutive draft tokens that would have been accepted at each position
is known for each source. With measured costs, the fastest division of the answer into steps can be computed
exactly. It is an upper bound for policies, which decide without this knowledge.

The draft tokens are the draft model's most probable tokens and the candidates of lookups. At temperature 0,
these are the tokens that are proposed, and the bound holds for chains. At other temperatures, a draft model
may sample other tokens and do better or worse. The bound does not hold for trees, which verify several
tokens for one position.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_local.core.calls import run
from spec_local.core.language_model import LanguageModel, prefill
from spec_local.core.proposal import Limit
from spec_local.lookups.base import Lookup


def best_seconds(
    runs: Mapping[str, Sequence[int]],
    main: Callable[[int], float],
    draft_step: Mapping[str, float],
    n: int,
    max_draft: int,
) -> float:
    """Return the least time in which n tokens can be generated.

    Args:
        runs: by source and position (0 to n − 1): the number of correct draft tokens in a row from there.
        main: seconds of a call of the main model, by its number of tokens.
        draft_step: seconds of a draft token, by source.
        n: tokens of the answer.
        max_draft: maximum number of draft tokens per step.

    Returns:
        seconds, by dynamic programming from the end: a step generates k correct draft tokens of one source
        and one token of the main model; it costs k draft tokens and a call of k + 1 tokens.
    """
    call = [main(k + 1) for k in range(min(max_draft, n) + 1)]
    best = [0.0] * (n + 1)
    for at in range(n - 1, -1, -1):
        best[at] = call[0] + best[at + 1]
        for source, lengths in runs.items():
            for k in range(1, min(max_draft, lengths[at]) + 1):
                step = k * draft_step[source] + call[k]
                best[at] = min(best[at], step + best[min(n, at + k + 1)])
    return best[0]


def run_lengths(correct: Sequence[bool]) -> list[int]:
    """The number of true values in a row from each position."""
    lengths = [0] * (len(correct) + 1)
    for at in range(len(correct) - 1, -1, -1):
        lengths[at] = lengths[at + 1] + 1 if correct[at] else 0
    return lengths[:-1]


def draft_run_lengths(
    draft: LanguageModel, prompt: Sequence[int], answer: Sequence[int], n_vocab: int
) -> list[int]:
    """Run lengths of the draft model's most probable tokens, in as few calls as its rows of logits allow.

    Args:
        n_vocab: size of the main model's vocabulary; the draft model may have more columns.

    Raises:
        BackendError: the draft model failed.
    """
    tokens = [*prompt, *answer]
    start = len(prompt) - 1  # the token after which the answer begins
    correct = [False] * len(answer)  # stays False beyond the draft model's context
    if start < draft.n_ctx:
        run(prefill(draft, tokens[:start]))
    size = min(draft.max_logits, draft.max_tokens)
    for first in range(start, min(len(tokens) - 1, draft.n_ctx), size):
        chunk = tokens[first : min(first + size, len(tokens) - 1, draft.n_ctx)]
        proposed = draft.evaluate(chunk, len(chunk))[:, :n_vocab].argmax(axis=1)
        following = np.asarray(tokens[first + 1 : first + 1 + len(chunk)])
        correct[first - start : first - start + len(chunk)] = (proposed == following).tolist()
    return run_lengths(correct)


def lookup_run_lengths(
    lookup: Lookup, prompt: Sequence[int], answer: Sequence[int], max_draft: int
) -> list[int]:
    """Run lengths of the candidates of a lookup, at most `max_draft` tokens per step."""
    history, lengths = list(prompt), []
    limit = Limit(max_draft, max_draft, 1)
    for at, token in enumerate(answer):
        candidates = lookup.find(history, limit).tokens
        correct = [a == b for a, b in zip(candidates, answer[at:], strict=False)]
        lengths.append(run_lengths([*correct, False])[0])
        history.append(token)
    return lengths
