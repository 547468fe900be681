"""Sessions on a Mac, as far as other machines can tell: the devices of their models, chosen by fake costs.

The build here has no GPU, so that models with layers on it run on the CPU: only the number of layers differs.
"""

import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.errors import ContextOverflow, InvalidRequest, ModelFileError
from spec_local.llama import runtime
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.opening import drafters
from spec_local.opening.drafters import Drafter
from spec_local.policies.cost_model import CostModel
from spec_local.session import Session
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

pytestmark = pytest.mark.usefixtures("unchecked", "own_cache")

METAL, CPU = -1, 0
FIRST_USE = "measuring main.gguf and draft.gguf on Metal and on the CPU (first use with these settings)"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placing")
    return [write_tiny_model(folder / f"{name}.gguf", n_layers=1) for name in ("main", "draft")]


# Seconds of a call of one token and of 17, by device.
FASTEST = {
    (METAL, METAL): {"main": {METAL: (0.05, 0.06), CPU: (0.06, 0.3)}, "draft": {METAL: 0.004, CPU: 0.010}},
    (CPU, CPU): {"main": {METAL: (0.10, 0.12), CPU: (0.05, 0.06)}, "draft": {METAL: 0.020, CPU: 0.004}},
    (METAL, CPU): {"main": {METAL: (0.05, 0.06), CPU: (0.06, 0.3)}, "draft": {METAL: 0.020, CPU: 0.004}},
    (CPU, METAL): {"main": {METAL: (0.10, 0.12), CPU: (0.05, 0.06)}, "draft": {METAL: 0.004, CPU: 0.020}},
}
"""By the number of layers on the GPU with which they are fastest, of main and draft."""


@pytest.fixture
def measured(measure_calls):
    """Let calls take given times; returns a function to set them, and a list of what is measured."""
    times, calls = {}, []

    def measure(row, *args, **options):
        role = "draft" if isinstance(row, HeadSequence) or "draft" in row.model.path.name else "main"
        calls.append((role, row.model.gpu_layers))
        seconds = times[role][row.model.gpu_layers]
        one, several = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        return CostModel({1: one, 17: several})

    measure_calls(measure)
    return times, calls


def layers(session):
    """Numbers of layers on the GPU, of the main model and the draft."""
    return tuple(row.model.gpu_layers for row in (session.main, session.draft) if row)


@pytest.fixture
def opened(paths):
    """Open a session; returns where its models are, and the lines that it logged."""

    def opened(main=None, draft=paths[1], **options):
        notes = []
        options = {"n_ctx": 128, "threads": 1} | options
        with Session.open(main or paths[0], draft, log=notes.append, **options) as session:
            return layers(session), notes

    return opened


@pytest.mark.parametrize("fastest", FASTEST, ids=str)
def test_each_model_is_opened_where_the_pair_is_fastest(a_mac, measured, opened, fastest):
    times, _ = measured
    times |= FASTEST[fastest]
    found, notes = opened()
    assert found == fastest
    assert notes[0] == FIRST_USE
    plain, drafts = notes[1:]
    assert plain.startswith(
        f"Plain decoding is fastest on {'Metal' if fastest[0] else 'the CPU'} (20 tokens/s; "
    )
    assert " tokens/s expected at 0.8 acceptance; " in drafts


def test_the_first_use_measures_once(a_mac, measured, opened):
    times, calls = measured
    times |= FASTEST[CPU, METAL]
    assert opened()[0] == (CPU, METAL)
    # Each is measured briefly, after a call that shows whether the machine is as fast as it was.
    assert {*calls} == {(role, device) for role in ("main", "draft") for device in (METAL, CPU)}
    calls.clear()
    assert opened() == ((CPU, METAL), [])
    assert not calls
    assert opened(n_ctx=64)[1][0] == FIRST_USE  # other settings, other costs
    assert calls


def test_costs_that_tune_stored_are_used(a_mac, measured, opened, paths):
    _, calls = measured
    for path, several in zip(paths, FASTEST[METAL, CPU].values(), strict=True):
        for device, seconds in several.items():
            one, more = seconds if isinstance(seconds, tuple) else (seconds, seconds)
            cost_store.save(Conditions(path, device, 1, 128), CostModel({1: one, 17: more}))
    assert opened() == ((METAL, CPU), [])
    assert not calls


def test_estimates_do_not_decide(a_mac, measured, opened, paths):
    """Sessions store them beside what they have seen, which may be a call of one token."""
    times, calls = measured
    times |= FASTEST[CPU, CPU]
    for path in paths:
        for device in (METAL, CPU):
            cost_store.save(Conditions(path, device, 1, 128), CostModel({1: 0.05}, {8: 1.1}))
    assert opened()[1][0] == FIRST_USE
    assert calls


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpu_layers": -1}, (METAL, METAL)),
        ({"gpu_layers": 0}, (CPU, CPU)),
        ({"gpu_layers": 7}, (7, 7)),
        ({"device": "metal"}, (METAL, METAL)),
        ({"device": "cpu"}, (CPU, CPU)),
        ({"device": "metal", "gpu_layers": 3}, (3, 3)),
        ({"reproducible": True}, (CPU, CPU)),  # works on no other device
    ],
    ids=str,
)
def test_what_is_asked_for_is_not_measured(a_mac, measured, opened, options, expected):
    _, calls = measured
    assert opened(**options) == (expected, [])
    assert not calls


