"""Events of answers as the process with the models sends them, and readers of what exchanges write."""

import json
from collections import Counter
from typing import Any

from spec_local.answers.gain import Gain
from spec_local.chat.tool_calls import ToolCall as Call
from spec_local.engine.events import Statistics
from spec_local.server.supervision.events import (
    AnswerRequest,
    Delta,
    Ended,
    Event,
    Loaded,
    MarkedSpan,
    Started,
    Token,
)

LOADED = Loaded("tiny.gguf", "draft.gguf", n_ctx=512, n_parallel=2, template="{{ messages }}")
WEATHER = Call("call_1", "weather", '{"city": "Bern"}')
TIME = Call("call_2", "time", "{}")


def token(number: int, piece: bytes) -> Token:
    other = Token(number + 1, b"\xe2\x82", -2.5)
    return Token(number, piece, -0.25, (Token(number, piece, -0.25), other, Token(9, b"\xff", float("-inf"))))


STARTED = Started(n_prompt=12, n_cached=5)
STATISTICS = Statistics(
    prompt_n=7, cached_n=5, predicted_n=9, predicted_s=0.5, n_steps=4, draft_n=6, draft_n_accepted=4,
    steps_by=Counter(draft=3, none=1),
)  # fmt: skip
THOUGHT = Delta(reasoning="Let me see.", tokens=(token(1, b"Let me"), token(2, b" see.")))
HELLO = Delta(
    content="Hello",
    tokens=(token(3, b"Hel"), token(4, b"lo")),
    n_drafted=3,
    n_accepted=1,
    draft_depth=3,
    source="draft",
    spans=(MarkedSpan("Hel", "accepted"), MarkedSpan("lo", "corrected", ("p",))),
)
HELD_BACK = Delta(tokens=(token(5, b"\xe2\x82"),), n_drafted=2, draft_depth=1)
BROKEN = Delta(content="\udcff wörld", tokens=(token(6, b"\xff w\xc3"), token(7, b"\xb6rld")))


GAIN = Gain("faster", "about 1.5 times as fast as without drafts", 1.5)


def ended(reason: Any = "stop", rest: Delta | None = None, stopping_word: str = "") -> Ended:
    return Ended(rest or Delta(), reason, STATISTICS, stopping_word, plain_seconds=0.25, gain=GAIN)


ANSWER: list[Event] = [STARTED, HELLO, HELD_BACK, BROKEN, ended(rest=Delta(content="!"))]
TEXT = "Hello\ufffd wörld!"
THOUGHTFUL: list[Event] = [STARTED, THOUGHT, HELLO, ended("length")]
CALLING: list[Event] = [STARTED, HELLO, Delta(tool_calls=(WEATHER,)), ended(rest=Delta(tool_calls=(TIME,)))]


IN_PARTS: list[Event] = [
    STARTED,
    HELLO,
    Delta(tool_calls=(Call("call_1", "weather", '{"ci'),)),
    Delta(arguments='ty": "B'),
    Delta(arguments='ern"}', tool_calls=(TIME,)),
    ended(),
]
"""The same calls as they are generated."""
CUT = [*IN_PARTS[:4], ended("length")]
"""The token limit cuts a call."""


def stream(exchange: Any, *answers: list[Event]) -> str:
    """The whole stream; the events of several answers alternate."""
    written = [*exchange.begin()]
    for i in range(max(map(len, answers))):
        for index, events in enumerate(answers):
            if i < len(events):
                written += exchange.write(index, events[i])
    return "".join([*written, *exchange.end()])


def parsed(text: str) -> list[tuple[str, Any]]:
    """Names and data of server-sent events; ``[DONE]`` as text."""
    assert text.isascii()
    events = []
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        assert data.startswith("data: ")
        data = data.removeprefix("data: ")
        value = data if data == "[DONE]" else json.loads(data, parse_constant=_refuse)
        events.append((name[0].removeprefix("event: ") if name else "", value))
    return events


def written(value: Any) -> Any:
    """A response as the client gets it."""
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


def check_requests(requests: list[AnswerRequest]) -> None:
    """Check what holds for any request that is accepted."""
    assert 0 < len(requests) <= 128
    for request in requests:
        assert isinstance(request, AnswerRequest)
        json.dumps([request.messages, request.tools], allow_nan=False).encode()
        assert all(
            message["role"] in ("system", "user", "assistant", "tool") and isinstance(message["content"], str)
            for message in request.messages
        )


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
