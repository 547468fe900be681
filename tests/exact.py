"""The main model's own output, and comparing an enumerated distribution of answers with it."""

import itertools
import math

import pytest


def greedy_output(main, prompt, n):
    """The n most probable tokens after a prompt, one after the other."""
    history = list(prompt)
    for _ in range(n):
        history.append(int(main.logits(history).argmax()))
    return history[len(prompt) :]


def main_probability(main, sampler, prompt, tokens):
    """Probability with which the main model continues a prompt with these tokens."""
    found, history = 1.0, list(prompt)
    for token in tokens:
        found *= sampler.distribution(main.logits(history), history).dense(main.limits.n_vocab)[token]
        history.append(token)
    return found


def assert_main_distribution(outcomes, main, sampler, prompt, n=3):
    """Assert that the first n tokens have exactly the main model's distribution.

    outcomes: probability of each answer by its tokens, from `enumerate_outcomes`.
    """
    for tokens in itertools.product(range(main.limits.n_vocab), repeat=n):
        expected = main_probability(main, sampler, prompt, tokens)
        assert outcomes.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)


def assert_independent(outcomes, main, samplers, prompts, lengths):
    """Assert that several answers, of these numbers of tokens, are independent and each the main model's.

    outcomes: probability by the tuple of answers, from `enumerate_outcomes`.
    """
    expected = [
        {
            tokens: main_probability(main, sampler, prompt, tokens)
            for tokens in itertools.product(range(main.limits.n_vocab), repeat=n)
        }
        for sampler, prompt, n in zip(samplers, prompts, lengths, strict=True)
    ]
    for answers in itertools.product(*expected):
        product = math.prod(known[tokens] for known, tokens in zip(expected, answers, strict=True))
        assert outcomes.get(answers, 0.0) == pytest.approx(product, abs=1e-12)
