"""The decoding loop with models that cannot roll back to any length: lossless, and never stuck."""

import pytest

from spec_local.core.proposal import Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Step
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.testing import FakeModel, enumerate_outcomes
from tests.exact import assert_independent, assert_main_distribution, greedy_output
from tests.proposers import CASES, PROPOSERS, AlwaysWrong, adaptive, draft, main_model
from tests.rows import RowRng, finish, new_row
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, generate

MODES = {"fork": {"rollback": "fork"}, "bounded by 1": {"rollback": "bounded", "max_rollback": 1}}
EVERY_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
CHOSEN = {"greedy draft": "block", "lookup": "token", "recycling": "exact-match"}


@pytest.fixture(autouse=True)
def _caches(cached_distributions, cached_rho):
    pass


def recurrent_draft(how="drawn", noise=0.5):
    """A draft model that goes back to the end of the history in each step."""

    def make(sampler, n_vocab, is_end=lambda token: False, model=None):
        model = model or main_model(n_vocab, noise=noise, rollback="fork")
        return DraftModel(model, sampler, Chain(how), n_vocab=n_vocab, is_end=is_end)

    return make


def cases():
    found = {name: case for name, case in CASES.items() if name.startswith("draft, ")}
    found |= {f"{name}, {rule}": (PROPOSERS[name], rule) for name, rule in CHOSEN.items()}
    found["recurrent draft, block"] = recurrent_draft(), "block"
    found["recurrent draft, exact-match"] = recurrent_draft("coupled"), "exact-match"
    return found


EVERY_CASE = pytest.mark.parametrize(("make", "rule"), cases().values(), ids=cases().keys())


@EVERY_MODE
@EVERY_CASE
def test_three_tokens_have_exactly_the_main_distribution(make, rule, mode):
    sampler, prompt = Sampler(unfiltered()), [0, 1, 1, 0, 1]

    def run(rng):
        main = main_model(2, **mode)
        answer = main, prompt, make(sampler, 2), sampler.settings, rng, rule
        return tuple(generate(*answer, draft_max=2, max_tokens=3)[0])

    assert_main_distribution(enumerate_outcomes(run), main_model(2), sampler, prompt)


@EVERY_MODE
@EVERY_CASE
def test_output_at_temperature_0_equals_plain_decoding(make, rule, mode):
    for prompt, draft_max in (([1], 8), ([1, 2, 3, 1, 2, 3, 1], 1), ([*range(8)] * 5, 8)):
        main = main_model(8, n_ctx=128, **mode)
        proposer, limits = make(Sampler(GREEDY), 8), {"draft_max": draft_max, "max_tokens": 25}
        assert generate(main, prompt, proposer, rule=rule, **limits)[0] == greedy_output(main, prompt, 25)


@EVERY_MODE
@pytest.mark.parametrize("later", [0, 2])
def test_two_rows_are_independent(mode, later):
    kinds, lengths = [(draft(0.5), "block"), (recurrent_draft("coupled"), "exact-match")], (3, 2)
    prompts, costs = ([0, 1, 1, 0, 1], [1, 0, 1, 1]), {1: 1.0, 2: 1.05, 3: 1.4, 4: 1.9, 8: 4.0, 16: 9.0}

    def answers(rng):
        main = main_model(2, **mode)
        rows = [
            new_row(main, prompt, make, rule, rng=RowRng(rng, i), draft_max=2, max_tokens=n)
            for i, ((make, rule), prompt, n) in enumerate(zip(kinds, prompts, lengths, strict=True))
        ]
        shared = SharedCosts(CostModel(costs), 0), None
        engine, found, n_steps = Engine(SharedCalls(lambda: shared[0])), {}, 0
        engine.add(rows[0])
        while len(engine.requests) or n_steps <= later:
            if n_steps == later:
                engine.add(rows[1])
            n_steps += 1
            for row, event in engine.step():
                if isinstance(event, Step):
                    found.setdefault(row, []).extend(event.tokens)
        return tuple(tuple(found[row]) for row in rows)

    samplers = [Sampler(unfiltered())] * 2
    assert_independent(enumerate_outcomes(answers), main_model(2), samplers, prompts, lengths)


