"""The decoding loop on the fake model: lossless for every proposer, shape and verifier."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.constraint import Constraint
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.events import Prefilled, Step
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.testing import FakeModel, FakeState, decode, enumerate_outcomes
from spec_local.verifiers import VERIFIERS
from tests.exact import assert_main_distribution, greedy_output
from tests.proposers import CASES, EVERY_CASE, EVERY_SHAPE, SHAPES, draft, main_model
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, Failing, check_draft_cache, events_of, generate

SELECTED = {  # each verifier, each drawing, chains and trees, draft models and lookups
    name: CASES[name]
    for name in (
        *("draft, token", "draft, block", "staged draft, block", "greedy draft, traversal"),
        *("lookup, exact-match", "recycling, block", "best first, token", "coupled tree, exact-match"),
        *("tree, spectr", "tree, traversal", "staged coupled, exact-match", "one, block"),
        *("forced, block", "staged forced, block", "staged forced coupled, exact-match"),
        *("trimmed draft, token", "trimmed tree, traversal", "trimmed coupled tree, exact-match"),
    )
}
EVERY_SELECTED_CASE = pytest.mark.parametrize(("make", "rule"), SELECTED.values(), ids=SELECTED.keys())


@pytest.fixture(autouse=True)
def _caches(cached_distributions, cached_rho):
    pass


@EVERY_CASE
def test_output_at_temperature_0_equals_plain_decoding(make, rule):
    main, how = main_model(8, n_ctx=128), GREEDY
    for prompt, draft_max in (([1], 8), ([1, 2, 3, 1, 2, 3, 1], 1), ([*range(8)] * 5, 8)):
        proposer = make(Sampler(how), 8)
        tokens, end = generate(main, prompt, proposer, how, rule=rule, draft_max=draft_max, max_tokens=25)
        assert tokens == greedy_output(main, prompt, 25)
        assert end.reason == "length"


def test_draft_max_0_drafts_nothing():
    main, how = main_model(8), GREEDY
    tokens, end = generate(main, [1, 2], draft(0.0)(Sampler(how), 8), how, draft_max=0, max_tokens=20)
    assert tokens == greedy_output(main, [1, 2], 20)
    assert end.statistics.draft_n == 0


PENALTIES = {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2, "penalty_window": 3}
SETTINGS = {
    "top-p and min-p": unfiltered(temperature=0.7, top_p=0.8, min_p=0.1),
    "penalties and bias": unfiltered(**PENALTIES, logit_bias={0: -np.inf, 1: 2.0}),
    "top-n-sigma, XTC and DRY": unfiltered(
        top_n_sigma=1.3, xtc_probability=0.4, xtc_threshold=0.2, dry_multiplier=0.7, dry_allowed_length=1
    ),
    "XTC at temperature 0": unfiltered(temperature=0, xtc_probability=0.3, xtc_threshold=0.2),
}


def check_three_tokens(make, rule, how, n_vocab=3):
    """Check that three tokens have exactly the main model's distribution."""
    prompt = [token % n_vocab for token in (0, 1, 2, 0, 1)]
    sampler, main = Sampler(how), main_model(n_vocab)

    def run(rng):
        answer = main_model(n_vocab), prompt, make(sampler, n_vocab), how, rng, rule
        return tuple(generate(*answer, draft_max=2, max_tokens=3)[0])

    assert_main_distribution(enumerate_outcomes(run), main, sampler, prompt)


@EVERY_CASE
def test_three_tokens_have_exactly_the_main_distribution(make, rule):
    # With three tokens that are all possible, these two have ten times as many branches as others.
    has_many = rule == "spectr" or make is CASES["tree, exact-match"][0]
    check_three_tokens(make, rule, unfiltered(), 2 if has_many else 3)


@EVERY_SELECTED_CASE
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS.keys())
def test_three_tokens_have_exactly_the_distribution_of_the_settings(make, rule, how):
    check_three_tokens(make, rule, how)


CONSTRAINTS = {
    "no token twice in a row": lambda n_vocab, answer: set(range(n_vocab)) - set(answer[-1:]),
    "by position": lambda n_vocab, answer: {(len(answer) + sum(answer)) % n_vocab, n_vocab - 1},
    "one": lambda n_vocab, answer: {len(answer) % n_vocab},
}
EVERY_CONSTRAINT = pytest.mark.parametrize("allowed", CONSTRAINTS.values(), ids=CONSTRAINTS.keys())


def masked(logits, tokens):
    """Logits with −inf for all other tokens."""
    return np.where(np.isin(np.arange(len(logits)), list(tokens)), logits, np.float32(-np.inf))


