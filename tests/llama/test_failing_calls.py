"""Each call that changes a file fails in turn: conversations, batches and the datastore lose nothing."""

import errno
import json
import os
from dataclasses import replace

import pytest

from spec_local.batch.answers import open_answers
from spec_local.batch.runner import read_entries, run
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.chat_session import ChatSession, state_path
from spec_local.core.sampling import SamplingSettings
from spec_local.datastore.datastore import Datastore
from spec_local.datastore.file_format import StoredText
from spec_local.errors import SpecLocalError
from spec_local.session import Done, Session
from spec_local.settings import GenerationSettings
from tests.failing_calls import failures

GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=3, policy="fixed")

pytestmark = pytest.mark.parametrize(
    ("code", "killed"),
    [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True)],
    ids=["full disk", "broken disk", "killed"],
)


@pytest.fixture
def session(tiny_model, make_context):
    return Session(make_context(tiny_model, n_ctx=128))


@pytest.fixture
def chat(tiny_model, make_context):
    def make():
        conversation = Conversation(tiny_model, ChatTemplate(tiny_model))
        return ChatSession(Session(make_context(tiny_model, n_ctx=128)), conversation, GREEDY)

    return make


def attempt(failure, call, *errors):
    """The error with which a call ends while one of its changes of a file fails; None: it does not."""
    with failure.active():
        try:
            call()
        except errors as error:
            return error
    return None


def leftovers(folder, killed):
    """The temporary files in a folder; a process that is killed cannot delete them."""
    return [] if killed else [p.name for p in folder.iterdir() if p.name.endswith((".part", ".lock"))]


def test_saving_a_conversation(chat, tmp_path, code, killed):
    """Each of the two files is the old or the new one, whatever the other is, and both can be loaded."""
    saved, loaded, path = chat(), chat(), tmp_path / "chat.json"
    files, versions = (path, state_path(path)), []
    for message in ("Hello", "And then?"):
        list(saved.send(message))
        saved.save(path, with_state=True)
        versions.append([file.read_bytes() for file in files])
    for failure in failures(code, killed):
        for file, content in zip(files, versions[0], strict=True):
            file.write_bytes(content)
        error = attempt(failure, lambda: saved.save(path, with_state=True), SpecLocalError)
        assert error is None or os.strerror(code) in str(error)
        possible = versions if error else versions[1:]
        for file, contents in zip(files, zip(*possible, strict=True), strict=True):
            assert file.read_bytes() in contents, failure.calls
        assert not leftovers(tmp_path, killed)
        loaded.load(path)
        assert (
            loaded.conversation.messages == saved.conversation.messages[: len(loaded.conversation.messages)]
        )
        assert [event for event in loaded.send("So?") if isinstance(event, Done)]
        saved.save(path, with_state=True)
        assert [file.read_bytes() for file in files] == versions[1]


def test_answering_a_batch(session, tiny_path, tmp_path, code, killed):
    """The next run completes the output: no answer is lost, repeated or generated again."""
    path = tmp_path / "answers.jsonl"
    lines = [json.dumps({"prompt": f"the {n}"}).encode() for n in range(3)]
    entries = read_entries(lines, "prompts", tiny_path, replace(GREEDY, proposer="none"))

    def answer():
        with open_answers(path) as answers:
            return [o.entry.index for o in run(session, answers.unanswered(entries), answers)]

    def contents():
        """The contents of the complete lines, without the times; only a killed process leaves half a line."""
        *lines, last = path.read_bytes().split(b"\n")
        assert killed or not last
        return {
            record["index"]: record["content"] for record in map(json.loads, lines) if "content" in record
        }

    assert answer() == [0, 1, 2]
    whole, lines = contents(), path.read_bytes().splitlines(True)
    failed = json.dumps({"index": 1, "id": None, "key": entries[1].key, "error": "too long"}).encode() + b"\n"
    for failure in failures(code, killed):
        path.write_bytes(lines[0] + failed + lines[2])
        error = attempt(failure, answer, OSError)
        if error:  # the command prints both
            assert error.strerror == os.strerror(code)
            assert path.name in str(error.filename)
        assert not leftovers(tmp_path, killed)
        done = contents()
        assert error or done == whole
        assert done.items() <= whole.items()
        assert {0, 2} <= done.keys()
        assert answer() == [n for n in range(3) if n not in done], failure.calls
        assert contents() == whole
        assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("merged", [False, True])
def test_adding_to_the_datastore(tmp_path, code, killed, merged):
    """The old text stays; the new text is there or not, and can be added later."""
    folder = tmp_path / "texts"
    old, new = [list(range(n, n + 20)) for n in (10, 40)], list(range(80, 100))

    def opened(log=None):
        return Datastore(folder, 1000, log=([] if log is None else log).append)

    def texts():
        log = []
        found = [text.tokens.tolist() for text in opened(log)._texts(())]
        assert not log
        return found

    for failure in failures(code, killed):
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        opened().add([StoredText.of(old[0])])
        opened().add_answer(old[1])
        log = []
        with failure.active():
            datastore = opened(log)
            try:
                datastore.add([StoredText.of(new)]) if merged else datastore.add_answer(new)
            except SpecLocalError as raised:
                log.append(str(raised))
        assert len(log) <= 1
        assert new in texts() or os.strerror(code) in log[0]
        assert sorted(texts()) in (old, [*old, new]), failure.calls
        assert not [name for name in leftovers(folder, killed) if name != "lock"]
        opened().add_answer(new)
        assert sorted(texts()) == [*old, new]
