"""Conclusions of a benchmark, in words, and the repetition of unclear runs."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from spec_local.bench.conclusions import conclusion, disturbance, plain_spread, reason_to_repeat
from spec_local.bench.figures import Estimate
from spec_local.bench.variants import Variant
from spec_local.settings import GenerationSettings
from spec_local.system.machine import OtherPrograms, is_busy
from tests.unit.test_bench_report import outcome, run

VARIANTS = [Variant(name, GenerationSettings()) for name in ("plain", "speculative")]


@pytest.mark.parametrize(
    ("estimate", "part"),
    [
        (Estimate(1.62, 1.36, 1.94, 8), "1.62 times as fast as plain decoding [1.36, 1.94]."),
        (Estimate(0.81, 0.7, 0.93, 8), "slower: 0.81 times as fast"),
        (Estimate(1.01, 0.94, 1.06, 8), "no difference from plain decoding shown: the interval [0.94, 1.06]"),
        (Estimate(1.0, 0.97, 1.04, 8), "as fast as plain decoding, within 4% [0.97, 1.04]."),
        (Estimate(1.62, 1.36, 1.94, 5), "for these 5 prompts; use 6 or more"),
        (Estimate(1.62, 1.62, 1.62, 1), "1.62 times as fast as plain decoding on this prompt"),
    ],
    ids=["faster", "slower", "unclear", "equal", "few prompts", "one prompt"],
)
def test_conclusions(estimate, part):
    assert part in conclusion(estimate)


def prompts(*rates):
    """Outcomes of a prompt for each pair of rates of plain and of speculative runs."""
    return [outcome("c", f"p{i}", *pair) for i, pair in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([([10.0], [12.0]), ([10.0], [9.0])], "no difference is shown yet"),
        ([([10.0], [12.0]), ([10.0], [11.0])], ""),  # faster
        ([([10.0], [9.0]), ([10.0], [8.0])], ""),  # slower
        ([([10.0], [10.2]), ([10.0], [9.9])], ""),  # the same
        ([([10.0], [10.0])], ""),  # one prompt has no interval
        ([([10.0, 13.0], [14.0, 13.0]), ([10.0, 9.0], [9.0, 9.0])], "no difference is shown yet"),
        # the prompts differ, but the runs of each are steady
        ([([10.0, 10.1], [12.0, 12.1]), ([10.0, 9.9], [9.0, 9.0])], ""),
    ],
)
def test_unclear_results_are_repeated(rates, expected):
    assert reason_to_repeat(prompts(*rates), VARIANTS, 0.0) == expected


def test_results_of_a_busy_machine_are_repeated(pretend):
    pretend(default_threads=8)
    for pair in (([10.0], [20.0]), ([10.0, 13.0], [20.0, 20.0])):
        assert reason_to_repeat(prompts(pair), VARIANTS, 3.0) == "other programs used 3.0 of 8 cores"
        assert reason_to_repeat(prompts(pair), VARIANTS, 0.5) == ""
    assert reason_to_repeat(prompts(([10.0, 10.1], [20.0, 20.0])), VARIANTS, 3.0) == ""


def test_the_spread_of_plain_runs():
    assert plain_spread(prompts(([10.0], [20.0]))) is None
    assert plain_spread(prompts(([8.0, 10.0, 12.0], [20.0] * 3))) == pytest.approx(0.2)
    single = prompts(([10.0], [20.0]))[0]
    assert plain_spread([replace(single, control=run(single.prompt, "plain", 12.0))]) == pytest.approx(1 / 11)
    # different prompts may have different speeds
    assert plain_spread(prompts(([8.0, 8.0], [1.0, 2.0]), ([4.0, 4.0], [1.0, 2.0]))) == 0


def test_a_noisy_machine(pretend):
    pretend(default_threads=8)
    assert disturbance(None, 0.7) == disturbance(0.04, 0.7) == ""
    assert not is_busy(0.7)
    assert is_busy(0.9)
    assert "other programs used 0.9 of 8 cores. Close" in disturbance(0.04, 0.9)
    both = disturbance(0.12, 3.0)
    assert "other programs used 3.0 of 8 cores and plain runs of the same prompt differ by 12%" in both


def test_what_other_programs_use(monkeypatch):
    now = {"clock": 100.0, "system": 50.0, "own": 7.0}
    # as on macOS, where there is no more than this
    monkeypatch.setattr(
        psutil,
        "cpu_times",
        lambda: SimpleNamespace(user=now["system"], nice=1.0, system=2.0, idle=now["clock"]),
    )
    monkeypatch.setattr(os, "times", lambda: (now["own"], 0.5, 0.25, 0.25, 0.0))
    monkeypatch.setattr(time, "monotonic", lambda: now["clock"])
    programs = OtherPrograms()
    now.update(clock=110.0, system=50.0 + 25.0, own=7.0 + 20.0)
    assert programs.cores() == pytest.approx(0.5)  # 25 s of all, 20 s of them its own, in 10 s
    now.update(own=90.0)
    assert programs.cores() == 0  # clocks of different precision
    monkeypatch.setattr(time, "sleep", lambda seconds: now.update(clock=now["clock"] + seconds))
    assert OtherPrograms.now() == 0