@pytest.mark.slow
@EVERY_SELECTED_CASE
@pytest.mark.parametrize(
    ("allowed", "how"),
    [
        pytest.param(CONSTRAINTS["no token twice in a row"], unfiltered(), id="no token twice in a row"),
        pytest.param(CONSTRAINTS["by position"], unfiltered(**PENALTIES), id="by position, penalties"),
        pytest.param(CONSTRAINTS["by position"], unfiltered(top_k=2), id="by position, top-k"),
        pytest.param(CONSTRAINTS["one"], unfiltered(), id="one"),
    ],
)
def test_three_constrained_tokens_have_exactly_the_main_distribution(make, rule, allowed, how):
    """The constraint starts at the first token of the answer and applies to both models."""
    n_vocab, prompt = 3, [0, 1, 2, 0, 1]
    main = main_model(n_vocab)

    def run(rng):
        constraint = Constraint(FakeState(n_vocab, partial(allowed, n_vocab)))
        proposer = make(Sampler(how, constraint), n_vocab)
        limits = {"draft_max": 2, "max_tokens": 3}
        return tuple(generate(main_model(n_vocab), prompt, proposer, how, rng, rule, constraint, **limits)[0])

    outcomes = enumerate_outcomes(run)
    for tokens in itertools.product(range(n_vocab), repeat=3):
        expected = 1.0
        for i, token in enumerate(tokens):
            possible = allowed(n_vocab, tokens[:i])
            if token not in possible:
                expected = 0.0
                break
            history = [*prompt, *tokens[:i]]
            p = Sampler(how).distribution(masked(main.logits(history), possible), history)
            expected *= p.dense(n_vocab)[token]
        assert outcomes.get(tokens, 0.0) == pytest.approx(expected, abs=1e-12)


@EVERY_SELECTED_CASE
@EVERY_CONSTRAINT
def test_constrained_output_at_temperature_0_equals_plain_decoding(make, rule, allowed):
    main, how, prompt, expected = main_model(8), GREEDY, [1, 2, 3], []
    for _ in range(25):
        logits = masked(main.logits([*prompt, *expected]), allowed(8, tuple(expected)))
        expected.append(int(logits.argmax()))
    constraint = Constraint(FakeState(8, partial(allowed, 8)))
    proposer = make(Sampler(how, constraint), 8)
    tokens, _ = generate(main, prompt, proposer, how, rule=rule, constraint=constraint, max_tokens=25)
    assert tokens == expected


@EVERY_SHAPE
@EVERY_CONSTRAINT
def test_draft_tokens_obey_the_constraint(shape, rule, allowed):
    how, constraint = unfiltered(), Constraint(FakeState(8, partial(allowed, 8)))
    proposer = DraftModel(main_model(8, noise=0.5), Sampler(how, constraint), shape(), n_vocab=8)
    output = []
    for event in events_of(main_model(8), [1, 2, 3], proposer, how, None, rule, constraint, max_tokens=40):
        if isinstance(event, Step):
            for node, token in enumerate(event.proposal.tokens):
                above = [event.proposal.tokens[n] for n in event.proposal.path(node)[:-1]]
                assert token in allowed(8, (*output, *above))
            output += event.tokens
            assert constraint._node.state.answer == tuple(output)  # no state of an earlier step is kept
    assert len(output) == 40


@pytest.mark.slow
@EVERY_CASE
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_follows_an_end_token(make, rule, temperature):
    how = unfiltered(temperature=temperature)
    for seed in range(2):
        main = FakeModel(6, seed=seed)
        expected = greedy_output(main, [1, 2], 20)
        last = max(expected, key=expected.index)  # of all tokens, the one that comes latest

        def is_end(token, last=last):
            return token == last

        # Whether a proposer has `is_end` makes no difference.
        proposer = make(Sampler(how), 6, *([is_end] if seed % 2 else []))
        tokens, end = generate(main, [1, 2], proposer, how, SeededRng(seed), rule, is_end=is_end)
        assert end.reason == "stop"
        assert tokens.index(last) == len(tokens) - 1
        assert temperature or tokens == expected[: len(tokens)]


@EVERY_CASE
def test_a_full_context_ends_the_answer(make, rule):
    main = main_model(8, n_ctx=20)
    tokens, end = generate(main, [1, 2, 3], make(Sampler(GREEDY), 8), rule=rule)
    assert end.reason == "context"
    assert tokens == greedy_output(main, [1, 2, 3], len(tokens))
    assert len(main.cached) == 20


@EVERY_SHAPE
def test_a_draft_model_with_a_full_context_proposes_nothing(shape, rule):
    how, main = GREEDY, main_model(8)
    small = DraftModel(main_model(8, n_ctx=10, noise=0.3), Sampler(how), shape(), n_vocab=8)
    for prompt in ([1, 2], [1] * 30):
        tokens, _ = generate(main, prompt, small, how, rule=rule, max_tokens=30)
        assert tokens == greedy_output(main, prompt, 30)


