"""The adaptive policy on recorded and made-up texts, on a clock of their own: see benchmarks/simulate.py."""

import sys
from pathlib import Path

import numpy as np
import pytest

from spec_local.core.proposal import Limit
from spec_local.lookups.base import match_confidence


@pytest.fixture(scope="module")
def sim():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import simulate

        yield simulate
        for name in ("simulate", "traces", "common"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def texts(sim):
    return sys.modules["traces"]


@pytest.fixture(scope="module")
def simulated(sim):
    """A cell of the benchmark's table, by the names of machine and answers."""
    pairs, groups = {p.name: p for p in sim.PAIRS}, {g.name: g for g in sim.groups()}
    return lambda pair, group: sim.simulate(pairs[pair], groups[group])


F16, Q4, METAL = "x86 F16 + 0.5B", "x86 Q4_K_M + 0.5B", "Metal 13B, draft 0.08"


def test_a_draft_says_what_it_said_and_is_as_sure_of_it(texts):
    trace = texts.recorded()["chat"][0]
    probs = np.exp(trace.drafts.astype(np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    assert ((probs.argmax(axis=1) == trace.answer) == np.array(trace.right)).all()
    assert probs.max(axis=1) == pytest.approx(np.clip(trace.sure, 2 / trace.n_vocab, 0.9995), rel=1e-5)


def test_calls_cost_what_the_table_says_and_the_clock_agrees(sim, texts):
    """A draft that is always right, asked for 4 guesses a step: 5 tokens a step, the last step less."""
    pair = sim.PAIRS[0]
    group = sim.Group("always right", texts.drafted([1.0] * 100)[:1])
    calls = sim.fixed_calls(group)
    main, draft = pair.main, pair.draft
    assert sim.seconds(calls["plain"], pair, group) == pytest.approx(100 * main[1])
    # After the first step the draft has two tokens to read: the last guess and main's own.
    assert sim.seconds(calls["draft 4"], pair, group) == pytest.approx(
        20 * main[5] + 80 * draft[1] + 19 * (draft[2] - draft[1])
    )
    machine = sim.Machine(pair, group)
    sim.run(group, machine, *sim.FIXED["draft 4"])
    prompt = main[len(group.traces[0].prompt) - 1] + draft[len(group.traces[0].prompt) - 1]
    assert machine.clock() == pytest.approx(prompt + sim.seconds(machine.calls, pair, group))


def test_what_befalls_a_machine_comes_in_the_second_half(sim, texts):
    pair, traces = sim.PAIRS[0], texts.drafted([0.5] * 100)
    slower = sim.Group("slower", traces, slower=(3.0, 1.0))
    calls = sim.fixed_calls(slower)["plain"]
    assert sim.seconds(calls, pair, slower) == pytest.approx(400 * pair.main[1])
    noisy = sim.Group("noisy", traces, noisy=True)
    machine = sim.Machine(pair, noisy)
    sim.run(noisy, machine, *sim.FIXED["plain"])
    assert sim.seconds(machine.calls, pair, noisy) == pytest.approx(200 * pair.main[1])
    assert machine.clock() > 1.1 * (200 * pair.main[1] + 2 * pair.main[60])


@pytest.mark.parametrize("match", [3, 12])
def test_a_trap_is_one_for_every_lookup(sim, texts, match):
    for trace in texts.traps(match, 0.5):
        text, lookup = [*trace.prompt, *trace.answer], sim.PromptLookup(shortest=2)
        sure = [
            lookup.find(text[:end], Limit(1, 1, 1)).confidence[0]
            for end in range(len(trace.prompt), len(text))
        ]
        assert np.mean(sure) > match_confidence(match) - 0.01
        assert sum(trace.copies) <= 2  # where nothing is looked for but the most frequent, one may be right


@pytest.mark.parametrize("pair", [F16, Q4, METAL])
@pytest.mark.parametrize("group", ["code editing", "acceptance 0.8"])
def test_nobody_beats_the_oracle(simulated, pair, group):
    cell = simulated(pair, group)
    assert cell.oracle >= max(cell.best, cell.adaptive) >= cell.plain


LAPTOP, F16_B, Q8_B = "laptop 7B, draft 0.15", "x86-b F16, draft 0.22", "x86-b Q8_0, draft 0.39"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "group"),
    [
        (METAL, "code editing"),
        (METAL, "acceptance 0.8"),
        (METAL, "code and prose in turn"),
        (METAL, "long copies"),
        (LAPTOP, "summarising"),
        (LAPTOP, "acceptance 0.9"),
        (LAPTOP, "main 3 × slower"),
        (LAPTOP, "noisy neighbour, 0.8"),
        (F16, "acceptance 0.9"),
        (F16, "maths"),
        (F16_B, "code writing"),
        (F16_B, "collapse"),
        (Q8_B, "acceptance 0.8"),  # in which the first guesses fail, as it happens
    ],
)
def test_the_policy_is_about_as_fast_as_the_best_fixed_choice_in_hindsight(simulated, pair, group):
    cell = simulated(pair, group)
    assert cell.of_best > 0.95
    assert cell.of_plain > 1.1  # there was something to gain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "group"),
    [
        (F16, "always wrong, and sure"),
        (METAL, "always wrong"),
        (LAPTOP, "always wrong"),
        (LAPTOP, "draft dearer than main"),
        (F16, "collapse"),
        (F16, "both 3 × slower"),
        (LAPTOP, "lookup trap"),
        (F16, "deep lookup trap"),
        (Q4, "chat"),
        (Q4, "noisy neighbour, 0.3"),
    ],
)
def test_the_policy_is_hardly_ever_slower_than_plain_decoding(simulated, pair, group):
    assert simulated(pair, group).of_plain > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("pair", [F16, METAL, LAPTOP])
