"""The devices of the models: which placement is the fastest for given costs, and what is refused."""

import sys

import pytest

from spec_local.calibration.placement import PLACEMENTS, DeviceCosts, Placement, choose
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.devices import fixed_gpu_layers, has_metal
from spec_local.policies.cost_model import CostModel
from spec_local.system import machine


def costs(one, several=None):
    """Costs of calls: seconds of one token, and of 17."""
    return CostModel({1: one, 17: several or one})


def placed(metal, cpu, **options):
    """The choice for seconds per call of the main model with 1 and 17 tokens, and of the draft model."""
    found = {}
    for device, (one, several, draft) in {"metal": metal, "cpu": cpu}.items():
        found[device] = DeviceCosts(costs(one, several), costs(draft) if draft else None, **options)
    return choose(found)


# Seconds per call on each device: of the main model with 1 and with 17 tokens, and of the draft model.
WINNERS = {
    ("metal", "metal"): ((0.05, 0.06, 0.004), (0.06, 0.3, 0.01)),
    ("cpu", "cpu"): ((0.10, 0.12, 0.020), (0.05, 0.06, 0.004)),
    ("metal", "cpu"): ((0.05, 0.06, 0.020), (0.06, 0.3, 0.004)),
    ("cpu", "metal"): ((0.10, 0.12, 0.004), (0.05, 0.06, 0.020)),
}


@pytest.mark.parametrize(("best", "seconds"), WINNERS.items(), ids=map(" and ".join, WINNERS))
def test_each_placement_is_the_best_one_for_some_costs(best, seconds):
    choice = placed(*seconds)
    assert choice.best == Placement(*best)
    assert choice.fastest_plain == best[0]
    assert list(choice.drafting) == list(PLACEMENTS)
    fastest = max(choice.drafting.values())
    assert choice.drafting[choice.best] == fastest
    assert fastest > 1.5 * max(choice.plain.values())


def test_plain_decoding_may_be_fastest_elsewhere():
    """A call of one token is faster on the CPU, and one of several on the GPU, which verifies drafts."""
    choice = placed((0.06, 0.065, 0.004), (0.05, 0.4, 0.006))
    assert choice.fastest_plain == "cpu"
    assert choice.best == Placement("metal", "metal")


def test_the_times_of_both_models_add_up():
    """The best chain of n draft tokens at an acceptance rate of 0.8, with costs that do not depend on n."""
    choice = placed((1.0, 1.0, 0.1), (2.0, 2.0, 0.05))
    for placement, main, draft in zip(PLACEMENTS, (1.0, 2.0, 1.0, 2.0), (0.1, 0.05, 0.05, 0.1), strict=True):
        speeds = [sum(0.8**i for i in range(n + 1)) / (main + n * draft) for n in range(17)]
        assert choice.drafting[placement] == pytest.approx(max(speeds))
    assert choice.plain == {"metal": pytest.approx(1.0), "cpu": pytest.approx(0.5)}


def test_ties_go_to_the_simpler_placement():
    same = (0.05, 0.06, 0.004)
    assert placed(same, same).best == Placement("metal", "metal")
    assert placed(same, (0.0495, 0.0594, 0.004)).best == Placement("metal", "metal")  # 1 % is no difference
    assert placed(same, (0.0495, 0.0594, 0.004)).fastest_plain == "metal"
    slower = (0.5, 0.6, 0.004)
    assert placed(slower, same).best == Placement("cpu", "cpu")  # the draft model is as fast on the GPU
    assert placed(same, slower).best == Placement("metal", "metal")
    useless = (0.05, 0.8, 0.05)  # no draft token pays, so that the draft model's device makes no difference
    assert placed(useless, (0.05, 0.8, 0.04)).best == Placement("metal", "metal")


def test_without_a_draft_model_plain_decoding_decides():
    choice = placed((0.06, 0.065, None), (0.05, 0.4, None))
    assert choice.best == Placement("cpu", "cpu")
    assert choice.sentences() == ["Plain decoding is fastest on the CPU (20 tokens/s; Metal 17)."]


