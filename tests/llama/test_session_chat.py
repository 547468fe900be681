"""Session.chat: a whole chat as plain dicts, with the tokens of earlier turns kept."""

import json
from dataclasses import replace

import pytest

from spec_local.chat.rendered import Rendered
from spec_local.chat.template import ChatTemplate
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Failed, Prefilled
from spec_local.errors import InvalidRequest, ModelError
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.llama.answers import text_of, tokens_of
from tests.scripted_model import ANSWER, THOUGHT, write_thinking_model
from tests.unfiltered import unfiltered

GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=12, policy="fixed")
LONG = replace(GREEDY, max_tokens=64)
DRAWN = replace(GREEDY, sampling=unfiltered(1.5), seed=3)
SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def session(tiny_model, tiny_draft, make_context):
    return Session(*(make_context(model, n_ctx=512) for model in (tiny_model, tiny_draft)))


def run(events):
    """The events, tokens and text of an answer."""
    events = list(events)
    assert isinstance(events[0], Prefilled)
    assert isinstance(events[-1], Done)
    return events, tokens_of(events), text_of(events)


@pytest.mark.parametrize(
    "messages", [[user("hello")], [SYSTEM, user("a"), assistant("b"), user("c")]], ids=["one", "several"]
)
def test_it_answers_the_rendered_messages(session, messages):
    model = session.main.model
    prompt = ChatTemplate(model).render(messages).tokens(model.vocabulary)
    _, expected, text = run(session.generate(prompt, GREEDY))
    events, tokens, content = run(session.chat(messages, GREEDY))
    assert (tokens, content) == (expected, text)
    assert events[-1].statistics.draft_n


@pytest.mark.parametrize(
    "settings",
    [GREEDY, *(replace(DRAWN, seed=seed) for seed in range(2))],
    ids=["greedy", "seed 0", "seed 1"],
)
def test_a_second_turn_reads_only_new_tokens(session, settings):
    """Drawn tokens spell texts that the tokenizer splits differently."""
    messages = [SYSTEM, user("hello " * 20)]
    _, tokens, text = run(session.chat(messages, settings))
    assert tokens
    cached = list(session.main.cached)
    messages += [assistant(text), user("and?")]
    (prefilled, *_), _, _ = run(session.chat(messages, settings))
    assert prefilled.statistics.cached_n == len(cached)
    assert session.main.cached[: len(cached)] == cached


def test_turns_of_a_chat_are_kept_over_another_use(session):
    messages = [user("hello")]
    *_, text = run(session.chat(messages, DRAWN))
    first = list(session.main.cached)
    run(session.generate("another text", GREEDY))
    messages += [assistant(text), user("and?")]
    run(session.chat(messages, DRAWN))
    assert session.main.cached[: len(first)] == first


def test_another_chat_shares_its_beginning_only(session):
    prompt = ChatTemplate(session.main.model).render([SYSTEM, user("b")])
    run(session.chat([SYSTEM, user("a"), assistant("one"), user("two")], GREEDY))
    expected = prompt.tokens(session.main.model.vocabulary)
    (prefilled, *_), _, _ = run(session.chat([SYSTEM, user("b")], GREEDY))
    assert session.main.cached[: len(expected)] == expected
    assert 0 < prefilled.statistics.cached_n < len(expected)


def test_an_answer_that_is_closed_early_is_kept(session):
    events = session.chat([user("hello")], replace(DRAWN, max_tokens=100))
    text = ""
    for event in events:
        text += event.text if isinstance(event, Text) else ""
        if len(text) > 20:
            break
    events.close()
    cached = list(session.main.cached)
    (prefilled, *_), _, _ = run(session.chat([user("hello"), assistant(text), user("on")], GREEDY))
    # A character that was not complete is not part of the text.
    assert len(cached) - 4 <= prefilled.statistics.cached_n


def test_a_new_chat_ends_an_unfinished_one(session):
    unfinished = session.chat([user("hello")], GREEDY)
    assert isinstance(next(unfinished), Prefilled)
    _, tokens, _ = run(session.chat([user("you")], GREEDY))
    assert [event.reason for event in unfinished] == ["cancelled"]
    assert run(session.chat([user("you")], GREEDY))[1] == tokens


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["mapping", "text"])
def test_json_schema(session, schema):
    *_, text = run(session.chat([user("hello")], replace(DRAWN, max_tokens=60), json_schema=schema))
    assert json.loads(text)["n"] in (1, 2)


