"""Drafting with a head that gives a whole block in one call: the distribution, and what a block costs."""

from dataclasses import replace

import numpy as np
import pytest

from spec_local.core.proposal import Limit, Proposal, depth_of
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.llama.heads.lattice import Lattice, SparseRows
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.base import Decision, DraftReading, Offer, Policy
from spec_local.policies.choice import ExpectedStep, best_chain, could_gain
from spec_local.policies.cost_model import CostModel, chain_seconds
from spec_local.policies.planner import plan
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst, Coupled, Drawn
from spec_local.testing import enumerate_outcomes
from tests.exact import assert_main_distribution
from tests.proposers import adaptive, main_model
from tests.unfiltered import unfiltered
from tests.unit import generation
from tests.unit.generation import GREEDY
from tests.unit.test_adaptive import Clock, Output
from tests.unit.test_heads import FakeHead

BLOCK = 3
MAIN = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5, 16: 2.0, 64: 5.0}
DRAFT = {1: 0.4, 8: 0.5, 64: 1.0}


@pytest.fixture(autouse=True)
def _caches(cached_distributions, cached_rho):
    pass


class FakeBlockHead(FakeHead):
    """Its logits depend on the history that it has received, the token after that, and the place."""

    def __init__(self, n_vocab, **kwargs):
        super().__init__(n_vocab, order=BLOCK + 1, **kwargs)
        self.limits = replace(self.limits, max_branches=16, max_draft=BLOCK, drafts_blocks=True)
        self.wanted = []

    def call(self, tokens, parents=None, n_logits=None, *, n_draft=None):
        if n_draft is not None:
            assert n_draft <= BLOCK
            self.wanted.append(n_draft)
        return super().call(tokens, parents, n_logits)

    def logits(self, history):
        anchor = min(len(history), len(self._received) + 1)
        assert len(history) - anchor < BLOCK
        return super().logits([*history[:anchor], *[-1] * (len(history) - anchor)])


class FakeLatticeHead(FakeBlockHead):
    """Its logits also depend on the token before, and only two candidates of each place have any."""

    k = 2

    def logits(self, history):
        anchor = min(len(history), len(self._received) + 1)
        known, place = history[:anchor], len(history) - anchor
        lattice = Lattice(np.array([self._row(known, i) for i in range(place + 1)], np.float32), self.k)
        sparse = SparseRows(self.n_vocab)
        return sparse.fill(lattice.candidates([place]), lattice.scores([place], history[-1:]))[0]

    def _row(self, known, place):
        unary = super().logits([*known, *[-1] * place])
        pairs = super().logits([*known, *[-1] * place, 0])[: self.k]
        tokens = (-unary).argsort()[: self.k][::-1]
        scores = [unary[tokens] + np.roll(pairs, i if place else 0) for i in range(self.k)]
        return np.concatenate((tokens, *scores))

    def fill(self, call, logits):
        super().fill(call, logits)
        self.limits = replace(self.limits, draft_tokens=np.isfinite(logits).any(axis=0).nonzero()[0])
        logits[:, np.isinf(logits).all(axis=0)] = np.nan  # nobody reads them


SHAPES = {
    "drawn chain": ("block", lambda: Chain("drawn")),
    "drawn chain, token by token": ("token", lambda: Chain("drawn")),
    "coupled chain": ("exact-match", lambda: Chain("coupled")),
    "greedy chain": ("block", lambda: Chain("greedy")),
    "drawn tree": ("spectr", lambda: Drawn("with replacement", 3, 2)),
    "tree without replacement": ("traversal", lambda: Drawn("without replacement", 3, 2)),
    "coupled tree": ("exact-match", lambda: Coupled(4)),
}


def generate(head, shape, how, rng, *, policy=None, prompt=(0, 1, 2, 0, 1), **options):
    made = DraftModel(head, Sampler(how), shape, n_vocab=head.limits.n_vocab)
    made = CombinedProposer(policy, made) if policy else made
    options = {"max_tokens": 3, "draft_max": 2} | options
    return tuple(generation.generate(main_model(head.limits.n_vocab), prompt, made, how, rng, **options)[0])


@pytest.mark.parametrize("kind", [FakeBlockHead, FakeLatticeHead])
@pytest.mark.parametrize("name", SHAPES)
def test_the_distribution_is_the_main_models(name, kind):
    rule, shape = SHAPES[name]
    v, how = 2 if rule == "spectr" and kind is FakeBlockHead else 3, unfiltered()
    prompt = [0, 1, v - 1, 0, 1]

    def answer(rng):
        return generate(kind(v), shape(), how, rng, rule=rule, prompt=prompt)

    assert_main_distribution(enumerate_outcomes(answer), main_model(v), Sampler(how), prompt)


@pytest.mark.parametrize("shape", [lambda: Chain("greedy"), lambda: BestFirst(6)])
def test_no_draft_is_longer_than_a_block(shape):
    head = FakeBlockHead(8)
    generate(head, shape(), GREEDY, SeededRng(0), max_tokens=30, draft_max=20)
    assert max(head.wanted) == BLOCK
    assert head.wanted[-1] < BLOCK  # near the end of the answer


