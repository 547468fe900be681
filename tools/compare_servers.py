"""Send the same requests to several servers, and show where they answer differently.

    python -m tools.compare_servers http://localhost:8080 http://localhost:8081

The first is specdec serve; another may be llama-server with the same model. Responses are also compared with
the types of OpenAI's and Anthropic's Python clients. For each request that is not answered alike, a line has
the status of each server, and the names that the first one's response lacks.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic.types
import httpx
import openai.types
import openai.types.chat
import openai.types.responses
from pydantic import TypeAdapter, ValidationError

USER = {"role": "user", "content": "Name three primes."}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
CLAUDE_TOOL = {"name": "weather", "input_schema": WEATHER}

CHAT: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "seed": 1, "stop": "x", "top_p": 0.9, "presence_penalty": 0.1},
    {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER]},
    {"messages": [USER, {"role": "system", "content": "Be brief."}]},
    {"messages": [{"role": "system", "content": "Be brief."}]},
    {"messages": [USER, {"role": "assistant", "content": "2, 3 and"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
    {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Hi"}]}]},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "Hi"}]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": NAMED},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "messages": [USER, CALLED, RESULT]},
    {"tools": [TOOL], "response_format": FORM},
    {"response_format": FORM},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2},
    {"max_tokens": 3.0},
    {"max_tokens": None, "max_completion_tokens": 3},
    {"temperature": "warm"},
    {"stream_options": {"include_usage": True}, "stream": False},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ["one", "two"]},
    {"prompt": " "},
    {"prompt": ""},
    {"prompt": [5, 6, 7]},
    {"logprobs": 2},
    {"n": 2, "temperature": 1},
    {"stop": ["a", "b"]},
    {"prompt": {"x": 1}},
]
RESPONSES: list[dict[str, Any]] = [
    {},
    {"input": [USER]},
    {"instructions": "Be brief."},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    {"tools": [FLAT_TOOL], "tool_choice": "required"},
    {"tools": [{"type": "web_search"}]},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": WEATHER}}},
    {"previous_response_id": "resp_1"},
]
MESSAGES: list[dict[str, Any]] = [
    {},
    {"system": "Be brief."},
    {"messages": [USER, {"role": "assistant", "content": "2, 3 and"}]},
    {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}},
    {"stop_sequences": ["a"]},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": []},
]
LLAMA: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/completion", {"prompt": "one two", "n_predict": 4}),
    ("POST", "/completion", {"prompt": ["one", "two"], "n_predict": 4}),
    ("POST", "/completion", {"prompt": "one", "n_predict": 4, "n_probs": 2}),
    ("POST", "/tokenize", {"content": "one two", "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/apply-template", {"messages": [USER]}),
    ("GET", "/v1/models", None),
    ("GET", "/props", None),
    ("GET", "/health", None),
]


@dataclass(frozen=True)
class Asked:
    """A request. type: of the client's type for a good response; None: there is none."""

    method: str
    path: str
    body: dict[str, Any] | None
    type: Any = None
    name: str = field(default="", compare=False)


def requests() -> Iterator[Asked]:
    """The requests: 60."""
    chat, response = openai.types.chat.ChatCompletion, openai.types.responses.Response
    kinds = (
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 24}, CHAT, chat),
        ("/v1/completions", {"prompt": "one two", "max_tokens": 4}, COMPLETIONS, openai.types.Completion),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 24}, RESPONSES, response),
        ("/v1/messages", {"messages": [USER], "max_tokens": 24}, MESSAGES, anthropic.types.Message),
    )
    for path, base, bodies, kind in kinds:
        for body in bodies:
            yield Asked("POST", path, {"model": "any", **base, **body}, kind, f"{path} {json.dumps(body)}")
    for method, path, given in LLAMA:
        yield Asked(method, path, given, None, f"{path} {json.dumps(given) if given else ''}")


@dataclass(frozen=True)
class Answered:
    """A response. names: of all fields, with dots. wrong: why it is not of the client's type; None: it is."""

    status: int
    names: frozenset[str]
    wrong: str | None


def ask(client: httpx.Client, asked: Asked) -> Answered:
    response = client.request(asked.method, asked.path, json=asked.body)
    try:
        value = response.json()
    except ValueError:
        return Answered(response.status_code, frozenset(), "it is not JSON")
    wrong = None
    if response.status_code == 200 and asked.type:
        try:
            TypeAdapter(asked.type).validate_python(value)
        except ValidationError as error:
            wrong = str(error).replace("\n", " ")[:300]
    return Answered(response.status_code, frozenset(names_in(value)), wrong)


def names_in(value: Any, before: str = "") -> Iterator[str]:
    """The names of all fields in a JSON value; the items of a list have no numbers."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield before + name
            yield from names_in(inner, f"{before}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from names_in(inner, before)


def differences(answers: Sequence[Answered]) -> str:
    """What is different about the first answer; empty: nothing."""
    ours, *others = answers
    found = [ours.wrong] if ours.wrong else []
    if len({answer.status // 100 for answer in answers}) > 1:
        found.append("status " + " ".join(str(answer.status) for answer in answers))
    elif ours.status == 200:
        for other in others:
            if lacks := other.names - ours.names:
                found.append("lacks " + ", ".join(sorted(lacks)))
    return "; ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="+")
    clients = [httpx.Client(base_url=address, timeout=300) for address in parser.parse_args().address]
    asked_all = list(requests())
    for asked in asked_all:
        if found := differences([ask(client, asked) for client in clients]):
            print(f"{asked.name[:100]}: {found}", flush=True)
    print(f"{len(asked_all)} requests")


if __name__ == "__main__":
    main()
