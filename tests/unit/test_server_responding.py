"""Responses on a slow machine: headers and signs of life while there is nothing to send."""

import asyncio
import json
import time

import pytest

from spec_local.engine.events import Statistics
from spec_local.errors import BackendError, InvalidRequest
from spec_local.server import responding
from spec_local.server.chat_completions import ChatCompletions
from spec_local.server.engine import Answers
from spec_local.server.events import Delta, Ended, Reading, Refused, Started
from spec_local.server.llama_completion import LlamaCompletion
from spec_local.server.messages import Messages
from spec_local.server.responses import Responses
from tests.server_events import LOADED

STARTED, ENDED = Started(3, 1), Ended(Delta("."), "stop", Statistics(predicted_n=2))
READING = Reading(8000, 1234, 0, 1.0)
MESSAGES = {"messages": [{"role": "user", "content": "Why?"}]}
REQUESTS = [
    (ChatCompletions, MESSAGES),
    (LlamaCompletion, {"prompt": "a"}),
    (Messages, MESSAGES | {"max_tokens": 5}),
    (Responses, {"input": "Why?"}),
]
BROKEN = BackendError("it failed: try again")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(responding, "_HEADERS_S", 0.03)
    monkeypatch.setattr(responding, "_SIGN_S", 0.05)
    monkeypatch.setattr(responding, "_WHOLE_S", 0.06)


async def respond(exchange, *script, stream=True):
    """The response, its parts and whether it has ended; numbers in the script are pauses in seconds."""
    answers, ends = Answers(1), []

    async def play():
        for event in script:
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                answers.put(0, event)

    playing = asyncio.create_task(play())
    if stream:
        response = await responding.stream(exchange, answers, lambda: ends.append(1))
    else:
        response = await responding.whole(exchange, answers, "/v1/chat/completions", lambda: ends.append(1))
    parts = []
    if hasattr(response, "body_iterator"):
        async for part in response.body_iterator:
            parts.append((time.monotonic(), part if isinstance(part, str) else part.decode()))
    await playing
    return response, [part for _, part in parts], ends


def run(kind, body, *script, stream=True):
    exchange = kind(body | {"stream": stream}, LOADED)
    return asyncio.run(respond(exchange, *script, stream=stream))


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_a_stream_that_waits(kind, body):
    script = (0.12, READING, 0.12, STARTED, Delta("a"), 0.12, ENDED)
    _, parts, _ = run(kind, body, *script)
    signs = [part for part in parts if part.startswith((": ", "event: ping"))]
    assert len(signs) >= 4
    assert parts[0] in signs or kind is Responses  # whose first events say so
    if kind is Messages:
        assert set(signs) == {'event: ping\ndata: {"type":"ping"}\n\n'}
    else:
        states = list(dict.fromkeys(signs))
        assert states == [": waiting\n\n", ": reading the prompt 1234/8000\n\n", ": generating\n\n"]
    for script in ([STARTED, Delta("a"), ENDED], [STARTED, 0.01, Delta("a"), 0.01, ENDED]):
        silent = run(kind, body, *script)[1]
        assert not any(part.startswith((": ", "event: ping")) for part in silent)


def test_progress_is_a_sign_of_life():
    body = MESSAGES | {"return_progress": True}
    reading = [READING, 0.03] * 6
    _, parts, _ = run(ChatCompletions, body, *reading, STARTED, ENDED)
    text = "".join(parts)
    assert text.count("prompt_progress") == 6
    assert ": reading" not in text


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
@pytest.mark.parametrize("before", [(), (READING,), (0.01,)])
def test_an_error_that_is_known_at_once_is_a_status(kind, body, before):
    with pytest.raises(InvalidRequest):
        run(kind, body, *before, Refused(InvalidRequest("wrong: correct it")))


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_an_error_after_the_headers_is_an_event(kind, body):
    _, parts, _ = run(kind, body, 0.1, Refused(BROKEN))
    assert str(BROKEN) in parts[-1]


def test_headers_come_before_the_first_event():
    async def main():
        answers = Answers(1)
        begun = time.monotonic()
        response = await responding.stream(ChatCompletions(MESSAGES, LOADED), answers, lambda: None)
        first = await anext(response.body_iterator)
        return time.monotonic() - begun, first

    seconds, first = asyncio.run(main())
    assert first == ": waiting\n\n"
    assert 0.03 <= seconds < 1


def test_a_fast_object_has_no_white_space():
    response, parts, ends = run(ChatCompletions, MESSAGES, STARTED, Delta("a"), ENDED, stream=False)
    assert not parts
    assert response.headers["content-length"] == str(len(response.body))
    assert ends == [1]


def test_white_space_before_a_slow_object():
    script = (READING, 0.2, STARTED, Delta("a"), ENDED)
    response, parts, _ = run(ChatCompletions, MESSAGES, *script, stream=False)
    assert response.headers["content-type"] == "application/json"
    assert parts[0] == " "
    assert parts.count(" ") >= 2
    assert json.loads("".join(parts))["choices"][0]["message"]["content"] == "a."


@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_an_error_in_place_of_an_object(pause):
    """It has a status of its own, unless white space has been sent."""
    script = (pause, Refused(BROKEN))
    if pause:
        _, parts, _ = run(ChatCompletions, MESSAGES, *script, stream=False)
        assert json.loads("".join(parts))["error"]["message"] == str(BROKEN)
    else:
        with pytest.raises(BackendError):
            run(ChatCompletions, MESSAGES, *script, stream=False)
