"""Ollama's protocol: what bodies ask for, and what clients get."""

import json
from datetime import UTC, datetime

import httpx
import pytest

from spec_local.core.sampling import SamplingSettings
from spec_local.errors import BackendError, InvalidRequest
from spec_local.server import app
from spec_local.server.protocols.ollama import OllamaChat, OllamaGenerate, timestamp
from spec_local.server.supervision.events import Delta, Loaded
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.settings import GenerationSettings
from tests.server_events import (
    ANSWER,
    CALLING,
    CUT,
    IN_PARTS,
    LOADED,
    STARTED,
    TEXT,
    THOUGHTFUL,
    Call,
    ended,
    stream,
    written,
)

QUESTION = {"role": "user", "content": "Why?"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {}}}
NOTE = "[image left out: this model reads text only]"
BASE = Loaded("base", None, n_ctx=512, n_parallel=2, template=None)


def chat(**more):
    return OllamaChat({"model": "m", "messages": [QUESTION]} | more, LOADED)


def generate(loaded=LOADED, **more):
    return OllamaGenerate({"model": "m", "prompt": "Why?"} | more, loaded)


def request(**more):
    return chat(**more).requests[0]


def messages(*given):
    return request(messages=list(given)).messages


def lines(exchange, answer):
    text = stream(exchange, answer)
    assert text.isascii()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


# Bodies


def test_options():
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 42,
        "stop": ["END"],
        "repeat_penalty": 1.5,
        "repeat_last_n": 33,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "mirostat": 0,
        "typical_p": 1.0,
        **{"num_ctx": 512, "num_thread": 4, "num_gpu": 1, "num_keep": 5, "use_mmap": True, "tfs_z": 1},
    }
    sampling = SamplingSettings(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repeat_penalty=1.5,
        penalty_window=33,
        presence_penalty=0.25,
        frequency_penalty=0.75,
    )
    expected = GenerationSettings(sampling, max_tokens=9, stops=["END"], seed=42)
    for exchange in (chat(options=options), generate(options=options)):
        (found,) = exchange.requests
        assert found.settings == expected
        assert not found.warnings


def test_options_precede_the_servers_defaults():
    defaults = {"temperature": 0.25, "top_k": 5, "logit_bias": {"7": -1}, "speculative": {"draft_max": 3}}
    found = request(**defaults, options={"temperature": 0.5, "top_k": None}).settings
    assert (found.sampling.temperature, found.sampling.top_k, found.draft_max) == (0.5, 5, 3)
    assert found.sampling.logit_bias == {7: -1}
    assert request(**defaults, options=None).settings.sampling.temperature == 0.25
    assert request(speculative=False).settings.policy == "off"


@pytest.mark.parametrize(("given", "expected"), [(-1, None), (-2, None), (0, 0), (7, 7), (None, None)])
def test_the_limit_of_tokens(given, expected):
    assert request(options={"num_predict": given}).settings.max_tokens == expected


def test_a_longer_context_than_the_servers_is_a_warning():
    (warning,) = request(options={"num_ctx": 4096}).warnings
    assert warning == (
        "options.num_ctx is 4096, but this server's context has 512 tokens: start it with --ctx 4096"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"options": {"mirostat": 1}}, "options: mirostat is not supported: give 0, or leave it out"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_ctx": "many"}}, "options.num_ctx"),
        ({"options": [1]}, "options: give"),
        ({"format": "xml"}, "format: give json, or a JSON schema"),
        ({"format": {"type": "nothing"}}, "format"),
        ({"think": "a lot"}, "think: give true, false, low, medium, high or max"),
        ({"top_logprobs": 21}, "top_logprobs: give at most 20"),
        ({"messages": "Why?"}, "messages: give"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "the question is only"),
        ({"messages": [QUESTION | {"role": "wizard"}]}, r"messages\[0\].role"),
    ],
)
def test_refusals(body, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        chat(**body)
    assert str(caught.value).isprintable()


def test_formats():
    schema = {"type": "array"}
    assert json.loads(request(format="json").settings.json_schema) == {"type": "object"}
    assert json.loads(request(format=schema).settings.json_schema) == schema
    assert "format" in request(format=schema | {"uniqueItems": True}).warnings[0]
    assert request(format="").settings.json_schema is None
    assert generate(format=schema).requests[0].settings.json_schema


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_thinking_is_a_matter_of_the_template(think, variables):
    assert request(think=think).variables == variables
    assert generate(system="Be kind.", think=think).requests[0].variables == variables


def test_calls_without_ids_and_their_results_by_order():
    def call(name, **arguments):
        return {"function": {"name": name, "arguments": arguments}}

    found = messages(
        {"role": "SYSTEM", "content": "Be kind."},
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "thinking": "I look.",
            "tool_calls": [call("weather", city="Zürich"), call("time"), call("weather", city="Rome")],
        },
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "lost", "tool_name": "other"},
    )
    called = found[2]
    assert (called["content"], called["reasoning_content"]) == ("", "I look.")
    ids = [each["id"] for each in called["tool_calls"]]
    assert len(set(ids)) == 3
    assert [each["function"] for each in called["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Zürich"}'},
        {"name": "time", "arguments": "{}"},
        {"name": "weather", "arguments": '{"city": "Rome"}'},
    ]
    results = [(message["tool_call_id"], message["content"]) for message in found[3:6]]
    assert results == [(ids[1], "noon"), (ids[0], "rain"), (ids[2], "sun")]
    assert found[6] == {"role": "user", "content": "lost"}
    assert found[0] == {"role": "system", "content": "Be kind."}


