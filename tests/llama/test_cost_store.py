"""Costs on disk: measured once, stored under everything they depend on, and never a reason to fail."""

import contextlib
import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local.calibration import cost_store
from spec_local.calibration import measure as timing
from spec_local.calibration.cost_store import Conditions
from spec_local.core.calls import run
from spec_local.core.sampling import SamplingSettings
from spec_local.llama import runtime
from spec_local.llama.devices import ON_CPU
from spec_local.llama.draft_vocabulary import USUAL_FIRST
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies.cost_model import CostModel
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    return {
        name: write_tiny_model(folder / f"{name}.gguf", n_layers=1, noise=noise)
        for name, noise in (("main", 0.0), ("draft", 0.05))
    }


@pytest.fixture
def open_session(paths, own_cache, unchecked):

    def open_session(draft=None, **kwargs):
        kwargs = {"n_ctx": 128, "threads": 1} | kwargs
        return Session.open(paths["main"], paths[draft] if draft else None, **kwargs)

    return open_session


@pytest.fixture
def answer(open_session):
    """Generate an answer in a new session; returns its text. Nothing is measured that would be logged."""

    def answer(draft=None, settings=None, **kwargs):
        notes = []
        with open_session(draft, log=notes.append, **kwargs) as session:
            wanted = {"sampling": SamplingSettings(temperature=0), "max_tokens": 8} | (settings or {})
            events = session.generate("one two", GenerationSettings(**wanted))
            text = text_of(events)
        assert text
        assert not notes
        return text

    return answer


@pytest.fixture
def measure(open_session):
    """Measure in a new session; returns the names of the models that were measured."""

    def measure(draft=None):
        notes = []
        with open_session(draft, log=notes.append) as session:
            session.costs()
        measured = [note.removeprefix("measuring ").split()[0] for note in notes]
        assert notes == [f"measuring {name} (first use with these settings)" for name in measured]
        return sorted(measured)

    return measure


def files(cache):
    return sorted((cache / "costs").iterdir()) if (cache / "costs").is_dir() else []


def stored(path):
    return json.loads(path.read_text())


def test_each_model_is_measured_once(measure, answer, own_cache):
    assert measure("draft") == ["draft.gguf", "main.gguf"]
    assert len(files(own_cache)) == 2
    assert measure("draft") == []
    assert measure() == []  # the main model costs the same without a draft model
    answer("draft")
    assert len(files(own_cache)) == 2  # no temporary files
    assert not any(stored(path)["estimates"] for path in files(own_cache))


def test_an_answer_begins_with_estimates_and_the_next_one_with_what_its_calls_took(
    answer, measure, own_cache, monkeypatch
):
    calls = []
    monkeypatch.setattr(timing, "run", lambda call: calls.append(len(call.tokens)) or run(call))
    answer("draft", {"max_tokens": 40, "proposer": "draft"})
    # Twice each, and timed once; again where a call of one token seems slower than one of four.
    assert calls[:4] == [1, 4, 1, 4]
    assert {*calls[4:]} == {1}
    assert len(calls) < 10
    (path,) = (path for path in files(own_cache) if stored(path)["model"] == "main.gguf")
    known = stored(path)
    seen = known["seconds"].keys() - {"1"}
    assert known["estimates"]
    assert not seen & known["estimates"].keys()
    n_calls = len(calls)
    answer("draft")
    assert 1 not in calls[n_calls:]
    assert measure() == ["main.gguf"]
    assert not stored(path)["estimates"]


def test_estimates_do_not_replace_measured_costs(tiny_path, own_cache):
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    cost_store.save(known, CostModel({1: 0.1}, {2: 1.5}))
    assert cost_store.measured(known) is None  # not good enough for reports
    assert cost_store.read(known).costs.costs == {1: 0.1, 2: pytest.approx(0.15)}
    started = time.time()
    cost_store.save(known, CostModel({1: 0.2, 4: 0.3}))
    cost_store.save(known, CostModel({1: 0.1}, {2: 1.5}), started)
    assert cost_store.measured(known).costs.costs == {1: 0.2, 4: 0.3}


@pytest.mark.parametrize("n_first", [0, *USUAL_FIRST])
def test_costs_of_drafting_are_found_with_any_usual_part_of_the_vocabulary(tiny_path, own_cache, n_first):
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    assert cost_store.measured_drafting(known) is None
    cost_store.save(replace(known, n_first=n_first), CostModel({1: 0.1}))
    assert cost_store.measured_drafting(known).costs.costs == {1: 0.1}