@EVERY_SHAPE
@pytest.mark.parametrize(
    "limits", [{"max_branches": 1}, {"max_branches": 3}, {"max_tokens": 3}, {"max_logits": 4}], ids=str
)
@pytest.mark.parametrize("whose", ["main", "draft"])
def test_the_limits_of_both_models_are_respected(shape, rule, limits, whose):
    for temperature in (0, 1):
        how = unfiltered(temperature=temperature)
        main = main_model(8, **(limits if whose == "main" else {}))
        small = main_model(8, noise=0.5, **(limits if whose == "draft" else {}))
        proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
        tokens, end = generate(main, [1, 2, 3], proposer, how, rule=rule, draft_max=8, max_tokens=15)
        assert len(tokens) == 15
        assert temperature or tokens == greedy_output(main, [1, 2, 3], 15)
        assert end.statistics.draft_n > 0


@EVERY_CASE
def test_closing_early_leaves_only_the_history_in_the_caches(make, rule):
    how = unfiltered()
    for n_events in (0, 1, 5):
        main, proposer = main_model(8), make(Sampler(how), 8)
        history = [1, 2, 3]
        events = events_of(main, history, proposer, how, rule=rule)
        for event in itertools.islice(events, n_events):
            history += event.tokens if isinstance(event, Step) else []
        events.close()
        assert list(main.cached) == (history[:-1] if n_events else [])
        check_draft_cache(proposer, history)


@EVERY_SHAPE
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", ["main", "draft"])
def test_a_failing_model_leaves_only_the_history_in_the_caches(fails, late, shape, rule):
    """In the prompt and in a step; the next answer is correct."""
    how = unfiltered()
    for fails_at in (0, 1, 2, 5, 9):
        main, model = Failing(8, seed=2, scale=1.0), Failing(8, seed=2, scale=1.0, noise=0.3)
        failing = main if fails == "main" else model
        failing.left, failing.late = fails_at, late
        proposer = DraftModel(model, Sampler(how), shape(), n_vocab=8)
        history = [1, 2]
        events = events_of(main, history, proposer, how, rule=rule)
        with pytest.raises(BackendError):
            history.extend(token for event in events if isinstance(event, Step) for token in event.tokens)
        for cached in (main.cached, model.cached):
            assert list(cached) == history[: len(cached)]
        failing.left = 10**9
        tokens, _ = generate(main, history, proposer, rule=rule, max_tokens=9)
        assert tokens == greedy_output(main, history, 9)