def test_probes_of_a_draft_that_is_always_wrong_cost_little(sim, texts, pair):
    """In a session that is long enough for what was believed at first not to count."""
    pair = next(p for p in sim.PAIRS if p.name == pair)
    traces = [trace for seed in range(4) for trace in texts.drafted([0.0] * 256, [0.4] * 256, seed)]
    calls = sim.adaptive_calls(pair, group := sim.Group("always wrong", traces))
    assert 1 / 1.015 < group.n_tokens * pair.main[1] / sim.seconds(calls, pair, group) <= 1
    last = [role for role, _, said in calls if said > group.n_tokens // 2]
    assert "draft" in last  # it is still asked, now and then


def test_a_draft_that_becomes_good_is_noticed(sim, texts):
    """Where probes are cheap; elsewhere the draft may have too much to catch up with in this answer."""
    pair = next(p for p in sim.PAIRS if p.name == METAL)
    group = sim.Group("good at last", texts.drafted([0.02] * 256 + [0.9] * 256))
    last = [role for role, _, said in sim.adaptive_calls(pair, group) if said > group.n_tokens - 128]
    assert 128 / last.count("main") > 2  # tokens a step


@pytest.mark.slow
def test_a_neighbour_does_not_end_all_asking_of_a_draft(sim, texts):
    """Whatever his calls hit: there was a time when five disturbed ones made the draft look dear for good."""
    pair = next(p for p in sim.PAIRS if p.name == METAL)
    traces = [trace for seed in range(8) for trace in texts.drafted([0.85] * 256, seed=seed)]
    group = sim.Group("noisy session", traces, noisy=True)
    for seed in range(4):
        machine = sim.Machine(pair, group, seed)
        sim.run(group, machine, sim.adaptive(machine), sim.MOST)
        last = [role for role, _, said in machine.calls if said > group.n_tokens - 1024]
        assert 1024 / last.count("main") > 2.5  # tokens a step


@pytest.mark.parametrize("group", ["code editing", "acceptance 0.8"])
def test_a_machine_without_a_draft_has_lookup_and_plain_decoding(simulated, group):
    cell = simulated("x86 135M alone", group)
    assert not cell.which.startswith("draft")
    assert cell.of_best > 0.95
