"""Costs between sessions: measured once, kept under all that they depend on, and never a reason to fail."""

import contextlib
import json
import os

import pytest

from spec_local.calibration import cost_store
from spec_local.core.sampling import SamplingSettings
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies.cost_model import CostModel
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    return {
        name: write_tiny_model(folder / f"{name}.gguf", n_layers=1, noise=noise)
        for name, noise in (("main", 0.0), ("draft", 0.05))
    }


@pytest.fixture
def open_session(paths, own_cache, monkeypatch):
    monkeypatch.setattr("spec_local.session.check_model_file", lambda *args, **kwargs: None)

    def open_session(draft=None, **kwargs):
        kwargs = {"n_ctx": 128, "threads": 1} | kwargs
        return Session.open(paths["main"], paths[draft] if draft else None, **kwargs)

    return open_session


@pytest.fixture
def talk(open_session):
    """A session with one answer: what was said, and who was measured for it."""

    def talk(draft=None, settings=None, **kwargs):
        notes = []
        with open_session(draft, log=notes.append, **kwargs) as session:
            wanted = {"sampling": SamplingSettings(temperature=0), "max_tokens": 8} | (settings or {})
            answer = session.generate("one two", GenerationSettings(**wanted))
            said = "".join(event.text for event in answer if isinstance(event, (Text, Done)))
        assert said
        measured = [note.removeprefix("measuring ").split()[0] for note in notes]
        assert notes == [f"measuring {name} (first use with these settings)" for name in measured]
        return said, sorted(measured)

    return talk


def files(cache):
    return sorted((cache / "costs").iterdir()) if (cache / "costs").is_dir() else []


def test_what_was_measured_is_kept(talk, own_cache):
    said, measured = talk("draft")
    assert measured == ["draft.gguf", "main.gguf"]
    assert len(files(own_cache)) == 2
    assert talk("draft") == (said, [])
    assert talk() == (said, [])  # main costs the same with and without a draft
    assert len(files(own_cache)) == 2  # and nothing half written


def test_a_file_says_what_it_is(talk, own_cache):
    talk()
    (path,) = files(own_cache)
    known = json.loads(path.read_text())
    assert sorted(known) == ["model", "seconds"]
    assert known["model"] == "main.gguf"
    assert {"1", "2", "4", "8"} <= set(known["seconds"])
    assert all(0 < seconds < 10 for seconds in known["seconds"].values())


def test_an_answer_adds_to_what_is_known(talk, own_cache, monkeypatch):
    """Twice as fast as the machine is, and believed at first: then calls that were made outvote it."""
    talk()
    (path,) = files(own_cache)
    content = json.loads(path.read_text())
    kept = {n: seconds / 2 for n, seconds in content["seconds"].items()}
    path.write_text(json.dumps(content | {"seconds": kept}))
    looks = [CostModel({int(n): seconds for n, seconds in kept.items()})]
    monkeypatch.setattr("spec_local.session.measure", lambda *args, **kwargs: looks.pop())
    assert talk(settings={"max_tokens": 64})[1] == []
    assert files(own_cache) == [path]
    assert json.loads(path.read_text())["seconds"]["1"] > kept["1"]


@pytest.mark.parametrize(("looks", "believed"), [((0.1,), True), ((5.0, 0.1), True), ((5.0, 5.0), False)])
def test_what_was_kept_is_believed_if_one_of_two_looks_says_so(
    talk, open_session, own_cache, monkeypatch, looks, believed
):
    """looks: what 7 tokens more are seen to take, in calls of one token; 0.1 is what was kept.

    What is believed is how costs grow, and not how fast the machine was: a draft that was kept as dear would never be asked, and
    never timed, again.
    """
    talk()
    (path,) = files(own_cache)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": {"1": 7.0, "8": 7.7, "16": 9.0}}))
    found = [CostModel({1: 1.0, 8: 1.0 + more}) for more in looks]
    found.append(CostModel({1: 1.0, 16: 11.0}))  # of a whole measurement, if there is one
    monkeypatch.setattr("spec_local.session.measure", lambda *args, **kwargs: found.pop(0))
    with open_session() as session:
        main, _ = session.costs()
        assert main.seconds(16) == pytest.approx(9.0 / 7.0 if believed else 11.0)
    assert len(found) == believed
    known = json.loads(path.read_text())["seconds"]
    assert known["16"] == pytest.approx(9.0 / 7.0 if believed else 11.0)


