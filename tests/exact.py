"""An enumerated distribution of answers against main's own."""

import itertools

import pytest


def is_mains(said, main, sampler, prompt, n=3):
    """Assert that the first n tokens have exactly main's distribution.

    said: chance of each answer, by its tokens, as `enumerate_outcomes` finds it.
    """
    for tokens in itertools.product(range(main.n_vocab), repeat=n):
        expected, history = 1.0, list(prompt)
        for token in tokens:
            expected *= sampler.distribution(main.logits(history), history).dense(main.n_vocab)[token]
            history.append(token)
        assert said.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)
