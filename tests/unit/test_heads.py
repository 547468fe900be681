"""The engine hands the main model's hidden states to a head: each once, in order, and of the right tokens."""

import itertools
from functools import partial

import pytest

from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.core.sequence import common_prefix
from spec_local.engine.engine import Engine
from spec_local.engine.events import Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.policies.base import NOTHING, Policy
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Beam, BestFirst, Coupled, Drawn
from spec_local.testing import FakeModel, enumerate_outcomes, fake_state
from spec_local.verifiers import VERIFIERS
from tests.exact import assert_main_distribution, greedy_output
from tests.proposers import main_model
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, events_of

MODES = {
    "any": {},
    "fork": {"rollback": "fork"},
    "bounded": {"rollback": "bounded", "max_rollback": 2},
}
EVERY_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
N_READ = 6  # received tokens that the head reads in a call


@pytest.fixture(autouse=True)
def _caches(cached_distributions, cached_rho):
    pass


class FakeHead(FakeModel):
    """A head that checks what it receives, and forgets states as heads on llama.cpp do.

    forgetful: whether the last state of what it takes from another row is always missing.
    """

    def __init__(self, n_vocab, *, forgetful=False, **kwargs):
        super().__init__(n_vocab, **{"seed": 2, "scale": 1.0, "noise": 0.5, "max_branches": 1} | kwargs)
        self._received, self._forgetful = [], forgetful
        self.n_states = 0

    def new_sequence(self):
        row = super().new_sequence()
        row._received = []
        return row

    def receive(self, start, tokens, states):
        assert start <= len(self._received)
        assert len(states) == len(tokens)
        history = [*self._received[:start], *tokens]
        for i, state in enumerate(states):
            assert tuple(state) == fake_state(history[: start + i + 1])
        if history == self._received[: len(history)]:
            return
        self.n_states += len(history) - common_prefix(history, self._received)
        self._received = history
        assert len(self.cached) - len(history) < 40
        self.truncate(min(len(self.cached), common_prefix(self.cached, history) + 1))

    def reuse(self, tokens, text=()):
        tokens = list(tokens)
        others = [self, *self.context.sequences]
        best = max(others, key=lambda other: common_prefix(other._received, tokens))
        n = common_prefix(best._received, tokens)
        n_pairs = min(common_prefix(best.cached, tokens), n)
        self._clear()
        if n_pairs < min(len(best.cached), n) or (self._forgetful and best is not self):
            n = max(n_pairs - 1, 0)  # the state before the next pair is forgotten
        self._replace(tokens[:n_pairs])
        self._received = tokens[:n]
        return n

    async def read(self):
        while len(self._received) - len(self.cached) >= N_READ:
            start = len(self.cached)
            await self.call(self._received[start : start + N_READ], n_logits=0)


def proposer(head, sampler, kind="greedy", policy=None):
    made = DraftModel(head, sampler, Chain(kind), n_vocab=head.limits.n_vocab)
    return CombinedProposer(policy, made) if policy else made


def generate(main, head, prompt, *, kind="greedy", shape=None, how=GREEDY, **options):
    """All generated tokens; checks after each step what the head has received."""
    made, found = proposer(head, Sampler(how), kind), []
    made.shape = shape or made.shape
    for event in events_of(main, prompt, made, how, **options):
        if isinstance(event, Step):
            found += event.tokens
            history = [*prompt, *found]
            assert head._received == history[:-1]
            assert list(head.cached) == history[: len(head.cached)]
    return found


@EVERY_MODE
@pytest.mark.parametrize(
    ("rule", "kind"), [("block", "drawn"), ("exact-match", "coupled"), ("block", "greedy")]
)
def test_the_distribution_is_the_main_models(mode, rule, kind):
    prompt, how = [0, 1, 2, 0, 1], unfiltered()

    def run(rng):
        main, head = main_model(3, **mode), FakeHead(3)
        found = generate(
            main, head, prompt, rule=rule, kind=kind, how=how, rng=rng, draft_max=2, max_tokens=3
        )
        return tuple(found)

    assert_main_distribution(enumerate_outcomes(run), main_model(3), Sampler(how), prompt)