def test_calls_with_ids():
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for i in (1, 2)
    ]
    results = [{"role": "tool", "content": str(i), "tool_call_id": f"c{i}"} for i in (2, 1)]
    found = messages(QUESTION, {"role": "assistant", "tool_calls": calls}, *results)
    assert [each["id"] for each in found[1]["tool_calls"]] == ["c1", "c2"]
    assert [each["tool_call_id"] for each in found[2:]] == ["c2", "c1"]


def test_images_are_notes():
    image = QUESTION | {"images": ["aGk=", "aGk="]}
    assert messages(image) == [{"role": "user", "content": f"Why?\n{NOTE}\n{NOTE}"}]
    assert messages(QUESTION | {"images": []}) == messages(QUESTION | {"images": None}) == [QUESTION]
    assert generate(images=["aGk="], system="S").requests[0].messages[1]["content"] == f"Why?\n{NOTE}"


def test_tools():
    without_type = {"function": {"name": "time"}}
    (first, second) = request(tools=[TOOL, without_type]).tools
    assert (first, second) == (TOOL, {"type": "function", **without_type})
    found = request(tools=[TOOL, {"type": "web_search"}])
    assert found.tools == [TOOL]
    assert found.tool_choice == "auto"


def test_a_prompt():
    (found,) = generate().requests
    assert found.messages == [{"role": "user", "content": "Why?"}]
    assert generate(system="Be kind.").requests[0].messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why?"},
    ]
    (raw,) = generate(raw=True, suffix="not used", template="", system="").requests
    assert (raw.messages, raw.prompt, raw.parse_special, raw.suffix) == ((), "Why?", True, None)
    (gap,) = generate(suffix="end", system="not used").requests
    assert (gap.messages, gap.prompt, gap.suffix) == ((), "Why?", "end")
    (base,) = generate(BASE).requests
    assert (base.messages, base.prompt, base.parse_special) == ((), "Why?", False)


@pytest.mark.parametrize("field", [{"system": "S"}, {"template": "{{ .Prompt }}"}, {"context": [1]}])
def test_raw_prompts_have_nothing_else(field):
    with pytest.raises(InvalidRequest, match="leave them out"):
        generate(raw=True, **field)


def test_templates_are_refused():
    with pytest.raises(InvalidRequest, match="template is not supported: leave it out"):
        generate(template="{{ .Prompt }}")


def test_a_context_is_the_conversation():
    first = generate(system="Be kind.")
    context = written(first.whole([ANSWER]))["context"]
    assert all(type(number) is int for number in context)
    earlier = [*first.requests[0].messages, {"role": "assistant", "content": TEXT}]
    follows = generate(prompt="And?", context=context)
    assert follows.requests[0].messages == [*earlier, {"role": "user", "content": "And?"}]
    other = generate(prompt="And?", context=context, system="Be brief.").requests[0].messages
    assert [message["content"] for message in other] == ["Be brief.", "Why?", TEXT, "And?"]


@pytest.mark.parametrize(
    "context",
    [[1, 2], [300], [-1], [*b"[1]"], [*b'[["user", 1]]'], [*b'[["x", ""]]'], [*rb'[["user", "\ud800"]]']],
)
def test_a_context_of_another_server_is_left_out(context):
    (found,) = generate(context=context).requests
    assert found.messages == [QUESTION]
    assert found.warnings == ["context is not from this server, and is left out: use /api/chat"]


# Answers


def test_a_stream():
    *parts, last = lines(chat(), ANSWER)
    assert chat().streams
    assert all(part["model"] == "m" and part["done"] is False for part in parts)
    assert "".join(part["message"]["content"] for part in parts) == TEXT
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert last["message"] == {"role": "assistant", "content": ""}  # some clients leave out what is here
    assert (last["done"], last["done_reason"]) == (True, "stop")
    counts = {name: last[name] for name in ("prompt_eval_count", "eval_count", "eval_duration")}
    assert counts == {"prompt_eval_count": 12, "eval_count": 9, "eval_duration": 500_000_000}
    assert type(last["total_duration"]) is int
    for part in (*parts, last):
        assert datetime.fromisoformat(part["created_at"]).tzinfo
        assert len(part["created_at"]) == len("2026-11-28T17:21:44.623560369Z")


def test_a_whole_answer():
    exchange = chat(stream=False)
    assert not exchange.streams
    exchange.waited_s = 2.0
    found = written(exchange.whole([ANSWER]))
    assert found["message"] == {"role": "assistant", "content": TEXT}
    assert found["load_duration"] == 2_000_000_000 <= found["total_duration"] < 3_000_000_000
    found = written(generate(stream=False).whole([ANSWER]))
    assert (found["response"], found["done"], found["done_reason"]) == (TEXT, True, "stop")


