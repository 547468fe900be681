"""OpenAI's chat completions: what bodies ask for, and what clients get, as OpenAI's package reads it."""

import json
import re
import sys

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.server.protocols.chat_completions import ChatCompletions
from spec_local.server.supervision.events import Delta, MarkedSpan, Refused
from spec_local.settings import GenerationSettings
from tests.server_events import (
    ANSWER,
    BROKEN,
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
from tests.unfiltered import changed_values

QUESTION = {"role": "user", "content": "Why?"}
WEATHER_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def exchange(**more):
    return ChatCompletions({"messages": [QUESTION]} | more, LOADED)


def streaming(**more):
    return exchange(stream=True, **more)


def request(**more):
    return exchange(**more).requests[0]


def chunks(exchange, *answers):
    *found, (_, done) = parsed(stream(exchange, *answers))
    assert done == "[DONE]"
    return [ChatCompletionChunk.model_validate(data) for _, data in found]


def whole(exchange, *answers):
    return ChatCompletion.model_validate(written(exchange.whole(answers)))


# Bodies


def test_defaults_are_those_of_the_command_line():
    found = request()
    assert found.settings == GenerationSettings()
    assert found.messages == [QUESTION]
    assert (found.tools, found.tool_choice, found.marks) == ([], "auto", False)
    assert not exchange().streams
    assert exchange(stream=True).streams


FIELDS = """
    temperature top_p n stop max_tokens tools tool_choice response_format stream seed logit_bias speculative
    stream_options
""".split()  # noqa: SIM905
DEFAULTS = {
    "null": dict.fromkeys(FIELDS),
    "no limit and no seed": {"max_tokens": -1, "seed": -1, "grammar": ""},
    "functions that there are not": {"functions": [], "function_call": "none"},
    "samplers that do nothing": {"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1},
}


@pytest.mark.parametrize("more", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_values_that_are_the_defaults(more):
    assert request(**more).settings == GenerationSettings()


def test_settings():
    settings = request(
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.1,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        frequency_penalty=0.5,
        presence_penalty=-1,
        logit_bias={"7": -100, "8": 5.5},
        seed=3,
        max_tokens=5,
        max_completion_tokens=6,
        stop="END",
    ).settings
    assert settings == GenerationSettings(
        SamplingSettings(0, 0, 0.5, 0.1, 1.1, 0.5, -1, 2**31 - 1, logit_bias={7: -100, 8: 5.5}),
        seed=3,
        max_tokens=6,
        stops=["END"],
    )


@pytest.mark.parametrize(
    ("setting", "value"), [*changed_values()], ids=lambda each: getattr(each, "field", "")
)
def test_each_sampling_setting_is_a_field(setting, value):
    found = request(**{setting.body: value}).settings.sampling
    assert found == SamplingSettings(**{setting.field: value})
    assert request(**{setting.body: None}).settings == GenerationSettings()
    with pytest.raises(InvalidRequest, match=setting.body):
        request(**{setting.body: {"a": 1}})


def test_special_values_of_llama_cpp():
    found = request(
        **{"top_n_sigma": -1, "xtc_probability": -0.5, "dry_penalty_last_n": -1, "dry_base": 0.5},
        dry_sequence_breakers=[],
    ).settings.sampling
    assert found == SamplingSettings(dry_penalty_last_n=2**31 - 1, dry_sequence_breakers=())
    with pytest.raises(InvalidRequest, match="repeat_last_n is -2: give 0 or more"):
        request(repeat_last_n=-2)


def test_each_choice_has_its_own_seed():
    assert [each.settings.seed for each in exchange(n=3, seed=7).requests] == [7, 8, 9]
    assert [each.settings.seed for each in exchange(n=2).requests] == [None, None]


def test_parts_of_content_are_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert request(messages=[{"role": "user", "content": parts}]).messages == [
        {"role": "user", "content": "a\nb"}
    ]


def test_messages_keep_calls_results_and_reasoning_and_nothing_else():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = request(
        messages=[
            {"role": "developer", "content": "Be kind.", "name": "boss"},
            QUESTION | {"x": 1},
            {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}], "refusal": None},
            {"role": "tool", "content": "7", "tool_call_id": "c", "name": "f"},
            {"role": "assistant", "content": "Seven", "reasoning_content": "Hm"},
            QUESTION,
        ]
    )
    assert found.messages == [
        {"role": "system", "content": "Be kind."},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "Seven", "reasoning_content": "Hm"},
        QUESTION,
    ]


