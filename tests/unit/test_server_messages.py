"""Anthropic's messages: what bodies ask for, and what clients get, as Anthropic's package reads it."""

import json
import re

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.server.protocols.messages import Messages
from spec_local.server.supervision.events import Delta
from spec_local.settings import GenerationSettings
from tests.server_events import (
    ANSWER,
    CALLING,
    CUT,
    HELLO,
    IN_PARTS,
    LOADED,
    STARTED,
    TEXT,
    THOUGHT,
    THOUGHTFUL,
    Call,
    ended,
    parsed,
    stream,
    written,
)

QUESTION = {"role": "user", "content": "Why?"}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
EVENT = TypeAdapter(RawMessageStreamEvent)
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def exchange(**more):
    return Messages({"model": "m", "max_tokens": 9, "messages": [QUESTION]} | more, LOADED)


def request(**more):
    return exchange(**more).requests[0]


def events(exchange, answer):
    found = []
    for name, data in parsed(stream(exchange, answer)):
        assert name == data["type"]
        found.append(EVENT.validate_python(data))
    return found


def whole(exchange, answer):
    found = written(exchange.whole([answer]))
    Message.model_validate(found)
    return found


# Bodies


def content(role, *blocks):
    return {"messages": [{"role": role, "content": list(blocks)}]}


def test_settings():
    found = request(
        temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], speculative=False, seed=3, stream=True
    )
    assert found.settings == GenerationSettings(
        SamplingSettings(temperature=0.5, top_p=0.9, top_k=7),
        max_tokens=9,
        stops=["END"],
        policy="off",
        seed=3,
    )
    assert found.messages == [QUESTION]
    assert request(max_tokens=None).settings == GenerationSettings()


def test_a_schema_for_the_answer():
    schema = {"type": "array"}
    found = request(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(found.settings.json_schema) == schema


def test_messages_in_openais_form():
    use = {"type": "tool_use", "id": "u", "name": "weather", "input": {"city": "Zürich"}}
    results = [
        {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": "v", "is_error": True},
        {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
    ]
    found = request(
        system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be short."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me look."},
                    use,
                ],
            },
            {"role": "user", "content": results},
        ],
    )
    call = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert found.messages == [
        {"role": "system", "content": "Be kind.\nBe short."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "u", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "u"},
        {"role": "tool", "content": "", "tool_call_id": "v"},
        {"role": "user", "content": "And?"},
    ]


def test_a_call_alone_and_a_text_before_a_result():
    use = {"type": "tool_use", "id": "u", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "u", "content": "sunny"}
    here = {"type": "text", "text": "Here:"}
    asked, answered = content("assistant", use)["messages"], content("user", here, result)["messages"]
    _, called, *rest = request(messages=[QUESTION, *asked, *answered]).messages
    assert called["content"] == ""
    assert len(called["tool_calls"]) == 1
    assert [(each["role"], each["content"]) for each in rest] == [("user", "Here:"), ("tool", "sunny")]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
def test_tools(choice, expected):
    found = request(tools=[TOOL | {"type": "custom"}], tool_choice=choice)
    function = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]
    assert found.tool_choice == expected


RESULT = {"type": "tool_result", "tool_use_id": "u"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
BASH = {"type": "bash_20250124", "name": "bash"}
NOTE = "[image left out: this model reads text only]"


def test_tools_that_do_not_exist_here_are_left_out():
    others = [BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    assert [tool["function"]["name"] for tool in request(tools=[*others, TOOL]).tools] == ["weather"]


def test_images_and_documents():
    def document(kind, **source):
        return {"type": "document", "title": "Notes", "source": {"type": kind, **source}}

    (found,) = request(
        **content(
            "user",
            IMAGE,
            document("text", media_type="text/plain", data="Buy milk."),
            document("content", content=[{"type": "text", "text": "And bread."}]),
            document("base64", media_type="application/pdf", data="AA"),
            {
                "type": "search_result",
                "title": "T",
                "source": "U",
                "content": [{"type": "text", "text": "C"}],
            },
        )
    ).messages
    assert found["content"].splitlines() == [
        *(NOTE, "Notes", "Buy milk.", "Notes", "And bread."),
        "[document Notes left out: this model reads text only]",
        *("T", "U", "C"),
    ]


def test_a_screenshot_as_a_result_is_answered():
    use = content("assistant", {"type": "tool_use", "id": "u", "name": "look", "input": {}})["messages"]
    result = content("user", RESULT | {"content": [IMAGE]}, IMAGE)["messages"]
    assert [(each["role"], each["content"]) for each in request(messages=[*use, *result]).messages[1:]] == [
        ("tool", NOTE),
        ("user", NOTE),
    ]


def test_blocks_of_other_tools_become_text():
    found = request(
        messages=[
            QUESTION,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "s",
                        "content": [
                            {
                                "type": "web_search_result",
                                "url": "u",
                                "title": "t",
                                "encrypted_content": "x",
                                "page_age": None,
                            }
                        ],
                    },
                ],
            },
            QUESTION,
        ]
    ).messages[1]
    assert found["content"].splitlines() == [
        "I look.",
        '[server_tool_use: {"name": "web_search", "input": {"query": "q"}}]',
        '[web_search_tool_result: {"content": [{"url": "u", "title": "t"}]}]',
    ]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (THINKING, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (THINKING | {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({}, {}),
    ],
)
def test_variables_of_the_template(more, expected):
    assert request(**more).variables == expected


def test_a_budget_for_the_thinking():
    assert request(**THINKING).settings.reasoning_budget == 1024
    assert request(thinking={"type": "adaptive"}).settings.reasoning_budget is None


def test_the_start_of_an_answer():
    begun = {"role": "assistant", "content": "Because \n"}
    assert request(messages=[QUESTION, begun]).messages == [QUESTION, begun]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role: give 'system', "),
        (content("user", IMAGE), "messages: the question is only '[image left out"),
        (content("user", {"type": "smell"}), "messages[0].content: content of the type smell is not"),
        (content("user", {}), "messages[0].content: a part of the content has no text"),
        (
            {"tools": [TOOL, BASH], "tool_choice": {"type": "tool", "name": "bash"}},
            "tool_choice names 'bash', which is no function in tools",
        ),
        ({"tools": [BASH], "tool_choice": {"type": "any"}}, "tool_choice needs tools that are functions"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice is not supported"),
        ({"thinking": {"type": "maybe"}}, "thinking.type: give 'enabled', 'disabled' or 'adaptive'"),
        ({"max_tokens": "many"}, "max_tokens: give a valid integer"),
    ],
)
def test_errors(more, part):
    with pytest.raises(InvalidRequest, match=re.escape(part)):
        exchange(**more)


