"""Responses on a slow machine: headers and signs of life while there is nothing to send. In virtual time."""

import asyncio
import json
from dataclasses import replace

import pytest

from spec_local.engine.events import Statistics
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.server.protocols import responding
from spec_local.server.protocols.chat_completions import ChatCompletions
from spec_local.server.protocols.llama_completion import LlamaCompletion
from spec_local.server.protocols.messages import Messages
from spec_local.server.protocols.ollama import OllamaChat
from spec_local.server.protocols.responses import Responses
from spec_local.server.supervision.events import Delta, Ended, Reading, Refused, Started
from spec_local.server.supervision.supervisor import AnswerEvents
from tests import virtual_time
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


SHORT = responding.Waits(headers=0.06, sign=0.05, whole=0.06)


async def respond(exchange, *script, stream=True):
    """The response, its parts and whether it has ended; numbers in the script are pauses in seconds."""
    answers, ends = AnswerEvents(1), []

    async def play():
        for event in script:
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                answers.put(0, event)

    playing = asyncio.create_task(play())
    if stream:
        response = await responding.stream(exchange, answers, lambda: ends.append(1), SHORT)
    else:
        making = responding.whole(exchange, answers, lambda: ends.append(1))
        response = await responding.with_signs(making, type(exchange), "/v1/chat/completions", waits=SHORT)
    parts = []
    if hasattr(response, "body_iterator"):
        async for part in response.body_iterator:
            parts.append(part if isinstance(part, str) else part.decode())
    await playing
    return response, parts, ends


def run(kind, body, *script, stream=True):
    exchange = kind(body | {"stream": stream}, LOADED)
    return virtual_time.run(respond(exchange, *script, stream=stream))


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


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_headers_wait_until_all_prompts_are_checked(seconds):
    """An agent shortens its prompt if the status is 400; but no client waits for headers without an end."""

    async def status():
        answers = AnswerEvents(2)
        answers.unchecked = {5, 6}
        answers.check(5)
        answers.put(0, STARTED)
        exchange = LlamaCompletion({"prompt": ["a", "b"], "stream": True}, LOADED)
        making = asyncio.create_task(responding.stream(exchange, answers, lambda: None, waits))
        await asyncio.sleep(0.2)
        answers.put(1, Refused(ContextOverflow("too long: shorten it")))
        return (await making).status_code

    waits = replace(SHORT, checked=seconds or 5.0)
    if seconds:
        assert virtual_time.run(status()) == 200
    else:
        with pytest.raises(ContextOverflow):
            virtual_time.run(status())


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_an_error_after_the_headers_is_an_event(kind, body):
    _, parts, _ = run(kind, body, 0.1, Refused(BROKEN))
    assert str(BROKEN) in parts[-1]


def test_headers_come_before_the_first_event():
    async def main():
        answers = AnswerEvents(1)
        now = asyncio.get_running_loop().time
        begun = now()
        response = await responding.stream(ChatCompletions(MESSAGES, LOADED), answers, lambda: None, SHORT)
        first = await anext(response.body_iterator)
        return now() - begun, first

    seconds, first = virtual_time.run(main())
    assert first == ": waiting\n\n"
    assert seconds == pytest.approx(SHORT.headers)


class Loading:
    """A stream whose model is being loaded: `loaded` says when it is, and `made` what comes of it."""

    def __init__(self, kind, body):
        self.exchange, self.answers, self.ends = kind(body | {"stream": True}, LOADED), AnswerEvents(1), []
        self.loaded, self.made = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def make(self):
        await self.made
        self.loaded.set_result(None)
        return await responding.stream(self.exchange, self.answers, lambda: self.ends.append(1), SHORT)

    def response(self):
        kind = type(self.exchange)
        path = "/v1/messages" if kind is Messages else "/v1/chat/completions"
        return responding.with_signs(self.make(), kind, path, begun=self.loaded, model="m", waits=SHORT)


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_stream_whose_model_is_being_loaded(kind, body, error):
    async def main():
        loading = Loading(kind, body)
        for event in (STARTED, Delta("a"), ENDED):
            loading.answers.put(0, event)
        response = await loading.response()
        parts = aiter(response.body_iterator)
        signs = [await anext(parts) for _ in range(3)]
        if error:
            loading.made.set_exception(error)
        else:
            loading.made.set_result(None)
        rest = [part async for part in parts]
        response.end()
        return signs, "".join(rest), loading.ends

    signs, rest, ends = virtual_time.run(main())
    sign = 'event: ping\ndata: {"type":"ping"}\n\n' if kind is Messages else ": loading m\n\n"
    assert signs == [sign] * 3
    if error:
        assert ends == []
        (data,) = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: ")]
        assert data.get("type", "error") == "error"
        assert (data.get("error") or data)["message"] == str(error)
    else:
        assert ends == [1]
        assert '"a"' in rest


def test_a_stream_of_lines_has_empty_parts():
    """Each line is a part by itself: some clients read what arrives at a time as one object."""
    script = (0.12, READING, 0.12, STARTED, Delta("a"), Delta("b"), Delta("c"), 0.12, ENDED)
    _, parts, _ = run(OllamaChat, MESSAGES, *script)
    lines = [json.loads(part) for part in parts if part]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    texts = [line["message"]["content"] for line in lines]
    assert texts.count("") >= 5
    assert "".join(texts) == "abc."


@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_stream_of_lines_whose_model_is_being_loaded(error):
    async def main():
        loading = Loading(OllamaChat, MESSAGES)
        for event in (STARTED, Delta("a"), Refused(error) if error else ENDED):
            loading.answers.put(0, event)
        response = await loading.response()
        parts = aiter(response.body_iterator)
        signs = [await anext(parts) for _ in range(3)]
        loading.made.set_result(None)
        return response.media_type, signs, [part async for part in parts if part]

    media_type, signs, rest = virtual_time.run(main())
    assert media_type == "application/x-ndjson"
    for sign in signs:
        assert json.loads(sign)["model"] == "m"
        assert json.loads(sign)["message"]["content"] == ""
    last = json.loads(rest[-1])
    assert last == {"error": str(error)} if error else last["done"]


@pytest.mark.parametrize("is_made", [False, True])
def test_a_client_that_goes_while_its_model_is_being_loaded(is_made):
    async def main():
        loading = Loading(ChatCompletions, MESSAGES)
        response = await loading.response()
        assert await anext(response.body_iterator)
        if is_made:
            loading.made.set_result(None)
            await asyncio.sleep(0.1)
        response.end()
        await asyncio.sleep(0)
        return loading

    loading = virtual_time.run(main())
    assert loading.made.cancelled() is not is_made
    assert loading.ends == [1] * is_made


@pytest.mark.parametrize("error", [None, BROKEN])
def test_a_model_that_is_loaded_has_the_first_word(error):
    """Its stream has signs of its own, and an error that it knows at once is a status."""

    async def main():
        loading = Loading(ChatCompletions, MESSAGES)
        loading.answers.put(0, Refused(error) if error else READING)
        loading.made.set_result(None)
        response = await loading.response()
        return await anext(response.body_iterator)

    if error:
        with pytest.raises(BackendError):
            virtual_time.run(main())
    else:
        assert virtual_time.run(main()) == ": reading the prompt 1234/8000\n\n"


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
