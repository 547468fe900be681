"""A chat as a library: what becomes of half answers, of second ones, and of a full context."""

import itertools
from dataclasses import replace

import pytest

from spec_local.chat.chat_session import ChatSession, Forgotten, state_of
from spec_local.chat.conversation import ChatTemplate, Conversation
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Prefilled
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings

GREEDY = GenerationSettings(sampling=SamplingSettings(temperature=0), max_tokens=12, policy="fixed")


@pytest.fixture
def chat(tiny_model, tiny_draft, make_context):
    def make(settings=GREEDY, n_ctx=512, **kwargs):
        contexts = [make_context(model, n_ctx=n_ctx) for model in (tiny_model, tiny_draft)]
        conversation = Conversation(tiny_model, ChatTemplate(tiny_model))
        return ChatSession(Session(*contexts), conversation, settings, **kwargs)

    return make


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, (Text, Done)))


def after(n):
    """A `cancelled` that says yes from its n-th call on."""
    count = itertools.count(1)
    return lambda: next(count) >= n


def test_an_answer_becomes_part_of_the_conversation(chat):
    c = chat()
    said = text_of(c.say("hello"))
    assert c.conversation.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said},
    ]


def test_of_a_second_turn_only_the_new_is_read(chat):
    c = chat()
    list(c.say("hello " * 20))
    known = len(c.session.main.cached)
    (prefilled,) = (event for event in c.say("and?") if isinstance(event, Prefilled))
    assert prefilled.statistics.cached_n == known
    list(c.again())
    (prefilled,) = (event for event in c.again() if isinstance(event, Prefilled))
    assert prefilled.statistics.prompt_n == 0


@pytest.mark.parametrize("stop", ["cancel", "close"])
def test_half_an_answer_stays(chat, stop):
    whole = text_of(chat().say("hello"))
    c = chat()
    if stop == "cancel":
        said = text_of(c.say("hello", cancelled=after(4)))
    else:
        events = c.say("hello")
        said = text_of(itertools.islice(events, 3))
        events.close()
    assert said
    assert whole.startswith(said)
    assert said != whole
    assert c.conversation.messages[-1] == {"role": "assistant", "content": said}


def test_if_nothing_was_said_all_is_as_before(chat):
    c = chat()
    text_of(c.say("hello"))
    before = list(c.conversation.messages)
    for ask in (lambda: c.say("more", cancelled=lambda: True), lambda: c.again(cancelled=lambda: True)):
        assert text_of(ask()) == ""
        assert c.conversation.messages == before
    with pytest.raises(ContextOverflow):
        list(c.say("words " * 600))
    assert c.conversation.messages == before
    with pytest.raises(InvalidRequest):
        list(c.say("lone \ud900 surrogate"))
    assert c.conversation.messages == before


def test_again_needs_an_answer(chat):
    c = chat()
    with pytest.raises(InvalidRequest, match="no answer"):
        list(c.again())


def test_with_a_seed_each_again_draws_with_the_next(chat):
    def settings(seed):
        return GenerationSettings(seed=seed, max_tokens=12)

    alone = [text_of(chat(settings(seed)).say("hello")) for seed in (5, 6, 7)]
    assert len(set(alone)) == 3
    c = chat(settings(5))
    assert [text_of(c.say("hello")), text_of(c.again()), text_of(c.again())] == alone
    c.conversation.withdraw()
    assert text_of(c.say("hello")) == alone[0]  # a new question begins with the seed itself


def test_a_context_that_is_full_ends_an_answer(chat):
    endless = GenerationSettings(sampling=SamplingSettings(temperature=0), policy="fixed")
    c = chat(endless, n_ctx=96)
    *_, done = c.say("hello")
    assert done.reason == "context"
    with pytest.raises(ContextOverflow):
        list(c.say("more"))
    assert len(c.conversation.messages) == 2


def test_a_context_that_is_full_forgets_the_oldest(chat):
    c = chat(n_ctx=160, when_full="forget")
    c.conversation.system = "Be brief."
    forgotten = 0
    for turn in range(12):
        for event in c.say(f"question {turn}"):
            if isinstance(event, Forgotten):
                forgotten += event.n_messages
        assert c.conversation.system == "Be brief."
        assert c.conversation.messages[-2]["content"] == f"question {turn}"
    assert forgotten > 4
    assert len(c.conversation.messages) == 1 + 2 * 12 - forgotten


def test_forgetting_keeps_what_was_read_of_the_system_message(chat):
    c = chat(n_ctx=200, when_full="forget")
    c.conversation.system = "word " * 12
    for turn in range(20):
        events = list(c.say(f"question {turn}"))
        if any(isinstance(event, Forgotten) for event in events):
            break
    (prefilled,) = (event for event in events if isinstance(event, Prefilled))
    assert prefilled.statistics.cached_n > 20
    assert prefilled.statistics.prompt_n > 20


