"""What pairs of the catalog are expected to gain, by hand-made sizes and published acceptances."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.kernels.choice import SIZES
from spec_local.llama.devices import OFFLOADED
from spec_local.models import catalog, expected_gains
from spec_local.models.catalog import ModelEntry, PairEntry, PublishedAcceptance
from spec_local.models.expected_gains import USUAL_RATE, Products, estimated
from spec_local.policies.cost_model import CostModel
from spec_local.system.machine import default_threads
from tests.named_models import write_catalog

FLAT = Products({kind: dict.fromkeys(SIZES, 1.0) for kind in ("Q4_K", "Q6_K", "Q8_0")})
"""A machine on which a call of many tokens takes as long as one of a single token."""
STEEP = Products({kind: {n: float(n) for n in SIZES} for kind in ("Q4_K", "Q6_K", "Q8_0")})
"""One on which it takes as long as so many calls."""


@pytest.fixture(autouse=True)
def own_folder(empty_home):
    pass


def model(size, name="m-Q8_0.gguf", **facts):
    return {"repo": "a/b-GGUF", "file": name, "rounded_size": size, **facts}


def accepted(per_step, draft):
    return PublishedAcceptance(per_step=per_step, draft=draft, source="s")


def known(tmp_path, models, **acceptances):
    """Pairs of `main` with each other model, by the model's name."""
    write_catalog(tmp_path / "config", models)
    return {
        name: PairEntry(main="main", draft=name, note="n", acceptance=acceptances.get(name))
        for name in models
        if name != "main"
    }


@pytest.mark.parametrize(
    ("per_step", "draft", "rate"),
    [(1.5, 1, 0.5), (1.75, 2, 0.5), (2.533, 3, 0.7), (4.0, 3, 1.0), (1.0001, 7, 0.0001)],
)
def test_the_rate_of_a_published_acceptance(per_step, draft, rate):
    found = accepted(per_step, draft).rate
    assert found == pytest.approx(rate, abs=0.003)
    assert sum(found**i for i in range(draft + 1)) == pytest.approx(per_step)


def test_a_small_model_takes_a_call_for_each_draft_token_and_a_block_one(tmp_path):
    sizes = {"main": model(1000), "small": model(100), "block": model(100, head="dflash")}
    pairs = known(tmp_path, sizes, small=accepted(2.533, 3), block=accepted(2.533, 3))
    small, block = (estimated(pairs[name], FLAT) for name in ("small", "block"))
    rate = pairs["small"].acceptance.rate
    tokens = [sum(rate**i for i in range(n + 1)) for n in range(16)]
    assert small.speedup == pytest.approx(max(tokens[n] / (1 + 0.1 * n) for n in range(16)))
    assert block.speedup == pytest.approx(tokens[3] / 1.1)
    assert (small.draft_length, block.draft_length) == (4, 3)  # no longer block than was measured


def test_where_larger_calls_take_longer_nothing_gains(tmp_path):
    pairs = known(tmp_path, {"main": model(1000), "small": model(100)})
    gain = estimated(pairs["small"], STEEP)
    assert (gain.draft_length, gain.speedup) == (0, 1.0)


def test_what_calls_read_counts_and_not_the_size_of_the_file(tmp_path):
    sizes = {"main": model(1000, reads=800), "head": model(500, head="eagle3", reads=80)}
    pairs = known(tmp_path, sizes, head=accepted(1.5, 1))
    assert estimated(pairs["head"], FLAT).speedup == pytest.approx(1.5 / 1.1)


def test_types_that_are_slower_to_read_make_a_draft_expensive(tmp_path):
    slow = Products({"Q8_0": dict.fromkeys(SIZES, 1.0), "Q3_K": dict.fromkeys(SIZES, 3.0)})
    sizes = {"main": model(1000), "fast": model(100), "slow": model(100, "m-Q3_K.gguf")}
    pairs = known(tmp_path, sizes)
    fast, slower = (estimated(pairs[name], slow).speedup for name in ("fast", "slow"))
    assert fast == estimated(pairs["fast"], FLAT).speedup > slower


def test_a_type_that_was_not_measured_is_assumed_to_be_usual(tmp_path):
    pairs = known(tmp_path, {"main": model(1000), "other": model(100, "m.gguf")})
    assert estimated(pairs["other"], FLAT) == estimated(pairs["other"], Products())


def test_experts_are_read_by_more_tokens(tmp_path):
    """8 of 10 bytes are experts, of which a token reads an eighth: 3 of 10 bytes, and two tokens 3.875."""
    (entry,) = [ModelEntry(**{"description": "d", "licence": "l"} | model(1000, experts=EXPERTS))]
    (costs,) = FLAT.costs(entry)
    assert [costs.seconds(n) for n in (1, 2)] == pytest.approx([300.0, 200 + 800 * (1 - (7 / 8) ** 2)])


EXPERTS = {"size": 800, "used": 1, "of": 8}


def test_dspark_corrects_each_token(tmp_path):
    main, head = 10**10, 10**9
    sizes = {"main": model(main), "dflash": model(head, head="dflash"), "dspark": model(head, head="dspark")}
    pairs = known(tmp_path, sizes, dflash=accepted(3, 7), dspark=accepted(3, 7))
    dflash, dspark = (estimated(pairs[name], FLAT).speedup for name in ("dflash", "dspark"))
    assert dflash / dspark == pytest.approx(1 + 7 * 0.041 / 11, abs=0.002)