@pytest.mark.parametrize("start", ["the", "the \n ", ""])
def test_a_last_answer_is_continued(session, start):
    model = session.main.model
    prompt = ChatTemplate(model).render([user("hello")]) + Rendered.of(start, [])
    _, expected, text = run(session.generate(prompt.tokens(model.vocabulary), GREEDY))
    messages = [user("hello"), assistant(start)]
    events = session.chat(messages, GREEDY)
    assert session.answer is None
    _, tokens, continuation = run(events)
    assert (tokens, continuation) == (expected, text)
    assert session.answer == assistant(start + text)
    cached = list(session.main.cached)
    again = [user("hello"), assistant(start + text), user("and?")]
    (prefilled, *_), _, _ = run(session.chat(again, GREEDY))
    assert prefilled.statistics.cached_n == len(cached)


def test_json_schema_replaces_that_of_the_settings(session):
    settings = replace(DRAWN, json_schema='{"const": 7}', max_tokens=60)
    assert run(session.chat([user("hello")], settings))[2] == "7"
    assert run(session.chat([user("hello")], settings, json_schema={"const": 8}))[2] == "8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "no question to answer"),
        ({"json_schema": {"a": {1}}}, "json_schema is dict: give what JSON can hold"),
        ({"json_schema": {"pattern": 1}}, "pattern"),
        ({"json_schema": SCHEMA, "settings": replace(GREEDY, grammar='root ::= "a"')}, "give one of them"),
    ],
)
def test_invalid_requests(session, arguments, message):
    with pytest.raises(InvalidRequest, match=message):
        session.chat(**{"messages": [user("a")]} | arguments)
    assert len(run(session.chat([user("a")], GREEDY))[1]) == 12


def test_a_model_without_a_chat_template(session, monkeypatch):
    monkeypatch.setattr(session.main.model, "chat_template", None)
    with pytest.raises(ModelError, match="no chat template"):
        session.chat([user("hello")])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["both markers", "opened", "channels"])
def test_a_splitter_separates_the_reasoning(tmp_path, kind):
    with Session.open(write_thinking_model(tmp_path / "m.gguf", kind), threads=1) as session:
        assert session.splitter().feed("<think>a") == ("", "<think>a")  # there is no chat yet
        events = session.chat([user("Why?")], LONG)
        splitter = session.splitter()
        parts = splitter.finish(text_of(events))
        assert parts == (THOUGHT, ANSWER)
        again = session.chat([user("Why?"), assistant(ANSWER), user("Why?")], LONG)
        assert text_of(again)
        events = session.chat([user("Why?")], replace(LONG, grammar='root ::= "a"'))
        splitter = session.splitter()
        assert splitter.finish(text_of(events)) == (THOUGHT, "a")


@pytest.mark.parametrize(
    "stop", ["", "end", "middle"], ids=["no stop", "pending stop", "a stop that ends it"]
)
def test_the_texts_alone_are_the_whole_answer(session, stop):
    """Also if the answer ends where a stop string may begin: `Done` has no rest of it."""
    whole = session.complete([user("hello")], GREEDY)
    stops = {"": (), "end": [whole[-3:] + "\0"], "middle": [whole[4:6]]}[stop]
    expected = whole[: whole.find(stops[0])] if stop == "middle" else whole
    _, _, text = run(session.chat([user("hello")], GREEDY, stops=stops))
    assert text == expected
    assert session.answer["content"] == expected
    assert session.complete([user("hello")], GREEDY, stops=stops) == expected


def test_complete_continues_a_text_or_tokens(session):
    text = "Once upon a time"
    tokens = session.main.model.vocabulary.tokenize(text, add_special=True)
    continued = text_of(session.generate(text, GREEDY))
    assert continued
    assert session.complete(text, GREEDY) == session.complete(tokens, GREEDY) == continued
    with pytest.raises(InvalidRequest, match="prompt"):
        session.complete(5)


def test_complete_leaves_out_the_reasoning(tmp_path, make_context):
    path = write_thinking_model(tmp_path / "m.gguf", "both markers")
    with Session.open(path, threads=1) as session:
        assert session.complete([user("hello")], LONG) == ANSWER
        assert session.answer["reasoning_content"]


def messages_in(events):
    """By number, the messages with which several answers end."""
    return {number: event.message for number, event in events if isinstance(event, Done)}