def test_tools():
    found = request(tools=[WEATHER_TOOL | {"strict": True}], tool_choice="required")
    assert (found.tools, found.tool_choice) == ([WEATHER_TOOL], "required")
    assert found.parallel_tool_calls
    assert not request(tools=[WEATHER_TOOL], parallel_tool_calls=False).parallel_tool_calls
    named = {"type": "function", "function": {"name": "weather"}}
    assert request(tools=[WEATHER_TOOL], tool_choice=named).tool_choice == "weather"


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_object", "schema": {"type": "array"}}, '{"type": "array"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}},
            '{"type": "null"}',
        ),
    ],
)
def test_response_format(form, schema):
    assert request(response_format=form).settings.json_schema == schema


CHOSEN = {"proposer": "lookup", "draft_max": 4, "policy": "fixed", "shape": "tree"}


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"speculative": False}, {"policy": "off"}),
        ({"speculative": True}, {}),
        ({"speculative": CHOSEN}, CHOSEN),
        ({"speculative.n_max": 3, "speculative.p_min": 0.5}, {"draft_max": 3, "draft_p_min": 0.5}),
    ],
    ids=["off", "on", "chosen", "as llama.cpp names it"],
)
def test_speculation(more, settings):
    assert request(**more).settings == GenerationSettings(**settings)


BEGUN = {"role": "assistant", "content": "Because "}


@pytest.mark.parametrize(
    ("last", "more"),
    [
        (BEGUN, {}),
        (BEGUN | {"prefix": True}, {}),  # DeepSeek, Mistral
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}),  # vLLM
        ({"role": "developer", "content": "Go on."}, {"add_generation_prompt": True}),
    ],
)
def test_the_last_message_can_have_any_role(last, more):
    found = request(messages=[QUESTION, last], **more).messages[-1]
    assert found["content"] == last["content"]
    assert request(messages=[last], **more).messages == [found]


def test_a_body_of_responses():
    """Cursor sends it to the path of chat completions."""
    body = {
        "model": "gpt-5",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}],
        "tools": [{"type": "function", "name": "weather"}, {"type": "custom", "name": "ApplyPatch"}],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 9,
        "include": ["reasoning.encrypted_content"],
    }
    (found,) = ChatCompletions(body, LOADED).requests
    assert found.messages == [{"role": "system", "content": "Be brief."}, QUESTION]
    assert [tool["function"]["name"] for tool in found.tools] == ["weather"]
    assert found.variables == {"reasoning_effort": "low"}
    assert found.settings.max_tokens == 9
    assert ChatCompletions({"input": "Why?"}, LOADED).requests[0].messages == [QUESTION]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LEFT_OUT = "[image left out: this model reads text only]"


def test_images_become_notes():
    files = [
        {"type": "file", "file": {"filename": "a b.pdf", "file_data": "data:application/pdf;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    found = request(
        messages=[
            {"role": "user", "content": [IMAGE]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, IMAGE, *files]},
        ]
    ).messages
    assert found[0]["content"] == LEFT_OUT
    assert found[2]["content"].splitlines() == [
        "And?",
        LEFT_OUT,
        "[document a b.pdf left out: this model reads text only]",
        "[audio left out: this model reads text only]",
    ]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": [1]}},
            {"enable_thinking": True, "x": [1]},
        ),
    ],
)
def test_variables_of_the_template(more, expected):
    assert request(**more).variables == expected


@pytest.mark.parametrize("name", ["thinking_budget_tokens", "reasoning_budget_tokens", "reasoning_budget"])
def test_a_budget_for_the_reasoning(name):
    assert request(**{name: 0}).settings.reasoning_budget == 0
    assert request().settings.reasoning_budget is None
    assert request(**{name: -1}).settings.reasoning_budget == sys.maxsize  # no limit under a grammar, either


CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
TIME_TOOL = {"type": "function", "function": {"name": "time"}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_tools_that_are_not_functions_are_left_out():
    found = request(tools=[CUSTOM, WEATHER_TOOL, {"type": "web_search"}])
    assert [tool["function"]["name"] for tool in found.tools] == ["weather"]
    assert request(tools=[CUSTOM]).tools == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (allowed("auto", TIME_TOOL), ("auto", ["time"])),
        (allowed("required", CUSTOM, TIME_TOOL, WEATHER_TOOL), ("required", ["weather", "time"])),
        (allowed("auto", CUSTOM), ("auto", [])),
    ],
)
def test_allowed_tools(choice, expected):
    found = request(tools=[WEATHER_TOOL, TIME_TOOL, CUSTOM], tool_choice=choice)
    assert (found.tool_choice, [tool["function"]["name"] for tool in found.tools]) == expected


