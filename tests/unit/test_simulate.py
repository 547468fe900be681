"""The adaptive policy on recorded and synthetic answers, on a virtual clock: see benchmarks/simulate.py."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spec_local.proposers.draft_model import DraftModel


@pytest.fixture(scope="module")
def sim():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import simulate

        few = ("plain", *(f"draft {n}" for n in (1, 2, 4, 6, 8, 12, 16)), "lookup 3", "lookup 63")
        patch.setattr(simulate, "FIXED", {name: simulate.FIXED[name] for name in few})
        yield simulate
        for name in ("simulate", "traces", "common"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def traces(sim):
    return sys.modules["traces"]


@pytest.fixture(scope="module")
def simulated(sim):
    """Return a cell of the benchmark's table by the names of machine and group."""
    pairs, groups = {p.name: p for p in sim.PAIRS}, {g.name: g for g in sim.groups()}
    return lambda pair, group: sim.simulate(pairs[pair], groups[group])


F16, Q4, METAL = "x86 F16 + 0.5B", "x86 Q4_K_M + 0.5B", "Metal 13B, draft 0.08"


def test_calls_cost_what_the_table_and_the_clock_state(sim, traces):
    """With a draft model that is always right and 4 draft tokens, each step but the last gives 5 tokens."""
    pair = sim.PAIRS[0]
    group = sim.Group("always right", traces.drafted([1.0] * 100)[:1])
    calls = sim.fixed_calls(group)
    main, draft = pair.main, pair.draft
    assert sim.seconds(calls["plain"], pair, group) == pytest.approx(100 * main[1])
    # After the first step the draft model reads two tokens: its last one and the one after it.
    assert sim.seconds(calls["draft 4"], pair, group) == pytest.approx(
        20 * main[5] + 80 * draft[1] + 19 * (draft[2] - draft[1])
    )
    machine = sim.Machine(pair, group)
    sim.run(group, machine, *sim.FIXED["draft 4"])
    prompt = main[len(group.traces[0].prompt) - 1] + draft[len(group.traces[0].prompt) - 1]
    assert machine.clock() == pytest.approx(prompt + sim.seconds(machine.calls, pair, group))


LAPTOP, Q8_B = "laptop 7B, draft 0.15", "x86-b Q8_0, draft 0.39"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "group"),
    [
        (METAL, "code editing"),
        (LAPTOP, "noisy neighbour, 0.8"),
        (F16, "code editing"),
        (Q8_B, "acceptance 0.8"),  # where the first draft tokens happen to be rejected
    ],
)
def test_the_policy_is_about_as_fast_as_the_best_fixed_choice_in_hindsight(simulated, pair, group):
    cell = simulated(pair, group)
    assert cell.of_best > 0.95
    assert cell.of_plain > 1.1  # there is something to gain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "group"),
    [
        (F16, "always wrong, confident"),
        (LAPTOP, "always wrong"),
        (LAPTOP, "slow draft model"),
        (F16, "both 3 × slower"),
        (F16, "deep lookup trap"),
        (Q4, "noisy neighbour, 0.3"),
    ],
)
def test_the_policy_is_at_most_slightly_slower_than_plain_decoding(sim, pair, group):
    pair = next(p for p in sim.PAIRS if p.name == pair)
    group = next(g for g in sim.groups() if g.name == group)
    machine = sim.Machine(pair, group)
    sim.run(group, machine, *sim.FIXED["plain"])
    plain, adaptive = machine.calls, sim.adaptive_calls(pair, group)
    assert sim.seconds(plain, pair, group) / sim.seconds(adaptive, pair, group) > 0.98


@pytest.mark.parametrize("error", [0.5, 2.0])
@pytest.mark.parametrize(
    ("pair", "group", "gain"),
    [
        (F16, "always wrong, confident", 0.97),
        (Q4, "noisy neighbour, 0.3", 0.97),
        (METAL, "acceptance 0.8", 2.0),  # estimates of a CPU, where calls of several tokens cost far more
        (Q4, "code editing", 1.75),
    ],
)
def test_wrong_estimates_of_costs_cost_little(sim, pair, group, gain, error):
    """A session that measured nothing; draft calls seem to take half or twice as long as they do."""
    pair, group = (
        {each.name: each for each in many}[name] for many, name in ((sim.PAIRS, pair), (sim.groups(), group))
    )
    machine = sim.Machine(pair, group)
    sim.run(group, machine, *sim.FIXED["plain"])
    found = sim.seconds(sim.adaptive_calls(pair, group, error), pair, group)
    assert sim.seconds(machine.calls, pair, group) / found > gain


