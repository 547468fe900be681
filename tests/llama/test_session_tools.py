"""Tools of a chat: what the model is told, what it calls, and what stays in the cache from turn to turn."""

import json
from dataclasses import replace

import pytest

from spec_local.chat import saved_chat
from spec_local.chat.conversation import Conversation
from spec_local.chat.request import ChatRequest
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_use import ToolUse
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Prefilled
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.tiny import CHAT_TEMPLATE, FIRST_BYTE
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from tests.chat_templates import TOOL_TEMPLATES, StandIn
from tests.llama.answers import text_of
from tests.scripted_model import CHANNELS, write_scripted_model

GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=100)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
ASKED = {"role": "user", "content": "Rain in Paris?"}
CALLED = {"name": "weather", "arguments": '{"city": "Paris"}'}
UNANSWERED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": CALLED}],
}
SCRIPTS = {  # the last token of the prompt, and what the model writes then
    "Hermes": (
        "<0x0A>",
        ["I look.", "\n<tool_call>", '\n{"name": "weather", "arg', 'uments": {"city": ', '"Paris"}}',
         "\n</tool_call>"],
    ),
    "Mistral": (
        "<|im_end|>",
        ["[TOOL_CALLS]", '[{"name": "weather", "argum', 'ents": {"city": "Paris"}', ', "id": "abcdefgh9"}]'],
    ),
    "LFM2": ("<0x0A>", ["<|tool_call_start|>", "[weather(city=", "'Paris')]", "<|tool_call_end|>"]),
    "Llama 3": ("<0x0A>", ['{"name": "weather", ', '"parameters": {"city"', ': "Paris"}}']),
}  # fmt: skip


CONTROL = ["[TOOL_CALLS]", "<|tool_call_start|>", "<|tool_call_end|>"]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory, unchecked):
    folder, opened = tmp_path_factory.mktemp("tools"), {}
    for kind, (before, script) in SCRIPTS.items():
        path = folder / f"{kind}.gguf"
        write_scripted_model(path, TOOL_TEMPLATES[kind], before, script, ["[TOOL_CALLS]"], control=CONTROL)
        opened[kind] = Session.open(path, n_ctx=2048, threads=1, parallel=2)
    yield opened
    for session in opened.values():
        session.close()


@pytest.fixture(params=list(SCRIPTS))
def session(sessions, request):
    return sessions[request.param]


@pytest.fixture
def hermes(sessions):
    return sessions["Hermes"]


def template_of(session, template):
    return ChatTemplate(
        StandIn(path="x.gguf", vocabulary=session.main.model.vocabulary, chat_template=template)
    )


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_chat_with_a_call_and_its_result(sessions, kind):
    session = sessions[kind]
    raw = text_of(session.chat([ASKED], GREEDY, tools=TOOLS))
    assert raw == "".join(SCRIPTS[kind][1])
    found = session.tool_call_parser().finish(session.splitter().finish(raw).answer)
    (call,) = found.calls
    assert {"name": call.name, "arguments": call.arguments} == CALLED
    answer = session.answer
    assert answer["content"] == found.text == ("I look." if kind == "Hermes" else "")
    assert [each["function"] for each in answer["tool_calls"]] == [CALLED]

    cached = list(session.main.cached)
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "18 °C"}
    events = session.chat([ASKED, answer, result], GREEDY, tools=TOOLS)
    prefilled = next(event for event in events if isinstance(event, Prefilled))
    # What the model wrote is what the template writes: only the result is new.
    assert prefilled.statistics.cached_n == len(cached)
    assert session.main.cached[: len(cached)] == cached
    assert text_of(events) == raw
    if kind == "Mistral":
        assert call.id == answer["tool_calls"][0]["id"] == "abcdefgh9"


def test_calls_of_several_answers(session):
    events = session.generate_many([[ASKED]] * 3, GREEDY, tools=TOOLS)
    answers = [event.message for _, event in events if isinstance(event, Done)]
    assert [[call["function"] for call in answer["tool_calls"]] for answer in answers] == [[CALLED]] * 3