def test_calls_that_are_not_of_functions_become_text():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    custom = {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "x = 1\n"}}
    answer = {"role": "assistant", "content": "Wait.", "tool_calls": [call, custom]}
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in "ab"]
    assert request(messages=[QUESTION, answer, *results]).messages[1:] == [
        {
            "role": "assistant",
            "content": 'Wait.\n[custom_tool_call: {"name": "patch", "input": "x = 1\\n"}]',
            "tool_calls": [call],
        },
        results[0],
        {"role": "user", "content": "b"},
    ]


def messages(**message):
    return {"messages": [message]}


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages: give a valid array"),
        (messages(role="user"), "messages[0].content is missing"),
        (messages(content="x"), "messages[0].role is missing"),
        (messages(role="king", content="x"), "messages[0].role: give 'system', "),
        (messages(role="user", content=[IMAGE]), "messages: the question is only '[image left out: "),
        (messages(role="user", content=[{"type": "smell"}]), "content of the type smell is not supported"),
        (messages(role="user", content="\ud800"), "the body is not JSON ("),
        ({"temperature": "warm"}, "temperature: give a valid number"),
        ({"temperature": True}, "temperature: give a valid number"),
        ({"temperature": 101}, "temperature is 101.0: give at most 100"),
        ({"top_p": 2}, "top_p is 2.0: give at most 1"),
        ({"temperature": float("nan")}, "the body is not JSON ("),
        ({"n": 0}, "n: give at least 1"),
        ({"n": 129}, "n: give at most 128"),
        ({"stop": ["x"] * 65}, "stop: give at most 64 items"),
        ({"stop": [1]}, "stop[0]: give a valid string"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[0][1]: give a valid number"),
        ({"logit_bias": [5, 1]}, "logit_bias[0]: give a valid array"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias[5] is 1e+300: give at most"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21: give at most 20"),
        ({"response_format": {"type": "xml"}}, "response_format.type: give 'text', "),
        ({"response_format": {"type": "json_schema"}}, "has no schema: add it"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "an answer cannot "),
        ({"json_schema": "x"}, "json_schema: give a JSON schema"),
        ({"functions": [{"name": "f"}]}, "functions and function_call are not supported: give tools"),
        ({"tools": [{"type": 7}]}, "tools[0].type: give 'function'"),
        ({"tools": [WEATHER_TOOL] * 1025}, "tools has 1025 functions: give at most 1024"),
        ({"tools": [CUSTOM], "tool_choice": "required"}, "tool_choice needs tools that are functions"),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}},
            "tool_choice asks for a tool of the type 'custom', which does not exist here",
        ),
        (
            {"tools": [WEATHER_TOOL], "tool_choice": allowed("required", CUSTOM)},
            "tool_choice needs tools that are functions",
        ),
        ({"tools": [WEATHER_TOOL], "tool_choice": allowed("maybe")}, "tool_choice: give the mode auto or"),
        ({"tools": [WEATHER_TOOL], "tool_choice": "maybe"}, "tool_choice is not supported: give auto, "),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice names 'f', which"),
        ({"speculative": {"speed": 9}}, "speculative has the unknown key 'speed'"),
        ({"speculative": {"policy": "wild"}}, "policy 'wild' is unknown"),
        ({"speculative": {"draft_max": "8"}}, "draft_max is '8': give an integer"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: give an object"),
        ({"continue_final_message": True}, "continue_final_message needs a last message of the assistant"),
        ({"add_generation_prompt": False}, "add_generation_prompt: give true, or add the start"),
        (
            messages(role="assistant", content="x") | {"continue_final_message": False},
            "continue_final_message: give true",
        ),
        ({"mirostat": 2}, "mirostat is not supported"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_errors_name_the_field_and_what_to_give(more, part):
    with pytest.raises(InvalidRequest, match=re.escape(part)) as error:
        exchange(**more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("depth", [150, 900, 3000, 20_000])
def test_deep_nesting_is_no_crash(depth):
    nested = {}
    for _ in range(depth):
        nested = {"properties": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    with pytest.raises(InvalidRequest):
        exchange(tools=[tool], response_format={"type": "json_schema", "json_schema": {"schema": nested}})


# Responses


def test_a_stream():
    found = chunks(streaming(), ANSWER)
    first, *middle, last = found
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in found] == [None] * (len(found) - 1) + ["stop"]
    assert last.timings["draft_n"] == 6
    assert last.timings["plain_ms"] == 250
    assert last.timings["gain"] == {"words": "about 1.5 times as fast as without drafts", "times": 1.5}
    assert {(chunk.id, chunk.model, chunk.created) for chunk in found} == {
        (first.id, "tiny.gguf", first.created)
    }
    assert first.system_fingerprint.startswith("specdec-")
    assert chunks(streaming(model="gpt"), ANSWER)[0].model == "gpt"
    assert not any("specdec" in chunk.model_extra or "usage" in chunk.model_fields_set for chunk in found)


def test_usage_in_a_stream():
    *others, last = chunks(streaming(stream_options={"include_usage": True}), THOUGHTFUL)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in others)
    assert last.choices == []
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 9, 21)
    assert usage.prompt_tokens_details.cached_tokens == 5
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 2)
    assert details.reasoning_tokens == 2


