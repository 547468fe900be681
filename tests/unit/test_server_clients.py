"""The clients of OpenAI and Anthropic on what exchanges write, without a network."""

import json

import anthropic
import httpx2
import openai
import pytest

from spec_local.errors import BackendError
from spec_local.server.chat_completions import ChatCompletions
from spec_local.server.messages import Messages
from spec_local.server.responses import Responses
from tests.server_events import (
    ANSWER,
    CALLING,
    HELLO,
    LOADED,
    STARTED,
    TEXT,
    THOUGHT,
    THOUGHTFUL,
    ended,
    stream,
    written,
)

KINDS = {"/v1/chat/completions": ChatCompletions, "/v1/messages": Messages, "/v1/responses": Responses}
QUESTION = [{"role": "user", "content": "Why?"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


def http(answer, *, failure=None):
    """A client that answers as the server does; failure: after the start of a stream."""

    def respond(request):
        exchange = KINDS[request.url.path](json.loads(request.content), LOADED)
        if not exchange.streams:
            return httpx2.Response(200, json=written(exchange.whole([answer])))
        if failure:
            text = "".join([*exchange.begin(), *exchange.write(0, STARTED), *exchange.failed(failure)])
        else:
            text = stream(exchange, answer)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=text)

    return httpx2.Client(transport=httpx2.MockTransport(respond))


def openai_client(answer, **more):
    return openai.OpenAI(base_url="http://x/v1", api_key="x", http_client=http(answer, **more), max_retries=0)


def anthropic_client(answer, **more):
    return anthropic.Anthropic(
        base_url="http://x", api_key="x", http_client=http(answer, **more), max_retries=0
    )


def test_openai_chat_accumulates_calls_and_usage():
    tools = [{"type": "function", "function": FUNCTION}]
    with openai_client(CALLING).chat.completions.stream(
        model="m", messages=QUESTION, tools=tools, stream_options={"include_usage": True}
    ) as events:
        made = events.get_final_completion()
    assert [call.function.name for call in made.choices[0].message.tool_calls] == ["weather", "time"]
    assert made.choices[0].message.content == "Hello"
    assert (made.choices[0].finish_reason, made.usage.total_tokens) == ("tool_calls", 21)


@pytest.mark.parametrize("answer", [ANSWER, THOUGHTFUL, CALLING])
def test_openai_responses_accumulate(answer):
    whole = openai_client(answer).responses.create(model="m", input="Why?")
    with openai_client(answer).responses.stream(model="m", input="Why?") as events:
        *_, last = events
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text == (TEXT if answer is ANSWER else "Hello")


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        THOUGHTFUL,
        CALLING,
        [STARTED, THOUGHT, *CALLING[1:3], HELLO, ended()],
        [STARTED, ended("length")],
    ],
)
def test_anthropic_accumulates_the_same_message(answer):
    body = {
        "model": "m",
        "max_tokens": 2000,
        "messages": QUESTION,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = anthropic_client(answer).messages.create(**body)
    with anthropic_client(answer).messages.stream(**body) as events:
        accumulated = events.get_final_message()
    assert accumulated.model_dump() | {"id": ""} == whole.model_dump() | {"id": ""}


def test_failures_in_streams_are_errors():
    error = BackendError("it failed: try again")
    with pytest.raises(openai.APIError, match="it failed: try again"):
        list(
            openai_client(ANSWER, failure=error).chat.completions.create(
                model="m", messages=QUESTION, stream=True
            )
        )
    with pytest.raises(anthropic.APIError, match="it failed: try again"):
        list(
            anthropic_client(ANSWER, failure=error).messages.create(
                model="m", max_tokens=9, messages=QUESTION, stream=True
            )
        )
