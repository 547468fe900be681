"""Rows of an engine: which calls they share, and that none disturbs another one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.constraint import Constraint
from spec_local.core.proposal import CallLoad
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Failed, Finished, Prefilled, Statistics, Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.errors import BackendError, DeadEnd, InvalidRequest
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.draft_model import Chain
from spec_local.proposers.shapes import BestFirst, Coupled, Drawn
from spec_local.testing import FakeState
from spec_local.verifiers import VERIFIERS
from tests.exact import greedy_output
from tests.proposers import PROPOSERS, draft, main_model
from tests.rows import check_caches, engine_with, finish, new_row
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, Failing

V = 8


def models(**limits):
    """A main and a draft model for many rows."""
    limits = {"max_tokens": 256, "max_logits": 256, "n_ctx": 400} | limits
    return main_model(V, **limits), main_model(V, noise=0.4, **limits)


def run_until(engine, kind):
    """Steps until an event of a kind, and all events up to it."""
    events = []
    while not any(isinstance(event, kind) for _, event in events):
        events += engine.step()
    return events


KINDS = {
    "plain": (None, "block"),
    "chain": (draft(0.4), "block"),
    "coupled": (draft(0.4, lambda: Chain("coupled")), "exact-match"),
    "coupled tree": (draft(0.4, lambda: Coupled(6, 2)), "exact-match"),
    "best first": (draft(0.4, lambda: BestFirst(6, 3)), "traversal"),
    "drawn tree": (draft(0.4, lambda: Drawn("without replacement", 6, 3)), "traversal"),
    "lookup": (PROPOSERS["suffix"], "token"),
    "recycling": (PROPOSERS["recycling"], "block"),
}


# Tokens ----------------------------------------------------------------------------------------------------


def seeded(main, small, kind, prompt, seed, n, how=None, **options):
    make, rule = KINDS[kind]
    shared = {"draft": small} if make and "draft" in make.__qualname__ else {}
    return new_row(main, prompt, make, rule, rng=SeededRng(seed), how=how, max_tokens=n, **shared, **options)


def alone(kind, prompt, seed, n, how=None):
    answers = {}
    row = seeded(*models(), kind, prompt, seed, n, how)
    engine = Engine()
    engine.add(row)
    finish(engine, answers)
    return answers.get(row, [])


@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(sorted(KINDS)),
            st.lists(st.integers(0, V - 1), min_size=1, max_size=50),
            st.integers(0, 9),  # seed
            st.integers(0, 25),  # tokens
            st.integers(0, 6),  # step in which it is added
        ),
        min_size=1,
        max_size=5,
    ),
    temperature=st.sampled_from([0.0, 1.0]),
    data=st.data(),
)
def test_a_seeded_row_gives_the_same_tokens_in_any_company(rows, temperature, data):
    """Whatever else is generated, starts, ends or is removed meanwhile."""
    how = unfiltered(temperature=temperature)
    main, small = models()
    engine, answers, removed = Engine(), {}, set()
    made = [seeded(main, small, kind, prompt, seed, n, how) for kind, prompt, seed, n, _ in rows]
    victim = data.draw(st.sampled_from([None, *made]))
    last_step = data.draw(st.integers(0, 12))
    at = 0
    while engine.requests or at <= max(row[-1] for row in rows):
        for row, (*_, first) in zip(made, rows, strict=True):
            if first == at:
                engine.add(row)
        if at == last_step and victim in engine.requests:
            engine.remove(victim)
            removed.add(victim)
            assert list(victim.main.cached) == victim.history[: len(victim.main.cached)]
        for row, event in engine.step():
            if isinstance(event, Step):
                answers.setdefault(row, []).extend(event.tokens)
                check_caches(row)
        at += 1
    for row, (kind, prompt, seed, n, _) in zip(made, rows, strict=True):
        expected, found = alone(kind, prompt, seed, n, how), answers.get(row, [])
        assert found == (expected[: len(found)] if row in removed else expected)


# Calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_main_call_per_step_for_all_rows(kind):
    main, small = models()
    rows = [seeded(main, small, kind, [1, 2, i], 0, 20) for i in range(4)]
    engine = engine_with(*rows)
    run_until(engine, Prefilled)
    main.context.calls.clear()
    n_steps = 0
    while engine.requests:
        events = engine.step()
        steps = [event for _, event in events if isinstance(event, Step)]
        if steps:
            n_steps += 1
            # In each row the last token of its history, and its draft tokens.
            assert main.context.calls[-1] == [1 + len(step.proposal.tokens) for step in steps]
        assert len(main.context.calls) == n_steps
    assert all(row.statistics.n_steps <= n_steps for row in rows)
    assert n_steps == max(row.statistics.n_steps for row in rows)


@pytest.mark.parametrize(
    ("depths", "n_parallel"),
    [((4, 4, 4), [3, 3, 3, 3]), ((1, 2, 5), [3, 2, 1, 1, 1])],
    ids=["equal", "unequal"],
)
def test_draft_calls_are_shared(depths, n_parallel):
    """One call for each position; rows that draft less drop out."""
    main, small = models()
    engine = Engine()
    for i, depth in enumerate(depths):
        make = draft(0.4)
        engine.add(new_row(main, [1, 2, i], make, "block", rng=SeededRng(i), draft=small, draft_max=depth))
    run_until(engine, Prefilled)
    for _ in range(3):
        small.context.calls.clear()
        engine.step()
        assert [len(call) for call in small.context.calls] == n_parallel
    engine.close()


def test_a_prompt_is_read_in_the_calls_that_verify_other_rows():
    main, small = models()
    engine = Engine()
    first = new_row(main, [1, 2], draft(0.4), "block", rng=SeededRng(0), draft=small, draft_max=3)
    engine.add(first)
    run_until(engine, Prefilled)
    second = new_row(main, [3] * 220, rng=SeededRng(1), max_tokens=3)
    engine.add(second)
    main.context.calls.clear()
    events = run_until(engine, Prefilled)
    # 219 tokens in chunks of 96: the first row goes on in each call.
    assert [call[1:] for call in main.context.calls] == [[96], [96], [27], []]
    assert [1 + len(e.proposal.tokens) for row, e in events if row is first] == [
        call[0] for call in main.context.calls
    ]
    assert sum(isinstance(event, Step) for row, event in events if row is first) == 4
    assert second.statistics.prompt_n == 219
    engine.close()


@pytest.mark.parametrize(("n_generating", "chunk"), [(1, 96), (2, 48), (3, 32), (6, 32)])
def test_more_of_a_prompt_is_read_while_fewer_rows_wait_for_it(n_generating, chunk):
    main, _ = models()
    rows = [new_row(main, [1, i], rng=SeededRng(i)) for i in range(n_generating)]
    engine = engine_with(*rows)
    while not all(row.statistics.n_steps for row in rows):
        engine.step()
    engine.add(new_row(main, [3] * 220, rng=SeededRng(0), max_tokens=1))
    main.context.calls.clear()
    engine.step()
    assert main.context.calls == [[1] * n_generating + [chunk]]
    engine.close()


def test_several_prompts_share_the_part_of_a_call_that_is_for_prompts():
    main, _ = models()
    engine = Engine()
    first = new_row(main, [1, 2], rng=SeededRng(0))
    engine.add(first)
    run_until(engine, Prefilled)
    for i in range(3):
        engine.add(new_row(main, [3 + i] * 61, rng=SeededRng(0), max_tokens=1))
    main.context.calls.clear()
    for _ in range(2):
        engine.step()
    first_call, second_call = main.context.calls
    assert first_call[0] == second_call[0] == 1  # the first row's token
    assert sum(first_call[1:]) >= sum(second_call[1:]) > 60  # several prompts in each
    assert sum(first_call[1:] + second_call[1:]) == 3 * 60
    engine.close()


def test_a_prompt_is_read_in_large_calls_while_no_row_generates():
    main, _ = models(max_tokens=64, max_logits=64)
    engine = Engine()
    for i in range(3):
        engine.add(new_row(main, [i] * 100, rng=SeededRng(0), max_tokens=1))
    finish(engine)
    # The first row's 99 tokens fill the first call; the others follow in the rest of each.
    assert main.context.calls[:2] == [[64], [35, 29]]
    assert sum(map(sum, main.context.calls[:-1])) >= 3 * 99


def test_proposals_are_divided_fairly_where_calls_are_small():
    """Each row's part of a call is limited, so that no row waits."""
    _, small = models()
    limited = main_model(V, max_tokens=12, max_logits=9)
    engine = Engine()
    make = draft(0.0)
    for i in range(3):
        row = new_row(limited, [1, i], make, rng=SeededRng(i), draft=small, draft_max=8, max_tokens=20)
        engine.add(row)
    ends = finish(engine)
    assert all(end.reason == "length" for end in ends.values())
    assert max(map(sum, limited.context.calls)) <= 9
    assert [3, 3, 3] in limited.context.calls


