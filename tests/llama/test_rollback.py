"""Rejected tokens leave no trace beyond a sliding window.

A context reads a text in rounds: it evaluates a chain or a tree of the text's next tokens and wrong ones, and
commits some of the text's. Now and then, it commits wrong tokens, and truncates these and some before them.
Its logits are compared with those of a context that reads only the text, one token per call. Differences
must be as small as the noise (no rejected tokens, calls of several tokens), and much smaller than after a
text in which one token is wrong.

Everything is in F32, and the attention does not round to F16, so that the noise is small. What is left comes
from llama.cpp's F16 table of the activation function.
"""

import random

import numpy as np
import pytest

from spec_local.llama.model import Model
from spec_local.llama.open import open_row
from spec_local.llama.tiny import SLIDING_WINDOW, write_tiny_model

NOISE = 0.005  # at most 0.0006
N_NODES = 12  # maximum number of tokens per draft
FIRST = 8 * SLIDING_WINDOW + 1  # first position whose logits are compared
TEXT = random.Random(0).choices(range(5, 500), k=12 * SLIDING_WINDOW)


@pytest.fixture
def model(f32_caches, folder):
    path = write_tiny_model(folder / "gemma3-f32.gguf", architecture="gemma3", tensor_type="F32")
    return Model(path)


@pytest.fixture
def plain(model):
    return opened(model)


@pytest.fixture
def expected(plain):
    """Logits after each token from FIRST on."""
    return read_in_calls(plain, TEXT, 1)


def opened(model):
    """A context that has read the text up to FIRST."""
    context = open_row(
        model, n_ctx=len(TEXT) + 2 * N_NODES, max_branches=N_NODES, flash_attention=False, threads=1
    )
    read(context, TEXT[:FIRST])
    return context


def read(context, text):
    """Commit the tokens of the text that follow those in the context."""
    while rest := text[len(context.cached) :][: context.max_tokens]:
        context.evaluate(rest, 0)


def read_in_calls(context, text, largest):
    """Read the rest of the text in calls of up to `largest` tokens; return the logits after each token."""
    rng, rows = random.Random(0), []
    while rest := text[len(context.cached) :][: rng.randint(1, largest)]:
        rows.append(context.evaluate(rest, len(rest)).copy())
    return np.concatenate(rows)


def draft(rng, shape, right, wrong):
    """Tokens and parents of a chain or tree of all these tokens, and the nodes of the path `right`."""
    order = [True] * len(right) + [False] * len(wrong)
    if shape == "tree":
        rng.shuffle(order)
    path, tokens, parents = [-1], [], []
    for node, is_right in enumerate(order):
        parents.append(path[-1] if is_right else node - 1 if shape == "chain" else rng.randint(-1, node - 1))
        tokens.append(right[len(path) - 1] if is_right else wrong[node + 1 - len(path)])
        if is_right:
            path.append(node)
    return tokens, parents, path[1:]


def read_with_drafts(context, shape, rounds):
    """Read the text in rounds, again and again from FIRST on; yield positions and the logits after them."""
    rng = random.Random(0)

    def wrong():
        return [rng.randrange(context.n_vocab) for _ in range(rng.randint(1, N_NODES // 2))]

    for i in range(rounds):
        start = len(context.cached)
        if start == len(TEXT) or i % 10 == 9:
            context.evaluate(wrong(), 0)
            start = rng.randint(FIRST // 2, start)
            context.truncate(start)
            read(context, TEXT[: max(start, FIRST)])
            start = len(context.cached)
        right = TEXT[start:][: rng.randint(0, N_NODES // 2)]
        tokens, parents, path = draft(rng, shape, right, wrong())
        n = rng.randint(1, len(tokens))
        rows = [*context.decode_tree(tokens[:n], parents[:n]).copy()]
        if n < len(tokens):
            rows += [*context.decode_tree(tokens[n:], parents[n:]).copy()]
        yield from ((start + j, rows[node]) for j, node in enumerate(path))
        context.commit(path[: rng.randint(0, len(path))])


def differences(found, expected):
    """Largest difference of a logit, for each position and its logits."""
    return [float(np.abs(row - expected[position - FIRST]).max()) for position, row in found]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rejected_tokens_do_not_change_later_logits(shape, model, expected):
    found = differences(read_with_drafts(opened(model), shape, rounds=60), expected)
    assert len(found) > 100
    assert max(found) < NOISE


def test_the_size_of_a_call_changes_logits_by_noise_only(plain, expected):
    plain.truncate(FIRST)
    assert max(differences(enumerate(read_in_calls(plain, TEXT, N_NODES), FIRST), expected)) < NOISE


@pytest.mark.parametrize("distance", [1, 8, 64])
def test_one_wrong_token_would_be_noticed(distance, model, plain, expected):
    changed = TEXT[: FIRST + N_NODES]
    changed[FIRST - distance] = (changed[FIRST - distance] + 1) % model.vocabulary.n_tokens
    plain.truncate(FIRST - distance)
    read(plain, changed[:FIRST])
    found = differences(enumerate(read_in_calls(plain, changed, 1), FIRST), expected)
    assert np.median(found) > 20 * NOISE