# Responses


def test_a_whole_response():
    found = whole(exchange(), ANSWER)
    assert found["content"] == [{"type": "text", "text": TEXT}]
    assert (found["stop_reason"], found["stop_sequence"], found["model"]) == ("end_turn", None, "m")
    assert found["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 9,
    }


def test_calls_and_what_surrounds_them():
    assert whole(exchange(), [STARTED, THOUGHT, *CALLING[1:]])["content"] == [
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
    ]


def test_thinking_is_shown_only_if_wanted():
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": ""}
    text = {"type": "text", "text": "Hello"}
    assert whole(exchange(**THINKING), THOUGHTFUL)["content"] == [thought, text]
    for more in (
        {},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ):
        assert whole(exchange(**more), THOUGHTFUL)["content"] == [text]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (ended(), "end_turn"),
        (ended(stopping_word="END"), "stop_sequence"),
        (ended("length"), "max_tokens"),
        (ended("context"), "model_context_window_exceeded"),
        (ended("cancelled"), "end_turn"),
    ],
)
def test_stop_reasons(last, reason):
    found = whole(exchange(), [STARTED, last])
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, last.stopping_word or None)
    assert found["content"] == []
    assert whole(exchange(), CALLING)["stop_reason"] == "tool_use"


def test_the_events_of_a_stream():
    assert [event.type for event in events(exchange(**THINKING), THOUGHTFUL)] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events(exchange(), CALLING) if "block" in event.type] == [
        *(0, 0, 0),
        *(1, 1, 1),
        *(2, 2, 2),
    ]
    start = events(exchange(), ANSWER)[0].message
    assert (start.content, start.stop_reason, start.usage.input_tokens) == ([], None, 7)


def test_arguments_come_in_parts():
    found = [event for event in events(exchange(), IN_PARTS) if event.type == "content_block_delta"]
    assert [event.delta.partial_json for event in found if event.delta.type == "input_json_delta"] == [
        *('{"ci', 'ty": "B', 'ern"}'),
        "{}",
    ]
    assert [event.index for event in found] == [0, 1, 1, 1, 2]


def test_a_call_that_is_cut_has_what_is_complete_of_its_input():
    found = whole(exchange(), CUT)
    assert found["content"][1]["input"] == {"city": "B"}
    assert found["stop_reason"] == "max_tokens"


def test_a_schema_and_tools():
    schema = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    for field in ({"output_config": {"format": schema}}, {"output_format": schema}):
        found = exchange(
            tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **field
        )
        (asked,) = found.requests
        assert json.loads(asked.settings.json_schema) == {"type": "array"}
        assert not asked.parallel_tool_calls
        (name,) = (key if key == "output_format" else "output_config.format" for key in field)
        warning = f"{name}: uniqueItems at # is not supported and not enforced"
        assert whole(found, ANSWER)["warnings"] == [warning]
    assert request(tools=[TOOL]).parallel_tool_calls


def client(answer):
    """Anthropic's client of a server that gives this answer."""

    def respond(request):
        made = Messages(json.loads(request.content), LOADED)
        if not made.streams:
            return httpx2.Response(200, json=written(made.whole([answer])))
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, text=stream(made, answer))

    http = httpx2.Client(transport=httpx2.MockTransport(respond))
    return anthropic.Anthropic(base_url="http://x", api_key="x", http_client=http, max_retries=0)


MIXED = [STARTED, THOUGHT, *CALLING[1:3], HELLO, ended()]


@pytest.mark.parametrize("answer", [ANSWER, THOUGHTFUL, CALLING, IN_PARTS, MIXED, [STARTED, ended("length")]])
def test_a_stream_accumulates_to_the_whole_message(answer):
    body = {"model": "m", "max_tokens": 2000, "messages": [QUESTION]} | THINKING
    whole = client(answer).messages.create(**body)
    with client(answer).messages.stream(**body) as events:
        accumulated = events.get_final_message()
    assert accumulated.model_dump() | {"id": ""} == whole.model_dump() | {"id": ""}


@pytest.mark.parametrize("arguments", ['{"x": "\\ud800"}', '{"x": 1e999}', "[1]", "no", "{" * 10**5])
def test_arguments_that_are_no_json_object(arguments):
    answer = [STARTED, Delta(tool_calls=(Call("c", "f", arguments),)), ended()]
    (block,) = whole(exchange(), answer)["content"]
    assert block["input"] == ({"x": "\ufffd"} if "ud800" in arguments else {"arguments": arguments})


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ContextOverflow("long"), "invalid_request_error"), (BackendError("bad"), "api_error")],
)
def test_a_failure_in_a_stream(error, kind):
    ((name, data),) = parsed("".join(exchange().failed(error)))
    assert name == "error"
    assert data == {"type": "error", "error": {"type": kind, "message": str(error)}}
