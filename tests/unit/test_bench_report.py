"""Ratios and intervals of runs, and the report in all its formats."""

import csv
import io
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from spec_local.bench import report
from spec_local.bench.figures import geometric_mean, summarise
from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Difference, Outcome, Run
from spec_local.bench.theory import Hindsight
from spec_local.bench.variants import variants
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Statistics
from spec_local.settings import GenerationSettings
from tests.bench_record import RECORD, cells

GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=10)


def run(prompt, variant, rate, number=1, **statistics):
    values = {
        "predicted_n": 10,
        "predicted_s": 10 / rate,
        "prompt_s": 1.0,
        "first_token_s": 1.5,
        "n_steps": 5,
    }
    return Run(prompt, variant, number, [1, 2], "a|b", "length", Statistics(**(values | statistics)))


def outcome(category, name, plain, other, difference=None, achieved=0.5, **statistics):
    prompt = Prompt(category, name, "text")
    runs = {"plain": plain, "speculative": other}
    made = {
        variant: [
            run(prompt, variant, r, i, **(statistics if variant != "plain" else {"n_steps": 10}))
            for i, r in enumerate(rates, 1)
        ]
        for variant, rates in runs.items()
    }
    found = {"speculative": [Hindsight(achieved, error) for error in (0.02, 0.04)]} if achieved else {}
    return Outcome(prompt, made, {"speculative": difference}, found)


DRAFTING = {
    "draft_n": 8,
    "draft_n_accepted": 5,
    "tested_at": [4, 4],
    "accepted_at": [3, 2],
    "steps_by": Counter(draft=4, none=1),
    "profile": {"draft model": 1.0, "propose": 0.5, "main model": 2.0, "verify": 0.25, "commit": 0.25},
}
OUTCOMES = [
    outcome("code", "a", [10.0, 30.0, 11.0], [22.0, 1.0, 33.0], **DRAFTING),
    outcome("code", "b", [10.0], [5.0], Difference(1, 7, 0.0125), achieved=0.25, **DRAFTING),
    outcome("prose", "c", [8.0], [8.0], achieved=None, **(DRAFTING | {"tested_at": [1], "accepted_at": [0]})),
]


def results(**changes):
    values = {
        "record": RECORD,
        "variants": variants(GREEDY, {}),
        "outcomes": OUTCOMES,
        "n_prompts": 3,
        "peak_memory": 123_000_000,
        "other_programs": 0.0,
    }
    return report.Results(**(values | changes))


def test_estimates():
    one = geometric_mean([1.5])
    assert (one.value, one.low, one.high, one.n) == pytest.approx((1.5, 1.5, 1.5, 1))
    assert geometric_mean([2.0, 0.5]).value == pytest.approx(1.0)
    many = geometric_mean(np.exp(np.random.default_rng(1).normal(0.2, 0.3, 100)))
    # the mean of 100 values with a standard deviation of 0.3 has an interval of ±1.96 · 0.03
    assert np.log(many.high / many.low) == pytest.approx(2 * 1.96 * 0.03, rel=0.2)
    assert many.low < many.value < many.high


def test_figures_of_a_variant():
    figures = summarise(OUTCOMES, "speculative")
    # a: medians 22 and 11; b: 0.5; c: 1
    assert figures.by_category["code"].value == pytest.approx(1.0)
    assert figures.by_category["prose"].value == pytest.approx(1.0)
    assert figures.speedup.n == 3
    assert figures.tokens_per_second == 8.0
    assert figures.first_token_s == 1.5
    # with one second per prompt: 10 tokens in 1 + 10/22 s and in 1 + 10/11 s, and so on
    expected = [(1 + 10 / 11) / (1 + 10 / 22), (1 + 1) / (1 + 2), 1]
    assert figures.with_prompt.value == pytest.approx(np.prod(expected) ** (1 / 3))
    assert figures.tokens_per_step == 2.0
    assert figures.acceptance == pytest.approx(5 / 8)
    assert figures.tested_at == [4 * 4 + 1, 4 * 4]
    assert figures.accepted_at == [4 * 3, 4 * 2]
    assert figures.steps_by == {"draft": 20, "none": 5}
    assert figures.shares == pytest.approx({"drafting": 1.5 / 4, "main": 0.5, "rest": 0.5 / 4})
    assert figures.achieved == pytest.approx((0.5 * 0.25) ** 0.5)
    assert figures.theory == pytest.approx(((2 / 0.5) * (0.5 / 0.25)) ** 0.5)
    assert figures.theory_error == pytest.approx(0.03)
    assert [str(prompt) for prompt, _ in figures.differences] == ["code/b"]


def test_figures_of_plain():
    figures = summarise(OUTCOMES, "plain")
    assert figures.speedup.value == 1.0
    assert figures.acceptance is None
    assert figures.theory is None
    assert figures.shares == {"drafting": 0, "main": 0, "rest": 0}


def test_markdown():
    text = report.markdown(results())
    assert cells(text, "main") == [["main", "m.gguf (tiny), 2.0 MB, SHA-256 abababababab…"]]
    assert cells(text, "settings") == [["settings", "1 thread, context 256, MTL (draft: CPU)"]]
    assert cells(text, "prompts") == [["prompts", "3 prompts of 2 categories, 1 run of each variant"]]
    assert cells(text, "answers") == [["answers", "up to 10 tokens, temperature 0"]]
    assert cells(text, "code") == [["code", "1.00 [0.50, 2.00]"]]
    assert cells(text, "prose") == [["prose", "1.00"]]
    assert cells(text, "all, with prompt time") == [["all, with prompt time", "0.96 [0.67, 1.31]"]]
    rates, acceptance, best = (row[1:] for row in cells(text, "speculative"))
    assert rates[:5] == ["8.0", "1.50 s", "2.00", "62% of 40", "37.5%"]
    assert rates[5:] == ["50.0%", "12.5%", "draft 80%, none 20%"]
    assert acceptance == ["71%", "50%"]
    assert best == ["2.83 ×", "± 3%", "35%"]
    assert "identical for 2 of 3 prompts" in text
    assert "code/b after 7 tokens (gap 0.0125)" in text
    assert "speculative: no difference from plain decoding shown" in text
    assert (
        "Do not rely on these figures: plain runs of the same prompt differ by 9% from their median" in text
    )
    assert cells(text, "equal runs") == [["equal runs", "of plain decoding differ by 9.1% from their median"]]
    assert cells(text, "other programs") == [["other programs", "used 0.00 cores"]]