TREES = {
    "best first, exact-match": (partial(BestFirst, 4, 2), "exact-match"),
    "beam, exact-match": (partial(Beam, 2, 4), "exact-match"),
    "coupled, exact-match": (partial(Coupled, 4, 2), "exact-match"),
} | {
    f"{v.drawing}, {rule}": (partial(Drawn, v.drawing, 3, 2), rule)
    for rule, v in VERIFIERS.items()
    if v.drawing not in ("chosen", "one")
}


@pytest.mark.parametrize(("shape", "rule"), TREES.values(), ids=TREES.keys())
def test_the_distribution_with_trees_is_the_main_models(shape, rule):
    v, how, n_nodes = 2 if rule == "spectr" else 3, unfiltered(), set()
    prompt = [0, 1, v - 1, 0, 1]

    def run(rng):
        main, head = main_model(v), FakeHead(v, noise=1.0, max_branches=8)
        made = shape()
        found = generate(
            main, head, prompt, rule=rule, shape=made, how=how, rng=rng, draft_max=2, max_tokens=3
        )
        n_nodes.update(main.context.calls[-1])
        return tuple(found)

    assert_main_distribution(enumerate_outcomes(run), main_model(v), Sampler(how), prompt)
    assert max(n_nodes) > 3  # more than a chain's


@EVERY_MODE
@pytest.mark.parametrize("draft_max", [1, 3, 8])
def test_each_state_is_handed_over_once(mode, draft_max):
    """Over several answers, whose prompts continue, repeat or replace the history."""
    main, head = main_model(8, n_ctx=128, **mode), FakeHead(8, n_ctx=128)
    prompts = [list(range(8)) * 4, [1], [*range(8)] * 5, [*range(8)] * 4]
    for prompt in prompts:
        found = generate(main, head, prompt, draft_max=draft_max, max_tokens=30)
        assert found == greedy_output(main, prompt, 30)
    n_tokens = sum(map(len, prompts)) + 30 * len(prompts)
    assert head.n_states < n_tokens


@EVERY_MODE
@pytest.mark.parametrize("forgetful", [False, True])
def test_rows_share_a_prompt(mode, forgetful):
    """A beginning is read once, by the main model and the head, and rows receive only what they lack."""
    main, head = main_model(8, n_ctx=128, **mode), FakeHead(8, n_ctx=128, forgetful=forgetful)
    prompts = [[*range(8)] * 6 + [n] for n in range(3)]
    engine, found = Engine(), {}
    for prompt in prompts:
        sampler = Sampler(GREEDY)
        made = proposer(head.new_sequence(), sampler)
        options = {"sampler": sampler, "rng": SeededRng(0), "max_tokens": 20, "draft_max": 4}
        engine.add(Request(main.new_sequence(), prompt, RequestOptions(proposer=made, **options)))
    rows = list(engine.requests)
    while engine.requests:
        assert engine.n_calls < 200
        for row, event in engine.step():
            assert not hasattr(event, "error"), event
            if isinstance(event, Step):
                found.setdefault(row, []).extend(event.tokens)
    for row, prompt in zip(rows, prompts, strict=True):
        assert found[row] == generate(main_model(8), FakeHead(8), prompt, draft_max=4, max_tokens=20)
    if mode == MODES["any"] and not forgetful:
        assert main.context.calls[0] == [32]
        assert engine.statistics.prompt_n < 60


def test_steps_without_a_draft_leave_no_more_states_than_a_call_reads():
    """Even if a policy never drafts. What the head reads of them is in the answer's ledger, as drafting."""

    class Never(Policy):
        main_costs = SharedCosts(CostModel({1: 1.0}))

        def choose(self, offer):
            return NOTHING

    main, head = main_model(8, n_ctx=128), FakeHead(8, n_ctx=128)
    sampler = Sampler(GREEDY)
    made = proposer(head, sampler, "greedy", Never())
    ticks = itertools.count()
    for event in events_of(main, [*range(8)] * 4, made, max_tokens=50, clock=lambda: float(next(ticks))):
        if isinstance(event, Step):
            assert len(head._received) - len(head.cached) <= N_READ
    assert len(head.cached) > 70
    assert set(event.statistics.saved_s) == {"draft", "reading", "searching"}
    assert event.statistics.saved_s["draft"] < 0