def test_a_measurement_that_was_stopped_leaves_estimates(open_session, own_cache):
    with open_session() as session:
        main, _ = session.costs(stopped=lambda: True)
        assert main.estimates
        main, _ = session.costs(stopped=lambda: False)
        assert not main.estimates


def test_the_timed_calls_evaluate_a_text(open_session, own_cache, monkeypatch):
    """In a mixture of experts, calls of equal tokens are faster than those of an answer."""
    lib, calls = runtime.library(), []
    decode = lib.llama_decode

    def recorded(context, batch):
        calls.append(tuple(batch.token[: batch.n_tokens]))
        return decode(context, batch)

    monkeypatch.setattr(lib, "llama_decode", recorded)
    with open_session("draft") as session:
        session.costs()
    assert all(len(set(call)) >= 5 for call in calls if len(call) >= 8)
    assert len({call for call in calls if len(call) == 1}) > 3


def test_an_answer_refines_the_costs(answer, own_cache):
    """Costs of half the real time are used at first; then calls of the answer correct them."""
    answer()
    (path,) = files(own_cache)
    before = {n: seconds / 2 for n, seconds in stored(path)["seconds"].items()}
    path.write_text(json.dumps(stored(path) | {"seconds": before}))
    answer(settings={"max_tokens": 64})
    assert files(own_cache) == [path]
    assert stored(path)["seconds"]["1"] > before["1"]


@pytest.mark.parametrize(
    ("checks", "used"), [((), True), ((0.1,), True), ((5.0, 0.1), True), ((5.0, 5.0), False)]
)
def test_stored_costs_are_used_if_one_of_two_checks_agrees(
    answer, open_session, own_cache, measure_calls, checks, used
):
    """checks: measured time of 7 more tokens, in calls of one token; 0.1 is stored.

    Only relative costs are used, not the speed that the machine had: a draft model stored as expensive would
    never be timed again. Costs that were checked today are not checked again.
    """
    answer()
    (path,) = files(own_cache)
    known = stored(path) | {"seconds": {"1": 7.0, "8": 7.7, "16": 9.0}, "estimates": {}}
    path.write_text(json.dumps(known | {"checked": known["checked"] - 90_000 * bool(checks)}))
    found = [CostModel({1: 1.0, 8: 1.0 + more}) for more in checks]
    measure_calls(lambda *args, **kwargs: found.pop(0))
    with open_session() as session:
        text_of(session.generate("one", GenerationSettings(max_tokens=1)))
        main, _ = session.known_costs
        assert (main.seconds(16) / main.seconds(1) == pytest.approx(9.0 / 7.0)) == used
        assert bool(main.estimates) != used
    assert not found
    assert stored(path)["checked"] == pytest.approx(known["checked"], abs=1000)


@pytest.mark.parametrize(("others", "age", "checked"), [(1, 700, True), (1, 300, False), (0, 700, False)])
def test_costs_of_a_busy_machine_are_checked_after_ten_minutes(
    answer, own_cache, measure_calls, others_use, others, age, checked
):
    others_use(others)
    answer()
    (path,) = files(own_cache)
    known = stored(path)
    assert known["others"] == pytest.approx(others, abs=0.2)
    known |= {"seconds": {"1": 7.0, "8": 7.7}, "estimates": {}, "checked": known["checked"] - age}
    path.write_text(json.dumps(known))
    timed = []

    def measured(*args, **kwargs):
        timed.append(kwargs)
        return CostModel({1: 1.0, 8: 1.1})

    measure_calls(measured)
    others_use(0)
    answer()
    assert bool(timed) == checked
    assert stored(path)["others"] == pytest.approx(0 if checked else others, abs=0.2)


def test_an_interrupted_answer_saves_costs(open_session, own_cache):
    with open_session() as session:
        events = session.generate("one two", GenerationSettings())
        next(events)
        events.close()
    assert len(files(own_cache)) == 1
    session = open_session(threads=2)
    with contextlib.suppress(KeyError), session:
        session.costs()
        raise KeyError
    assert len(files(own_cache)) == 2