@pytest.mark.slow
def test_trials_of_a_draft_model_that_is_always_wrong_cost_little(sim, traces):
    """In a session that is long enough for the initial estimates not to matter."""
    pair = next(p for p in sim.PAIRS if p.name == METAL)
    answers = [trace for seed in range(4) for trace in traces.drafted([0.0] * 256, [0.4] * 256, seed)]
    calls = sim.adaptive_calls(pair, group := sim.Group("always wrong", answers))
    assert 1 / 1.015 < group.n_tokens * pair.main[1] / sim.seconds(calls, pair, group) <= 1
    last = [role for role, _, position in calls if position > group.n_tokens // 2]
    assert "draft" in last  # it is still tried occasionally


def test_a_draft_model_that_becomes_good_is_used_again(sim, traces):
    """Trials must be cheap: elsewhere the draft model may have too many tokens to read first."""
    pair = next(p for p in sim.PAIRS if p.name == METAL)
    group = sim.Group("good in the end", traces.drafted([0.02] * 256 + [0.9] * 256))
    last = [role for role, _, position in sim.adaptive_calls(pair, group) if position > group.n_tokens - 128]
    assert 128 / last.count("main") > 2  # tokens per step


@pytest.mark.slow
def test_disturbed_calls_do_not_end_drafting(sim, traces):
    """Whichever calls are slow: five of them must not make the draft model seem expensive for good."""
    pair = next(p for p in sim.PAIRS if p.name == METAL)
    answers = [trace for seed in range(5) for trace in traces.drafted([0.85] * 256, seed=seed)]
    group = sim.Group("noisy session", answers, noisy=True)
    machine = sim.Machine(pair, group)
    sim.run(group, machine, sim.adaptive(machine), sim.MAX_DRAFT)
    last = [role for role, _, position in machine.calls if position > group.n_tokens - 1024]
    assert 1024 / last.count("main") > 2.5  # tokens per step


@pytest.mark.parametrize("reading", [1e-5, 2e-3], ids=["quick", "slow"])
def test_a_draft_model_that_reads_a_part_of_the_prompt_drafts_as_recorded(sim, traces, reading):
    """Where reading takes long, it reads only the end of the prompt."""
    rng = np.random.default_rng(0)
    prompt, answer = traces._text(rng, 300), traces._text(rng, 100)
    right, wrong = ([ok] * 100 for ok in (True, False))
    sure = [0.9] * 100
    end = traces.Trace(prompt, answer, right, sure)
    whole = traces.Trace(prompt, answer, wrong if reading > 1e-3 else right, sure, {32: end, 128: end})
    n = np.arange(4097.0)
    pair = sim.Pair("p", 0.02 + 1e-4 * n, 2e-3 + reading * n)
    machine = sim.Machine(pair, sim.Group("g", [whole]))
    sim.run(machine._group, machine, sim.adaptive(machine, kind=DraftModel, max_tokens=100), sim.MAX_DRAFT)
    # Not before the first tokens, and with the last tokens of its window.
    n_read = sum(n for role, n, _ in [*machine.reading, *machine.calls] if role == "draft" and n > 16)
    assert n_read in (range(299, 320) if reading < 1e-3 else range(32, 34))
    assert len([call for call in machine.calls if call[0] == "main"]) < 40  # most drafts are accepted


@pytest.fixture(scope="module")
def sessions(sim):
    import sessions

    yield sessions
    for name in ("sessions", "processors"):
        sys.modules.pop(name, None)


def test_several_clients_get_their_answers_and_plain_decoding_takes_the_time_of_its_calls(sessions, traces):
    """Three clients, each with two answers of 40 tokens after prompts that one call reads."""
    every = [trace for seed in range(3) for trace in traces.drafted([0.8] * 40, seed=seed)]
    every = [replace(trace, prompt=trace.prompt[:33]).from_token(-1 - i) for i, trace in enumerate(every)]
    pair = next(pair for pair in sessions.machines() if pair.name == "Zen 4")
    prompts, step = pair.main[3 * 32], pair.main[3]
    plain = sessions.plain(pair, every, 3)
    assert [each.trace for each in plain] == every
    for i, each in enumerate(plain):
        began = i // 3 * (prompts + 40 * step)
        assert each.began.seconds == pytest.approx(began)
        assert each.read.seconds == pytest.approx(began + prompts)
        assert each.ended == pytest.approx((began + prompts + 40 * step, (i // 3 + 1) * 40 * step))

    mode = sessions.Mode("clients", "measured", n_clients=3, lengths=(40,))
    answers, _ = sessions.session(pair, mode, every, 1)  # it compares the texts
    assert {each.trace for each in answers} == set(every)
    assert max(each.ended.seconds for each in answers) < plain[-1].ended.seconds + answers[0].began.seconds


def test_a_new_pair_pays_for_its_first_calls(sessions, traces):
    (trace, _) = traces.drafted([0.0] * 40, [0.4] * 40)
    pair = next(pair for pair in sessions.machines() if pair.name == "kernels off")
    (answer,), _ = sessions.session(pair, sessions.Mode("new", "estimated"), [trace], 1)
    assert answer.began.seconds == 0.0
    n_calls = 2  # of each model, one of them counted: the first ones touch memory for the first time
    calls = n_calls * (pair.main[1] + pair.draft[1])
    (plain,) = sessions.plain(pair, [trace], 1)
    assert answer.ended.seconds >= plain.ended.seconds + calls - 1e-9