def test_more_rows_than_fit_into_a_call_are_refused():
    limited = main_model(V, max_tokens=12, max_logits=3)
    engine = Engine()
    for _ in range(3):
        engine.add(new_row(limited, [1], rng=SeededRng(0)))
    with pytest.raises(InvalidRequest, match="4 requests"):
        engine.add(new_row(limited, [1], rng=SeededRng(0)))
    other = new_row(main_model(V, max_logits=3), [1], rng=SeededRng(0), max_tokens=2)
    engine.add(other)  # has a model of its own
    assert len(engine.requests) == 4
    engine.close()
    assert engine.requests == []


def test_rows_of_several_models_are_called_by_themselves():
    """As for reproducible output, where each row has a context of its own."""
    mains = [main_model(V) for _ in range(3)]
    answers = {}
    rows = [new_row(main, [1, 2], rng=SeededRng(0), how=GREEDY, max_tokens=7) for main in mains]
    engine = engine_with(*rows)
    finish(engine, answers)
    for row, main in zip(rows, mains, strict=True):
        assert answers[row] == greedy_output(main, [1, 2], 7)
        assert main.context.calls == [[1]] * 8


# A shared beginning ----------------------------------------------------------------------------------------


def test_a_shared_beginning_is_read_once():
    main, small = models(max_tokens=64, max_logits=64)
    beginning = [1, 2, 3, 4, 5] * 30
    answers = {}
    rows = [
        new_row(main, [*beginning, i, i], draft(0.4), "block", rng=SeededRng(0), how=GREEDY, draft=small,
                max_tokens=10)
        for i in range(4)
    ]  # fmt: skip
    engine = engine_with(*rows)
    run_until(engine, Prefilled)
    main_tokens = sum(row.statistics.prompt_n for row in rows)
    finish(engine, answers)
    assert main_tokens <= len(beginning) + 4
    assert sum(row.statistics.prompt_n for row in rows) == len(beginning) + 4
    assert [row.statistics.prompt_n for row in rows[1:]] == [1, 1, 1]
    assert [row.statistics.cached_n for row in rows] == [0, 150, 150, 150]
    for i, row in enumerate(rows):
        assert row.history[len(beginning) + 2 :] == greedy_output(main, [*beginning, i, i], 10)


