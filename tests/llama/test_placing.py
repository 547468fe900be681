"""The devices of a session's models, chosen by fake costs; the CPU computes in place of a GPU."""

import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.errors import ContextOverflow, InvalidRequest, ModelFileError
from spec_local.llama.devices import OFFLOADED, ON_CPU, Offload
from spec_local.llama.fitting import MARGIN, free_bytes
from spec_local.llama.gguf_tensors import bytes_by_layer
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

METAL, CPU = OFFLOADED, ON_CPU
FIRST_USE = "measuring main.gguf and draft.gguf on metal and on the CPU (first use with these settings)"


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
    times, calls, sizes = {}, [], {}

    def measure(row, *args, **options):
        role = "draft" if isinstance(row, HeadSequence) or "draft" in row.model.path.name else "main"
        calls.append((role, row.model.offload))
        sizes.setdefault(row.model.offload, set()).update(options.get("sizes", ()))
        seconds = times[role][row.model.offload]
        if isinstance(seconds, Exception):
            raise seconds
        one, several = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        return CostModel({1: one, 17: several})

    measure_calls(measure)
    yield times, calls
    if 64 in sizes.get(METAL, ()):  # kernels for more than eight tokens begin with 9
        assert 9 in sizes[METAL]
        assert 9 not in sizes.get(CPU, ())


def layers(session):
    """Where they run, of the main model and the draft."""
    return tuple(row.model.offload for row in (session.main, session.draft) if row)


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
def test_each_model_is_opened_where_the_pair_is_fastest(a_gpu, measured, opened, fastest):
    times, _ = measured
    times |= FASTEST[fastest]
    found, notes = opened()
    assert found == fastest
    assert notes[0] == FIRST_USE
    plain, drafts = notes[1:]
    assert plain.startswith(
        f"Plain decoding is fastest on {'the CPU' if fastest[0] == CPU else 'metal'} (20 tokens/s; "
    )
    assert " tokens/s expected at 0.8 acceptance; " in drafts


def test_the_first_use_measures_once(a_gpu, measured, opened):
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


def test_costs_that_tune_stored_are_used(a_gpu, measured, opened, paths):
    _, calls = measured
    for path, several in zip(paths, FASTEST[METAL, CPU].values(), strict=True):
        for device, seconds in several.items():
            one, more = seconds if isinstance(seconds, tuple) else (seconds, seconds)
            cost_store.save(Conditions(path, device, 1, 128), CostModel({1: one, 17: more}))
    assert opened() == ((METAL, CPU), [])
    assert not calls


def test_estimates_do_not_decide(a_gpu, measured, opened, paths):
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
        ({"gpu_layers": 7}, (Offload(7), Offload(7))),
        ({"device": "gpu"}, (METAL, METAL)),
        ({"device": "metal"}, (Offload(-1, "metal"), Offload(-1, "metal"))),
        ({"device": "cpu"}, (CPU, CPU)),
        ({"device": "metal", "gpu_layers": 3}, (Offload(3, "metal"), Offload(3, "metal"))),
        ({"draft_device": "cpu"}, (METAL, CPU)),
        ({"device": "cpu", "draft_device": "gpu"}, (CPU, METAL)),
        ({"reproducible": True}, (CPU, CPU)),  # works on no other device
    ],
    ids=str,
)
def test_what_is_asked_for_is_not_measured(a_gpu, measured, opened, options, expected):
    _, calls = measured
    assert opened(**options) == (expected, [])
    assert not calls


def test_without_a_gpu(measured, opened):
    """Nothing is measured."""
    _, calls = measured
    assert opened() == ((METAL, METAL), [])
    assert opened(device="cpu") == ((CPU, CPU), [])
    assert not calls
    with pytest.raises(InvalidRequest, match="`device=metal` cannot be used"):
        opened(device="metal")
    with pytest.raises(InvalidRequest, match="`draft_device=gpu` cannot be used"):
        opened(draft_device="gpu")