@pytest.mark.usefixtures("unchecked")
def test_a_call_after_the_reasoning_of_gpt_oss(tmp_path):
    script = ["<|channel|>", "analysis<|mess", "age|>", "I look.", "<|end|>", "<|start|>", "assistant<|chan"]
    script += [
        "nel|>commentary to=func",
        "tions.weather <|constrain|>json",
        "<|message|>",
        '{"city": "Paris"}',
    ]
    path = write_scripted_model(tmp_path / "m.gguf", TOOL_TEMPLATES["gpt-oss"], "assistant", script, CHANNELS)
    with Session.open(path, n_ctx=512, threads=1) as session:
        events = session.chat([ASKED], GREEDY, tools=TOOLS)
        splitter, parser = session.splitter(), session.tool_call_parser()
        parts = splitter.finish(text_of(events))
        assert parts.reasoning == "I look."
        found = parser.finish(parts.answer)
        assert (found.text, [call.name for call in found.calls]) == ("", ["weather"])
        answer = session.answer
        assert answer["reasoning_content"] == "I look."
        assert [call["function"] for call in answer["tool_calls"]] == [CALLED]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "18 °C"}
        assert text_of(session.chat([ASKED, answer, result], GREEDY, tools=TOOLS)) == "".join(script)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"x": {"enum": [1]}}}])
