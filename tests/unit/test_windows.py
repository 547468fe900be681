"""Draft models that read only the end of a long history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.proposal import Limit
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.policies.base import WINDOWS, Decision, DraftReading, Offer, Policy
from spec_local.policies.experience import Experience
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel, Window
from spec_local.proposers.shapes import Coupled
from tests.proposers import adaptive, main_model
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, generate

LONG = [n % 8 for n in range(5_000)]


def draft_model(window=None, **limits):
    limits = {"n_ctx": 8_192, "max_tokens": 96} | limits
    model = main_model(8, noise=0.2, **limits)
    return DraftModel(model, Sampler(GREEDY), Chain("greedy"), n_vocab=8, window=window)


def offered(draft, history):
    draft.commit(history)
    return [(reading.window, reading.n_unread) for reading in draft.readings(history)]


def test_the_end_of_a_long_history_may_be_read_in_place_of_all():
    windows = [(32, 33), (128, 129), (512, 513), (2048, 2049)]
    assert offered(draft_model(), LONG) == [*windows, (None, 5_000)]
    assert offered(draft_model(), LONG[:600]) == [*windows[:3], (None, 600)]
    assert offered(draft_model(), LONG[:32]) == [(None, 32)]
    assert offered(draft_model(n_ctx=1_000), LONG) == [*windows[:2], (500, 501)]


@pytest.mark.parametrize("window", WINDOWS[2:])
def test_what_has_been_read_is_kept_while_little_is_unread(window):
    draft = draft_model()
    run(draft.prefill(LONG, DraftReading(window + 1, window)))
    assert draft.model.cached == [LONG[0], *LONG[-window:-1]]
    assert sum(draft.model.calls) == window
    assert offered(draft, [*LONG, 1, 2]) == [(window + 2, 3)]
    more = [*LONG, *LONG[:200]]
    assert (window + 200, 201) in offered(draft, more)
    assert (None, len(more)) in offered(draft, more)
    limit = Limit(3, 3, 1)
    run(draft.propose(more, limit, SeededRng(0), reading=DraftReading(201, window + 200)))
    assert len(draft.model.cached) == 1 + window + 200 + 2  # the last draft token is not evaluated


def test_another_text_is_read_anew():
    """Also where it is shorter than the start of the part that has been read."""
    draft = draft_model(Window())
    run(draft.prefill(LONG, DraftReading(513, 512)))
    for other in ([3, 3], [5] * 300, [7 - n for n in LONG]):
        assert offered(draft, other)[-1] == (None, len(other))


def test_a_draft_model_goes_on_where_its_context_is_full():
    draft, main = draft_model(n_ctx=64), main_model(8)
    proposer = CombinedProposer(Policy(), draft)
    output, end = generate(main, LONG[:40], proposer, GREEDY, draft_max=3, max_tokens=300)
    assert output == generate(main_model(8), LONG[:40], None, GREEDY, max_tokens=300)[0]
    assert end.statistics.n_steps < 200
    assert end.statistics.draft_n > 2 * end.statistics.n_steps  # from the first to the last step
    assert (
        sum(draft.model.calls) < 3 * 300 + 300 / 32 * 33 + 40
    )  # half of its context is read when it is full


class Windows(Policy):
    """Chooses these of the parts that are offered, again and again."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def choose(self, offer):
        self.numbers = [*self.numbers[1:], self.numbers[0]]
        if not offer.readings or self.numbers[0] == 9:
            return Decision()
        return Decision("draft", reading=offer.readings[self.numbers[0] % len(offer.readings)])


@given(
    numbers=st.lists(st.sampled_from([0, 1, 2, 9]), min_size=1, max_size=8),
    n_ctx=st.sampled_from([24, 50, 300, 1_000]),
    n_prompt=st.sampled_from([2, 30, 140, 700]),
    rollback=st.sampled_from([{}, {"rollback": "fork"}, {"rollback": "bounded", "max_rollback": 1}]),
)
@settings(max_examples=60)
def test_the_output_does_not_depend_on_what_is_read(numbers, n_ctx, n_prompt, rollback):
    prompt, main = LONG[:n_prompt], main_model(8, n_ctx=2_000)
    proposer = CombinedProposer(Windows(numbers), draft_model(n_ctx=n_ctx, **rollback))
    output, _ = generate(main, prompt, proposer, GREEDY, draft_max=3, max_tokens=40)
    assert output == generate(main_model(8, n_ctx=2_000), prompt, None, GREEDY, max_tokens=40)[0]


class Reads(Policy):
    """Always drafts, from the same part of the history."""

    def __init__(self, window):
        super().__init__()
        self.window = window

    def choose(self, offer):
        return Decision("draft", reading=DraftReading(1, self.window))


@pytest.mark.parametrize("shape", [Chain("coupled"), Coupled(6)], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [None, 10])
def test_both_models_draw_with_the_same_random_numbers_whatever_is_read(shape, window):
    """They are the same, and depend on the last two tokens: each first draft token is accepted."""
    draft = DraftModel(main_model(8), Sampler(unfiltered()), shape, n_vocab=8)
    proposer, how = CombinedProposer(Reads(window), draft), {"rule": "exact-match", "max_tokens": 60}
    _, end = generate(main_model(8), LONG[:20], proposer, unfiltered(), **how)
    assert end.statistics.accepted_at[0] == end.statistics.tested_at[0] > 10


# The adaptive policy's choice: a main model of 1 s a token, whose calls cost no more with several.

FLAT, CHEAP = {1: 1.0, 64: 1.3}, {1: 0.05, 64: 1.0}


def chosen(n, experience=None, max_tokens=None):
    """The part of a prompt of n tokens that is read; None: all; "none": nothing."""
    if experience:
        experience.budget.trust()
    else:
        experience = Experience()
    policy = adaptive(FLAT, CHEAP, experience, max_tokens=max_tokens)
    experience.n_tokens = 8
    windows = [DraftReading(1 + w, w) for w in WINDOWS if w < n]
    choice = policy.choose(Offer(Limit(8, 8, 1), readings=[*windows, DraftReading(n)]))
    return choice.reading.window if choice.reading else "none"


def test_the_longer_the_prompt_the_less_of_it_is_read():
    assert chosen(100, Experience()) is None
    assert chosen(16_000, Experience()) == 512
    assert chosen(16_000, Experience(), max_tokens=12) == 32
    assert chosen(16_000, Experience(), max_tokens=0) == "none"


def test_a_new_draft_model_reads_little():
    assert [chosen(n) for n in (50, 100, 16_000)] == [None, None, 128]


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({512: 0.7, 0: 0.7}, 512),
        ({512: -0.3, 0: 0.7}, None),  # answers that need all of their prompts
        ({512: -0.3}, "none"),
    ],
    ids=str,
)
def test_what_each_part_gained_decides(gains, expected):
    known = Experience()
    known.answers.gains = {(1, window): gain for window, gain in gains.items()}
    assert chosen(1_500, known) == expected