def test_a_shared_beginning_is_read_once_although_the_rows_contain_other_texts():
    main, _ = models(max_tokens=64, max_logits=64)
    rows = [new_row(main, [1, 2, 3, 4, 5] * 30, rng=SeededRng(0), max_tokens=1) for _ in range(3)]
    engine = Engine()
    for row, old in zip(rows, (6, 7, 0), strict=True):
        for _ in range(3):
            run(row.main.call([old] * 64, n_logits=0))
        engine.add(row)
    finish(engine)
    assert sum(row.statistics.prompt_n for row in rows) == 149


def test_a_short_beginning_is_not_waited_for():
    main, _ = models()
    engine = Engine()
    for i in range(2):
        engine.add(new_row(main, [*[5] * 15, i, i, i], rng=SeededRng(0), max_tokens=1))
    engine.step()
    assert main.context.calls == [[17, 17]]
    engine.close()


def test_rows_that_wait_go_on_where_the_reader_is_removed():
    main, _ = models(max_tokens=16, max_logits=16)
    rows = [new_row(main, [*[4, 5] * 40, i], rng=SeededRng(0), how=GREEDY, max_tokens=5) for i in range(2)]
    engine = engine_with(*rows)
    engine.step()
    engine.step()
    assert main.context.calls == [[16], [16]]
    engine.remove(rows[0])
    finish(engine)
    assert rows[1].statistics.prompt_n == 80 - 32
    assert rows[1].statistics.cached_n == 32
    assert rows[1].history[81:] == greedy_output(main, [*[4, 5] * 40, 1], 5)