def test_a_call_or_json_in_the_channels_of_gpt_oss(tmp_path, schema):
    path = write_scripted_model(
        tmp_path / "m.gguf", TOOL_TEMPLATES["gpt-oss"], "assistant", ["a", "b"], CHANNELS
    )
    parameters = {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    city = {"function": {"name": "weather", "parameters": parameters}}
    kinds = set()
    with Session.open(path, n_ctx=512, threads=1) as session:
        for seed in range(8):
            settings = replace(GREEDY, sampling=SamplingSettings(temperature=4), seed=seed)
            settings = replace(settings, reasoning_budget=seed, max_tokens=300)
            choice = "required" if schema is None else "auto"
            events = session.chat([ASKED], settings, tools=[city], tool_choice=choice, json_schema=schema)
            splitter = session.splitter()
            found = session.tool_call_parser().finish(splitter.finish(text_of(events)).answer)
            if found.calls:
                assert found.text == ""
                assert [call.name for call in found.calls] == ["weather"]
                assert json.loads(found.calls[0].arguments)["city"] in ("Paris", "Rome")
            else:
                assert json.loads(found.text) in ({}, {"x": 1})
            kinds.add(bool(found.calls))
    assert kinds == ({True} if schema is None else {True, False})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("control", [(), CHANNELS], ids=["text", "control tokens"])
def test_a_required_call_comes_after_the_reasoning_of_gpt_oss(tmp_path, control):
    script = ["<|channel|>", "analysis", "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant"]
    path = write_scripted_model(
        tmp_path / "m.gguf", TOOL_TEMPLATES["gpt-oss"], "assistant", script, CHANNELS, control
    )
    with Session.open(path, n_ctx=1024, threads=1) as session:
        for choice, schema, n in (("required", None, 9), ("auto", '{"enum": [7]}', 9), ("now", None, 0)):
            settings = replace(GREEDY, reasoning_budget=n, max_tokens=300)
            events = session.chat([ASKED], settings, tools=TOOLS, tool_choice=choice, json_schema=schema)
            parts = session.splitter().finish(text_of(events))
            answer = session.answer
            assert parts.reasoning == answer.get("reasoning_content", "") == ("I look." if n else "")
            if "tool_calls" not in answer:
                assert (choice, answer["content"]) == ("auto", "7")


def test_a_call_keeps_the_tokens_with_which_it_was_written(sessions):
    """Even if the tokenizer divides its text in another way."""
    model = sessions["Mistral"].main.model
    vocabulary, template = model.vocabulary, ChatTemplate(model)
    conversation = Conversation(model, template, [ASKED], ToolUse(template, TOOLS))
    before, text = conversation.prompt(), "".join(SCRIPTS["Mistral"][1])
    tokens = vocabulary.control("[TOOL_CALLS]")
    tokens += [FIRST_BYTE + byte for byte in text.removeprefix("[TOOL_CALLS]").encode()]
    conversation.answer(text, tokens)
    result = {"role": "tool", "tool_call_id": "abcdefgh9", "content": "18 °C"}
    following = conversation.following([*conversation.messages, result], conversation.tool_use)
    assert following.prompt()[: len(before) + len(tokens)] == before + tokens


def test_without_tools_nothing_is_a_call(session):
    raw = text_of(session.chat([ASKED], GREEDY))
    assert session.tool_call_parser().finish(raw) == (raw, (), "")
    assert session.answer == {"role": "assistant", "content": raw}
    assert "[TOOL_CALLS]" not in raw


def test_there_is_no_answer_before_the_end(hermes):
    events = hermes.chat([ASKED], GREEDY, tools=TOOLS)
    next(events)
    assert hermes.answer is None
    text_of(events)
    assert hermes.answer["role"] == "assistant"


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize(("choice", "name"), [("required", None), ("weather", "weather"), ("now", "now")])
def test_a_call_can_be_required(sessions, kind, choice, name):
    session = sessions[kind]
    for seed in range(4):
        settings = replace(GREEDY, sampling=SamplingSettings(temperature=2), seed=seed, max_tokens=200)
        raw = text_of(session.chat([ASKED], settings, tools=TOOLS, tool_choice=choice))
        call, *others = session.tool_call_parser().finish(raw).calls
        assert name is None or not others
        assert call.name == name or (name is None and call.name in ("weather", "now"))
        if call.name == "weather":
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        assert session.answer["tool_calls"][0]["function"]["name"] == call.name
        assert session.answer["content"] == ""
    cached = list(session.main.cached)
    result = {"role": "tool", "tool_call_id": session.answer["tool_calls"][0]["id"], "content": "18 °C"}
    prompt = [ASKED, session.answer, result]
    (prefilled, *_) = session.chat(prompt, GREEDY, tools=TOOLS)
    known = ToolUse(ChatTemplate(session.main.model), TOOLS).render(prompt)
    spelled = b"".join(session.main.model.vocabulary.piece(token, special=True) for token in cached[1:])
    if known.text.startswith(spelled):  # JSON may have other spaces than the template's
        assert prefilled.statistics.cached_n >= len(cached) - 1


def test_an_answer_without_tokens_is_an_answer(hermes):
    text_of(hermes.chat([ASKED], replace(GREEDY, max_tokens=0), tools=TOOLS))
    assert hermes.answer == {"role": "assistant", "content": ""}
    hermes.chat([ASKED], GREEDY, tools=TOOLS).close()
    assert hermes.answer is None


def test_tool_choice_none(hermes):
    (prefilled, *_) = hermes.chat([ASKED], GREEDY)
    (same, *_) = hermes.chat([ASKED], GREEDY, tools=TOOLS, tool_choice="none")
    assert same.statistics.prompt_n + same.statistics.cached_n == (
        prefilled.statistics.prompt_n + prefilled.statistics.cached_n
    )
    assert "tool_calls" not in hermes.answer


WRONG = {"function": {"name": "a", "parameters": {"type": 3}}}


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        ("Hermes", {"tool_choice": "other"}, "tool_choice is 'other': give auto, none, required or the name"),
        ("Hermes", {"tools": [], "tool_choice": "required"}, "tool_choice is 'required'"),
        ("Hermes", {"settings": replace(GREEDY, grammar='root ::= "a"')}, "cannot follow a grammar: remove"),
        ("Hermes", {"messages": [ASKED, UNANSWERED]}, "add a message with the result of each call"),
        (
            "Mistral",
            {"tools": [WRONG], "tool_choice": "a"},
            r"tools\[0\].function.parameters: type at # is 3",
        ),
    ],
)
def test_wrong_requests(sessions, kind, arguments, error):
    with pytest.raises(InvalidRequest, match=error):
        sessions[kind].chat(**{"messages": [ASKED], "tools": TOOLS} | arguments)
    assert text_of(sessions[kind].chat([ASKED], GREEDY, tools=[WRONG]))


