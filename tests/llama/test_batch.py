"""Batches on real llama.cpp: seeds, order, resuming, and prompts that fail."""

import json
from dataclasses import replace

import pytest

from spec_local.batch.answers import open_answers
from spec_local.batch.runner import read_entries, run
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

    def answer(*lines, settings=SETTINGS, **more):
        raw = [json.dumps({"prompt": line} if isinstance(line, str) else line).encode() for line in lines]
        entries = read_entries(raw, "prompts", tiny_path, settings, **more)
        with open_answers(path) as answers:
            outcomes = list(run(session, answers.unanswered(entries), answers))
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


def test_a_shared_system_message_is_evaluated_once(batch):
    system = "people would like to know about the time of day " * 2
    records, _ = batch(*TEXTS, system=system)
    n = [records[i]["timings"]["prompt_n"] for i in range(4)]
    cached = [records[i]["timings"]["cache_n"] for i in range(4)]
    assert cached[0] == 0
    assert all(c > n[0] / 2 for c in cached[1:])
    assert all(m < n[0] / 2 for m in n[1:])


def test_conversations(batch):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk.append({"role": "user", "content": "c"})
    records, _ = batch({"messages": talk}, {"messages": talk[2:]}, "c", settings=replace(SETTINGS, seed=None))
    counts = [sum(r["timings"][k] for k in ("prompt_n", "cache_n")) for _, r in sorted(records.items())]
    assert counts[0] > counts[1] == counts[2]
    assert "seed" not in records[0]
