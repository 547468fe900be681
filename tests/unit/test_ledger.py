"""The ledger of each answer, on a virtual clock that the models' calls and the lookups advance."""

import pytest

from spec_local.answers.json import timings
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Prefilled, Statistics, Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.policies.base import NOTHING, Decision, Policy
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.verifiers import VERIFIERS
from tests.proposers import adaptive, main_model
from tests.unit.generation import GREEDY

MAIN, DRAFT = CostModel({1: 1.0, 128: 13.7}), CostModel({1: 0.25, 128: 6.6})  # 0.9 + 0.1 n, and 0.2 + 0.05 n
SEARCH = 0.03125
PROMPT = [1, 2, 3, 4] * 5


class SlowLookup(PromptLookup):
    """Prompt lookup that takes a while."""

    def __init__(self, world):
        super().__init__(longest=8, shortest=2)
        self._world = world

    def find(self, history, limit):
        self._world.searched += SEARCH
        return super().find(history, limit)


class Scripted(Policy):
    """Does what its script says, over and over; one letter a step, see `choose`."""

    def __init__(self, world, script):
        super().__init__()
        self._world, self._script, self._n = world, script, 0

    @property
    def main_costs(self):
        return self._world.costs

    def choose(self, offer):
        self._do = self._script[self._n % len(self._script)]
        self._n += 1
        if self._do == "l" and offer.candidates:
            return Decision("lookup", proposal=offer.candidates[0])
        return Decision("draft") if self._do in "dt" else NOTHING

    def trim(self, proposal):  # "t": nothing of what was drafted is verified
        return proposal.first(0) if self._do == "t" else proposal


class World:
    """Rows of a main and a draft model."""

    def __init__(self):
        limits = {"max_tokens": 128, "max_logits": 128, "n_ctx": 400}
        self.main, self.draft = main_model(8, **limits), main_model(8, noise=0.3, **limits)
        self.costs, self.searched = SharedCosts(CostModel(MAIN.costs)), 0.0
        self.draft_costs = CostModel(DRAFT.costs)
        self.engine = Engine(SharedCalls(lambda: self.costs), self.clock)
        self.models = [(MAIN, self.main), (DRAFT, self.draft)]
        self.plain = {}  # seconds that each request would have taken in plain steps

    def clock(self):
        times = (costs.seconds(sum(n)) for costs, model in self.models for n in model.context.calls)
        return self.searched + sum(times)

    def add(self, policy=None, prompt=PROMPT, n=40, main=None):
        """A request; policy: a script, or a policy, or None for plain decoding."""
        policy = Scripted(self, policy) if isinstance(policy, str) else policy
        sampler = Sampler(GREEDY)
        chain = DraftModel(self.draft.new_sequence(), sampler, Chain(), n_vocab=8)
        request = Request(
            (main or self.main).new_sequence(),
            prompt,
            RequestOptions(
                sampler=sampler,
                rng=SeededRng(0),
                proposer=CombinedProposer(policy, chain, [SlowLookup(self)]) if policy else None,
                verifier=VERIFIERS["exact-match"],
                max_tokens=n,
                clock=self.clock,
            ),
        )
        self.engine.add(request)
        return request

    def step(self):
        """Advance all, and add the tokens' time in plain steps of as many requests."""
        events = self.engine.step()
        steps = [(request, event) for request, event in events if isinstance(event, Step)]
        for request, event in steps:
            seconds = len(event.tokens) * MAIN.seconds(len(steps))
            self.plain[request] = self.plain.get(request, 0.0) + seconds
        return events

    def finish(self):
        while self.engine.requests:
            self.step()

    def read(self):
        """Advance to the first step."""
        while not any(isinstance(event, Prefilled) for _, event in self.step()):
            pass


def saved(request):
    return dict(request.statistics.saved_s)


@pytest.mark.parametrize("policy", ["dtln", "adaptive"])
def test_the_sum_is_the_difference_to_plain_decoding(policy):
    world = World()
    if policy == "adaptive":
        policy = adaptive(world.costs, world.draft_costs, clock=world.clock)
    request = world.add(policy, n=90)
    world.finish()
    s = request.statistics
    assert s.predicted_n == 90
    assert {"lookup", "draft", "reading"} <= set(s.saved_s) <= {"lookup", "draft", "reading", "searching"}
    reading_main = MAIN.seconds(len(PROMPT) - 1)
    assert s.net_saved_s == pytest.approx(reading_main + 90.0 - (s.prompt_s + s.predicted_s))
    assert s.plain_s == pytest.approx(reading_main + 90.0)
    assert s.predicted_s < 90.0


def test_causes_of_single_steps():
    world = World()
    request = world.add("nt")
    world.read()
    assert saved(request) == pytest.approx({"reading": -DRAFT.seconds(len(PROMPT) - 1)})
    assert request.statistics.prompt_s == pytest.approx(
        MAIN.seconds(len(PROMPT) - 1) - request.statistics.saved_s["reading"]
    )
    world.step()
    assert request.statistics.saved_s["searching"] == pytest.approx(-SEARCH)
    before, drafted = world.clock(), len(world.draft.context.calls)
    world.step()  # a draft, of which nothing is verified
    assert len(world.draft.context.calls) > drafted
    assert request.statistics.saved_s["draft"] == pytest.approx(1.0 - (world.clock() - before))
    assert request.statistics.saved_s["searching"] == pytest.approx(-SEARCH)