def test_reasoning_and_calls_in_a_stream():
    deltas = [chunk.choices[0].delta for chunk in chunks(streaming(), THOUGHTFUL)]
    assert [delta.reasoning_content for delta in deltas if "reasoning_content" in delta.model_extra] == [
        "Let me see."
    ]
    found = chunks(streaming(), CALLING)
    calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id, call.function.name, call.function.arguments) for call in calls] == [
        (0, "call_1", "weather", '{"city": "Bern"}'),
        (1, "call_2", "time", "{}"),
    ]
    assert found[-1].choices[0].finish_reason == "tool_calls"


def test_arguments_come_in_parts():
    found = chunks(streaming(), IN_PARTS)
    calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id, call.function.name, call.function.arguments) for call in calls] == [
        (0, "call_1", "weather", '{"ci'),
        (0, None, None, 'ty": "B'),
        (0, None, None, 'ern"}'),
        (1, "call_2", "time", "{}"),
    ]
    same, other = (whole(exchange(), answer).choices[0].message for answer in (IN_PARTS, CALLING))
    assert same == other


def test_a_call_that_is_cut():
    (choice,) = whole(exchange(), CUT).choices
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.finish_reason) == ('{"city": "B', "length")
    assert chunks(streaming(), CUT)[-1].choices[0].finish_reason == "length"


LOOK_AHEAD = {"type": "json_schema", "json_schema": {"schema": {"pattern": "^(?=a)", "type": "string"}}}
SET_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}},
}


@pytest.mark.parametrize(
    ("body", "warnings"),
    [
        ({"response_format": LOOK_AHEAD}, ["response_format: the pattern '^(?=a)' at # is not"]),
        ({"json_schema": {"not": {}}}, ["json_schema: not at # is not supported and not enforced"]),
        ({"tools": [SET_TOOL]}, []),  # the model may write what it likes
        ({"tools": [SET_TOOL], "tool_choice": "required"},
         ["tools[0].function.parameters: uniqueItems at #/properties/a is not supported and not enforced"]),
        ({"tools": [WEATHER_TOOL, SET_TOOL], "response_format": LOOK_AHEAD},
         ["response_format: the pattern", "tools[1].function.parameters: uniqueItems"]),
        ({"tools": [SET_TOOL], "response_format": LOOK_AHEAD, "tool_choice": "none"}, ["response_format: "]),
    ],
)  # fmt: skip
def test_warnings_name_what_is_not_enforced(body, warnings):
    found = exchange(**body).whole([ANSWER])
    assert len(found.get("warnings", ())) == len(warnings)
    last = json.loads([*streaming(**body).write(0, ANSWER[-1])][-1].removeprefix("data: "))
    assert last.get("warnings", []) == found.get("warnings", [])
    for warning, part in zip(found.get("warnings", ()), warnings, strict=True):
        assert warning.startswith(part)