# Rows that end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_cancelling_one_row_disturbs_no_other(kind, after):
    main, small = models(max_tokens=16, max_logits=16)
    answers = iter([False] * after)
    found = {}

    def row(seed, **options):
        return seeded(main, small, kind, [2, 1] * 20, seed, 12, **options)

    rows = [row(0), row(1, cancelled=lambda: next(answers, True)), row(2)]
    engine = engine_with(*rows)
    ends = finish(engine, found)
    assert ends[rows[1]].reason == "cancelled"
    for seed in (0, 2):
        assert ends[rows[seed]].reason == "length"
        assert found[rows[seed]] == alone(kind, [2, 1] * 20, seed, 12)
    cached = list(rows[1].main.cached)
    assert cached == rows[1].history[: len(cached)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_end_fails_that_row_only(kind):
    main, small = models()
    make, rule = KINDS[kind]
    constraint = Constraint(FakeState(V, lambda answer: range(V) if len(answer) < 4 else ()))
    sampler = Sampler(unfiltered(), constraint)
    proposer = make(sampler, V) if make else None
    options = RequestOptions(sampler, SeededRng(0), proposer, VERIFIERS[rule])
    dead = Request(main.new_sequence(), [1, 2], options)
    others = [seeded(main, small, kind, [1, 2, 3], i, 20) for i in range(2)]
    found = {}
    engine = engine_with(others[0], dead, others[1])
    ends = finish(engine, found)
    assert isinstance(ends[dead], Failed)
    assert isinstance(ends[dead].error, DeadEnd)
    assert len(found[dead]) == 4 == ends[dead].statistics.predicted_n
    assert list(dead.main.cached) == dead.history[:-1]
    for i, row in enumerate(others):
        assert isinstance(ends[row], Finished)
        assert found[row] == alone(kind, [1, 2, 3], i, 20)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_failing_draft_model_fails_its_rows_only(fails_at):
    main, _ = models()
    small = Failing(V, seed=2, scale=1.0, noise=0.4, max_tokens=256, max_logits=256)
    found = {}
    plain = seeded(main, None, "plain", [1, 2, 3], 0, 20)
    drafting = [new_row(main, [1, 2], draft(0), "block", rng=SeededRng(0), draft=small) for _ in range(2)]
    engine = engine_with(*drafting, plain)
    *_, first, second = small.context.sequences
    second.left = fails_at
    ends = finish(engine, found)
    for row, model in zip(drafting, (first, second), strict=True):  # their calls are shared
        assert isinstance(ends[row].error, BackendError)
        for cached in (row.main.cached, model.cached):
            assert list(cached) == row.history[: len(cached)]
    assert ends[plain].reason == "length"
    assert found[plain] == alone("plain", [1, 2, 3], 0, 20)


def test_a_failing_main_model_stops_the_step_and_rows_keep_their_history():
    main = Failing(V, seed=2, scale=1.0)
    rows = [new_row(main, [1, 2, i], rng=SeededRng(0), how=GREEDY, max_tokens=9) for i in range(2)]
    engine = engine_with(*rows)
    rows[1].main.left = 3
    with pytest.raises(BackendError):
        finish(engine)
    engine.close()
    for row in rows:
        assert list(row.main.cached) == row.history[:-1]
        assert len(row.history) == 5


# Counters --------------------------------------------------------------------------------------------------


def test_counters_of_rows_and_of_the_engine():
    main, _ = models()
    costs = CostModel({1: 1.0, 8: 2.0, 64: 9.0})
    given = Statistics()
    clock = lambda: sum(costs.seconds(sum(n)) for n in main.context.calls)  # noqa: E731
    engine, events = Engine(clock=clock, statistics=given), []
    rows = [
        new_row(main, [1, 2, i], *KINDS[kind], rng=SeededRng(i), max_tokens=20 + i, clock=clock)
        for i, kind in enumerate(["chain", "plain", "best first", "lookup"])
    ]
    for row in rows:
        engine.add(row)
    while engine.requests:
        events += engine.step()
    assert engine.statistics is given
    assert [row.statistics.predicted_n for row in rows] == [20, 21, 22, 23]
    for name in ("predicted_n", "n_steps", "draft_n", "draft_n_accepted", "prompt_n"):
        assert getattr(given, name) == sum(getattr(row.statistics, name) for row in rows)
    for name in ("tested_at", "accepted_at"):
        counts = [getattr(row.statistics, name) for row in rows]
        longest = max(map(len, counts))
        assert getattr(given, name) == [sum(c[i] for c in counts if i < len(c)) for i in range(longest)]
    assert sum(given.steps_by.values()) == given.n_steps
    # All tokens / those that would have been generated if all draft tokens had been accepted.
    depths = [event.proposal.depth for _, event in events if isinstance(event, Step)]
    assert given.system_efficiency == given.predicted_n / sum(1 + depth for depth in depths)
    assert 0 < given.system_efficiency < 1
    assert engine.n_calls == len(main.context.calls)
    # The engine's time is that of the calls; a row's, that of the steps up to its end.
    assert given.prompt_s + given.predicted_s == pytest.approx(clock())
    assert max(row.statistics.predicted_s for row in rows) == pytest.approx(given.predicted_s)
    assert given.tokens_per_second > max(row.statistics.tokens_per_second for row in rows)


# The planner -----------------------------------------------------------------------------------------------


class Recording(SharedCalls):
    """Records its arguments."""

    def __init__(self, costs):
        known = SharedCosts(CostModel(costs))
        super().__init__(lambda: known)
        self.chosen, self.observed = [], []

    def choose(self, proposals, load, spent):
        self.chosen.append((len(proposals), load, spent))
        return super().choose(proposals, load, spent)

    def observe(self, load, n_drafted, seconds):
        self.observed.append((load, n_drafted, seconds))
        super().observe(load, n_drafted, seconds)


def test_what_the_planner_learns():
    main, small = models()
    costs = CostModel({1: 1.0, 8: 2.0, 64: 9.0})
    clock = lambda: (  # noqa: E731
        sum(costs.seconds(sum(n)) for n in main.context.calls) + 0.1 * len(small.context.calls)
    )
    planner = Recording({1: 1.0, 8: 2.0, 64: 9.0})
    engine = Engine(planner, clock)
    rows = [
        new_row(main, [1, i], draft(0.4), "block", rng=SeededRng(i), draft=small, draft_max=2, max_tokens=40)
        for i in range(2)
    ]
    for row in rows:
        engine.add(row)
    run_until(engine, Prefilled)
    engine.step()
    load = CallLoad(2, 0, 0, 2)
    assert planner.chosen == [(2, load, pytest.approx(0.2))]
    assert planner.observed == [(load, 4, pytest.approx(costs.seconds(6)))]
    engine.add(new_row(main, [3] * 61, rng=SeededRng(0), max_tokens=1))
    engine.step()
    engine.step()
    assert [load for _, load, _ in planner.chosen[1:]] == [CallLoad(2, 48, 1, 3), CallLoad(2, 12, 1, 3)]
    assert len(planner.observed) == 1  # a call that reads a prompt is not comparable
    engine.close()
    engine.add(new_row(main, [1, 2, 3], rng=SeededRng(0), max_tokens=2))
    finish(engine)
    assert len(planner.chosen) == 3  # nothing is shared by one request
    assert len(planner.observed) == 1


def test_logits_of_a_call_are_used_before_the_next_one():
    """The fake model overwrites old logits with NaN, which samplers refuse."""
    main, small = models(max_tokens=6, max_logits=6)
    found = {}
    rows = [seeded(main, small, "best first", [1, 2, i], 0, 20, GREEDY) for i in range(3)]
    engine = engine_with(*rows)
    finish(engine, found)
    for i, row in enumerate(rows):
        assert found[row] == greedy_output(main, [1, 2, i], 20)
    assert np.isnan(main.context._buffer).any()