@pytest.mark.parametrize("settings", [{"policy": "fixed"}, {"policy": "off"}, {"proposer": "none"}], ids=str)
def test_who_does_not_ask_for_costs_pays_none(talk, own_cache, settings):
    assert talk("draft", settings)[1] == []
    assert files(own_cache) == []


def test_an_interrupted_answer_keeps_costs_too(open_session, own_cache):
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


ANOTHER_FORM = {"model": "main.gguf", "seconds": {"1": 0.1}, "watts": 3}
DAMAGED = {
    "empty": b"",
    "half": b'{"model":"main.gguf","seconds":{"1":0.00',
    "bytes": bytes(range(256)),
    "no object": b"[1, 2]",
    "another form": json.dumps(ANOTHER_FORM).encode(),
    "no costs": b'{"model":"main.gguf","seconds":{}}',
    "no seconds": b'{"model":"main.gguf","seconds":{"1":"x"}}',
    "below zero": b'{"model":"main.gguf","seconds":{"1":-0.1}}',
    "no number": b'{"model":"main.gguf","seconds":{"1":NaN}}',
    "endless": b'{"model":"main.gguf","seconds":{"1":Infinity}}',
    "no tokens": b'{"model":"main.gguf","seconds":{"0":0.1}}',
    "lists": b'{"model":"main.gguf","seconds":{"1":[0.1]}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_measured_anew_and_mended(talk, own_cache, content):
    said, _ = talk()
    (path,) = files(own_cache)
    path.write_bytes(content)
    assert talk() == (said, ["main.gguf"])
    assert files(own_cache) == [path]
    assert talk() == (said, [])


def test_a_folder_in_the_place_of_a_file_is_no_error(talk, own_cache):
    said, _ = talk()
    (path,) = files(own_cache)
    path.unlink()
    path.mkdir()
    assert talk() == (said, ["main.gguf"])
    assert files(own_cache) == [path]  # no temporary files


def test_a_cache_folder_that_cannot_be_written_is_no_error(talk, own_cache):
    own_cache.touch()  # a file where the folder should be
    said, measured = talk("draft")
    assert (said, measured) == talk("draft")
    assert measured == ["draft.gguf", "main.gguf"]


def test_costs_are_kept_for_what_they_depend_on(paths, make_context, own_cache, monkeypatch):
    model = Model(paths["main"])
    usual = {"n_ctx": 128, "threads": 1}

    def path(model=model, **kwargs):
        return cost_store.path_of(make_context(model, **usual | kwargs))

    known = path()
    assert known.parent == own_cache / "costs"
    assert path(max_logits=1) == known
    others = [
        path(threads=2),
        path(n_ctx=64),
        path(cache_type="q8_0"),
        path(max_tokens=32),
        path(max_branches=2),
        path(Model(paths["main"], gpu_layers=0)),
        path(Model(paths["draft"])),
    ]
    assert path(max_branches=64) == path(max_branches=2)
    monkeypatch.setattr("spec_local.machine.llama_cpp_build", lambda: "another build")
    others.append(path())
    monkeypatch.undo()
    stat = paths["main"].stat()
    os.utime(paths["main"], ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    others.append(path())
    assert len({known, *others}) == 1 + len(others)


def test_sessions_of_other_settings_measure_for_themselves(talk):
    assert talk()[1] == ["main.gguf"]
    for kwargs in ({"n_ctx": 64}, {"threads": 2}, {"cache_type": "q8_0"}, {"branches": 64}):
        assert talk(**kwargs)[1] == ["main.gguf"], kwargs
        assert talk(**kwargs)[1] == [], kwargs
    assert talk()[1] == []


def test_a_table_comes_back_as_it_went(paths, make_context, own_cache):
    context = make_context(Model(paths["main"]))
    assert cost_store.load(context) is None
    table = CostModel({1: 0.25, 2: 0.4, 64: 3.0})
    cost_store.save(context, table)
    again = cost_store.load(context)
    assert again.costs == table.costs


def test_a_model_file_that_is_gone_is_no_error(tmp_path, make_context, own_cache):
    path = write_tiny_model(tmp_path / "m.gguf", n_layers=1)
    context = make_context(Model(path))
    path.unlink()
    cost_store.save(context, CostModel({1: 1.0}))
    assert cost_store.load(context) is None
