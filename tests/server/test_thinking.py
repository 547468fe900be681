"""Models that think before a structured answer, in each protocol."""

import json

import pytest

from tests.chat_templates import TOOL_TEMPLATES
from tests.scripted_model import write_scripted_model
from tests.server.conftest import Server

THOUGHT = "I look."
OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
SEVEN = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
ASKED = [{"role": "user", "content": "Which?"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SEVEN}}}


@pytest.fixture(scope="module")
def server(specdec):
    before = TOOL_TEMPLATES["Hermes"].removesuffix("\n' }}")
    path = write_scripted_model(
        specdec.folder / "thinks.gguf",
        before + "\n<think>\n' }}" + OFF,
        "<0x0A>",
        [THOUGHT, "\n</th", "ink>\n\n"],
    )
    with Server(specdec, path, "--ctx", 1024) as started:
        yield started


def chat(server, **options):
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 300} | options
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    return choice["message"]


@pytest.mark.parametrize("form", [FORMAT, {"json_schema": SEVEN}, {"grammar": 'root ::= "{\\"n\\": 7}"'}])
def test_chat_completions(server, form):
    message = chat(server, **form)
    assert message["reasoning_content"] == THOUGHT
    assert json.loads(message["content"]) == {"n": 7}
    for less in ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking_budget_tokens": 0}):
        message = chat(server, **form, **less)
        assert "reasoning_content" not in message
        assert json.loads(message["content"]) == {"n": 7}


def test_a_stream(server):
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 300, "stream": True} | FORMAT
    with server.stream("/v1/chat/completions", body) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [each["delta"] for line in lines for each in json.loads(line)["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == THOUGHT
    assert json.loads("".join(delta.get("content") or "" for delta in deltas)) == {"n": 7}


def test_a_required_call(server):
    message = chat(server, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    assert message["reasoning_content"] == THOUGHT
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_an_answer_that_is_cut_within_the_reasoning(server):
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 1} | FORMAT
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (THOUGHT, "")


CLOSED = "the reasoning was closed after 150 tokens to leave room for the answer: give thinking_budget_tokens"


@pytest.fixture
def endless(server):
    """Fields of a request with which the model never closes its reasoning."""
    (closing,) = server.post("/tokenize", {"content": "\n</th"}).json()["tokens"]
    return {"temperature": 0, "logit_bias": {str(closing): -100}}


def test_reasoning_without_an_end_leaves_half_of_the_tokens(server, endless):
    body = {"messages": ASKED, "max_tokens": 300} | endless | FORMAT
    answer = server.post("/v1/chat/completions", body).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"n": 7}
    (warning,) = answer["warnings"]
    assert warning.startswith(CLOSED)
    with server.stream("/v1/chat/completions", body | {"stream": True}) as stream:
        assert sum(CLOSED in line for line in stream.iter_lines()) == 1
    for budget, reason in ((3, "stop"), (-1, "length")):
        answer = server.post("/v1/chat/completions", body | {"thinking_budget_tokens": budget}).json()
        assert "warnings" not in answer
        assert answer["choices"][0]["finish_reason"] == reason
    form = {"type": "json_schema", "name": "x", "schema": SEVEN}
    body = {"input": "Which?", "max_output_tokens": 300, "text": {"format": form}} | endless
    assert server.post("/v1/responses", body).json()["warnings"][0].startswith(CLOSED)
    form = {"output_config": {"format": {"type": "json_schema", "schema": SEVEN}}}
    body = {"model": "x", "messages": ASKED, "max_tokens": 300} | form | endless
    assert server.post("/v1/messages", body).json()["warnings"][0].startswith(CLOSED)


def test_responses(server):
    form = {"type": "json_schema", "name": "x", "schema": SEVEN}
    body = {"input": "Which?", "temperature": 0, "max_output_tokens": 300, "text": {"format": form}}
    thought, message = server.post("/v1/responses", body).json()["output"]
    assert [part["text"] for part in thought["content"]] == [THOUGHT]
    assert [json.loads(part["text"]) for part in message["content"]] == [{"n": 7}]


def test_messages(server):
    form = {"output_config": {"format": {"type": "json_schema", "schema": SEVEN}}}
    body = {"model": "x", "messages": ASKED, "temperature": 0, "max_tokens": 2000} | form
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    thought, text = server.post("/v1/messages", body | thinking).json()["content"]
    assert (thought["thinking"], json.loads(text["text"])) == (THOUGHT, {"n": 7})
    off = {"thinking": {"type": "disabled"}}
    (text,) = server.post("/v1/messages", body | off).json()["content"]
    assert json.loads(text["text"]) == {"n": 7}
