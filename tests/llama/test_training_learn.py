"""A round of training in a process of its own: versions, what it reports, and being ended at any time."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.datastore import datastore
from spec_local.datastore.answer_store import answer_store_of
from spec_local.models.head_versions import HeadVersions
from tests.llama.answers import tokens_of
from tests.llama.test_training_learning import files_with
from tests.llama.test_training_pipeline import generate
from tests.tiny_heads import write_tiny_main

ROUND = """
import sys
from pytest import MonkeyPatch
from spec_local.training import learn, pipeline
from tests.quick_training import shorten
shorten(MonkeyPatch())
own = float(sys.argv[1])
if own >= 0:  # acceptance on the user's answers, after a score that is lower by so much
    from dataclasses import replace
    compared = pipeline._Pipeline._compared
    def made_up(*arguments):
        learned = compared(*arguments)
        name = learn.OWN
        def with_rate(found, rate):
            return {**found, name: replace(found[name], overall=replace(found[name].overall, agreement=rate))}
        before = with_rate(learned.before, 0.5) if learned.before else {}
        return replace(learned, before=before, after=with_rate(learned.after, 0.5 + own))
    pipeline._Pipeline._compared = made_up
learn.main()
"""


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf", end_scale=1.5)


@pytest.fixture
def kept(main_path, monkeypatch, tmp_path):
    """A function that keeps answers to a number of prompts; data and caches are in a folder of the test."""
    for name in ("data", "cache"):  # in this process and in those of rounds
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
        monkeypatch.setattr(
            f"platformdirs.user_{name}_dir", lambda app, name=name: str(tmp_path / name / app)
        )

    def keep(first, n):
        settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=24)
        store = answer_store_of(main_path)
        with Session.open(main_path, "none", n_ctx=256, threads=1) as session:
            tokenize = session.main.model.vocabulary.tokenize
            for i in range(first, first + n):
                prompt = tokenize(f"was for on are with as his they {i} the of and", add_special=True)
                answer = tokens_of(session.generate(prompt, settings))
                store.add(prompt, answer, 0.0)
        return store.answers()

    return keep


@pytest.fixture
def start(main_path):
    """A function that starts a round; its process is ended after the test."""
    with ExitStack() as stack:

        def start(draft=None, *, gain=-1.0, minutes=0.03):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ROUND, str(gain)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            options = {"main": str(main_path), "draft": draft and str(draft), "threads": 1, "offload": "0"}
            process.stdin.write(json.dumps({**options, "minutes": minutes}) + "\n")
            process.stdin.flush()
            return process

        yield start


def events_of(process):
    """All events; the process ends by itself."""
    events = [json.loads(line) for line in process.stdout]
    assert process.wait(30) == 0
    return events


@pytest.mark.slow
def test_rounds_add_versions_if_they_are_better(main_path, kept, start):
    answers = kept(0, 30)
    versions = HeadVersions(main_path)
    events = events_of(start(gain=0.2))
    assert events[-1]["event"] == "version", events[-1]
    assert [e["name"] for e in events if e["event"] == "stage"][-3:] == [
        "training",
        "evaluating",
        "exporting",
    ]
    assert all(0 <= e["share"] <= 1 for e in events if e["event"] == "progress")
    assert [e for e in events if e["event"] == "evaluation" and 0 <= e["user"] <= 1]
    assert (events[-1]["number"], events[-1]["before"]) == (1, {})
    assert events[-1]["after"].keys() == {"user", "built_in"}
    first = versions.current()
    assert (first.number, first.n_answers, first.last_answer) == (1, len(answers), answers[-1].number)
    assert events[-1]["last_answer"] == answers[-1].number
    assert generate(main_path, versions.path(first)) == generate(main_path)

    # The next round continues that head, with the data of the first one. It is hardly better.
    answers = kept(30, 10)
    events = events_of(start(versions.path(first), gain=0.009))
    assert "generating training data" not in [e.get("name") for e in events]
    assert events[-1]["event"] == "unchanged"
    assert events[-1]["before"]["user"] == 0.5
    assert versions.current() == first
    assert versions.last_round == events[-1]["last_answer"] == answers[-1].number
    assert not (versions.folder / "training" / "head.gguf").exists()

    events = events_of(start(versions.path(first), gain=0.0101))
    assert (events[-1]["event"], events[-1]["number"]) == ("version", 2)
    assert versions.current().origin == str(versions.path(first))
    assert versions.rollback() == first


def test_too_few_answers_are_an_event(kept, start):
    kept(0, 3)
    (event,) = events_of(start())
    assert event["event"] == "failed"
    assert "too few to learn from" in event["message"]


def wait_for(process, name):
    """Wait until a stage of a round has begun, and something of it is done."""
    while json.loads(process.stdout.readline()).get("name") != name:
        pass
    while json.loads(process.stdout.readline()).get("share", 0) == 0:
        pass


@pytest.mark.slow
def test_clearing_deletes_what_a_round_that_was_killed_has_left(main_path, kept, start, tmp_path):
    answers = kept(0, 30)
    versions, store = HeadVersions(main_path), answer_store_of(main_path)
    process = start()
    wait_for(process, "training")
    process.kill()
    process.wait()
    assert files_with(versions.folder, answers)
    made = datastore.clear(store.path.parent)
    assert made.deleted == [versions.folder / "training" / "head.gguf.training" / "own"]
    assert files_with(tmp_path, answers) == []


@pytest.mark.slow
def test_clearing_ends_a_round_that_is_running_or_paused(main_path, kept, start, tmp_path):
    answers = kept(0, 30)
    store, process = answer_store_of(main_path), start()
    wait_for(process, "answering your prompts again")
    process.send_signal(signal.SIGSTOP)
    datastore.clear(store.path.parent)
    process.send_signal(signal.SIGCONT)
    event = events_of(process)[-1]
    assert event["event"] == "unchanged"
    assert "were deleted" in event["why"]
    assert files_with(tmp_path, answers) == []
    assert HeadVersions(main_path).all() == []


@pytest.mark.slow
def test_a_round_ends_with_its_input_and_resumes_after_a_kill(kept, start):
    kept(0, 30)
    process = start()
    while json.loads(process.stdout.readline())["event"] != "progress":
        pass
    started = time.monotonic()
    process.stdin.close()
    assert process.wait(10) == 1
    assert time.monotonic() - started < 5

    process = start()
    while json.loads(process.stdout.readline()).get("name") != "training":
        pass
    process.kill()
    process.wait()
    assert events_of(start())[-1]["event"] == "version"