def test_no_gain_of_a_head_without_a_published_acceptance(tmp_path):
    sizes = {"main": model(1000), "head": model(100, head="mtp"), "small": model(100), "unknown": model(1)}
    del sizes["unknown"]["rounded_size"]
    pairs = known(tmp_path, sizes)
    assert estimated(pairs["head"], FLAT) is None
    assert estimated(pairs["unknown"], FLAT) is None
    assert estimated(pairs["small"], FLAT).speedup > 1.5
    same = PairEntry(main="main", draft="small", note="n", acceptance=accepted(1 + USUAL_RATE, 1))
    assert estimated(same, FLAT).speedup == pytest.approx(estimated(pairs["small"], FLAT).speedup)


def write_acceptance(tmp_path, pair, per_step, draft):
    path = tmp_path / "config" / "models.toml"
    known = f"acceptance = {{per_step = {per_step}, draft = {draft}, source = {json.dumps('s')}}}"
    path.write_text(path.read_text().replace(f"[pairs.{pair}]", f"[pairs.{pair}]\n{known}"))
    catalog._catalog.cache_clear()


def test_the_best_draft_of_a_main_model(tmp_path):
    models = {"main": model(1000), "a": model(100), "b": model(100, head="eagle3"), "c": model(102)}
    pairs = {f"with-{name}": ("main", name) for name in "abc"}
    write_catalog(tmp_path / "config", models, pairs)
    gains = expected_gains.expected_gains(FLAT)
    assert [gains[f"with-{name}"].n_rivals for name in "ac"] == [0, 0]  # all would have the same rate
    write_acceptance(tmp_path, "with-b", 1.9, 3)
    gains = expected_gains.expected_gains(FLAT)
    assert [(gains[name].n_rivals, gains[name].is_best) for name in pairs] == [
        (2, True),
        (2, False),
        (2, True),  # nearly as fast
    ]
    write_acceptance(tmp_path, "with-a", 1.2, 3)
    gains = expected_gains.expected_gains(FLAT)
    assert [gains[name].is_best for name in pairs] == [False, False, True]
    gains = expected_gains.expected_gains(STEEP)
    assert not any(gains[name].is_best for name in pairs)


def test_costs_that_were_measured_here_come_first(tmp_path):
    models = {"main": model(1000), "small": model(100)}
    write_catalog(tmp_path / "config", models, {"pair": ("main", "small")})
    files = {name: tmp_path / f"{name}.gguf" for name in models}
    for path in files.values():
        path.write_bytes(b"no header")
    estimate = expected_gains.expected_gains(FLAT, files)["pair"]
    assert not estimate.is_measured
    for name, seconds in (("main", 1.0), ("small", 0.01)):
        costs = CostModel(dict.fromkeys((1, 4, 16), seconds))
        cost_store.save(Conditions(files[name], OFFLOADED, default_threads(), 4096), costs)
    gain = expected_gains.expected_gains(FLAT, files)["pair"]
    assert gain.is_measured
    assert gain.speedup > 1.2 * estimate.speedup
    files.pop("small")
    assert expected_gains.expected_gains(FLAT, files)["pair"] == estimate


def test_this_machine_is_known_or_usual():
    products = Products.of_this_machine()
    assert {2, 4, 8, 16} <= set(products.usual)
    assert all(set(SIZES[:7]) <= set(seconds) for seconds in products.seconds.values())


def test_the_shipped_heads_are_compared_with_small_models():
    catalog._catalog.cache_clear()
    gains = expected_gains.expected_gains(FLAT)
    mains = {catalog.pairs()[name].main for name, gain in gains.items() if gain.n_rivals}
    assert {"qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama3.1-8b"} <= mains
    for name in mains:
        of_main = [gain for each, gain in gains.items() if catalog.pairs()[each].main == name]
        assert any(gain.is_best for gain in of_main)
    assert all(1.0 <= gain.speedup < 4 for gain in gains.values())


ENTRIES = tomllib.loads((Path(__file__).parents[2] / "benchmarks" / "processors.toml").read_text())
COMPLETE = [
    entry
    for entry in ENTRIES["processor"]
    if entry["times"].keys() >= {"Q4_K", "Q6_K", "Q8_0", "Q4_0", "F16"}
]


def comparisons(products):
    """The gains of each head of the catalog, and of the small model for the same main model."""
    gains, pairs = expected_gains.expected_gains(products), catalog.pairs()
    heads = {name for name in gains if catalog.entry(pairs[name].draft).head}
    return {
        (head, small): (gains[head].speedup, gains[small].speedup)
        for head in heads
        for small in gains.keys() - heads
        if pairs[head].main == pairs[small].main
    }


@pytest.mark.parametrize("theirs", [False, True], ids=["specdec", "llama.cpp"])
@pytest.mark.parametrize("entry", COMPLETE, ids=lambda entry: entry["name"])
def test_choices_on_machines_that_were_not_measured(entry, theirs):
    """Nine of ten are those of the times of products there, or as fast."""
    catalog._catalog.cache_clear()
    known = {
        kind: {
            n: float(np.interp(n, [*map(int, times)], [both[theirs] for both in times.values()]))
            for n in SIZES[:7]
        }
        for kind, times in entry["times"].items()
    }
    has_avx512 = "AVX-512" in entry["name"] and not theirs
    usual = Products(usual=expected_gains._ON_AVX512) if has_avx512 else Products()
    there, chosen = comparisons(Products(known)), comparisons(usual)
    right = [
        max(gains) <= expected_gains._NEARLY * gains[chosen[names][0] < chosen[names][1]]
        for names, gains in there.items()
    ]
    assert len(right) >= 10
    assert sum(right) >= 0.9 * len(right)