class Wrong(AlwaysWrong):
    """Proposes n draft tokens that are never what the main model generates at temperature 0."""

    def __init__(self, main, n):
        self._main, self._n = main, n

    async def propose(self, history, limit, rng):
        token = (int(self._main.logits(history).argmax()) + 1) % 8
        return Proposal.chain([token] * min(self._n, limit.depth))


def sizes_of_calls(n, **mode):
    """The number of tokens in the main model's call of each step, with n wrong draft tokens in each."""
    main = main_model(8, max_tokens=40, max_logits=40, **mode)
    generate(main, [1, 2, 3], Wrong(main, n), rule="exact-match", draft_max=n, max_tokens=40)
    return main.calls[1:]


def test_kept_states_save_evaluating_tokens_again():
    assert set(sizes_of_calls(3, rollback="bounded", max_rollback=3)[:-4]) == {4}
    assert set(sizes_of_calls(3)[:-4]) == {4}


def test_right_after_a_rollback_a_long_draft_is_shortened():
    """A copy of the state is not possible then."""
    sizes = sizes_of_calls(6, rollback="bounded", max_rollback=3)
    assert sizes[0] == 7  # with a checkpoint of the prompt
    assert sizes[1] == 8  # the first token again, and the next one
    assert max(sizes) <= 7 + 17
    sizes = sizes_of_calls(6, rollback="bounded", max_rollback=6)
    assert set(sizes[:-8]) == {7}


def test_tokens_are_not_evaluated_again_and_again():
    """After some rejections, a plain step commits what had to be evaluated again."""
    sizes = sizes_of_calls(3, rollback="fork")
    assert sizes[:19] == [*range(4, 21), 18, 4]


def test_the_policy_learns_what_evaluating_again_costs():
    """Rejected draft tokens cost more if others must be evaluated again: fewer are verified."""

    def n_drafted(**mode):
        main, how = FakeModel(8, seed=2, scale=1.0, n_ctx=600, **mode), Sampler(unfiltered())
        small = FakeModel(8, seed=2, scale=1.0, noise=0.5, n_ctx=600)
        costs = CostModel({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0, 64: 14.0})
        shared = SharedCosts(costs, main.limits.max_rollback), CostModel({1: 0.05, 64: 3.2})
        policy = adaptive(*shared, clock=lambda: 0.0)
        proposer = CombinedProposer(policy, DraftModel(small, how, Chain(), n_vocab=8))
        engine = Engine(SharedCalls(lambda: shared[0]), clock=lambda: 0.0)
        row = new_row(main, [1], lambda sampler, n: proposer, "block", rng=SeededRng(1), max_tokens=400,
                      draft_max=16)  # fmt: skip
        engine.add(row)
        finish(engine)
        return row.statistics.draft_n

    fork, bounded, free = (
        n_drafted(rollback="fork"),
        n_drafted(rollback="bounded", max_rollback=16),
        n_drafted(),
    )
    assert bounded == free
    assert fork < 0.8 * free


@pytest.mark.parametrize(("n_rejected", "expected"), [(0, 0.0), (2, 0.0), (3, 0.4)])
def test_costs_of_evaluating_again(n_rejected, expected):
    costs = SharedCosts(CostModel({1: 1.0, 3: 1.4, 5: 1.8}), max_rollback=2).at()
    assert costs.seconds_again(n_rejected, 2) == pytest.approx(expected)


def test_costs_beyond_the_kept_states():
    plain = SharedCosts(CostModel({1: 1.0, 3: 1.4, 5: 1.8})).at()
    costs = SharedCosts(CostModel({1: 1.0, 3: 1.4, 5: 1.8}), max_rollback=2).at()
    assert costs.first(5)[:4] == pytest.approx(plain.first(5)[:4])
    assert costs.first(5)[4:] == pytest.approx([1.0 + 2 * 0.6, 1.0 + 2 * 0.8])
    assert costs.seconds(5) == pytest.approx(2.6)
    assert plain.seconds(500) == CostModel({1: 1.0, 3: 1.4, 5: 1.8}).seconds(500)
    assert plain.seconds(5) == pytest.approx(1.8)  # the model's own table has not changed