DAMAGED = {
    "empty": b"",
    "half": b'{"model":"main.gguf","seconds":{"1":0.00',
    "bytes": bytes(range(256)),
    "not an object": b"[1, 2]",
    "other fields": b'{"model":"main.gguf","seconds":{"1":0.1},"watts":3}',
    "no costs": b'{"model":"main.gguf","seconds":{}}',
    "NaN": b'{"model":"main.gguf","seconds":{"1":NaN}}',
    "lists": b'{"model":"main.gguf","seconds":{"1":[0.1]}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_has_no_costs(tiny_path, own_cache, content):
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    cost_store.save(known, CostModel({1: 0.1}))
    cost_store.path_of(known).write_bytes(content)
    assert cost_store.measured(known) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_that_cannot_be_read_is_replaced_by_a_new_measurement(answer, measure, own_cache, is_folder):
    text = answer()
    (path,) = files(own_cache)
    path.write_bytes(DAMAGED["half"])
    if is_folder:
        path.unlink()
        path.mkdir()
    assert measure() == ["main.gguf"]
    assert answer() == text
    assert files(own_cache) == [path]  # no temporary files
    assert is_folder or measure() == []


def test_a_huge_file_is_not_read(tiny_path, own_cache):
    """A cost model of 300,000 sizes takes weeks to build: its time grows with the cube of their number."""
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    path = cost_store.path_of(known)
    path.parent.mkdir(parents=True)
    for n_sizes, length in [(600, 0), (3, 10**7), (5_000, 0), (300_000, 0)]:
        seconds = {str(i): 1 for i in range(1, n_sizes + 1)}
        path.write_text(json.dumps({"model": "m" * length, "seconds": seconds}, separators=(",", ":")))
        assert cost_store.measured(known) is None
    path.write_text(json.dumps({"model": "m", "seconds": {str(i): 1.0 for i in range(1, 200)}}))
    assert len(cost_store.measured(known).costs.costs) == 199


NUMBERS = st.integers() | st.floats() | st.sampled_from([1e308, 5e-324, 10**400, 86_400.0, True, "1", None])
SIZES = st.integers(0, 200).map(str) | st.sampled_from(["-1", "1.5", "9" * 400, "1e5", "x", "", " 7", "٣"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seconds=st.dictionaries(SIZES, NUMBERS | st.floats(0, 10), max_size=6))
def test_no_file_gives_impossible_costs(tiny_path, own_cache, seconds):
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    path = cost_store.path_of(known)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": "m", "seconds": seconds}))
    if found := cost_store.measured(known):
        assert all(0 < found.costs.seconds(n) < 1e12 for n in (1, 2, 7, 96, 1000))
        assert np.isfinite(found.costs.first(300)).all()


def test_a_cache_folder_that_is_not_writable_is_no_error(answer, measure, own_cache):
    own_cache.touch()  # a file where the folder should be
    assert answer("draft") == answer("draft")
    assert measure("draft") == measure("draft") == ["draft.gguf", "main.gguf"]


def test_files_depend_on_everything_that_costs_depend_on(
    paths, make_context, own_cache, pretend, monkeypatch
):
    model = Model(paths["main"])
    usual = {"n_ctx": 128, "threads": 1}

    def path(model=model, **kwargs):
        return cost_store.path_of(make_context(model, **usual | kwargs))

    known = path()
    assert known.parent == own_cache / "costs"
    assert path(max_logits=1) == path(max_tokens=64) == known
    changes = ({"threads": 2}, {"n_ctx": 64}, {"cache_type": "q8_0"}, {"max_branches": 2})
    others = [path(**change) for change in changes]
    others += [path(Model(paths["main"], offload=ON_CPU)), path(Model(paths["draft"]))]
    assert path(max_branches=64) == path(max_branches=2)
    pretend(llama_cpp_build="another build")
    others.append(path())
    monkeypatch.undo()
    stat = paths["main"].stat()
    os.utime(paths["main"], ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    others.append(path())
    assert len({known, *others}) == 1 + len(others)


def test_no_table_is_kept_in_which_64_tokens_are_quicker_than_8(tiny_path, own_cache):
    known = Conditions(tiny_path, ON_CPU, 1, 128)
    path = cost_store.path_of(known)
    cost_store.save(known, CostModel({1: 1.0, 8: 2.2, 64: 1.5}))
    assert json.loads(path.read_text())["seconds"] == {"1": 1.0, "8": 1.5, "64": 1.5}
    path.write_text(json.dumps({"model": "m", "seconds": {"1": 1.0, "8": 2.2, "64": 1.5}}))
    assert cost_store.measured(known).costs.costs == {1: 1.0, 8: 1.5, 64: 1.5}


def test_a_model_file_that_was_deleted_is_no_error(tmp_path, make_context, own_cache):
    path = write_tiny_model(tmp_path / "m.gguf", n_layers=1)
    context = make_context(Model(path))
    path.unlink()
    cost_store.save(context, CostModel({1: 1.0}))
    assert cost_store.measured(context) is None