def test_elsewhere_nothing_has_changed(measured, opened):
    """As many layers as possible, and nothing is measured."""
    _, calls = measured
    assert opened() == ((METAL, METAL), [])
    assert opened(device="cpu") == ((CPU, CPU), [])
    assert not calls
    with pytest.raises(InvalidRequest, match="is for Macs with Apple silicon"):
        opened(device="metal")


def test_without_a_draft(a_mac, measured, opened):
    times, calls = measured
    times["main"] = {METAL: (0.06, 0.065), CPU: (0.05, 0.4)}
    assert opened(draft=None) == (
        (CPU,),
        [
            "measuring main.gguf on Metal and on the CPU (first use with these settings)",
            "Plain decoding is fastest on the CPU (20 tokens/s; Metal 17).",
        ],
    )
    calls.clear()
    assert opened(draft=None) == ((CPU,), [])
    assert not calls


def test_a_model_that_is_too_large_for_the_gpu(a_mac, measured, opened, monkeypatch):
    times, _ = measured
    times |= FASTEST[METAL, METAL]
    create = Model.__init__

    def limited(model, path, *, gpu_layers=-1, **options):
        if gpu_layers:
            raise ContextOverflow("not enough memory: use a smaller model")
        create(model, path, gpu_layers=gpu_layers, **options)

    monkeypatch.setattr(Model, "__init__", limited)
    reason = "`device=metal` cannot be used for these models: not enough memory: use a smaller model"
    assert opened() == ((CPU, CPU), [FIRST_USE, reason])


def test_files_that_cannot_be_used_anywhere(a_mac, opened, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"damaged\.gguf"):
        opened(damaged)


def test_which_device_a_session_shows(devices, paths, monkeypatch):
    """The names of llama.cpp, in the first line of a chat and in the report of a benchmark."""
    devices(("Vulkan", 1), ("CPU", 0))
    for options, shown in (({}, "Vulkan"), ({"device": "cpu"}, "CPU"), ({"gpu_layers": 1}, "Vulkan and CPU")):
        with Session.open(*paths, n_ctx=64, threads=1, **options) as session:
            assert session.device == shown
            if options != {"gpu_layers": 1}:
                monkeypatch.setattr(session.draft.model, "gpu_layers", -1 - session.main.model.gpu_layers)
                assert session.device == (
                    "Vulkan (draft: CPU)" if shown == "Vulkan" else "CPU (draft: Vulkan)"
                )


@pytest.mark.parametrize(
    ("found", "used"),
    [
        ([("CPU", 0)], []),
        ([("CUDA", 1), ("Vulkan", 2), ("CPU", 0)], ["CUDA"]),
        ([("Vulkan", 2), ("BLAS", 3), ("CPU", 0)], ["Vulkan"]),
        ([("CPU", 0), ("RPC", 1)], []),
        ([("Vulkan", 1), ("CPU", 0), ("RPC", 1)], ["Vulkan"]),
    ],
    ids=str,
)
def test_the_gpus_of_this_machine(devices, paths, found, used):
    """A worker on another machine is a device of the same kind: models of this machine are not on it."""
    devices(*found)
    assert list(runtime.gpus().values()) == used
    assert Model(paths[0], weights=False).is_on_gpu == bool(used)


def test_a_draft_that_is_found(a_mac, measured, opened, paths, monkeypatch):
    times, calls = measured
    times |= FASTEST[CPU, METAL]
    monkeypatch.setattr(
        drafters, "find_drafters", lambda conditions, spare: iter([Drafter(paths[1], "a test", True)])
    )
    found, notes = opened(draft="auto")
    assert found == (CPU, METAL)
    assert [note.partition(" ")[0] for note in notes] == ["measuring", "Plain", "With", "drafting"]
    calls.clear()
    found, notes = opened(draft="auto")
    assert found == (CPU, METAL)
    assert [note.partition(" ")[0] for note in notes] == ["drafting"]
    assert not calls


@pytest.fixture(scope="module")
def heads(folder):
    """Of each kind of head, the main model's file and the head's."""
    main = write_tiny_main(folder / "main-of-head.gguf")
    return {
        "eagle": (main, write_tiny_eagle(folder / "eagle.gguf")),
        "mtp": (write_tiny(folder / "own-layer.gguf", "qwen35", n_mtp=1), None),
        "dflash": (main, write_tiny_block_head(folder / "blocks.gguf")),
    }


@pytest.mark.parametrize("kind", ["eagle", "mtp", "dflash"])
def test_a_head_is_where_the_main_model_is(a_mac, measured, opened, heads, kind):
    times, calls = measured
    # Alone, the main model is faster on the CPU, and the head, too.
    times |= {"main": {METAL: (0.06, 0.065), CPU: (0.05, 0.4)}, "draft": {METAL: 0.006, CPU: 0.002}}
    found, notes = opened(*heads[kind])
    assert found == (METAL, METAL)
    assert "main on" not in " ".join(notes)
    calls.clear()
    found, notes = opened(*heads[kind])
    assert found == (METAL, METAL)
    assert not [note for note in notes if note.startswith("measuring")]
    assert not calls