def test_a_stream_of_a_prompt():
    *parts, last = lines(generate(), THOUGHTFUL)
    assert [part["response"] for part in parts] == ["", "Hello"]
    assert parts[0]["thinking"] == "Let me see."
    assert (last["response"], last["done_reason"]) == ("", "length")
    assert last["context"]
    for body in ({"raw": True}, {"suffix": "end"}):
        assert "context" not in lines(generate(**body), ANSWER)[-1]


def test_thinking():
    thought, hello, _ = lines(chat(), THOUGHTFUL)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "Let me see."}
    assert hello["message"] == {"role": "assistant", "content": "Hello"}
    whole = written(chat().whole([THOUGHTFUL]))["message"]
    assert (whole["thinking"], whole["content"]) == ("Let me see.", "Hello")


@pytest.mark.parametrize("answer", [CALLING, IN_PARTS])
def test_calls_are_whole_objects(answer):
    expected = [
        {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Bern"}}},
        {"id": "call_2", "function": {"index": 1, "name": "time", "arguments": {}}},
    ]
    parts = lines(chat(tools=[TOOL]), answer)
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == expected
    assert "tool_calls" not in parts[-1]["message"]
    assert parts[-1]["done_reason"] == "stop"
    whole = written(chat(tools=[TOOL]).whole([answer]))
    assert whole["message"] == {"role": "assistant", "content": "Hello", "tool_calls": expected}


def test_a_call_that_is_cut():
    *_, cut, last = lines(chat(tools=[TOOL]), CUT)
    (call,) = cut["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "B"}
    assert last["done_reason"] == "length"


def test_arguments_that_are_no_object():
    answer = [STARTED, Delta(tool_calls=(Call("c", "weather", "[1]"),)), ended()]
    (call,) = written(chat().whole([answer]))["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"arguments": "[1]"}


def test_log_probabilities():
    exchange = chat(logprobs=True, top_logprobs=3)
    assert exchange.requests[0].settings.logprobs == 3
    assert chat(logprobs=True).requests[0].settings.logprobs == 0
    assert chat(top_logprobs=3).requests[0].settings.logprobs is None
    found = [each for part in lines(exchange, ANSWER) for each in part.get("logprobs", ())]
    assert [(each["token"], each["logprob"]) for each in found[:2]] == [("Hel", -0.25), ("lo", -0.25)]
    assert len(found[0]["top_logprobs"]) == 3
    assert written(chat(logprobs=True).whole([ANSWER]))["logprobs"][0]["token"] == "Hel"
    assert "logprobs" not in written(chat().whole([ANSWER]))


@pytest.mark.parametrize(
    ("kind", "empty"), [(OllamaChat, {"messages": []}), (OllamaGenerate, {"prompt": ""})]
)
def test_loading_and_unloading(kind, empty):
    for body in (empty, {}):
        exchange = kind(body, LOADED)
        assert (exchange.requests, exchange.streams) == ([], False)
        found = written(exchange.whole([]))
        assert (found["done"], found["done_reason"], found["model"]) == (True, "load", LOADED.name)
        assert kind.without_model(body | {"keep_alive": "5m"}) is kind.without_model(body) is None
        for keep_alive in (0, "0", "0s"):
            unload = body | {"keep_alive": keep_alive}
            assert kind(unload, LOADED).whole([])["done_reason"] == "unload"
            assert kind.without_model(unload | {"model": "m"})["done_reason"] == "unload"
    asked = {"messages": [QUESTION], "prompt": "Why?", "keep_alive": 0}
    assert kind.without_model(asked) is None
    assert kind(asked, LOADED).requests


def test_signs_of_life_and_errors():
    sign = json.loads(OllamaChat.sign_of_life("loading m", "m"))
    assert sign.pop("created_at")
    assert sign == {"model": "m", "message": {"role": "assistant", "content": ""}, "done": False}
    assert json.loads(OllamaGenerate.sign_of_life("loading m", "m"))["response"] == ""
    assert json.loads(OllamaChat.refused(BackendError("it failed: try again"))) == {
        "error": "it failed: try again"
    }


def test_warnings_are_in_the_last_object():
    exchange = chat(options={"num_ctx": 4096})
    assert ["warnings" in line for line in lines(exchange, ANSWER)][-1]


async def test_a_model_whose_file_is_gone(tmp_path):
    gone = ServedModel("gone", {"main": tmp_path / "gone.gguf", "n_ctx": None})
    transport = httpx.ASGITransport(app.create(ServedModels([gone]), app.Access()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        listed, shown = await client.get("/api/tags"), await client.post("/api/show", json={"model": "gone"})
    assert listed.json() == {"models": []}
    assert shown.status_code == 503
    assert "the file of gone cannot be read" in shown.json()["error"]


def test_times():
    ns = 1_795_887_703_000_000_042
    assert timestamp(ns) == "2026-11-28T17:41:43.000000042Z"
    assert datetime.fromisoformat(timestamp(ns)) == datetime.fromtimestamp(ns // 10**9, UTC)
