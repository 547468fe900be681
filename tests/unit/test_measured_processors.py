"""Measured processors, replayed through the choice of kernels: see benchmarks/processors.py."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from spec_local.kernels import choice

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENTRIES = tomllib.loads((BENCHMARKS / "processors.toml").read_text())["processor"]


@pytest.fixture(scope="module")
def replaying():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import processors

        yield processors
        for name in ("processors", "simulate", "traces", "common"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def answers(replaying):
    return replaying.answers_of_each_kind(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry["name"] for entry in ENTRIES])
def test_no_choice_would_be_two_per_cent_better(replaying, answers, name):
    models = [each for each in replaying.processors() if each.name.startswith(f"{name}: ")]
    assert models
    for each in models:
        found = replaying.replay(each, answers)
        assert found.gain >= 0.98 * found.best, each.name
        assert found.best > 1


@pytest.mark.slow
def test_a_rule_that_looks_at_one_token_only_would_fail(replaying, answers, monkeypatch):
    def slower_at_one_token(kind, times):
        return 0 if times.speed(1) < 0.98 else None

    zen_4 = replaying.processors()[0]
    assert zen_4.name.startswith("Zen 4")
    monkeypatch.setattr(replaying, "most_tokens", slower_at_one_token)
    found = replaying.replay(zen_4, answers)
    assert found.gain < 0.85 * found.best


@pytest.mark.slow
def test_sessions_are_those_that_were_recorded(replaying, monkeypatch, capsys):
    simulate = sys.modules["simulate"]
    lengths = {name: each for name, each in simulate.FIXED.items() if name in ("draft 2", "draft 7")}
    monkeypatch.setattr(simulate, "FIXED", lengths)
    monkeypatch.setattr(replaying, "N_DRAFT", (2, 7))
    replaying.print_tokens_per_call()
    printed = ast.literal_eval("{" + capsys.readouterr().out + "}")
    assert printed == {kind: (1, rates[2], rates[5]) for kind, rates in choice._TOKENS_PER_CALL.items()}