def test_plain_steps_are_the_reference_whatever_they_take():
    world = World()
    request, context = world.add("n"), world.main.context
    world.read()
    decode = context.decode
    context.decode = lambda calls: context.calls.append([128]) or decode(calls)  # another program
    world.step()
    assert request.statistics.predicted_s > 13
    assert request.statistics.saved_s["searching"] == pytest.approx(-SEARCH)


@pytest.mark.parametrize("script", ["l", "t"], ids=["by a lookup", "in vain"])
def test_a_plain_row_waits_for_what_others_draft(script):
    """Without a draft model, and if it drafts nothing that is verified."""
    world = World()
    drafting = world.add(script)
    plain = world.add("n", [0, *PROMPT])
    world.read()
    for _ in range(5):
        world.step()
    assert plain.statistics.saved_s["others"] < -5 * SEARCH
    assert "others" not in saved(drafting)


def test_requests_with_models_of_their_own_wait_for_each_other():
    world = World()
    other = main_model(8, max_tokens=128, max_logits=128, n_ctx=400)
    world.models.append((MAIN, other))
    request = world.add("d")
    world.read()
    late = world.add("n", [5, 6, 7, 0, 2] * 20, main=other)
    expected = request.statistics.net_saved_s
    for _ in range(6):
        before, n_calls = world.clock(), len(other.context.calls)
        steps = {row: event for row, event in world.step() if isinstance(event, Step)}
        expected += len(steps[request].tokens) * len(steps) - (world.clock() - before)
        if late not in steps:
            expected += sum(MAIN.seconds(sum(n)) for n in other.context.calls[n_calls:])
    assert late.statistics.n_steps > 2
    assert request.statistics.net_saved_s == pytest.approx(expected)


def test_several_rows():
    """Each answer's ledger is its own difference; a row without drafts pays for those of others."""
    world = World()
    scripts = (("l", 40), ("d", 30), ("n", 35), ("nnld", 20))
    rows = [world.add(script, [i, *PROMPT], n) for i, (script, n) in enumerate(scripts)]
    world.read()
    world.finish()
    for row in rows:
        s = row.statistics
        in_steps = s.net_saved_s - s.saved_s["reading"]
        assert in_steps == pytest.approx(world.plain[row] - s.predicted_s), saved(row)
    assert set(saved(rows[2])) == {"others", "searching", "reading"}
    assert rows[2].statistics.saved_s["others"] < -1.0


def test_a_prompt_of_another_request_is_no_loss():
    """Neither beside a plain row nor beside a draft."""
    world = World()
    request = world.add("nd")
    world.read()
    world.add("n", prompt=[5, 6, 7, 0, 2] * 20)
    for cause, plain in (("searching", 0.0), ("draft", 1.0)):
        n_draft = len(world.draft.context.calls)
        ((_, event),) = [each for each in world.step() if each[0] is request]
        (decoded, n_chunk), call = world.main.context.calls[-1], MAIN.seconds
        drafting = SEARCH + sum(DRAFT.seconds(sum(n)) for n in world.draft.context.calls[n_draft:])
        assert (decoded == 1) is (cause == "searching")
        assert n_chunk > 0
        lost = plain + (decoded - 1) * call(decoded + n_chunk) / (decoded + n_chunk) if plain else 0.0
        expected = plain * len(event.tokens) - drafting - lost
        assert request.statistics.saved_s[cause] == pytest.approx(expected)


def test_a_request_whose_prompt_is_read_waits_for_the_drafts_of_others():
    world = World()
    world.add("d")
    world.read()
    late = world.add("n", prompt=[5, 6, 7, 0, 2] * 20)
    n_draft = len(world.draft.context.calls)
    world.step()
    drafting = SEARCH + sum(DRAFT.seconds(sum(n)) for n in world.draft.context.calls[n_draft:])
    assert saved(late) == pytest.approx({"others": -drafting})


@pytest.mark.parametrize("policy", [None, Policy()], ids=["off", "no costs"])
def test_without_costs_there_is_no_ledger(policy):
    world = World()
    beside = world.add("d")
    request = world.add(policy)
    world.finish()
    assert request.statistics.predicted_n == 40
    assert saved(request) == {}
    assert request.statistics.plain_s == request.statistics.prompt_s + request.statistics.predicted_s
    assert saved(beside)


def test_parts_of_an_answer_are_added():
    first, second = Statistics(saved_s={"draft": 1.0, "reading": -0.5}), Statistics(saved_s={"draft": 0.5})
    assert (first + second).saved_s == {"draft": 1.5, "reading": -0.5}
    made = Statistics(prompt_s=1.0, predicted_s=2.0, saved_s={"draft": 1.5, "measuring": -0.5})
    assert timings(made)["saved_ms"] == {"draft": 1500.0, "measuring": -500.0}
    assert (made.net_saved_s, made.plain_s) == (1.0, 4.5)  # measuring is in neither of the other times
