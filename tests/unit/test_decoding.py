"""The whole loop on the fake model: exact, for every proposer."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.decoding import Finished, Prefilled, Step, decode
from spec_local.dice import SeededDice
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.fake import FakeModel, enumerate_outcomes
from spec_local.proposers import DraftModel, PromptLookup, Proposal
from spec_local.sampling import Sampler, SamplingSettings
from spec_local.verifiers import VERIFIERS


class AlwaysWrong:
    """Guesses that have nothing to do with main."""

    def prefill(self, history):
        return iter(())

    def propose(self, history, limit, dice, lap):
        return Proposal.certain([(history[-1] + 1) % 3] * limit)

    def commit(self, history):
        pass


def draft(noise, **kwargs):
    def make(sampler, n_vocab):
        return DraftModel(FakeModel(n_vocab, noise=noise), sampler, n_vocab=n_vocab, **kwargs)

    return make


def smaller_draft(sampler, n_vocab):
    return DraftModel(FakeModel(n_vocab - 1, seed=4), sampler, n_vocab=n_vocab)


def larger_draft(sampler, n_vocab):
    return DraftModel(FakeModel(n_vocab + 2, seed=4), sampler, n_vocab=n_vocab)


PROPOSERS = {
    "plain": lambda sampler, n_vocab: None,
    "draft": draft(0.5),
    "perfect draft": draft(0.0),
    "unlike draft": draft(5.0),
    "greedy draft": draft(0.5, greedy=True),
    "smaller draft": smaller_draft,
    "larger draft": larger_draft,
    "lookup": lambda sampler, n_vocab: PromptLookup(longest=3, shortest=1),
    "always wrong": lambda sampler, n_vocab: AlwaysWrong(),
}
EVERY_PROPOSER = pytest.mark.parametrize("make", PROPOSERS.values(), ids=PROPOSERS.keys())
EVERY_VERIFIER = pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS.keys())


def say(main, prompt, proposer, shape=None, dice=None, **kwargs):
    """All tokens said, and the last event."""
    sampler = Sampler(shape or SamplingSettings(temperature=0))
    events = list(
        decode(main, prompt, sampler=sampler, proposer=proposer, dice=dice or SeededDice(0), **kwargs)
    )
    assert isinstance(events[-1], Finished)
    return [t for e in events if isinstance(e, Step) for t in e.tokens], events[-1]


def reference(main, prompt, n):
    """Greedy decoding, written out."""
    history = list(prompt)
    for _ in range(n):
        history.append(int(main.logits(history).argmax()))
    return history[len(prompt) :]


@EVERY_PROPOSER
@EVERY_VERIFIER
@pytest.mark.parametrize("draft_max", [0, 1, 3, 8])
def test_temperature_0_is_plain_decoding_token_for_token(make, verifier, draft_max):
    main, shape = FakeModel(8, n_ctx=128), SamplingSettings(temperature=0)
    for prompt in ([1], [1, 2, 3, 1, 2, 3, 1], list(range(8)) * 5):
        tokens, end = say(
            main,
            prompt,
            make(Sampler(shape), 8),
            shape,
            verifier=verifier,
            draft_max=draft_max,
            max_tokens=60,
        )
        assert tokens == reference(main, prompt, 60)
        assert end.reason == "length"
        assert list(main.cached) == (prompt + tokens)[:-1]


SHAPES = {
    "as it is": SamplingSettings(),
    "top-k": SamplingSettings(temperature=0.7, top_k=2),
    "top-p and min-p": SamplingSettings(top_p=0.8, min_p=0.1),
    "penalties": SamplingSettings(
        repeat_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2, penalty_window=3
    ),
    "bias": SamplingSettings(logit_bias={0: -np.inf, 1: 2.0}),
}


@EVERY_PROPOSER
@EVERY_VERIFIER
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_first_three_tokens_have_exactly_mains_distribution(make, verifier, shape):
    n_vocab, prompt = 3, [0, 1, 2, 0, 1]
    sampler, main = Sampler(shape), FakeModel(n_vocab, seed=2, scale=1.0)

    def run(dice):
        model = FakeModel(n_vocab, seed=2, scale=1.0)
        return tuple(
            say(
                model,
                prompt,
                make(sampler, n_vocab),
                shape,
                dice,
                verifier=verifier,
                draft_max=2,
                max_tokens=3,
            )[0]
        )

    said = enumerate_outcomes(run)
    for tokens in itertools.product(range(n_vocab), repeat=3):
        expected, history = 1.0, list(prompt)
        for token in tokens:
            expected *= sampler.distribution(main.logits(history), history).dense(n_vocab)[token]
            history.append(token)
        assert said.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)


@EVERY_PROPOSER
def test_a_seed_repeats_what_is_said(make):
    shape = SamplingSettings()
    first, second = (
        say(FakeModel(8), [1], make(Sampler(shape), 8), shape, SeededDice(5), max_tokens=50)[0]
        for _ in range(2)
    )
    assert first == second


@EVERY_PROPOSER
@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_said_after_an_end_token(make, temperature):
    shape = SamplingSettings(temperature=temperature)
    for seed in range(20):
        main = FakeModel(6, seed=seed)
        tokens, end = say(
            main,
            [1, 2],
            make(Sampler(shape), 6),
            shape,
            SeededDice(seed),
            is_end=lambda t: t == 3,
            max_tokens=40,
        )
        assert end.reason == ("stop" if 3 in tokens else "length")
        assert 3 not in tokens[:-1]
        assert list(main.cached) == ([1, 2, *tokens])[:-1]


@EVERY_PROPOSER
def test_a_full_context_ends_the_answer(make):
    shape = SamplingSettings(temperature=0)
    main = FakeModel(8, n_ctx=20)
    tokens, end = say(main, [1, 2, 3], make(Sampler(shape), 8), shape)
    assert end.reason == "context"
    assert tokens == reference(main, [1, 2, 3], len(tokens))
    assert len(main.cached) == 20


def test_a_draft_of_a_short_context_falls_silent_and_nothing_else_happens():
    shape = SamplingSettings(temperature=0)
    main = FakeModel(8)
    small = DraftModel(FakeModel(8, n_ctx=10), Sampler(shape), n_vocab=8)
    for prompt in ([1, 2], [1] * 30):
        assert say(main, prompt, small, shape, max_tokens=30)[0] == reference(main, prompt, 30)


@EVERY_PROPOSER
def test_closing_early_leaves_only_what_was_said(make):
    shape = SamplingSettings(temperature=0)
    main, proposer = FakeModel(8), make(Sampler(shape), 8)
    events = decode(main, [1, 2, 3], sampler=Sampler(shape), proposer=proposer, dice=SeededDice(0))
    said = [1, 2, 3]
    for event in itertools.islice(events, 5):
        said += event.tokens if isinstance(event, Step) else []
    events.close()
    assert list(main.cached) == said[:-1]
    if isinstance(proposer, DraftModel):
        assert list(proposer.model.cached) == said[: len(proposer.model.cached)]


@pytest.mark.parametrize("fails", ["main", "draft"])
def test_a_failing_model_leaves_only_what_was_said(fails):
    class Failing(FakeModel):
        def evaluate(self, tokens, n_logits):
            logits = super().evaluate(tokens, n_logits)
            if len(self.calls) > 9:
                raise BackendError("no")
            return logits

    main = (Failing if fails == "main" else FakeModel)(8)
    model = (Failing if fails == "draft" else FakeModel)(8, noise=0.3)
    proposer = DraftModel(model, Sampler(SamplingSettings()), n_vocab=8)
    said = [1, 2]
    events = decode(main, said, sampler=Sampler(SamplingSettings()), proposer=proposer, dice=SeededDice(0))
    with pytest.raises(BackendError):
        said.extend(token for event in events if isinstance(event, Step) for token in event.tokens)
    for cached in (main.cached, model.cached):
        assert list(cached) == said[: len(cached)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=5), st.integers(0, 99)
)
def test_both_caches_are_reused_and_never_believed_too_far(prompts, seed):
    """Turns, edits and repetitions in any order say what a fresh model would."""
    shape = SamplingSettings(temperature=0)
    main, small = FakeModel(5, max_tokens=7), FakeModel(5, noise=0.5, max_tokens=3)
    proposer = DraftModel(small, Sampler(shape), n_vocab=5)
    for prompt in prompts:
        tokens, end = say(main, prompt, proposer, shape, SeededDice(seed), max_tokens=9)
        assert tokens == reference(main, prompt, 9)
        assert end.statistics.prompt_n + end.statistics.cached_n == len(prompt) - 1


def test_a_second_turn_evaluates_only_what_is_new():
    shape = SamplingSettings(temperature=0)
    main, small = FakeModel(8), FakeModel(8, noise=0.5)
    proposer = DraftModel(small, Sampler(shape), n_vocab=8)
    prompt = [1, 2, 3] * 10
    tokens, _ = say(main, prompt, proposer, shape, max_tokens=20)
    main.calls.clear()
    small.calls.clear()
    events = decode(
        main, [*prompt, *tokens, 5, 6], sampler=Sampler(shape), proposer=proposer, dice=SeededDice(0)
    )
    assert isinstance(next(events), Prefilled)
    assert sum(main.calls) == 2  # the last token said, and one new; the other goes with the first step
    assert sum(small.calls) <= 6


def test_cancelling_between_chunks_of_the_prompt_and_between_steps():
    for after in range(12):
        main, answers = FakeModel(8, max_tokens=4), iter([False] * after)
        tokens, end = say(main, [1, 2, 3] * 5, None, cancelled=partial(next, answers, True))
        assert end.reason == "cancelled"
        assert list(main.cached) == ([1, 2, 3] * 5 + tokens)[: len(main.cached)]


def test_impossible_requests_fail_before_anything_is_evaluated():
    main, sampler = FakeModel(8, n_ctx=20), Sampler(SamplingSettings())
    for prompt, error in [([], InvalidRequest), ([1] * 21, ContextOverflow)]:
        with pytest.raises(error):
            decode(main, prompt, sampler=sampler, dice=SeededDice(0))
    for numbers in ({"draft_max": -1}, {"max_tokens": -1}):
        with pytest.raises(InvalidRequest):
            decode(main, [1], sampler=sampler, dice=SeededDice(0), **numbers)
    assert main.calls == []
    assert say(main, [1] * 20, None)[1].reason == "context"


def test_statistics_count_what_happened():
    shape, ticks = SamplingSettings(temperature=0), itertools.count()
    proposer = DraftModel(FakeModel(8), Sampler(shape), n_vocab=8)
    tokens, end = say(
        FakeModel(8), [1, 2, 3], proposer, shape, draft_max=3, max_tokens=40, clock=lambda: float(next(ticks))
    )
    statistics = end.statistics
    assert statistics.prompt_n == 2
    assert statistics.predicted_n == len(tokens) == 40
    assert statistics.n_steps == 10  # a perfect draft: every step says its three guesses and one more
    assert statistics.tokens_per_step == 4
    assert statistics.acceptance_rate == 1
    assert statistics.tested_at == statistics.accepted_at == [10, 10, 10]
    assert statistics.predicted_s == pytest.approx(sum(statistics.profile.values()))
    assert set(statistics.profile) == {
        "draft model", "draft sampling", "main model", "main sampling", "verify", "commit",
    }  # fmt: skip


def test_a_draft_is_called_once_per_guess_also_after_a_wholly_accepted_draft():
    shape, small = SamplingSettings(temperature=0), FakeModel(8)
    proposer = DraftModel(small, Sampler(shape), n_vocab=8)
    say(FakeModel(8), [1, 2, 3], proposer, shape, draft_max=3, max_tokens=40)
    assert small.calls == [2, *[1, 1, 1], *[2, 1, 1] * 9]