def test_marks():
    found = chunks(streaming(marks=True), ANSWER)
    assert exchange(marks=True).requests[0].marks
    assert [chunk.specdec for chunk in found if "specdec" in chunk.model_extra] == [
        {
            "spans": [
                {"text": "Hel", "kind": "accepted", "rejected": []},
                {"text": "lo", "kind": "corrected", "rejected": ["p"]},
            ],
            "proposer": "draft",
            "draft_n": 3,
            "draft_n_accepted": 1,
            "draft_depth": 3,
        },
        {"spans": [], "proposer": "none", "draft_n": 2, "draft_n_accepted": 0, "draft_depth": 1},
        {"spans": [], "proposer": "none", "draft_n": 0, "draft_n_accepted": 0, "draft_depth": 0},
        {"spans": [], "proposer": "none", "draft_n": 0, "draft_n_accepted": 0, "draft_depth": 0},
    ]


def test_logprobs_of_all_tokens_even_without_text():
    wanted = streaming(logprobs=True, top_logprobs=3)
    assert wanted.requests[0].settings.logprobs == 3
    tokens = [
        token
        for chunk in chunks(wanted, ANSWER)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    choice = whole(exchange(logprobs=True), ANSWER).choices[0]
    assert choice.logprobs.content == tokens
    assert [bytes(token.bytes) for token in tokens] == [b"Hel", b"lo", b"\xe2\x82", b"\xff w\xc3", b"\xb6rld"]
    assert (tokens[0].token, tokens[0].logprob) == ("Hel", -0.25)
    assert [top.logprob for top in tokens[0].top_logprobs] == [-0.25, -2.5, -3.4e38]
    assert whole(exchange(), ANSWER).choices[0].logprobs is None


def test_a_whole_response():
    found = whole(exchange(), ANSWER)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert found.usage.total_tokens == 21
    assert found.timings["predicted_n"] == 9
    assert "reasoning_content" not in choice.message.model_extra


def test_a_whole_response_with_reasoning_and_calls():
    (choice,) = whole(exchange(), THOUGHTFUL).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Let me see.", "Hello")
    assert choice.finish_reason == "length"
    (choice,) = whole(exchange(), [STARTED, *CALLING[2:]]).choices
    assert choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "time"]
    assert choice.finish_reason == "tool_calls"


def test_only_tokens_without_text_of_the_answer_count_as_reasoning():
    last_thought = Delta(reasoning="so", content="Yes", tokens=HELLO.tokens)
    usage = whole(exchange(), [STARTED, THOUGHT, last_thought, ended()]).usage
    assert usage.completion_tokens_details.reasoning_tokens == 2


def test_bytes_that_are_not_text_become_printable():
    broken = Delta(
        reasoning="\udcff",
        tool_calls=[Call("c", "f\udcff", "\udcff")],
        spans=[MarkedSpan("\udcff", "main", ["\udcfe"])],
    )
    message = whole(exchange(), [STARTED, broken, ended()]).choices[0].message
    assert message.reasoning_content == "\ufffd"
    assert message.tool_calls[0].function.model_dump() == {"name": "f\ufffd", "arguments": "\ufffd"}
    marked = chunks(streaming(marks=True), [STARTED, broken, ended()])[1]
    assert marked.specdec["spans"] == [{"text": "\ufffd", "kind": "main", "rejected": ["\ufffd"]}]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "stop"), ("length", "length"), ("context", "length"), ("cancelled", "stop")],
)
def test_finish_reasons(reason, expected):
    assert whole(exchange(), [STARTED, ended(reason)]).choices[0].finish_reason == expected


def test_several_choices():
    other = [STARTED, BROKEN, ended("length")]
    found = whole(exchange(n=2), ANSWER, other)
    assert [(c.index, c.message.content, c.finish_reason) for c in found.choices] == [
        (0, TEXT, "stop"),
        (1, "\ufffd wörld", "length"),
    ]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (12, 18)
    texts = ["", ""]
    for chunk in chunks(streaming(n=2), ANSWER, other):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [TEXT, "\ufffd wörld"]


def test_a_failure_in_a_stream():
    ((name, data),) = parsed("".join(exchange().failed(ContextOverflow("too long: shorten it"))))
    assert name == ""
    assert data["error"]["message"] == "too long: shorten it"
    assert data["error"]["type"] == "invalid_request_error"


def test_a_refused_answer_is_an_error():
    with pytest.raises(ContextOverflow):
        exchange().whole([[STARTED, HELLO, Refused(ContextOverflow("too long"))]])