def test_what_drafting_saved():
    saved = {"reading": -1.0, "searching": -0.0001, "draft": 3.0}
    made = results(outcomes=[outcome("code", "a", [1.0], [2.0], **DRAFTING, saved_s=saved)], n_prompts=1)
    rows = cells(report.markdown(made), "speculative")
    # 1 s for the prompt, 5 s for the tokens, and 2 s were saved
    assert ["speculative", "25.0%", "draft 37.5%, reading -12.5%"] in rows
    (plain, speculative) = csv.DictReader(io.StringIO(report.csv_rows(made)))
    assert (plain["saved_s"], float(speculative["saved_s"])) == ("0", pytest.approx(1.9999))
    variants = json.loads(report.as_json(made))["variants"]
    assert [variant["saved_s"] for variant in variants] == [{}, saved]
    assert variants[1]["plain_s"] == pytest.approx(7.9999)


def test_parts_without_results_are_left_out():
    assert "**interrupted: 3 of 5 prompts**" in report.markdown(results(n_prompts=5))
    bare = [replace(o, hindsight={}, differences={"speculative": None}) for o in OUTCOMES]
    text = report.markdown(results(outcomes=bare))
    assert "Best possible" not in text
    assert "speculative: identical for all 3 prompts." in text


def test_many_differences_are_shortened():
    many = [outcome("code", f"p{i}", [1.0], [1.0], Difference(1, i, i / 10)) for i in range(8)]
    text = report.markdown(results(outcomes=many))
    assert "code/p4 after 4 tokens" in text
    assert "code/p5" not in text
    assert "and 3 more" in text
    assert "identical for 0 of 8 prompts" in text
    assert "at most 0.7 apart" in text


def test_bars_of_several_variants():
    both = variants(GREEDY, {"draft-max": [1, 2]})
    one = outcome("code", "a", [2.0], [1.0])
    plain, slower = one.runs["plain"], one.runs["speculative"]
    runs = {"plain": plain, "draft-max=1": slower, "draft-max=2": plain}
    text = report.markdown(results(variants=both, outcomes=[replace(one, runs=runs)], n_prompts=1), width=80)
    bars = [line for line in text.splitlines() if "│" in line]
    assert bars[0] == "    code draft-max=1 " + "█" * 20 + " " * 19 + "│ 0.50"
    assert bars[1] == "         draft-max=2 " + "█" * 39 + "│ 1.00"
    assert len(bars) == 4


def test_csv():
    rows = list(csv.DictReader(io.StringIO(report.csv_rows(results()))))
    assert [(r["category"], r["name"], r["variant"]) for r in rows] == [
        (c, n, w) for c, n in (("code", "a"), ("code", "b"), ("prose", "c")) for w in ("plain", "speculative")
    ]
    assert [float(r["speedup"]) for r in rows] == [1, 2, 1, 0.5, 1, 1]
    assert [r["best_speedup"] for r in rows] == ["", "4.0", "", "2.0", "", ""]
    assert [r["best_error"] for r in rows] == ["", "0.03", "", "0.03", "", ""]
    assert [r["identical"] for r in rows] == ["1", "1", "1", "0", "1", "1"]
    assert (rows[3]["differs_after"], rows[3]["gap"]) == ("7", "0.0125")
    assert (rows[1]["runs"], rows[1]["steps"], rows[1]["accepted"]) == ("3", "5", "5")


def test_json():
    whole = json.loads(report.as_json(results()))
    assert whole["record"] == RECORD
    assert whole["settings"]["plain"]["proposer"] == "none"
    assert whole["settings"]["speculative"]["sampling"]["temperature"] == 0
    assert (whole["prompts_done"], whole["prompts_wanted"], whole["interrupted"]) == (3, 3, False)
    speculative = whole["variants"][1]
    assert speculative["speedup"]["n"] == 3
    assert speculative["conclusion"].startswith("no difference from plain decoding shown")
    assert whole["plain_spread"] == pytest.approx(1 / 11)
    assert whole["other_programs_cores"] == 0
    assert whole["noisy"] is True
    assert speculative["acceptance"] == pytest.approx(5 / 8)
    assert speculative["differences"] == [{"category": "code", "name": "b", "run": 1, "at": 7, "gap": 0.0125}]
    first = whole["prompts"][0]
    assert first["speedup"] == {"speculative": 2.0}
    assert (first["best_speedup"], first["best_error"]) == ({"speculative": 4.0}, {"speculative": 0.03})
    assert len(first["runs"]) == 6
    assert first["runs"][3]["statistics"]["profile"]["draft model"] == 1.0
    assert first["runs"][3]["statistics"]["tested_at"] == [4, 4]


def test_invalid_unicode_can_be_written():
    broken = replace(OUTCOMES[0].runs["plain"][0], text="\udcff")
    runs = OUTCOMES[0].runs | {"plain": [broken]}
    report.as_json(results(outcomes=[replace(OUTCOMES[0], runs=runs)])).encode()