def test_the_first_output_has_read_a_block():
    class Recorder(Policy):
        def __init__(self):
            super().__init__()
            self.n_read = []

        def wants_token(self, output):
            self.n_read.append(output.n_read)
            return True

    for head, expected in ((FakeBlockHead(8), [BLOCK, 0, 0]), (FakeHead(8), [1, 1, 1])):
        policy, how = Recorder(), GREEDY
        generate(head, Chain(), how, SeededRng(0), max_tokens=4, draft_max=BLOCK, policy=policy)
        assert policy.n_read[:3] == expected


# Costs


def blocks(seconds=DRAFT):
    costs = CostModel(seconds)
    costs.drafts_blocks = True
    return costs


def test_the_seconds_of_a_chain():
    """A block costs what its draft tokens cost, however many tokens are to be read."""
    assert chain_seconds(blocks(), 20, 4).tolist() == CostModel(DRAFT).first(4).tolist()
    assert chain_seconds(CostModel(DRAFT), 8, 3).tolist() == pytest.approx([0.0, 0.5, 0.9, 1.3])


def test_the_best_chain_makes_one_call():
    main, draft = CostModel(MAIN), CostModel(DRAFT)
    step = best_chain(0.8, main, blocks(), 7, n_unread=8)
    seconds = [main.seconds(n + 1) + draft.seconds(n) for n in range(1, 8)]
    rates = [sum(0.8**i for i in range(n + 2)) / s for n, s in enumerate(seconds)]
    assert step.rate == pytest.approx(max(rates))
    assert step.n == 1 + int(np.argmax(rates)) > best_chain(0.8, main, draft, 7, 8).n


def test_a_planned_tree_makes_one_call():
    main = CostModel(MAIN)
    for ranks, depth in (((0.7,), 5), ((0.6, 0.2, 0.1), 4)):
        found = plan(ranks, main, blocks(), 12, depth)
        n, found_depth = len(found.parents), depth_of(found.parents)
        assert found.seconds == pytest.approx(main.seconds(n + 1) + CostModel(DRAFT).seconds(found_depth))
        in_chain = plan(ranks, main, CostModel(DRAFT), 12, depth)
        assert depth_of(in_chain.parents) < found_depth <= depth
    nothing = plan((0.1,), main, blocks({1: 9.0, 64: 9.0}), 12, 5)
    assert (nothing.parents, nothing.seconds) == ((), 1.0)


def test_the_cost_of_a_best_first_tree_is_that_of_one_call(monkeypatch):
    spent, plain = [], CostModel(MAIN).seconds(1)

    def best_prefix(values, seconds):
        spent.append(seconds[0] - plain)
        return ExpectedStep(1.0, 1.0, len(values))

    monkeypatch.setattr("spec_local.proposers.shapes.best_prefix", best_prefix)
    for costs in (blocks(), CostModel(DRAFT)):
        shape = BestFirst(6, costs=(SharedCosts(CostModel(MAIN)), costs))
        how = GREEDY
        generate(FakeBlockHead(8), shape, how, SeededRng(0), max_tokens=8, draft_max=BLOCK)
        if costs.drafts_blocks:
            possible = [CostModel(DRAFT).seconds(n) for n in range(1, BLOCK + 1)]
            assert all(min(abs(s - p) for p in possible) < 1e-9 for s in spent)
        else:
            assert max(spent) > 0.7
        spent.clear()


def test_the_adaptive_policy_drafts_a_block_where_single_calls_do_not_pay():
    dear = {1: 0.9, 64: 0.9}
    assert not could_gain(CostModel(MAIN), CostModel(dear), MAX_CALLS)
    assert could_gain(CostModel(MAIN), blocks(dear), MAX_CALLS)
    clock = Clock()
    policy = adaptive(MAIN, blocks(dear), clock=clock, max_draft=5)
    assert policy.choose(Offer(Limit(64, 64, 1), (), [DraftReading(10)])) == Decision(
        "draft", Limit(5, 64, 1), reading=DraftReading(10)
    )
    n = 0
    while policy.wants_call():
        clock.now += 0 if n else 0.9
        if not policy.wants_token(Output(0 if n else 5, 0.9)):
            break
        n += 1
    assert n == 5
    assert len(policy.trim(Proposal.chain([0] * n)).tokens) >= 3


@pytest.mark.parametrize(("slope", "least", "most"), [(0.0, 8, 8), (0.05, 3, 6), (0.4, 1, 2)])
def test_a_block_is_as_long_as_pays(slope, least, most):
    """The more each of its tokens costs, the shorter."""
    costs = blocks({n: 0.1 + slope * n for n in (1, 2, 4, 8)})
    policy = adaptive(MAIN, costs, max_draft=8)
    choice = policy.choose(Offer(Limit(64, 64, 1), (), [DraftReading(2)]))
    assert choice.source == "draft"
    assert least <= choice.limit.depth <= most


def test_the_chain_is_no_longer_than_the_policy_wants():
    class Short(Policy):
        def choose(self, offer):
            return Decision("draft", replace(offer.limit, depth=min(2, offer.limit.depth)))

    head = FakeBlockHead(8)
    generate(head, Chain("greedy"), GREEDY, None, policy=Short(), max_tokens=20, draft_max=8)
    assert max(head.wanted) == 2
