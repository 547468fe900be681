"""`Session.open(learn=True)`: what is kept of answers, and that they stay the same."""

import pytest

from spec_local.datastore.answer_store import answer_store_of, open_answer_store
from spec_local.errors import ModelFileError
from spec_local.reasoning.markers import Splitter
from spec_local.session import ChatPrompt, Session

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked", "unchecked_headers")

PROMPT = list(range(300, 700))
"""More tokens than the datastore keeps of a prompt."""


@pytest.fixture
def open_session(tiny_path):
    opened = []

    def open_one(**options):
        opened.append(Session.open(tiny_path, "none", threads=1, n_ctx=1024, **options))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


def tokens_of(events):
    return [token for event in events for token in getattr(event, "tokens", ())]


def test_whole_prompts_and_answers_are_kept(open_session, tiny_path):
    plain = open_session()
    assert plain.answer_store is None
    session = open_session(learn=True)
    assert session.datastore is not None
    settings = {"max_tokens": 30, "temperature": 0.7, "seed": 3}
    expected = tokens_of(plain.generate(PROMPT, **settings))
    for _ in range(2):
        assert tokens_of(session.generate(PROMPT, **settings)) == expected
    [answer] = session.answer_store.answers()
    assert answer.tokens.tolist() == PROMPT + expected
    assert (answer.n_prompt, answer.temperature) == (len(PROMPT), 0.7)
    for store in (answer_store_of(tiny_path), open_answer_store(session.main.model)):
        assert store.path == session.answer_store.path
        assert [each.number for each in store.answers()] == [answer.number]
    assert session.datastore.contents().n_tokens == 256 + 30
    assert session.answer_store.contents().model == tiny_path.name


def test_a_cancelled_answer_is_kept_as_far_as_it_got(open_session):
    session = open_session(learn=True)
    n_calls = iter(range(1000))
    events = session.generate(PROMPT, max_tokens=200, cancelled=lambda: next(n_calls) > 20)
    expected = tokens_of(events)
    assert 4 <= len(expected) < 200
    [answer] = session.answer_store.answers()
    assert answer.tokens.tolist() == PROMPT + expected


def test_answers_of_several_prompts(open_session):
    session = open_session(learn=True, parallel=3)
    prompts = [PROMPT[n : n + 50] for n in range(5)]
    assert not [e for e in session.generate_many(prompts, max_tokens=12) if hasattr(e.event, "error")]
    assert sorted(answer.tokens[:50].tolist() for answer in session.answer_store.answers()) == prompts


def test_a_chat_prompt_is_kept_whole(open_session):
    session = open_session(learn=True)
    expected = tokens_of(session.generate(ChatPrompt(PROMPT, Splitter()), max_tokens=12))
    [answer] = session.answer_store.answers()
    assert answer.tokens.tolist() == PROMPT + expected


def test_the_first_use_is_said_once(open_session):
    for n_lines in (1, 0):
        log = []
        open_session(learn=True, log=log.append)
        assert len([line for line in log if "kept as tokens" in line]) == n_lines


def test_answers_do_not_fail_when_they_cannot_be_kept(open_session, own_cache):
    own_cache.mkdir(parents=True)
    (own_cache / "texts").write_text("a file")
    log = []
    session = open_session(learn=True, log=log.append)
    for seed in range(3):
        assert len(tokens_of(session.generate(PROMPT, max_tokens=12, seed=seed))) == 12
    assert len([line for line in log if "not kept" in line]) == 1
    assert session.answer_store.answers() == []


def test_a_model_file_that_was_deleted(tiny_path, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_path.read_bytes())
    with Session.open(copy, "none", threads=1, n_ctx=64) as session:
        copy.unlink()
        with pytest.raises(ModelFileError, match="learning needs"):
            open_answer_store(session.main.model)