def test_without_a_draft(a_gpu, measured, opened):
    times, calls = measured
    times["main"] = {METAL: (0.06, 0.065), CPU: (0.05, 0.4)}
    assert opened(draft=None) == (
        (CPU,),
        [
            "measuring main.gguf on metal and on the CPU (first use with these settings)",
            "Plain decoding is fastest on the CPU (20 tokens/s; metal 17).",
        ],
    )
    calls.clear()
    assert opened(draft=None) == ((CPU,), [])
    assert not calls


def test_a_model_that_cannot_be_used_on_the_gpu(a_gpu, measured, opened):
    times, _ = measured
    times |= FASTEST[METAL, METAL]
    times["main"] = times["main"] | {METAL: ContextOverflow("not enough memory: use a smaller model")}
    reason = "`device=metal` cannot be used for these models: not enough memory: use a smaller model"
    assert opened() == ((CPU, CPU), [FIRST_USE, reason])


def test_files_that_cannot_be_used_anywhere(a_gpu, opened, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"damaged\.gguf"):
        opened(damaged)


@pytest.fixture
def opened_session(paths):
    """A session, to look at after it was closed."""

    def opened(draft=paths[1], **options):
        with Session.open(paths[0], draft, n_ctx=128, threads=1, **options) as session:
            return session

    return opened


def test_which_device_a_session_shows(a_gpu, opened_session):
    """In the first line of a chat and in the report of a benchmark."""
    for options, shown in (
        ({"device": "gpu"}, "metal"),
        ({"device": "metal"}, "metal"),
        ({"device": "cpu"}, "CPU"),
        ({"draft_device": "cpu"}, "metal (draft: CPU)"),
        ({"gpu_layers": 1}, "metal (1 of 2 layers)"),
    ):
        assert opened_session(**options).device == shown


def test_layers_that_do_not_fit_stay_on_the_cpu(a_gpu, opened, opened_session, paths):
    (layer,), output = bytes_by_layer(paths[0], 1)
    caches = Model(paths[0], weights=False).kv_bytes(128)
    for spare, n in ((-1, 0), (output - 1, 0), (output, 1), (output + layer + caches - 1, 1)):
        a_gpu(free=MARGIN + spare)
        session = opened_session(device="gpu", draft=None)
        assert session.main.model.n_offloaded == n
        assert session.device == ("metal (1 of 2 layers)" if n else "CPU")
    a_gpu(free=MARGIN + output + layer + caches)
    assert opened_session(device="gpu", draft=None).main.model.n_offloaded == -1


@pytest.mark.parametrize("is_integrated", [False, True])
def test_the_memory_of_a_separate_gpu_counts(a_gpu, opened_session, paths, is_integrated):
    """In place of the machine's, of which a model on it needs none; an integrated one shares that."""
    header = Model(paths[0], weights=False)
    free = header.size + header.kv_bytes(128)
    a_gpu(free=MARGIN + free, is_integrated=is_integrated)
    assert (free_bytes(OFFLOADED) == free) is not is_integrated
    assert free_bytes(ON_CPU) != free
    for options, is_there in (
        ({"device": "gpu"}, True),
        ({"device": "cpu"}, False),
        ({"gpu_layers": 1}, False),
    ):
        model = opened_session(draft=None, **options).main.model
        assert model.has_own_memory is (is_there and not is_integrated)


def test_answers_at_a_time_fit_into_the_memory_of_a_separate_gpu(a_gpu, paths):
    cache = Model(paths[0], weights=False).kv_bytes(2048)
    for n in (2, 5):
        a_gpu(free=MARGIN + 2 * n * cache, is_integrated=False)
        with Session.open(paths[0], n_ctx=2048, threads=1, device="gpu", parallel=None) as session:
            assert session.n_parallel == n


def test_a_draft_that_is_found(a_gpu, measured, opened, paths, monkeypatch):
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
def test_a_head_is_where_the_main_model_is(a_gpu, measured, opened, heads, kind):
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


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
@pytest.mark.parametrize(("device", "draft_device"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_head_follows_the_main_model_whatever_is_asked_for(
    a_gpu, opened, heads, kind, device, draft_device
):
    """On the CPU, it would end the process: it shares tensors with a main model that is on a GPU."""
    found, _ = opened(*heads[kind], device=device, draft_device=draft_device)
    assert found == ((METAL, METAL) if device == "gpu" else (CPU, CPU))