def test_generate_and_generate_many_answer_messages_as_chat_does(session):
    chats = [[user("hello")], [SYSTEM, user("a"), assistant("b"), user("c")]]
    prompts = [*chats, "hello", session.main.model.vocabulary.tokenize("hello", add_special=True)]
    expected = [tokens_of(session.generate(prompt, GREEDY)) for prompt in prompts]
    assert expected[:2] == [tokens_of(session.chat(chat, GREEDY)) for chat in chats]
    assert expected[0] != expected[2] == expected[3]  # a text is continued
    found, answers = {}, {}
    for number, event in session.generate_many(prompts, GREEDY):
        if isinstance(event, Text):
            found.setdefault(number, []).extend(event.tokens)
        elif isinstance(event, Done):
            answers[number] = event.message
    assert [found[i] for i in range(4)] == expected
    assert [answers[i] for i in (2, 3)] == [None, None]
    for i, chat in enumerate(chats):
        assert answers[i] == assistant(session.complete(chat, GREEDY))


def test_the_last_event_of_a_chat_has_its_answer(session):
    events, _, text = run(session.generate([user("hello")], GREEDY))
    assert events[-1].message == session.answer == assistant(text)
    assert run(session.generate("hello", GREEDY))[0][-1].message is None


def test_reasoning_of_several_answers(tmp_path):
    path = write_thinking_model(tmp_path / "m.gguf", "both markers")
    with Session.open(path, n_ctx=512, threads=1, parallel=2) as session:
        answers = messages_in(session.generate_many([[user("a")], [user("b")]], LONG))
        assert set(answers) == {0, 1}
        for message in answers.values():
            assert message == assistant(ANSWER) | {"reasoning_content": THOUGHT}
        # As in `chat`, a grammar holds after the reasoning, whose budget is known.
        settings = replace(LONG, grammar='root ::= "a"', reasoning_budget=2)
        for message in messages_in(session.generate_many([[user("a")]] * 2, settings)).values():
            assert message["content"] == "a"
            assert THOUGHT.startswith(message["reasoning_content"])


def test_a_chat_that_cannot_be_answered_ends_alone(session):
    bad = [[user(5)], [{"role": "bot", "content": "a"}], [user("a"), 5], [user("x" * 100_000)]]
    events = list(session.generate_many([*bad, [user("hello")]], GREEDY))
    errors = {number: str(event.error) for number, event in events if isinstance(event, Failed)}
    assert set(errors) == {0, 1, 2, 3}
    assert errors[1] == "messages[0] has the role 'bot': give system, user, assistant, tool"
    assert messages_in(events) == {4: assistant(session.complete([user("hello")], GREEDY))}


def test_one_chat_is_not_several(session):
    with pytest.raises(InvalidRequest, match="prompts is one chat: give a list of chats"):
        session.generate_many([user("hello")], GREEDY)


def test_tools_need_messages(session):
    with pytest.raises(InvalidRequest, match="tools need a chat: give a list of messages"):
        session.generate("a", tools=[{"function": {"name": "b"}}])


def test_a_schema_may_be_a_dict_everywhere(session):
    settings = replace(DRAWN, max_tokens=60, json_schema=SCHEMA)
    assert settings.json_schema == json.dumps(SCHEMA)
    for prompt in ("a", [user("a")]):
        for text in (
            session.complete(prompt, settings),
            session.complete(prompt, DRAWN, json_schema=SCHEMA, max_tokens=60),
            text_of(e for _, e in session.generate_many([prompt], DRAWN, json_schema=SCHEMA, max_tokens=60)),
        ):
            assert json.loads(text)["n"] in (1, 2)


def test_settings_by_keyword(session):
    expected = tokens_of(session.chat([user("hello")], GREEDY))
    assert expected == tokens_of(session.chat([user("hello")], max_tokens=12, temperature=0, policy="fixed"))
    assert expected[:5] == tokens_of(session.chat([user("hello")], GREEDY, max_tokens=5))
    text = session.complete("a", GREEDY)
    assert text == text_of(session.generate("a", max_tokens=12, temperature=0))
    (events,) = ([e for _, e in session.generate_many(["a"], temperature=0, max_tokens=12)],)
    assert text == text_of(events)
    with pytest.raises(TypeError, match="no setting 'max_token': did you mean max_tokens"):
        session.chat([user("hello")], max_token=5)
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        session.complete("a", temperature=-1)
    with pytest.raises(InvalidRequest, match="set max_tokens there"):
        session.generate_many(["a"], [GREEDY], max_tokens=5)