@EVERY_SHAPE
def test_a_failing_verifier_leaves_no_draft_tokens_behind(shape, rule):
    class Broken:
        drawing = VERIFIERS[rule].drawing

        def __call__(self, proposal, p, n_vocab, rng, position):
            raise ValueError("no")

    how, main, small = unfiltered(), main_model(8), main_model(8, noise=0.3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    with pytest.raises(ValueError, match="no"):
        list(events_of(main, [1, 2], proposer, how, rule=Broken()))
    assert list(main.cached) == [1]
    assert list(small.cached) == [1, 2]
    for idle in (main, small):
        with pytest.raises(InvalidRequest):
            idle.commit([0])


@settings(max_examples=30)
@given(
    prompts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    name=st.sampled_from(sorted(SHAPES)),
)
def test_both_caches_are_reused_as_far_as_they_match(prompts, seed, name):
    """SessionLock, edits and repetitions in any order give the output of a fresh model."""
    how = GREEDY
    shape, rule = SHAPES[name]
    main, small = FakeModel(5, max_tokens=7), FakeModel(5, noise=0.5, max_tokens=3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=5)
    for prompt in prompts:
        tokens, end = generate(main, prompt, proposer, how, SeededRng(seed), rule, max_tokens=9)
        assert tokens == greedy_output(main, prompt, 9)
        assert end.statistics.prompt_n + end.statistics.cached_n == len(prompt) - 1


@EVERY_SHAPE
def test_a_second_turn_evaluates_only_new_tokens(shape, rule):
    how = GREEDY
    main, small = main_model(8), main_model(8, noise=0.5)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    prompt = [1, 2, 3] * 10
    tokens, _ = generate(main, prompt, proposer, how, rule=rule, max_tokens=20)
    main.calls.clear()
    small.calls.clear()
    events = events_of(main, [*prompt, *tokens, 5, 6], proposer, rule=rule)
    assert isinstance(next(events), Prefilled)
    assert sum(main.calls) == 2  # the last generated token and a new one; the other goes with the first step
    assert sum(small.calls) <= 6


def test_invalid_requests_fail_before_any_evaluation():
    main, sampler = FakeModel(8, n_ctx=20), Sampler(unfiltered())
    for prompt, error in [([], InvalidRequest), ([1] * 21, ContextOverflow)]:
        with pytest.raises(error):
            decode(main, prompt, sampler=sampler, rng=SeededRng(0))
    for numbers in ({"draft_max": -1}, {"max_tokens": -1}):
        with pytest.raises(InvalidRequest):
            decode(main, [1], sampler=sampler, rng=SeededRng(0), **numbers)
    assert main.calls == []
    assert generate(main, [1] * 20, None)[1].reason == "context"


PARTS = {"propose", "draft model", "main model", "verify", "commit"}


def check_profile(statistics):
    """Check that the parts of the steps are those of `PARTS`, and that no time is missing.

    The clock is one that advances by a second whenever it is read.
    """
    assert set(statistics.profile) == PARTS
    assert all(seconds >= statistics.n_steps for seconds in statistics.profile.values())
    assert statistics.predicted_s == sum(statistics.profile.values())


@EVERY_SHAPE
def test_statistics_are_the_sums_over_the_steps(shape, rule):
    how, ticks = unfiltered(), itertools.count()
    options = {"max_tokens": 60, "clock": lambda: float(next(ticks))}
    proposer = DraftModel(main_model(8, noise=0.4), Sampler(how), shape(), n_vocab=8)
    events = list(events_of(main_model(8), [1, 2, 3], proposer, how, SeededRng(1), rule, **options))
    steps, statistics = [e for e in events if isinstance(e, Step)], events[-1].statistics
    for step in steps:
        assert len(step.tokens) == step.n_accepted + 1
        assert len(step.proposal.follow(step.tokens)) >= step.n_accepted
    assert statistics.n_steps == len(steps)
    assert statistics.predicted_n == sum(len(step.tokens) for step in steps) == 60
    assert statistics.draft_n == sum(len(step.proposal.tokens) for step in steps)
    assert statistics.draft_n_accepted == sum(step.n_accepted for step in steps) > 0
    depths = range(max(step.proposal.depth for step in steps))
    assert statistics.tested_at == [sum(s.proposal.depth > n for s in steps) for n in depths]
    assert statistics.accepted_at == [sum(s.n_accepted > n for s in steps) for n in depths]
    check_profile(statistics)


def test_the_calls_of_each_step_are_timed():
    ticks = itertools.count()
    main, draft = FakeModel(), FakeModel(noise=0.4)
    proposer = DraftModel(draft, Sampler(GREEDY), Chain(), n_vocab=16)
    events = events_of(main, [1, 2, 3], proposer, clock=lambda: float(next(ticks)), max_tokens=20)
    statistics, n_draft = next(events).statistics, len(draft.calls)
    for event in events:
        if isinstance(event, Step):
            *drafted, verified = statistics.last_calls
            assert drafted == [("draft model", n, 1.0) for n in draft.calls[n_draft:]]
            assert verified == ("main model", 1 + len(event.proposal.tokens), 2.0)  # its start is read, too
            n_draft = len(draft.calls)


@EVERY_SHAPE
def test_the_main_model_is_called_once_per_step_and_the_draft_model_once_per_level(shape, rule):
    how, main, small = GREEDY, main_model(8), main_model(8, noise=0.3)
    proposer = DraftModel(small, Sampler(how), shape(), n_vocab=8)
    _, end = generate(main, [1, 2, 3], proposer, how, rule=rule, draft_max=3, max_tokens=40)
    assert len(main.calls) == 1 + end.statistics.n_steps  # one for the prompt
    assert sum(main.calls) == 2 + end.statistics.n_steps + end.statistics.draft_n
    assert len(small.calls) <= 1 + 3 * end.statistics.n_steps


def test_the_draft_model_reads_its_own_draft_tokens_once():
    how, small = GREEDY, FakeModel(8)
    proposer = DraftModel(small, Sampler(how), Chain(), n_vocab=8)
    _, end = generate(FakeModel(8), [1, 2, 3], proposer, how, draft_max=3, max_tokens=40)
    assert small.calls == [2, *[1, 1, 1], *[2, 1, 1] * 9]
    assert end.statistics.n_steps == 10  # each step: three draft tokens and one more
    assert end.statistics.tokens_per_step == 4
    assert end.statistics.acceptance_rate == 1
    assert end.statistics.tested_at == end.statistics.accepted_at == [10, 10, 10]


@EVERY_SHAPE
def test_a_perfect_draft_is_always_accepted(shape, rule):
    """Also above temperature 0, if tokens are drawn; each step generates a whole path and one more token."""
    for temperature in (0, 1) if shape is Chain else (0,):
        how = unfiltered(temperature=temperature)
        proposer = DraftModel(main_model(8), Sampler(how), shape(), n_vocab=8)
        _, end = generate(
            main_model(8), [1, 2, 3], proposer, how, SeededRng(3), rule, draft_max=1, max_tokens=40
        )
        assert end.statistics.n_steps == 20