def test_a_head_is_where_the_main_model_is():
    choice = placed(*WINNERS["cpu", "metal"], is_head=True)
    assert {(each.main, each.draft) for each in choice.drafting} == {("metal", "metal"), ("cpu", "cpu")}
    assert choice.best == Placement("metal", "metal")


def test_the_longest_draft_is_limited():
    found = {"cpu": DeviceCosts(costs(1.0), costs(0.01))}
    (one,), (many,) = (choose(found, n).drafting.values() for n in (1, 16))
    assert one == pytest.approx(1.8 / 1.01)
    assert many > 3


def test_one_device():
    choice = choose({"cpu": DeviceCosts(costs(0.05), costs(0.004))})
    assert choice.best == Placement("cpu", "cpu")
    assert list(choice.plain) == ["cpu"]


def test_sentences():
    plain, drafts = placed((0.10, 0.12, 0.004), (0.05, 0.06, 0.020)).sentences()
    assert plain == "Plain decoding is fastest on the CPU (20 tokens/s; Metal 10)."
    assert drafts == (
        "With drafts: main on the CPU, draft on Metal (51 tokens/s expected at 0.8 acceptance; both on "
        "Metal 30; both on the CPU 27; main on Metal, draft on the CPU 18)."
    )
    slow, _ = placed((1.0, 1.2, 0.04), (0.7, 1.0, 0.02)).sentences()
    assert slow == "Plain decoding is fastest on the CPU (1.4 tokens/s; Metal 1.0)."


def test_on_a_mac_the_fastest_device_is_found_out(a_mac):
    assert has_metal()
    assert fixed_gpu_layers("auto") is None
    assert fixed_gpu_layers("metal") == -1
    assert fixed_gpu_layers("cpu") == 0


def test_explicit_layers_win(a_mac):
    for given in (-1, 0, 20):
        assert fixed_gpu_layers("auto", given) == given
    assert fixed_gpu_layers("metal", 20) == 20
    assert fixed_gpu_layers("cpu", 0) == 0
    assert fixed_gpu_layers("auto", None, ["10.0.0.2:50052"]) == -1


@pytest.mark.parametrize(
    ("system", "machine_name", "is_apple"),
    [("darwin", "arm64", True), ("darwin", "x86_64", False), ("linux", "aarch64", False)],
)
def test_which_machines_are_macs_with_apple_silicon(monkeypatch, system, machine_name, is_apple):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine_name)
    assert machine.is_apple_silicon() == is_apple


def test_elsewhere_auto_is_what_it_was(pretend, monkeypatch):
    """On other systems the GPU, if any, holds all layers, and llama.cpp is not asked."""
    pretend(is_apple_silicon=False)
    monkeypatch.setattr(runtime.ggml(), "ggml_backend_dev_count", None)
    assert fixed_gpu_layers("auto") == -1
    assert fixed_gpu_layers("auto", 7) == 7
    assert fixed_gpu_layers("cpu") == 0


def test_a_build_without_metal(a_mac):
    a_mac(False)
    assert fixed_gpu_layers("auto") == -1
    with pytest.raises(InvalidRequest, match="built without Metal: reinstall llama-cpp-python") as raised:
        fixed_gpu_layers("metal")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("cpu", 20), "`device=cpu` contradicts `gpu_layers=20`: remove one of them"),
        (("cpu", -1), "`device=cpu` contradicts `gpu_layers=-1`: remove one of them"),
        (("metal", 0), "`device=metal` contradicts `gpu_layers=0`: remove one of them"),
        (("cpu", None, ["10.0.0.2"]), "`device=cpu` is for models on this machine alone: remove it"),
    ],
)
def test_contradictions(a_mac, arguments, why):
    with pytest.raises(InvalidRequest, match=why) as raised:
        fixed_gpu_layers(*arguments)
    assert "\n" not in str(raised.value)


def test_metal_on_another_machine(pretend):
    pretend(is_apple_silicon=False)
    with pytest.raises(
        InvalidRequest, match="is for Macs with Apple silicon, which this machine is not: remove"
    ):
        fixed_gpu_layers("metal")
