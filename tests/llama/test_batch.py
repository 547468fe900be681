"""Batches on real llama.cpp: seeds, order, resuming, and prompts that fail."""

import json
from dataclasses import replace

import pytest

from spec_local.batch.answers import open_answers
from spec_local.batch.runner import read_entries, run
from spec_local.chat.request import Request
from spec_local.engine import request as engine_request
from spec_local.errors import DeadEnd, InvalidRequest
from spec_local.llama.open import open_rows
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.unfiltered import unfiltered

SETTINGS = GenerationSettings(unfiltered(temperature=1.5), seed=11, max_tokens=12, proposer="none")
TEXTS = ["the time is long", "who may be there", "the time is long", "what will people do"]


@pytest.fixture(params=[1, 3], ids=["one at a time", "three at a time"])
def session(request, tiny_model):
    rows = open_rows(tiny_model, request.param, n_ctx=256, threads=1)
    session = Session(rows[0], more=[(row, None) for row in rows[1:]])
    yield session
    session.close()
    rows[0].close()


@pytest.fixture
def batch(session, tiny_path, tmp_path):
    """Answer lines into a file; returns its records by index, and the outcomes of the run."""
    path = tmp_path / "answers.jsonl"

    def answer(*lines, settings=SETTINGS, cancelled=lambda: False, **more):
        raw = [json.dumps({"prompt": line} if isinstance(line, str) else line).encode() for line in lines]
        entries = read_entries(raw, "prompts", tiny_path, settings, **more)
        with open_answers(path) as answers:
            outcomes = list(run(session, answers.unanswered(entries), answers, cancelled=cancelled))
        records = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert len({record["index"] for record in records}) == len(records)
        return {record["index"]: record for record in records}, outcomes

    answer.path = path
    return answer


def test_an_answer_does_not_depend_on_those_before_it(batch):
    records, outcomes = batch(*TEXTS)
    assert [outcome.entry.index for outcome in outcomes] == [0, 1, 2, 3]
    contents = [records[n]["content"] for n in range(4)]
    assert contents[0] != contents[2]  # the same prompt with another seed
    assert [records[n]["seed"] for n in range(4)] == [11, 12, 13, 14]
    lines = batch.path.read_bytes().splitlines(True)
    batch.path.write_bytes(lines[3] + lines[1][:-20])  # only the last answer, and a partial line
    records, outcomes = batch(*TEXTS)
    assert [outcome.entry.index for outcome in outcomes] == [0, 1, 2]
    assert [records[n]["content"] for n in range(4)] == contents
    _, outcomes = batch(*TEXTS)
    assert outcomes == []


@pytest.mark.parametrize(
    "error", [DeadEnd("no token may follow"), InvalidRequest("the grammar takes too long")]
)
def test_an_answer_without_a_next_token_is_an_error_of_its_own(batch, tiny_model, monkeypatch, error):
    commit, prompt = engine_request.Request.commit, list(Request(TEXTS[1]).tokens(tiny_model))

    def fails(request, call, logits, verified):
        if request.history[: len(prompt)] == prompt and request.statistics.n_steps == 2:
            raise error
        return commit(request, call, logits, verified)

    monkeypatch.setattr(engine_request.Request, "commit", fails)
    records, outcomes = batch(*TEXTS)
    assert {outcome.entry.index: outcome.error for outcome in outcomes} == {
        0: "", 1: str(error), 2: "", 3: ""
    }  # fmt: skip
    assert records[1]["error"] == str(error)
    monkeypatch.undo()
    records, outcomes = batch(*TEXTS)
    assert [outcome.entry.index for outcome in outcomes] == [1]  # retried
    assert records[1]["content"]


def test_the_recorded_seed_gives_the_same_answer_alone(batch, session, tiny_model):
    records, _ = batch(*TEXTS)
    settings = replace(SETTINGS, seed=records[2]["seed"])
    tokens = Request(TEXTS[2]).tokens(tiny_model)
    alone = [e for e in session.generate(tokens, settings) if hasattr(e, "tokens")]
    assert [t for e in alone for t in e.tokens] == records[2]["tokens"]


def test_a_shared_system_message_is_evaluated_once(batch):
    system = "people would like to know about the time of day " * 2
    records, _ = batch(*TEXTS, system=system)
    n = [records[i]["timings"]["prompt_n"] for i in range(4)]
    cached = [records[i]["timings"]["cache_n"] for i in range(4)]
    assert cached[0] == 0
    assert all(c > n[0] / 2 for c in cached[1:])
    assert all(m < n[0] / 2 for m in n[1:])


def test_a_failed_prompt_does_not_end_the_run(batch):
    lines = [TEXTS[0], "word " * 500, {"prompt": "a", "suffix": "b"}, TEXTS[1]]
    records, outcomes = batch(*lines)
    assert {outcome.entry.index: bool(outcome.error) for outcome in outcomes} == {
        0: False, 1: True, 2: True, 3: False
    }  # fmt: skip
    assert "context" in records[1]["error"]
    assert "no fill-in-the-middle tokens" in records[2]["error"]
    assert "content" in records[0]
    assert "content" in records[3]
    _, outcomes = batch(*lines)
    assert [outcome.entry.index for outcome in outcomes] == [1, 2]  # only these are retried


def test_a_stopped_run_keeps_only_whole_answers(batch):
    lines = [{"prompt": TEXTS[0], "max_tokens": 4}, *TEXTS[1:]]
    left = iter([False] * 5)  # within the next answers

    def cancelled():
        return batch.path.stat().st_size > 0 and next(left, True)

    records, outcomes = batch(*lines, cancelled=cancelled)
    assert [outcome.entry.index for outcome in outcomes] == [0]
    assert set(records) == {0}
    records, outcomes = batch(*lines)
    assert [outcome.entry.index for outcome in outcomes] == [1, 2, 3]
    assert len(records) == 4


def test_conversations(batch):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk.append({"role": "user", "content": "c"})
    records, _ = batch({"messages": talk}, {"messages": talk[2:]}, "c", settings=replace(SETTINGS, seed=None))
    counts = [sum(r["timings"][k] for k in ("prompt_n", "cache_n")) for _, r in sorted(records.items())]
    assert counts[0] > counts[1] == counts[2]
    assert "seed" not in records[0]
