"""Made-up training data: answers of a Markov chain, with states that tell what the tokens do not."""

import numpy as np

from spec_local import bfloat16
from spec_local.training.shards import TOP_K, Document

N_VOCAB, WIDTH, LENGTH = 24, 16, 30
PEAK = 0.9  # probability of the best token

_RNG = np.random.default_rng(0)
EMBEDDINGS = bfloat16.encode(_RNG.normal(size=(N_VOCAB, WIDTH)).astype(np.float32))
OUTPUT = _RNG.normal(size=(N_VOCAB, WIDTH)).astype(np.float32)
_BEST = np.array([_RNG.permutation(N_VOCAB) for _ in range(2)])


def document(tokens, n_prompt, *, states=None, top=None, category="chat", temperature=1.0, held_out=False):
    """A document; top: candidates and probabilities of each answer token, as a dict; None: the tokens."""
    n = len(tokens) - n_prompt
    ids, probs = np.zeros((n, TOP_K), np.uint32), np.full((n, TOP_K), 1e-6)
    for row, candidates in enumerate(top or [{token: 1.0} for token in tokens[n_prompt:]]):
        ids[row, : len(candidates)] = list(candidates)
        probs[row, : len(candidates)] = list(candidates.values())
    if states is None:
        states = np.arange((len(tokens) - 1) * 3 * WIDTH).reshape(len(tokens) - 1, -1) % 100
    return Document(
        np.array(tokens, np.uint32),
        n_prompt,
        category,
        temperature,
        held_out,
        ids,
        np.log(probs).astype(np.float16),
        bfloat16.encode(np.asarray(states, np.float32)),
    )


def chain(n, seed, *, n_prompt=3):
    """Documents in which the next token depends on the last one and on a coin, which only a state shows.

    The state of a token shows the coin of the token after it; the main model thus knows it in time for the
    first draft token, but not for the second. A fifth of the documents is held out, half are greedy.
    """
    rng = np.random.default_rng(seed)
    for i in range(n):
        greedy = i % 2 == 0
        coins, tokens, top = rng.integers(0, 2, LENGTH), rng.integers(0, N_VOCAB, n_prompt).tolist(), []
        while len(tokens) < LENGTH:
            p = np.full(N_VOCAB, (1 - PEAK) / (N_VOCAB - 1))
            p[_BEST[coins[len(tokens) - 1], tokens[-1]]] = PEAK
            best = np.argsort(-p)[:TOP_K]
            top.append({int(token): float(p[token]) for token in best})
            tokens.append(int(best[0] if greedy else rng.choice(N_VOCAB, p=p)))
        states = rng.normal(size=(LENGTH - 1, 3 * WIDTH))
        states[:, 0] = 4 * coins[1:] - 2
        states[:, -WIDTH:] += bfloat16.decode(EMBEDDINGS)[tokens[:-1]]
        yield document(
            tokens,
            n_prompt,
            states=states,
            top=top,
            category=("even", "odd")[i // 2 % 2],
            temperature=0.0 if greedy else 1.0,
            held_out=i % 5 == 0,
        )
