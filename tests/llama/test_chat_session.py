"""ChatSession: interrupted answers, regenerated answers, a full context, and saving."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial

import pytest

from spec_local.chat import saved_chat
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.chat_session import ChatSession, MessagesDropped
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Prefilled
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.prompt_cache.cache import PromptCache
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of, tokens_of
from tests.tiny_architectures import write_tiny

GREEDY = GenerationSettings(sampling=SamplingSettings(temperature=0), max_tokens=12, policy="fixed")


@pytest.fixture(scope="module", params=["llama", "mamba", "qwen35"])
def models(request, tiny_model, tiny_draft, folder):
    """A main and a draft model: with any rollback, with checkpoints only, and with kept states."""
    if request.param == "llama":
        yield tiny_model, tiny_draft
        return
    write = write_tiny if request.param == "qwen35" else partial(write_tiny_model, tensor_type="F32")
    made = [
        Model(write(folder / f"chat-{request.param}-{noise}.gguf", architecture=request.param, noise=noise))
        for noise in (0.0, 0.05)
    ]
    yield made
    for model in made:
        model.close()


ONE_KIND = pytest.mark.parametrize("models", ["llama"], indirect=True)
"""For tests in which it does not matter how a model rolls back."""


@pytest.fixture
def chat(models, make_context):
    def make(settings=GREEDY, n_ctx=512, **kwargs):
        contexts = [make_context(model, n_ctx=n_ctx) for model in models]
        conversation = Conversation(models[0], ChatTemplate(models[0]))
        session = Session(*contexts, prompt_cache=PromptCache(1 << 24))
        return ChatSession(session, conversation, settings, **kwargs)

    return make


def cancelled_at_call(n):
    """A `cancelled` callback that returns True from its n-th call on."""
    count = itertools.count(1)
    return lambda: next(count) >= n


def test_a_second_turn_reads_only_new_tokens(chat):
    c = chat()
    list(c.send("hello " * 20))
    n_cached = len(c.session.main.cached)
    (prefilled,) = (event for event in c.send("and?") if isinstance(event, Prefilled))
    assert prefilled.statistics.cached_n == n_cached
    list(c.regenerate())
    (prefilled,) = (event for event in c.regenerate() if isinstance(event, Prefilled))
    assert prefilled.statistics.prompt_n == 0


@pytest.mark.parametrize("stop", ["cancel", "close"])
def test_an_interrupted_answer_is_kept(chat, stop):
    whole = text_of(chat().send("hello"))
    c = chat()
    if stop == "cancel":
        part = text_of(c.send("hello", cancelled=cancelled_at_call(6)))
    else:
        events = c.send("hello")
        part = text_of(itertools.islice(events, 3))
        events.close()
    assert part
    assert whole.startswith(part)
    assert part != whole
    assert c.conversation.messages[-1] == {"role": "assistant", "content": part}


@ONE_KIND
def test_without_output_the_conversation_is_unchanged(chat):
    c = chat()
    text_of(c.send("hello"))
    before = list(c.conversation.messages)
    for ask in (lambda: c.send("more", cancelled=lambda: True), lambda: c.regenerate(cancelled=lambda: True)):
        assert text_of(ask()) == ""
        assert c.conversation.messages == before
    with pytest.raises(ContextOverflow):
        list(c.send("words " * 600))
    assert c.conversation.messages == before
    with pytest.raises(InvalidRequest):
        list(c.send("lone \ud900 surrogate"))
    assert c.conversation.messages == before


@ONE_KIND
def test_regenerate_adds_1_to_the_seed(chat):
    def settings(seed):
        return GenerationSettings(seed=seed, max_tokens=12)

    alone = [text_of(chat(settings(seed)).send("hello")) for seed in (5, 6, 7)]
    assert len(set(alone)) == 3
    c = chat(settings(5))
    assert [text_of(c.send("hello")), text_of(c.regenerate()), text_of(c.regenerate())] == alone
    c.conversation.undo()
    assert text_of(c.send("hello")) == alone[0]  # a new question uses the seed itself


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_cut_answer_continues_as_if_it_had_not_been_cut(chat, temperature):
    """After a limit of tokens and after Ctrl-C, without reading anything again."""
    settings = replace(GREEDY, sampling=SamplingSettings(temperature=temperature, repeat_penalty=1.1), seed=3)
    whole = chat(replace(settings, max_tokens=30))
    text = text_of(whole.send("hello"))
    c = chat(replace(settings, max_tokens=10))
    parts = [text_of(c.send("hello"))]
    events = list(c.continue_answer(cancelled_at_call(6)))
    (read,) = (event.statistics for event in events if isinstance(event, Prefilled))
    if not c.session.main.model.is_recurrent:
        assert read.prompt_n <= 1
    parts.append(text_of(events))
    c.settings = replace(settings, max_tokens=20 - len(tokens_of(events)))
    parts.append(text_of(c.continue_answer()))
    assert all(parts)
    assert "".join(parts) == text
    assert c.conversation.messages == whole.conversation.messages
    assert c.conversation.answer_tokens == whole.conversation.answer_tokens
    c.settings = whole.settings
    assert text_of(c.send("and?")) == text_of(whole.send("and?"))


@ONE_KIND
def test_a_cut_character_continues(chat):
    c = chat()
    pieces = {c.session.main.model.vocabulary.piece(token): token for token in range(300)}
    for byte in "😀".encode():
        sampling = replace(GREEDY.sampling, logit_bias={pieces[bytes([byte])]: 1e3})
        c.settings = replace(GREEDY, max_tokens=1, sampling=sampling)
        list(c.continue_answer() if c.conversation.messages else c.send("hello"))
    assert c.conversation.messages[-1] == {"role": "assistant", "content": "😀"}


@ONE_KIND
def test_a_loaded_answer_continues(chat, tmp_path):
    whole = chat()
    text = text_of(whole.send("hello"))
    c = chat(replace(GREEDY, max_tokens=5))
    begun = text_of(c.send("hello"))
    c.save(tmp_path / "chat.json")
    loaded = chat(replace(GREEDY, max_tokens=4))
    loaded.load(tmp_path / "chat.json")
    parts = [begun, text_of(loaded.continue_answer())]
    loaded.settings = replace(GREEDY, max_tokens=3)
    parts.append(text_of(loaded.continue_answer()))
    assert all(parts)
    assert "".join(parts) == text
    assert loaded.conversation.messages[-1]["content"] == "".join(parts)


@ONE_KIND
def test_answers_that_cannot_be_continued(chat):
    c = chat()
    for ask in (lambda: None, lambda: c.conversation.messages.append({"role": "user", "content": "x"})):
        ask()
        with pytest.raises(InvalidRequest, match="no answer to continue"):
            list(c.continue_answer())
    c.conversation.clear()
    text = text_of(c.send("hello"))
    before = list(c.conversation.messages)
    for more, error in (
        ({"grammar": 'root ::= "a"'}, "under a grammar"),
        ({"stops": [f"{text[-1]}…"]}, "may begin"),
    ):
        c.settings = replace(GREEDY, **more)
        with pytest.raises(InvalidRequest, match=error):
            list(c.continue_answer())
    assert c.conversation.messages == before
    c.settings = replace(GREEDY, stops=[text[-3:]])
    list(c.regenerate())
    with pytest.raises(InvalidRequest, match="complete"):
        list(c.continue_answer())


def test_a_full_context_ends_an_answer(chat):
    endless = GenerationSettings(sampling=SamplingSettings(temperature=0), policy="fixed")
    c = chat(endless, n_ctx=96)
    *_, done = c.send("hello")
    assert done.reason == "context"
    answered = list(c.conversation.messages)
    for _ in range(2):
        with contextlib.suppress(ContextOverflow):
            assert not text_of(c.continue_answer())
        assert c.conversation.messages == answered
    with pytest.raises(ContextOverflow):
        list(c.send("more"))
    assert len(c.conversation.messages) == 2


def test_a_full_context_drops_the_oldest_messages(chat):
    c = chat(n_ctx=160, when_full="drop-oldest")
    c.conversation.system = "Be brief."
    n_dropped = 0
    for turn in range(12):
        for event in c.send(f"question {turn}"):
            if isinstance(event, MessagesDropped):
                n_dropped += event.n_messages
        assert c.conversation.system == "Be brief."
        assert c.conversation.messages[-2]["content"] == f"question {turn}"
    assert n_dropped > 4
    assert len(c.conversation.messages) == 1 + 2 * 12 - n_dropped


def test_dropping_messages_keeps_the_system_message_in_the_kv_cache(chat):
    c = chat(n_ctx=200, when_full="drop-oldest")
    c.conversation.system = "word " * 12
    for turn in range(20):
        events = list(c.send(f"question {turn}"))
        if any(isinstance(event, MessagesDropped) for event in events):
            break
    (prefilled,) = (event for event in events if isinstance(event, Prefilled))
    if c.session.main.model.is_recurrent:  # no state ends with the system message
        assert prefilled.statistics.cached_n == 0
    else:
        assert prefilled.statistics.cached_n > 20
    assert prefilled.statistics.prompt_n > 20


def test_an_answer_continues_after_messages_are_dropped(chat):
    """In the middle of an answer no token is lost, and max_tokens limits the whole answer."""
    c = chat(n_ctx=200, when_full="drop-oldest")
    list(c.send("one"))
    list(c.send("two"))
    c.settings = replace(GREEDY, max_tokens=150)
    events = list(c.send("three"))
    kinds = [type(event) for event in events]
    assert Text in kinds[: kinds.index(MessagesDropped)]
    generated = tokens_of(events)
    assert len(generated) == 150
    n_before = len(tokens_of(events[: kinds.index(MessagesDropped)]))
    _, second = (event.statistics for event in events if isinstance(event, Prefilled))
    n_prompt = second.cached_n + second.prompt_n + 1  # the last token is read with the first step
    assert n_prompt == len(c.conversation.undo_answer()) + n_before
    c.conversation.answer(text_of(events), generated)
    (done,) = (event for event in events if isinstance(event, Done))
    assert done.reason == "length"
    statistics = done.statistics  # of the whole answer
    assert statistics.predicted_n == 150
    assert statistics.n_steps == sum(statistics.steps_by.values()) > 150 / 5
    assert statistics.draft_n_accepted == sum(statistics.accepted_at)
    first, second = (event.statistics for event in events if isinstance(event, Prefilled))
    assert statistics.prompt_n == first.prompt_n + second.prompt_n
    assert statistics.cached_n == first.cached_n
    assert statistics.profile["main model"] > second.profile["main model"] > 0
    assert c.conversation.messages[-1]["content"] == text_of(events)
    assert c.session.main.model.vocabulary.detokenize(generated) == text_of(events)
    assert [m["content"] for m in c.conversation.messages if m["role"] == "user"] == ["three"]


@ONE_KIND
def test_no_partial_character_is_lost_when_the_context_is_full(chat):
    """An incomplete character is held back while the answer continues in another `generate` call."""
    c = chat(n_ctx=200, when_full="drop-oldest")
    list(c.send("one"))
    list(c.send("two"))
    byte = next(t for t in range(300) if c.session.main.model.vocabulary.piece(t) == b"\xf0")
    sampling = replace(GREEDY.sampling, logit_bias={byte: 1e3})
    c.settings = replace(GREEDY, max_tokens=150, sampling=sampling)
    events = list(c.send("three"))
    assert any(isinstance(event, MessagesDropped) for event in events)
    assert text_of(events) == "\udcf0" * 150


@ONE_KIND
@pytest.mark.parametrize("more", [{"stops": ["never"]}, {"grammar": "root ::= [a-z ]+"}], ids=str)
def test_with_a_grammar_or_stop_strings_an_answer_ends_where_the_context_does(chat, more):
    c = chat(n_ctx=200, when_full="drop-oldest")
    list(c.send("one"))
    list(c.send("two"))
    c.settings = replace(GREEDY, max_tokens=150, **more)
    events = list(c.send("three"))
    assert not any(isinstance(event, MessagesDropped) for event in events)
    assert events[-1].reason == "context"
    list(c.send("four"))  # messages are dropped before the next answer
    assert c.conversation.messages[0]["content"] != "one"


@ONE_KIND
def test_dropping_messages_changes_the_random_numbers(chat):
    """Positions repeat, and with the same seed so would their random numbers."""

    def answer_after(n_turns, n_ctx):
        c = chat(GenerationSettings(seed=1, max_tokens=12), n_ctx=n_ctx, when_full="drop-oldest")
        for turn in range(n_turns):
            list(c.send(f"question {turn}"))
        c.conversation.clear()
        return text_of(c.send("hello"))

    assert answer_after(0, 512) == answer_after(2, 512) != answer_after(12, 160)


@ONE_KIND
def test_nothing_happens_before_the_first_event_is_read(chat):
    c = chat()
    c.send("never read")
    assert c.conversation.messages == []
    list(c.send("one"))
    c.regenerate()
    assert len(c.conversation.messages) == 2


@ONE_KIND
def test_one_answer_at_a_time(chat):
    c = chat()
    first = c.send("one")
    next(first)
    with pytest.raises(InvalidRequest, match="still being generated"):
        list(c.send("two"))
    answer = text_of(first)
    assert c.conversation.messages[-1]["content"] == answer
    assert text_of(c.send("two"))


def test_a_saved_conversation_continues(chat, tmp_path):
    """Also where other text was generated in between: the prompt cache has the conversation."""
    path, lines = tmp_path / "chat.json", []
    alone = chat()
    whole = [text_of(alone.send("one")), text_of(alone.send("two"))]
    first = chat()
    assert text_of(first.send("one")) == whole[0]
    first.save(path)
    first.session.complete("something else altogether", GREEDY)
    loaded = ChatSession(first.session, settings=GREEDY)
    assert loaded.load(path, lines.append) < 8  # the start of every conversation
    events = list(loaded.send("two"))
    assert text_of(events) == whole[1]
    (read,) = (event.statistics for event in events if isinstance(event, Prefilled))
    assert read.cached_n > 10
    assert loaded.load(path) > 10
    assert lines == []


@ONE_KIND
def test_another_model_tokenizes_the_whole_conversation(chat, models, make_context, tmp_path):
    c = chat()
    list(c.send("hello"))
    c.save(tmp_path / "chat.json", with_paths=True)
    assert saved_chat.paths_of(tmp_path / "chat.json") == [model.path for model in models]
    other, lines = models[1], []
    template = ChatTemplate(other)
    loaded = saved_chat.load(tmp_path / "chat.json", other, template, lines.append)
    assert c.conversation.answer_tokens
    assert loaded.ask("and?") == Conversation(other, template, c.conversation.messages).ask("and?")
    assert lines == [
        f"this conversation was with {models[0].path.name}; {other.path.name} goes on with it: "
        "give the other as main model"
    ]
    c.save(tmp_path / "chat.json")
    assert str(tmp_path) not in (tmp_path / "chat.json").read_text()
    assert saved_chat.paths_of(tmp_path / "chat.json") == []


@ONE_KIND
def test_unknown_when_full(chat):
    with pytest.raises(InvalidRequest, match="when_full is 'explode': give 'stop' or 'drop-oldest'"):
        chat(when_full="explode")
