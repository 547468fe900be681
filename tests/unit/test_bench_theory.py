"""The best possible speed-up of any draft length: against exhaustive search, and known cases."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.bench.theory import best_seconds, draft_run_lengths, lookup_run_lengths, run_lengths
from spec_local.core.calls import run
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.testing import FakeModel
from tests.exact import greedy_output

COSTS = st.lists(st.floats(0.1, 5), min_size=8, max_size=8)


def exhaustive(runs, main, draft_step, n, most, own):
    """The least time over all sequences of steps that generate n tokens."""
    starts = accumulate((tokens for tokens, _ in own), initial=0)
    taken = dict(zip(starts, own, strict=False))
    times, todo = [], [(0, 0.0)]
    while todo:
        done, time = todo.pop()
        if done >= n:
            times.append(time)
            continue
        todo.append((done + 1, time + main(1)))
        for source, lengths in runs.items():
            for m in range(1, most + 1):
                seconds = m * draft_step[source] + main(m + 1)
                todo.append((done + min(m, lengths[done]) + 1, time + seconds))
        if done in taken:
            tokens, seconds = taken[done]
            todo.append((done + tokens, time + seconds))
    return min(times)


@given(
    correct=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5),
    costs=COSTS,
    draft_step=st.floats(0, 2),
    most=st.integers(1, 4),
    own=st.lists(st.tuples(st.integers(1, 3), st.floats(0.1, 5)), max_size=3),
)
def test_it_equals_an_exhaustive_search(correct, costs, draft_step, most, own):
    runs = {name: run_lengths([c[i] for c in correct]) for i, name in enumerate(("draft", "lookup"))}
    steps = {"draft": draft_step, "lookup": 0.0}
    while sum(tokens for tokens, _ in own) > len(correct):
        own.pop()
    arguments = runs, lambda k: costs[k - 1], steps, len(correct), most, own
    assert best_seconds(*arguments) == pytest.approx(exhaustive(*arguments))


def test_run_lengths():
    assert run_lengths([True, True, False, True]) == [2, 1, 0, 1]
    assert run_lengths([]) == []


@pytest.mark.parametrize("limits", [{}, {"max_logits": 1}, {"max_logits": 5}, {"max_tokens": 3}])
@pytest.mark.parametrize("cached", [[], [1, 2], [5, 6, 7, 8, 9]])
def test_run_lengths_of_a_draft_model(limits, cached):
    main, draft = FakeModel(), FakeModel(noise=0.4, **limits)
    prompt = [1, 2, 3]
    answer = greedy_output(main, prompt, 20)
    correct = [int(draft.logits([*prompt, *answer[:i]]).argmax()) == answer[i] for i in range(20)]
    assert 4 < sum(correct) < 20
    if cached:
        run(draft.call(cached[:3], n_logits=0))
    assert draft_run_lengths(draft, prompt, answer, main.limits.n_vocab) == run_lengths(correct)


def test_a_draft_model_reads_the_answer_in_few_calls():
    draft = FakeModel(max_logits=8)
    draft_run_lengths(draft, [1, 2, 3], [4] * 20, 16)
    assert draft.calls == [2, 8, 8, 4]


def test_tokens_beyond_the_main_models_vocabulary_are_ignored():
    class Padded(FakeModel):
        async def call(self, tokens, parents=None, n_logits=None):
            logits = await super().call(tokens, parents, n_logits)
            return np.pad(logits, ((0, 0), (0, 4)), constant_values=99.0)

    assert draft_run_lengths(Padded(), [1], greedy_output(FakeModel(), [1], 1), 16) == [1]


def test_a_draft_model_with_a_shorter_context():
    long, short = FakeModel(), FakeModel(n_ctx=6)
    prompt = [1, 2, 3]
    answer = greedy_output(long, prompt, 8)
    assert draft_run_lengths(long, prompt, answer, 16) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert draft_run_lengths(short, prompt, answer, 16) == [4, 3, 2, 1, 0, 0, 0, 0]
    assert draft_run_lengths(short, list(range(7)), answer, 16) == [0] * 8


def test_run_lengths_of_a_lookup():
    prompt = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
    #         4 follows 1 2 3, and so do 5, 6, 7; then 8 comes instead of 9
    assert lookup_run_lengths(PromptLookup(shortest=2), prompt, [4, 5, 6, 7, 8, 8], 64) == [4, 3, 2, 1, 0, 0]
    assert lookup_run_lengths(PromptLookup(shortest=2), prompt, [4, 5, 6, 7, 8, 8], 2) == [2, 2, 2, 1, 0, 0]
    assert lookup_run_lengths(PromptLookup(shortest=2), [1, 2], [3, 4], 64) == [0, 0]


@pytest.mark.parametrize(
    ("draft_step", "shares"), [(0.28, (0.73, 0.72, 0.73, 0.76, 0.82)), (0.05, (0.82, 0.81, 0.79, 0.76, 0.77))]
)
def test_what_hindsight_is_worth(draft_step, shares):
    """The best fixed number of draft tokens, at known costs and rates, reaches so much of the bound.

    Seconds of calls of 1 to 13 tokens: of a 1.5B in Q4_K_M on a Zen 4. See docs/notes/policies.md.
    """
    main = (1.0, 1.12, 1.13, 1.15, 1.3, 1.45, 1.6, 1.75, 1.95, 2.1, 2.3, 2.5, 2.7)
    n, most = 5000, len(main) - 1
    for rate, share in zip((0.5, 0.6, 0.7, 0.8, 0.9), shares, strict=True):
        generated = accumulate(rate**i for i in range(most + 1))
        fixed = min((main[m] + draft_step * m) / tokens for m, tokens in enumerate(generated))
        runs = {"draft": run_lengths((np.random.default_rng(0).random(n) < rate).tolist())}
        bound = best_seconds(runs, lambda m: main[m - 1], {"draft": draft_step}, n, most)
        assert bound / (n * fixed) == pytest.approx(share, abs=0.02)
