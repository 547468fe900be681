"""Sessions in several threads: one use at a time, and `close` at any time."""

import contextlib
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import pytest

from spec_local.batch import read_entries, run
from spec_local.batch.answers import open_answers
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.chat_session import ChatSession
from spec_local.core.sampling import SamplingSettings
from spec_local.datastore import file_format
from spec_local.datastore.datastore import Datastore
from spec_local.errors import InvalidRequest
from spec_local.session import Done, Session
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")

DEADLINE = 60  # seconds; what takes longer hangs
PROMPT = "one two three one two three one two"
SETTINGS = GenerationSettings(unfiltered(0.8), seed=1, policy="fixed", max_tokens=24)
BUSY, CLOSED = "answering in another thread", "the session is closed"


@pytest.fixture
def make_session(tiny_model, tiny_draft, make_context):
    def make(**kwargs):
        return Session(*(make_context(model, **kwargs) for model in (tiny_model, tiny_draft)))

    return make


@pytest.fixture
def elsewhere():
    """A function that calls another one in a second thread, which stays alive, and returns the result."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result(DEADLINE)


def answer(session, prompt=PROMPT, settings=SETTINGS):
    return text_of(session.generate(prompt, settings))


class Gate:
    """A `cancelled` function that stops an answer in the middle of a step, until it is opened."""

    def __init__(self, n=2):
        self.reached, self.opened, self._calls, self._n = threading.Event(), threading.Event(), 0, n

    def __call__(self):
        self._calls += 1
        if self._calls == self._n:
            self.reached.set()
            assert self.opened.wait(DEADLINE)
        return False


USES = {
    "generate": lambda session: session.generate(PROMPT, SETTINGS),
    "costs": lambda session: session.costs(),
    "lookups": lambda session: session.lookups(SETTINGS),
}

KINDS = {
    "sampled": {},
    "greedy": {"sampling": SamplingSettings(0)},
    "drawn": {"verifier": "block"},
    "tree": {"shape": "tree", "tree_nodes": 6},
    "lookup": {"proposer": "lookup", "sampling": unfiltered(1, logit_bias={270: 9.0, 271: 9.0})},
    "grammar": {"grammar": 'root ::= ("one " | "two ")+'},
    "schema": {"json_schema": json.dumps({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4})},
}


def test_two_sessions_in_two_threads_share_their_models(make_session):
    """The output is that of one session after the other."""
    settings = [GenerationSettings(**{"seed": 3, "policy": "fixed", "max_tokens": 12} | kind)
                for kind in KINDS.values()]  # fmt: skip
    prompts = [PROMPT, "a b c " * 900]  # the longer one is tokenized on a stack of its own
    n_ctx = 2048

    def answers(session):
        return [answer(session, prompt[:n_ctx], each) for each in settings for prompt in prompts]

    expected = answers(make_session(max_branches=8, n_ctx=n_ctx))
    sessions = [make_session(max_branches=8, n_ctx=n_ctx) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(answers, sessions))
    assert found == [expected, expected]


@pytest.mark.parametrize("use", USES)
def test_one_use_at_a_time(make_session, elsewhere, use):
    """The answer is unchanged, between its events and within them."""
    session = make_session()
    alone = answer(session)
    gate = Gate()
    events = session.generate(PROMPT, SETTINGS, cancelled=gate)
    text = text_of([next(events)])

    def refused():
        with pytest.raises(InvalidRequest, match=BUSY):
            USES[use](session)
        return True

    assert elsewhere(refused)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: [next(events), next(events)])
        assert gate.reached.wait(DEADLINE)
        assert refused()
        for misuse in (events.__next__, events.close):
            with pytest.raises(InvalidRequest, match=BUSY):
                misuse()
        gate.opened.set()
        text += text_of(following.result(DEADLINE))
    assert text + text_of(events) == alone  # this thread reads on
    assert elsewhere(lambda: USES[use](session)) is not None


def test_an_answer_of_a_thread_that_has_ended_blocks_nobody(make_session):
    session, kept = make_session(), []

    def begin():
        kept.append(session.generate(PROMPT, SETTINGS))
        next(kept[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert answer(session) == answer(make_session())
    assert [type(event) for event in kept[0]] == [Done]


@pytest.mark.parametrize("n_read", [0, 1, 3])
def test_closing_between_events(tiny_path, elsewhere, n_read):
    session = Session.open(tiny_path, threads=1)
    whole = list(session.generate(PROMPT, SETTINGS))
    events = session.generate(PROMPT, SETTINGS)
    read = list(islice(events, n_read))
    elsewhere(session.close)
    assert not session.main.is_open
    read += events
    assert isinstance(read[-1], Done)
    assert read[-1].reason == "cancelled"
    assert read[-1].statistics.n_steps == max(n_read - 1, 0)
    assert text_of(whole).startswith(text_of(read))
    check_closed(session)


def check_closed(session):
    session.close()
    for use in USES.values():
        with pytest.raises(InvalidRequest, match=CLOSED):
            use(session)


@pytest.mark.parametrize("n", [1, 2, 4])  # calls of `cancelled`: while the prompt is read, and later
def test_closing_within_a_step(tiny_path, n):
    """`close` waits for the step, and the answer ends after it."""
    session = Session.open(tiny_path, threads=1)
    gate = Gate(n)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(lambda: list(session.generate(PROMPT, SETTINGS, cancelled=gate)))
        assert gate.reached.wait(DEADLINE)
        closing = pool.submit(session.close)
        while not session._lock.is_ending():
            pass
        assert session.main.is_open
        assert not closing.done()
        gate.opened.set()
        closing.result(DEADLINE)
        assert not session.main.is_open
        events = reading.result(DEADLINE)
    assert events[-1].reason == "cancelled"
    assert len(events) < 8
    check_closed(session)


def test_closing_in_a_callback(tiny_path):
    """As a signal handler may: it takes effect when the step ends."""
    session = Session.open(tiny_path, threads=1)
    open_within = []

    def close():
        session.close()
        open_within.append(session.main.is_open)
        return False

    events = list(session.generate(PROMPT, SETTINGS, cancelled=close))
    assert open_within == [True]
    assert [type(event) for event in events] == [Done]
    assert not session.main.is_open
    check_closed(session)


@pytest.mark.parametrize("use", USES)
def test_no_use_in_a_callback(make_session, use):
    session, errors = make_session(), []

    def cancelled():
        with pytest.raises(InvalidRequest, match="in a callback"):
            USES[use](session)
        errors.append(use)
        return False

    assert text_of(session.generate(PROMPT, SETTINGS, cancelled=cancelled)) == answer(session)
    assert errors
    session.close()
    assert session.main.is_open  # the contexts are somebody else's
    check_closed(session)


def test_many_threads_use_and_close_a_session(tiny_path, tiny_draft_path):
    """Each use succeeds as it does alone, or raises one of the documented errors."""
    with Session.open(tiny_path, tiny_draft_path, threads=1) as session:
        session.costs()
        alone = answer(session)
    for _ in range(4):
        session, texts, errors = Session.open(tiny_path, tiny_draft_path, threads=1), [], []
        started = threading.Event()

        def use(session, texts, errors, started):
            while CLOSED not in "".join(errors):
                try:
                    *events, last = session.generate(PROMPT, SETTINGS)
                except InvalidRequest as refusal:
                    errors.append(str(refusal))
                    continue
                started.set()
                if last.reason != "cancelled":
                    texts.append(text_of([*events, last]))

        with ThreadPoolExecutor(3) as pool:
            users = [pool.submit(use, session, texts, errors, started) for _ in range(3)]
            assert started.wait(DEADLINE)
            session.close()
            assert not session.main.is_open
            for user in users:
                user.result(DEADLINE)
        assert set(texts) <= {alone}
        assert all(BUSY in error or CLOSED in error for error in errors)


@pytest.mark.parametrize("how", ["dropped", "in a cycle"])
def test_an_unfinished_answer_is_deleted_in_another_thread(make_session, elsewhere, how):
    session = make_session()
    alone = answer(session, "and " + PROMPT)
    holder = SimpleNamespace(events=session.generate(PROMPT, SETTINGS))
    next(holder.events)
    if how == "in a cycle":
        holder.holder = holder
        del holder
        elsewhere(gc.collect)
    else:
        elsewhere(lambda: delattr(holder, "events"))
    assert elsewhere(lambda: answer(session, "and " + PROMPT)) == alone


def test_an_unfinished_answer_is_deleted_during_another_use(make_session, elsewhere):
    """It must not roll back the caches under that use; the next use ends it."""
    session = make_session()
    alone = answer(session, "and " + PROMPT)
    kept = [session.generate(PROMPT, SETTINGS)]
    next(kept[0])
    before = len(session.main.cached)
    session._lock.run(lambda: (kept.clear(), gc.collect()))
    assert len(session.main.cached) == before
    assert elsewhere(lambda: answer(session, "and " + PROMPT)) == alone


def chat_of(session):
    model = session.main.model
    return ChatSession(session, Conversation(model, ChatTemplate(model)), SETTINGS)


def test_one_answer_of_a_conversation_at_a_time(make_session, monkeypatch):
    chat = chat_of(make_session())
    conversation = chat.conversation
    both, ask = threading.Barrier(2), conversation.ask

    def slow(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # in vain: the second thread is refused before it comes here
        return ask(*arguments)

    monkeypatch.setattr(conversation, "ask", slow)

    def send(message):
        try:
            return text_of(chat.send(message))
        except InvalidRequest as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(send, ["hello", "hello"]))
    (error,) = [result for result in results if not isinstance(result, str)]
    assert "still being generated" in str(error)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_no_conversation_is_loaded_during_an_answer(make_session, tmp_path):
    chat = chat_of(make_session())
    chat.save(tmp_path / "chat.json")
    events = chat.send("hello")
    next(events)
    conversation = chat.conversation
    with pytest.raises(InvalidRequest, match="still being generated"):
        chat.load(tmp_path / "chat.json")
    text = text_of(events)
    assert chat.conversation is conversation
    assert conversation.messages[-1]["content"] == text


def test_closing_during_an_answer_keeps_the_part_of_a_conversation(tiny_path, elsewhere):
    session = Session.open(tiny_path, threads=1)
    chat = chat_of(session)
    events = chat.send("hello")
    text = text_of(islice(events, 4))
    elsewhere(session.close)
    *rest, last = events
    assert last.reason == "cancelled"
    assert text
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": text + text_of(rest)}


def test_closing_during_a_batch(tiny_path, tmp_path):
    """No prompt is recorded as failed: the next run answers the rest."""
    lines = [json.dumps({"prompt": prompt}).encode() for prompt in ("one", "two", "three")]
    session = Session.open(tiny_path, threads=1)
    entries = read_entries(lines, "prompts", tiny_path, SETTINGS, raw=True)
    with open_answers(tmp_path / "out.jsonl") as answers:
        outcomes = run(session, entries, answers)
        next(outcomes)
        session.close()
        with pytest.raises(InvalidRequest, match=CLOSED):
            next(outcomes)
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert "content" in json.loads(line)


def test_two_threads_share_a_datastore(tmp_path, monkeypatch):
    """One of them adds an answer while the other one reads what a third has written."""
    store = Datastore(tmp_path / "texts", 1000)
    for n in range(3):
        Datastore(tmp_path / "texts", 1000).add_answer([n + 1, 3, 4, 5])
    reading, added, decode = threading.Event(), threading.Event(), file_format.decode_journal

    def slow(*arguments):
        if not reading.is_set():
            reading.set()
            added.wait(0.1)  # in vain: the other thread waits for this one
        return decode(*arguments)

    monkeypatch.setattr(file_format, "decode_journal", slow)
    with ThreadPoolExecutor(1) as pool:
        refreshed = pool.submit(store.refresh)
        assert reading.wait(DEADLINE)
        store.add_answer([4, 3, 4, 5])
        added.set()
        refreshed.result(DEADLINE)
    assert store.contents().n_texts == 4
    assert Datastore(tmp_path / "texts", 1000).contents().n_texts == 4