def test_an_answer_goes_on_after_forgetting(chat):
    """In the middle of an answer: no token is lost, and max_tokens counts all of it."""
    c = chat(n_ctx=200, when_full="forget")
    list(c.say("one"))
    list(c.say("two"))
    c.settings = replace(GREEDY, max_tokens=150)
    events = list(c.say("three"))
    kinds = [type(event) for event in events]
    assert Text in kinds[: kinds.index(Forgotten)]
    said = [token for event in events if isinstance(event, Text) for token in event.tokens]
    assert len(said) == 150
    n_before = sum(len(e.tokens) for e in events[: kinds.index(Forgotten)] if isinstance(e, Text))
    _, second = (event.statistics for event in events if isinstance(event, Prefilled))
    n_prompt = second.cached_n + second.prompt_n + 1  # the last token is read with the first step
    assert n_prompt == len(c.conversation.retry()) + n_before
    c.conversation.answer(text_of(events), said)
    (done,) = (event for event in events if isinstance(event, Done))
    assert done.reason == "length"
    figures = done.statistics  # of the whole answer
    assert figures.predicted_n == 150
    assert figures.n_steps == sum(figures.steps_by.values()) > 150 / 5
    assert figures.draft_n_accepted == sum(figures.accepted_at)
    first, second = (event.statistics for event in events if isinstance(event, Prefilled))
    assert figures.prompt_n == first.prompt_n + second.prompt_n
    assert figures.cached_n == first.cached_n
    assert figures.profile["main model"] > second.profile["main model"] > 0
    assert c.conversation.messages[-1]["content"] == text_of(events)
    assert c.session.main.model.vocabulary.detokenize(said) == text_of(events)
    assert [m["content"] for m in c.conversation.messages if m["role"] == "user"] == ["three"]


def test_a_cut_character_is_not_lost_when_the_context_is_full(chat):
    """What may yet become a character is not said at once, and the answer goes on in another call."""
    c = chat(n_ctx=200, when_full="forget")
    list(c.say("one"))
    list(c.say("two"))
    byte = next(t for t in range(300) if c.session.main.model.vocabulary.piece(t) == b"\xf0")
    sampling = replace(GREEDY.sampling, logit_bias={byte: 1e3})
    c.settings = replace(GREEDY, max_tokens=150, sampling=sampling)
    events = list(c.say("three"))
    assert any(isinstance(event, Forgotten) for event in events)
    assert text_of(events) == "\udcf0" * 150


@pytest.mark.parametrize("more", [{"stops": ["never"]}, {"grammar": "root ::= [a-z ]+"}], ids=str)
def test_an_answer_that_must_be_followed_from_its_beginning_ends_where_the_context_does(chat, more):
    c = chat(n_ctx=200, when_full="forget")
    list(c.say("one"))
    list(c.say("two"))
    c.settings = replace(GREEDY, max_tokens=150, **more)
    events = list(c.say("three"))
    assert not any(isinstance(event, Forgotten) for event in events)
    assert events[-1].reason == "context"
    list(c.say("four"))  # but the next question has room again
    assert c.conversation.messages[0]["content"] != "one"


def test_after_forgetting_chance_is_another(chat):
    """Places of the text come again, and with them the randomness of a seed."""

    def answer(forgotten):
        c = chat(GenerationSettings(seed=1, max_tokens=12))
        c._forgettings = forgotten
        return text_of(c.say("hello"))

    assert answer(0) != answer(1)
    c = chat(GenerationSettings(seed=1, max_tokens=12), n_ctx=160, when_full="forget")
    for turn in range(12):
        list(c.say(f"question {turn}"))
    assert c._forgettings > 0


def test_an_answer_begins_with_its_first_event(chat):
    c = chat()
    c.say("never read")
    assert c.conversation.messages == []
    list(c.say("one"))
    c.again()
    assert len(c.conversation.messages) == 2


def test_one_answer_at_a_time(chat):
    c = chat()
    first = c.say("one")
    next(first)
    with pytest.raises(InvalidRequest, match="still being said"):
        list(c.say("two"))
    said = text_of(first)
    assert c.conversation.messages[-1]["content"] == said
    assert text_of(c.say("two"))


def test_a_conversation_that_was_kept_goes_on(chat, tmp_path):
    path, notes = tmp_path / "talk.json", []
    alone = chat()
    whole = [text_of(alone.say("one")), text_of(alone.say("two"))]
    first = chat()
    assert text_of(first.say("one")) == whole[0]
    size = first.save(path, with_state=True)
    assert size == state_of(path).stat().st_size
    again = chat()
    n = again.load(path, notes.append)
    assert n == len(first.session.main.cached) > 10
    events = list(again.say("two"))
    assert text_of(events) == whole[1]
    (read,) = (event.statistics for event in events if isinstance(event, Prefilled))
    assert read.cached_n == n
    assert notes == []


def test_a_state_of_another_conversation_is_not_counted(chat, tmp_path):
    path, c = tmp_path / "talk.json", chat()
    list(c.say("one"))
    c.save(path, with_state=True)
    c.conversation.clear()
    list(c.say("something else altogether"))
    c.save(path)
    assert c.load(path) < 8  # how every conversation begins
    notes = []
    state_of(path).write_bytes(b"rubbish")
    c.load(path, notes.append)
    assert "no saved state" in notes[0]


def test_when_full_must_be_known(chat):
    with pytest.raises(InvalidRequest, match="give stop or forget"):
        chat(when_full="explode")
