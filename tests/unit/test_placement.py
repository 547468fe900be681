"""The devices of the models: which placement is the fastest for given costs, and what is refused."""

import pytest

from spec_local.calibration.placement import DeviceCosts, Placement, choose
from spec_local.errors import InvalidRequest
from spec_local.llama.devices import OFFLOADED, ON_CPU, Offload, candidates, fixed_offload
from spec_local.policies.cost_model import CostModel


def costs(one, several=None):
    """Costs of calls: seconds of one token, and of 17."""
    return CostModel({1: one, 17: several or one})


def placed(metal, cpu, **options):
    """The choice for seconds per call of the main model with 1 and 17 tokens, and of the draft model."""
    found = {}
    for device, (one, several, draft) in {"metal": metal, "cpu": cpu}.items():
        found[device] = DeviceCosts(costs(one, several), costs(draft) if draft else None, **options)
    return choose(found)


PLACEMENTS = [
    Placement("metal", "metal"),
    Placement("cpu", "cpu"),
    Placement("metal", "cpu"),
    Placement("cpu", "metal"),
]
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
    assert list(choice.drafting) == PLACEMENTS
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
    assert choice.sentences() == ["Plain decoding is fastest on the CPU (20 tokens/s; metal 17)."]


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
    assert plain == "Plain decoding is fastest on the CPU (20 tokens/s; metal 10)."
    assert drafts == (
        "With drafts: main on the CPU, draft on metal (51 tokens/s expected at 0.8 acceptance; both on "
        "metal 30; both on the CPU 27; main on metal, draft on the CPU 18)."
    )
    slow, _ = placed((1.0, 1.2, 0.04), (0.7, 1.0, 0.02)).sentences()
    assert slow == "Plain decoding is fastest on the CPU (1.4 tokens/s; metal 1.0)."


def test_with_a_gpu_the_fastest_device_is_found_out(a_gpu):
    assert fixed_offload("auto") is None
    assert candidates() == {"metal": OFFLOADED, "cpu": ON_CPU}
    assert fixed_offload("gpu") == OFFLOADED
    for name in ("metal", "METAL", "Metal:"):  # as others write it: CUDA0, cuda:0
        assert fixed_offload(name) == Offload(-1, "metal")
    assert fixed_offload("cpu") == ON_CPU


def test_explicit_layers_win(a_gpu):
    for given in (-1, 0, 20):
        assert fixed_offload("auto", given) == Offload(given)
    assert fixed_offload("metal", 20) == Offload(20, "metal")
    assert fixed_offload("cpu", 0) == ON_CPU
    assert fixed_offload("auto", None, ["10.0.0.2:50052"]) == OFFLOADED


def test_without_a_gpu():
    """The number of layers is kept: costs are stored with it."""
    assert fixed_offload("auto") == OFFLOADED
    assert fixed_offload("auto", 7) == Offload(7)
    assert fixed_offload("cpu") == ON_CPU
    assert candidates() == {"cpu": ON_CPU}
    for device in ("gpu", "vulkan0"):
        with pytest.raises(InvalidRequest, match=f"`device={device}` cannot be used, as .* finds no GPU"):
            fixed_offload(device)


def test_a_gpu_with_another_name(a_gpu):
    with pytest.raises(InvalidRequest, match="`device=vulkan0` is unknown: this machine has metal, cpu"):
        fixed_offload("vulkan0")
    with pytest.raises(InvalidRequest, match="`draft_device=vulkan0` is unknown"):
        fixed_offload("vulkan0", setting="draft_device")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("cpu", 20), "`device=cpu` contradicts `gpu_layers=20`: remove one of them"),
        (("cpu", -1), "`device=cpu` contradicts `gpu_layers=-1`: remove one of them"),
        (("metal", 0), "`device=metal` contradicts `gpu_layers=0`: remove one of them"),
        (("cpu", None, ["10.0.0.2"]), "`device=cpu` is for models on this machine alone: remove it"),
        (("a GPU",), "`device='a gpu'` is unknown: give auto, gpu, cpu, or a name that specdec doctor shows"),
    ],
)
def test_contradictions(a_gpu, arguments, why):
    with pytest.raises(InvalidRequest, match=why) as raised:
        fixed_offload(*arguments)
    assert "\n" not in str(raised.value)
