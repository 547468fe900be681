"""OpenAI's responses: what bodies ask for, and what clients get, as OpenAI's package reads it."""

import json
import re
import time

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.server.protocols.responses import Responses
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
    THOUGHTFUL,
    WEATHER,
    ended,
    parsed,
    stream,
    written,
)

EVENT = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
NOW = 1_796_012_462


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time stands still: a response tells when it was made, and so must its equal."""
    monkeypatch.setattr(time, "time", lambda: NOW + 0.9)


def exchange(given="Why?", **more):
    return Responses({"input": given} | more, LOADED)


def request(given="Why?", **more):
    return exchange(given, **more).requests[0]


def events(exchange, answer):
    found = parsed(stream(exchange, answer))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    for name, data in found:
        assert name == data["type"]
        EVENT.validate_python(data)
    return [data for _, data in found]


def whole(exchange, answer):
    found = written(exchange.whole([answer]))
    Response.model_validate(found)
    return found


def without_ids(value):
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key != "id"}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


# Bodies


def test_settings():
    found = request(temperature=0.5, top_p=0.9, max_output_tokens=7, store=True, speculative={"draft_max": 2})
    assert found.settings == GenerationSettings(
        SamplingSettings(temperature=0.5, top_p=0.9), max_tokens=7, draft_max=2
    )
    assert found.messages == [{"role": "user", "content": "Why?"}]
    assert request().settings == GenerationSettings()


def test_a_schema_for_the_answer():
    schema = {"type": "array"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert json.loads(request(text={"format": form}).settings.json_schema) == schema
    assert whole(exchange(text={"format": form}), ANSWER)["text"] == {"format": form}


def test_items_as_messages():
    found = request(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "id": "fc"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Again."}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "snow"},
        ],
        instructions="Be kind.",
    )

    def call(number):
        function = {"name": "weather", "arguments": "{}"}
        return {"id": number, "type": "function", "function": function}

    assert found.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a"), call("b")],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "Again.", "tool_calls": [call("c")]},
        {"role": "tool", "content": "snow", "tool_call_id": "c"},
    ]


def test_instructions_alone():
    found = Responses({"instructions": "Tell a joke."}, LOADED).requests[0]
    assert found.messages == [{"role": "system", "content": "Tell a joke."}]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
OTHERS = {
    '[custom_tool_call: {"name": "patch", "input": "x"}]': {
        "type": "custom_tool_call",
        "call_id": "a",
        "name": "patch",
        "input": "x",
    },
    '[web_search_call: {"action": {"query": "q"}}]': {
        "type": "web_search_call",
        "id": "ws",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    '[local_shell_call: {"action": {"command": ["ls"]}}]': {
        "type": "local_shell_call",
        "call_id": "b",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    '[mcp_call: {"name": "n", "arguments": "{}", "output": "1", "server_label": "s"}]': {
        "type": "mcp_call",
        "id": "m",
        "name": "n",
        "arguments": "{}",
        "output": "1",
        "server_label": "s",
        "error": None,
    },
    '[image_generation_call: {"result": "[image left out: this model reads text only]"}]': {
        "type": "image_generation_call",
        "id": "i",
        "result": "AA",
    },
}
RESULTS = {
    '[custom_tool_call_output: {"output": "done"}]': {
        "type": "custom_tool_call_output",
        "call_id": "a",
        "output": "done",
    },
    '[computer_call_output: {"output": "[image left out: this model reads text only]"}]': {
        "type": "computer_call_output",
        "call_id": "c",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"},
    },
}


def test_items_of_tools_that_do_not_exist_here_become_text():
    nothing = [{"type": "mcp_list_tools", "server_label": "s", "tools": []}, {"type": "x_call", "id": "y"}]
    found = request(
        [{"role": "user", "content": "Why?"}, *OTHERS.values(), *nothing, *RESULTS.values()]
    ).messages
    assert found == [
        {"role": "user", "content": "Why?"},
        *({"role": "assistant", "content": text} for text in OTHERS),
        *({"role": "user", "content": text} for text in RESULTS),
    ]


def test_images_become_notes():
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "AA"}
    output = {"type": "function_call_output", "call_id": "a", "output": [IMAGE, file]}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    found = request([call, output, {"role": "user", "content": [IMAGE]}]).messages
    note = "[image left out: this model reads text only]"
    assert found[1]["content"] == f"{note}\n[document a.pdf left out: this model reads text only]"
    assert found[2]["content"] == note


def test_other_tools_are_left_out():
    kinds = "web_search web_search_preview file_search code_interpreter custom namespace mcp local_shell"
    others = [{"type": kind, "name": kind} for kind in kinds.split()]
    found = exchange(tools=[*others, TOOL], tool_choice="required")
    assert [tool["function"]["name"] for tool in found.requests[0].tools] == ["weather"]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "s"}, {"type": "function", "name": "weather"}],
    }
    found = exchange(tools=[*others, TOOL, TOOL | {"name": "time"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in found.requests[0].tools] == ["weather"]
    assert found.requests[0].tool_choice == "required"
    assert whole(found, CALLING)["tool_choice"] == choice


def test_a_call_after_further_reasoning_is_another_message():
    found = request(
        [
            {"role": "assistant", "content": "Wait."},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        ]
    )
    first, second, _ = found.messages
    assert first == {"role": "assistant", "content": "Wait."}
    assert (second["reasoning_content"], len(second["tool_calls"])) == ("Hm.", 1)


def test_tools():
    found = exchange(tools=[TOOL | {"strict": True}], tool_choice={"type": "function", "name": "weather"})
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    assert found.requests[0].tools == [{"type": "function", "function": function}]
    assert found.requests[0].tool_choice == "weather"
    response = whole(found, CALLING)
    assert response["tools"] == [TOOL | {"strict": True}]
    assert response["tool_choice"] == {"type": "function", "name": "weather"}
    assert request(tools=[TOOL], tool_choice="required").tool_choice == "required"


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"given": []}, "input is empty"),
        ({"given": [{"type": "reasoning", "summary": []}]}, "input is empty"),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input[0]: the type item_reference is not"),
        ({"given": [{"role": "user", "content": [IMAGE]}]}, "input: the question is only '[image left out"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"metadata": {"a": 1}}, "metadata.a: give a valid string"),
        ({"top_logprobs": 21}, "logprobs is 21: give at most 20"),
        ({"background": True}, "background is not supported"),
        ({"tools": [{"description": "f"}]}, "tools[0].name is missing"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice asks for a tool of the type 'web_search'",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "the format json_schema has no schema"),
        ({"max_output_tokens": 1.5}, "max_output_tokens: give a valid integer"),
    ],
)
def test_errors(more, part):
    with pytest.raises(InvalidRequest, match=re.escape(part)):
        exchange(**more)


# Responses


def test_a_whole_response():
    found = whole(exchange(model="m"), ANSWER)
    (item,) = found["output"]
    text = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert (item["type"], item["status"], item["content"]) == ("message", "completed", [text])
    assert Response.model_validate(found).output_text == TEXT
    assert (found["status"], found["incomplete_details"], found["model"]) == ("completed", None, "m")
    assert found["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (12, 9)


def test_reasoning_and_an_answer_that_was_cut_short():
    found = whole(exchange(), THOUGHTFUL)
    reasoning, message = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (reasoning["status"], message["status"]) == ("completed", "incomplete")
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_what_is_echoed():
    found = whole(exchange(metadata={"a": "b"}, parallel_tool_calls=False, top_logprobs=2), ANSWER)
    assert (found["metadata"], found["parallel_tool_calls"]) == ({"a": "b"}, False)
    assert found["top_logprobs"] == 2
    found = whole(exchange(), ANSWER)
    assert (found["metadata"], found["parallel_tool_calls"]) == ({}, True)


def test_effort():
    found = exchange(reasoning={"effort": "low"}, chat_template_kwargs={"x": 1})
    assert found.requests[0].variables == {"reasoning_effort": "low", "x": 1}
    assert whole(found, ANSWER)["reasoning"]["effort"] == "low"
    assert request(reasoning={"effort": "none"}).variables == {"enable_thinking": False}
    assert request(reasoning={"summary": "auto"}).variables == {}


INCLUDE = {"include": ["message.output_text.logprobs"]}


def test_logprobs_of_the_text():
    assert request(**INCLUDE, top_logprobs=3).settings.logprobs == 3
    assert request(**INCLUDE).settings.logprobs == 0
    assert request(include=["reasoning.encrypted_content"]).settings.logprobs is None
    answer = [STARTED, *THOUGHTFUL[1:2], *ANSWER[1:]]
    *_, message = whole(exchange(**INCLUDE), answer)["output"]
    (part,) = message["content"]
    assert [bytes(each["bytes"]) for each in part["logprobs"]] == [
        *(b"Hel", b"lo", b"\xe2\x82", b"\xff w\xc3", b"\xb6rld"),
    ]
    assert part["logprobs"][0]["top_logprobs"][1]["logprob"] == -2.5
    found = events(exchange(**INCLUDE), answer)
    deltas = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
    assert list(map(len, deltas)) == [2, 3, 0]
    (done,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [each for delta in deltas for each in delta] == part["logprobs"]


def test_calls():
    found = whole(exchange(), CALLING)
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call"]
    assert [(i["call_id"], i["name"], i["arguments"], i["status"]) for i in found["output"][1:]] == [
        ("call_1", "weather", '{"city": "Bern"}', "completed"),
        ("call_2", "time", "{}", "completed"),
    ]


def test_arguments_come_in_parts():
    found = [e for e in events(exchange(), IN_PARTS) if e["type"] == "response.function_call_arguments.delta"]
    assert [(event["output_index"], event["delta"]) for event in found] == [
        *((1, '{"ci'), (1, 'ty": "B'), (1, 'ern"}')),
        (2, "{}"),
    ]
    assert without_ids(whole(exchange(), IN_PARTS)) == without_ids(whole(exchange(), CALLING))


def test_a_call_that_is_cut_is_incomplete():
    found = whole(exchange(), CUT)
    call = found["output"][1]
    assert (call["arguments"], call["status"], found["status"]) == ('{"city": "B', "incomplete", "incomplete")


def test_a_schema_and_tools():
    tools = [{"type": "function", "name": "f", "parameters": {"properties": {"a": {"not": {}}}}}]
    found = exchange(tools=tools, text={"format": {"type": "json_object"}}, parallel_tool_calls=False)
    response = whole(found, ANSWER)
    assert response["warnings"] == [
        "tools[0].parameters: not at #/properties/a is not supported and not enforced"
    ]
    assert response["parallel_tool_calls"] is False
    assert not found.requests[0].parallel_tool_calls


def test_a_call_at_the_limit_is_complete():
    last = ended("length", rest=Delta(tool_calls=(WEATHER,)))
    text, call = whole(exchange(), [STARTED, HELLO, last])["output"]
    assert (text["status"], call["status"]) == ("incomplete", "completed")


@pytest.mark.parametrize("answer", [ANSWER, THOUGHTFUL, CALLING, IN_PARTS, CUT])
def test_a_stream_ends_with_the_same_response(answer):
    found = events(exchange(stream=True), answer)
    assert without_ids(found[-1]["response"]) == without_ids(whole(exchange(), answer))
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    assert (last["created_at"], last["completed_at"]) == (NOW, NOW if last["status"] == "completed" else None)


def test_the_events_of_a_stream():
    found = events(exchange(), [*CALLING[:2], *CALLING[3:]])
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert found[0]["response"]["output"] == []
    assert {event["item_id"] for event in found if event.get("output_index") == 0 and "item_id" in event} == {
        found[2]["item"]["id"]
    }
    assert found[2]["item"]["status"] == "in_progress"
    deltas = [event["delta"] for event in events(exchange(), ANSWER) if "delta" in event]
    assert "".join(deltas) == TEXT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextOverflow("long"), "context_length_exceeded"),
        (InvalidRequest("bad"), "invalid_prompt"),
        (BackendError("bad"), "server_error"),
    ],
)
def test_a_failure_in_a_stream(error, code):
    ((name, data),) = parsed("".join(exchange().failed(error)))
    assert name == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"] == {"code": code, "message": str(error)}
    if code == "context_length_exceeded":  # which OpenAI's server sends, and its library does not list
        data["response"]["error"]["code"] = "invalid_prompt"
    EVENT.validate_python(data)
