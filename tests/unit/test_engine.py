"""The engine's times, and what its planner learns from a step in which a request fails."""

import pytest

from spec_local.core.proposal import Proposal
from spec_local.core.rng import SeededRng
from spec_local.engine.engine import Engine
from spec_local.engine.events import Failed, Step
from spec_local.errors import BackendError
from spec_local.testing import FakeModel
from tests.rows import new_row


@pytest.mark.parametrize("n_prompt", [1, 2, 30, 100])
def test_the_time_to_the_first_token_is_that_of_all_steps_before_it(n_prompt):
    """Also that of the step in which the prompt ends: its call, of others, is waited for."""
    main = FakeModel(8, n_ctx=400)
    clock = lambda: float(len(main.context.calls))  # noqa: E731
    engine = Engine(clock=clock)
    engine.add(new_row(main, [1, 2, 3], rng=SeededRng(0), clock=clock))
    while not any(isinstance(event, Step) for _, event in engine.step()):
        pass
    added, late = clock(), new_row(main, [4] * n_prompt, rng=SeededRng(1), clock=clock)
    engine.add(late)
    while not late.statistics.n_steps:
        engine.step()
    assert clock() - added >= 2
    assert late.statistics.first_token_s == clock() - added


class FailingProposer:
    """Proposes nothing, and fails in its second step."""

    head, needs_logits, main_costs = None, False, None

    def __init__(self, sampler, n_vocab):
        self._n_steps = 0

    async def prefill(self, history):
        pass

    async def propose(self, history, limit, rng):
        self._n_steps += 1
        if self._n_steps == 2:
            raise BackendError("the draft model failed")
        return Proposal()

    def commit(self, history):
        pass


class RecordingPlanner:
    """Records how many requests began the steps whose calls it observes."""

    def __init__(self):
        self.observed = []

    def choose(self, proposals, load, spent):
        return proposals

    def observe(self, load, n_drafted, seconds):
        self.observed.append(load.n_parallel)


def test_the_planner_does_not_observe_a_call_that_a_failed_request_does_not_share():
    """It would take the time of two requests for that of three."""
    main, planner = FakeModel(8), RecordingPlanner()
    engine = Engine(planner)
    for i, make in enumerate([None, FailingProposer, None]):
        engine.add(new_row(main, [i], make, rng=SeededRng(i)))
    engine.step()  # reads the prompts
    for n_failed, observed in ((0, [3]), (1, [3]), (0, [3, 2])):
        failed = [event.error for _, event in engine.step() if isinstance(event, Failed)]
        assert len(failed) == n_failed
        assert planner.observed == observed
    assert main.context.calls == [[1, 1, 1], [1, 1], [1, 1]]