def test_templates_without_tools_or_with_an_unknown_form(hermes):
    template = template_of(hermes, CHAT_TEMPLATE)
    assert not template.has_tools
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    with pytest.raises(ModelError, match="the model's chat template has no tools: remove the tools"):
        ToolUse(template, TOOLS).render([ASKED])
    with pytest.raises(ModelError, match="the model's chat template has no tools: remove the tools"):
        template.render([ASKED], TOOLS)
    result = {"role": "tool", "content": "seven", "tool_call_id": "a"}
    earlier = [ASKED, {"role": "assistant", "tool_calls": [call]}, result]  # of another model
    for text in (template.render(earlier), ToolUse(template, []).render(earlier)):
        assert text == template.render(
            [
                ASKED,
                {"role": "assistant", "content": "[tool_call: a {}]"},
                {"role": "user", "content": "seven"},
            ]
        )
    assert ToolUse(template, TOOLS, "none").render([ASKED]).text
    unknown = template_of(hermes, "{{ tools }}{{ messages[0].content }}")
    with pytest.raises(ModelError, match="writes tool calls in a form that is not supported: use a model"):
        ToolUse(unknown, TOOLS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "both markers"])
def test_a_required_call_comes_after_the_reasoning(tmp_path, opened):
    source = TOOL_TEMPLATES["Hermes"] + "{# </think> #}"
    script = ["I look.", "\n</th", "ink>\n\n"]
    if opened:
        source = source.replace("assistant\n' }}{#", "assistant\n<think>\n' }}{#")
        assert "<think>" in source
    else:
        script.insert(0, "<think>")
    path = write_scripted_model(tmp_path / "m.gguf", source, "<0x0A>", script, ["</think>"])
    with Session.open(path, n_ctx=1024, threads=1) as session:
        for choice, schema in (("required", None), ("now", None), ("auto", '{"enum": [7]}')):
            events = session.chat([ASKED], GREEDY, tools=TOOLS, tool_choice=choice, json_schema=schema)
            splitter = session.splitter()
            parts = splitter.finish(text_of(events))
            assert parts.reasoning == "I look."
            answer = session.answer
            assert answer["reasoning_content"] == "I look."
            if "tool_calls" not in answer:
                assert (choice, answer["content"]) == ("auto", "7")
            assert session.tool_call_parser().finish(parts.answer).text == answer["content"]


def test_several_answers_with_requests(session):
    model = session.main.model
    request = ChatRequest(messages=[ASKED], tools=TOOLS)
    tokens, settings = request.tokens(model), request.settings(model, GREEDY)
    splitter, parser = request.splitter(model, tokens), request.parser(model)
    texts = ["", ""]
    for number, event in session.generate_many([tokens, tokens], settings):
        if isinstance(event, Text):
            texts[number] += event.text
    assert texts[0] == texts[1]
    (call,) = parser.finish(splitter.finish(texts[0]).answer).calls
    assert {"name": call.name, "arguments": call.arguments} == CALLED
    plain = ChatRequest(messages=[ASKED])
    assert plain.settings(model, GREEDY) is GREEDY
    assert plain.parser(model).finish(texts[0]) == (texts[0], (), "")
    with pytest.raises(InvalidRequest, match="tools need a chat template"):
        ChatRequest("a", raw=True, tools=TOOLS)


def test_calls_and_results_are_saved(hermes, tmp_path):
    text_of(hermes.chat([ASKED], GREEDY, tools=TOOLS))
    answer = hermes.answer
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "18 °C\udcff"}
    model = hermes.main.model
    template = ChatTemplate(model)
    conversation = Conversation(model, template).following([ASKED, answer, result])
    saved_chat.save(conversation, tmp_path / "chat.json")
    loaded = saved_chat.load(tmp_path / "chat.json", model, template)
    assert loaded.messages == conversation.messages
    assert loaded.prompt() == conversation.prompt()
    file = json.loads((tmp_path / "chat.json").read_text())
    file["messages"][1]["tool_calls"][0]["function"]["arguments"] = 5
    (tmp_path / "chat.json").write_text(json.dumps(file))
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\].tool_calls\[0\].function.arguments is int: give"
    ):
        saved_chat.load(tmp_path / "chat.json", model, template)
