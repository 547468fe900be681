"""Two rows of an engine: their answers are independent, each with exactly the main model's distribution."""

import functools
from dataclasses import replace
from functools import partial

import pytest

from spec_local.core.sampling import Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Step
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.draft_model import Chain
from spec_local.proposers.shapes import BestFirst, Coupled, Drawn
from spec_local.testing import enumerate_outcomes
from spec_local.verifiers import VERIFIERS
from tests.exact import assert_independent
from tests.proposers import PROPOSERS, draft, main_model
from tests.rows import RowRng, check_caches, new_row
from tests.unfiltered import unfiltered

V = 2
PROMPTS = ([0, 1, 1, 1, 0], [1, 0, 0, 1])
COSTS = {1: 1.0, 2: 1.05, 3: 1.4, 4: 1.9, 8: 4.0, 16: 9.0}  # with two rows, some draft tokens pay
seconds = functools.cache(CostModel(COSTS).seconds)


@pytest.fixture(autouse=True)
def _caches(cached_distributions, cached_rho):
    pass


class Valued:
    """Adds values to what a proposer proposes: of a 1 another than of a 0."""

    needs_logits = False
    head = main_costs = None

    def __init__(self, proposer):
        self._proposer = proposer
        self.prefill, self.commit, self.shorten = proposer.prefill, proposer.commit, proposer.shorten
        self.needs_logits, self.observe = proposer.needs_logits, proposer.observe

    async def propose(self, history, limit, rng):
        proposal = await self._proposer.propose(history, limit, rng)
        values = []
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            values.append((0.9 if token else 0.3) * (1.0 if parent < 0 else values[parent]))
        return replace(proposal, values=values)


def valued(make):
    return lambda sampler, n_vocab: Valued(make(sampler, n_vocab))


def planner(kind=SharedCalls):
    costs = SharedCosts(CostModel(COSTS))
    return kind(lambda: costs)


def drawn(rule):
    """A drawn tree for a verifier; a chain if it is lossless only for chains."""
    drawing = VERIFIERS[rule].drawing
    return draft(0.5, Chain if drawing in ("one", "chosen") else partial(Drawn, drawing, 2, 2))


def joint(cases, planner=lambda: None, *, lengths=(3, 2), later=0, limits=None):
    """The joint distribution of the answers of two rows, each a proposer and a verifier.

    later: steps of the first row before the second one is added.
    """

    def answers(rng):
        main = main_model(V, **(limits or {}))
        rows = [
            new_row(main, prompt, make, rule, rng=RowRng(rng, i), draft_max=2, max_tokens=n)
            for i, ((make, rule), prompt, n) in enumerate(zip(cases, PROMPTS, lengths, strict=True))
        ]
        # The clock of a machine on which the calls take what the planner expects.
        engine = Engine(planner(), clock=lambda: sum(seconds(sum(n)) for n in main.context.calls))
        engine.add(rows[0])
        found = {row: [] for row in rows}
        waiting, n_steps = [rows[1]], 0
        while engine.requests or waiting:
            if waiting and (n_steps >= later or not engine.requests):
                engine.add(waiting.pop())
            for row, event in engine.step():
                if isinstance(event, Step):
                    n_steps += 1
                    found[row] += event.tokens
                    check_caches(row)
        return tuple(tuple(found[row]) for row in rows)

    return enumerate_outcomes(answers)


def assert_lossless(cases, *args, lengths=(3, 2), **kwargs):
    outcomes = joint(cases, *args, lengths=lengths, **kwargs)
    samplers = [Sampler(unfiltered())] * 2
    assert_independent(outcomes, main_model(V), samplers, PROMPTS, lengths)


PLAIN, CHAIN = (None, "block"), (draft(0.5), "block")
COUPLED = draft(0.5, lambda: Chain("coupled")), "exact-match"
GREEDY = draft(0.5, lambda: Chain("greedy")), "token"
PAIRS = {
    "coupled": (COUPLED, COUPLED),
    "coupled tree and chain": ((draft(0.5, lambda: Coupled(3, 2)), "exact-match"), CHAIN),
    "greedy and plain": (GREEDY, PLAIN),
    "best first and coupled": ((draft(0.5, lambda: BestFirst(3, 2)), "exact-match"), COUPLED),
    "lookup and chain": ((PROPOSERS["lookup"], "traversal"), CHAIN),
    "recycling and lookup": ((PROPOSERS["recycling"], "exact-match"), (PROPOSERS["suffix"], "block")),
    "staged and larger": ((PROPOSERS["staged draft"], "block"), (PROPOSERS["larger draft"], "token")),
}
# Each verifier next to another one.
PAIRS |= {
    f"{rule} and {other}": ((drawn(rule), rule), (drawn(other), other))
    for rule, other in zip(VERIFIERS, [*VERIFIERS][1:] + [*VERIFIERS][:1], strict=True)
}
EVERY_PAIR = pytest.mark.parametrize("cases", PAIRS.values(), ids=PAIRS.keys())


@EVERY_PAIR
def test_two_rows_are_independent(cases):
    assert_lossless(cases, lengths=(2, 2) if "spectr" in (rule for _, rule in cases) else (3, 2))


@pytest.mark.parametrize(
    ("name", "later"), [("coupled", 1), ("lookup and chain", 2), ("greedy and plain", 2)]
)
def test_a_row_that_joins_later(name, later):
    """Its prompt is read in calls in which the other one's draft tokens are verified."""
    assert_lossless(PAIRS[name], later=later)


def test_a_prompt_read_in_several_calls_while_another_row_generates():
    assert_lossless((CHAIN, CHAIN), limits={"max_tokens": 4})


CHOSEN = {
    "greedy": (valued(draft(0.5, lambda: Chain("greedy"))), "block"),
    "lookup": (valued(PROPOSERS["lookup"]), "token"),
    "coupled": (valued(draft(0.5, lambda: Chain("coupled"))), "exact-match"),
    "best first": (valued(draft(0.5, lambda: BestFirst(3, 2))), "traversal"),
    "drawn": (valued(draft(0.5)), "block"),
}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *[("greedy", "lookup"), ("lookup", "coupled"), ("coupled", "best first"), ("best first", "greedy")],
        *[("greedy", "drawn"), ("lookup", "drawn"), ("coupled", "drawn"), ("best first", "drawn")],
    ],
)
def test_the_planner_shortens_chosen_tokens_only(name, other):
    """By all rows' values: the number of a row's draft tokens depends on the other one's."""
    assert_lossless((CHOSEN[name], CHOSEN[other]), planner)


def test_the_enumeration_detects_rows_that_share_random_numbers(monkeypatch):
    """So that it would notice a row that draws with the rng of another one."""

    class Same(RowRng):
        def __init__(self, rng, row):
            super().__init__(rng, 0)

    monkeypatch.setitem(globals(), "RowRng", Same)
    with pytest.raises(AssertionError):
        assert_lossless(PAIRS["coupled"])
