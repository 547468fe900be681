"""Runs in hindsight: the best possible speed-up, and its error, from the times of their own calls."""

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.bench.figures import achieved, best_error, best_speedup, speedup
from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Outcome, TokenizedPrompt, measure
from spec_local.bench.theory import Prices, TimedStep, best_seconds, draft_run_lengths, hindsight
from spec_local.bench.variants import variants
from spec_local.core.calls import TimedCall
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Finished, Prefilled
from spec_local.policies.cost_model import CostModel
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.session import Done, Text
from spec_local.settings import GenerationSettings
from spec_local.testing import FakeModel, decode

SECONDS = st.floats(0, 10)


def calls(part, most, longest):
    return st.lists(st.builds(TimedCall, st.just(part), st.integers(1, longest), SECONDS), max_size=most)


@st.composite
def steps(draw, least=0):
    """Steps of a run with any number of calls of the draft model and any times."""
    found = []
    for _ in range(draw(st.integers(least, 8))):
        main = TimedCall("main model", draw(st.integers(1, 65)), draw(SECONDS))
        made = [*draw(calls("draft model", 4, 40)), main]
        rest = draw(st.floats(0, 1))
        found.append(TimedStep(draw(st.integers(1, 6)), sum(call.seconds for call in made) + rest, made))
    return found


COSTS = st.dictionaries(st.integers(2, 65), SECONDS, max_size=5)


@given(
    run=steps(least=1),
    earlier=steps(),
    main=COSTS,
    draft=st.none() | COSTS,
    lengths=st.fixed_dictionaries(
        {name: st.lists(st.integers(0, 70), max_size=50) for name in ("draft", "x")}
    ),
)
def test_no_run_exceeds_the_best(run, earlier, main, draft, lengths):
    tables = [CostModel({1: 1.0} | each) if each is not None else None for each in (main, draft)]
    prices = Prices(*tables)
    prices.observe(earlier)
    prices.observe(run)
    found = hindsight(run, lengths, prices)
    assert 0 < found.achieved <= 1
    measured, priced = (sum(map(each, run)) for each in (lambda step: step.seconds, prices.of))
    assert abs(measured - priced) <= found.error * priced * (1 + 1e-9)


def true_seconds(n):
    """A call of the main model takes as long for four tokens as for one, and is expensive beyond."""
    return 1.0 if n <= 4 else n / 2


class Timed:
    """A session of fake models and a clock. disturbances: factors of the times of calls with draft tokens."""

    datastore = answer_store = None

    def __init__(self, before, disturbances=(1.0,)):
        self.now = 0.0
        self.main, self.draft = FakeModel(max_logits=65, max_tokens=65), FakeModel(noise=0.8)
        self.drafter = self.draft
        self._before = before
        factors = cycle(disturbances)
        for model, seconds in ((self.main, true_seconds), (self.draft, lambda n: 0.1)):
            self._time(model.context, seconds, factors)

    def _time(self, context, seconds, factors):
        decode_untimed = context.decode

        def decode(calls):
            n = sum(len(call.tokens) for call in calls)
            self.now += seconds(n) * (next(factors) if n > 1 else 1.0)
            return decode_untimed(calls)

        context.decode = decode

    def generate(self, prompt, settings, *, cancelled):
        sampler = Sampler(SamplingSettings(temperature=0))
        drafts = settings.proposer != "none"
        proposer = DraftModel(self.draft, sampler, Chain(), n_vocab=16) if drafts else None
        options = {"draft_max": 3, "max_tokens": settings.max_tokens, "clock": lambda: self.now}
        for event in decode(
            self.main, prompt, sampler=sampler, rng=SeededRng(0), proposer=proposer, **options
        ):
            if isinstance(event, Finished):
                yield Done(event.reason, event.statistics)
            else:
                yield event if isinstance(event, Prefilled) else Text("", event.tokens, event.proposal)

    def proposers(self, settings):
        return [] if settings.proposer == "none" else ["draft"]

    def lookups(self, settings):
        return []

    def costs(self):
        return self._before, CostModel({1: 0.1})


PROMPTS = [TokenizedPrompt(Prompt("c", f"p{i}", ""), [1, 2, i]) for i in range(4)]
TRUTH = CostModel({n: true_seconds(n) for n in range(1, 66)})


def outcomes(session):
    events = measure(session, PROMPTS, variants(GenerationSettings(max_tokens=64), {}))
    return [event for event in events if isinstance(event, Outcome)]


def best_at_true_times(prompt, answer):
    lengths = {"draft": draft_run_lengths(FakeModel(noise=0.8), prompt, answer, 16)}
    return len(answer) / best_seconds(lengths, true_seconds, {"draft": 0.1}, len(answer), 64)


def test_costs_from_before_the_run_do_not_count():
    doubled = CostModel({n: 2 * true_seconds(n) if n > 1 else 1.0 for n in range(1, 66)})
    for before in (TRUTH, doubled):
        for prompt, outcome in zip(PROMPTS, outcomes(Timed(before)), strict=True):
            best = best_speedup(outcome, "speculative")
            truth = best_at_true_times(prompt.tokens, outcome.runs["plain"][0].tokens)
            assert best == pytest.approx(truth, rel=0.02)
            assert best_error(outcome, "speculative") == pytest.approx(0, abs=1e-9)
            assert achieved(outcome, "speculative") <= 1
            assert achieved(outcome, "speculative") == pytest.approx(speedup(outcome, "speculative") / best)


@pytest.mark.parametrize("disturbances", [[1.0, 1.0, 1.0, 2.0], [0.8, 1.0, 1.2, 1.1]], ids=["slow", "noise"])
def test_the_error_covers_disturbances_of_a_run(disturbances):
    for prompt, outcome in zip(PROMPTS, outcomes(Timed(TRUTH, disturbances)), strict=True):
        error = best_error(outcome, "speculative")
        truth = best_at_true_times(prompt.tokens, outcome.runs["plain"][0].tokens)
        assert abs(best_speedup(outcome, "speculative") / truth - 1) <= error
        assert achieved(outcome, "speculative") <= 1


def test_calls_that_do_not_occur_are_priced_from_those_that_do():
    prices = Prices(CostModel({1: 2.0, 8: 6.0}), CostModel({1: 1.0}))
    prices.observe([TimedStep(1, 1.1, [TimedCall("main model", 1, 1.0)])] * 10)  # the machine is faster now
    assert (prices.main(1), prices.main(8), prices.draft(1)) == pytest.approx((1.1, 3.3, 0.55))
    prices.observe(
        [TimedStep(1, 1.4, [TimedCall("draft model", 1, 0.3), TimedCall("main model", 1, 1.1)])] * 3
    )
    assert prices.draft(1) == pytest.approx(0.3)
    assert Prices(CostModel({1: 2.0}), None).draft(1) == 0
