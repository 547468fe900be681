"""Compare an enumerated distribution of answers with that of the main model."""

import itertools

import pytest


def assert_main_distribution(outcomes, main, sampler, prompt, n=3):
    """Assert that the first n tokens have exactly the main model's distribution.

    outcomes: probability of each answer by its tokens, from `enumerate_outcomes`.
    """
    for tokens in itertools.product(range(main.n_vocab), repeat=n):
        expected, history = 1.0, list(prompt)
        for token in tokens:
            expected *= sampler.distribution(main.logits(history), history).dense(main.n_vocab)[token]
            history.append(token)
        assert outcomes.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)
