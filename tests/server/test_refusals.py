"""Mistakes of clients are a status, also of streams, and in the form that each protocol has for them."""

import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 8}
WRONG = {"type": "object", "properties": {"id": {"type": "string", "pattern": "^(abc$"}}, "required": ["id"]}
LEFT_OUT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}


def tool(**function):
    return [{"type": "function", "function": {"name": "find", **function}}]


def bodies(schema):
    """A body for each way to give a schema, with the name of the field in errors."""
    named = {"name": "answer", "schema": schema}
    plain = {"prompt": "one two", "max_tokens": 8}
    form = {"type": "json_schema", "json_schema": named}
    return {
        "chat": ("/v1/chat/completions", CHAT | {"response_format": form}, "response_format"),
        "chat, llama.cpp": ("/v1/chat/completions", CHAT | {"json_schema": schema}, "json_schema"),
        "chat, old": (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_object", "schema": schema}},
            "response_format",
        ),
        "tools": (
            "/v1/chat/completions",
            CHAT | {"tools": tool(parameters=schema), "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        "completions": ("/v1/completions", plain | {"response_format": form}, "response_format"),
        "completion": ("/completion", plain | {"json_schema": schema}, "json_schema"),
        "responses": (
            "/v1/responses",
            {"input": "one two", "max_output_tokens": 8, "text": {"format": named | {"type": "json_schema"}}},
            "text.format",
        ),
        "responses, tools": (
            "/v1/responses",
            {"input": "one two", "tools": [{"type": "function", "name": "find", "parameters": schema}],
             "tool_choice": "required"},
            "tools[0].parameters",
        ),
        "messages": (
            "/v1/messages",
            CHAT | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format",
        ),
        "messages, tools": (
            "/v1/messages",
            CHAT | {"tools": [{"name": "find", "input_schema": schema}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
    }  # fmt: skip


WAYS = list(bodies({}))


def events(response):
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_schema_with_a_mistake(server, way, stream):
    path, body, field = bodies(WRONG)[way]
    response = server.post(path, body | {"stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == (
        f"{field}: the pattern '^(abc$' at #/properties/id is not a regular expression "
        "(missing ), unterminated subpattern): correct it"
    )


@pytest.mark.parametrize("way", [way for way in WAYS if "tools" not in way])
def test_what_is_not_enforced_is_named_in_the_first_and_the_last_event(server, way):
    path, body, field = bodies(LEFT_OUT)[way]
    warnings = [f"{field}: uniqueItems at # is not supported and not enforced"]
    assert server.post(path, body).json()["warnings"] == warnings
    first, *_, last = events(server.post(path, body | {"stream": True}))
    first = first.get("message") or first.get("response") or first
    assert first["warnings"] == warnings
    if path != "/v1/messages":
        assert (last.get("response") or last)["warnings"] == warnings


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion", "/infill"])
@pytest.mark.parametrize("grammar", ['root ::= "a', "root ::= missing", "x", 'root ::= root "a"'])
def test_a_grammar_with_a_mistake(server, path, grammar, stream):
    gap = {"prompt": "a", "input_prefix": "", "input_suffix": ""}
    response = server.post(path, CHAT | gap | {"grammar": grammar, "stream": stream})
    assert response.status_code == 400, response.text
    assert "\n" not in response.json()["error"]["message"]


def long_bodies(words):
    text = "many " * words
    messages = [{"role": "user", "content": text}] * 2
    return {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 8},
        "/completion": {"prompt": text},
        "/completions": {"prompt": ["a", text]},
        "/api/chat": {"messages": messages},
        "/api/generate": {"prompt": text},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [5_000, 30_000, 200_000])
@pytest.mark.parametrize("path", long_bodies(0))
def test_a_prompt_that_is_too_long(server, path, words, stream):
    """Agents shorten their history when they see one of these; the sizes are up to a MB."""
    response = server.post(path, long_bodies(words)[path] | {"stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(" tokens > 4096 maximum")
        assert error["type"] == "invalid_request_error"
        return
    if path.startswith("/api/"):
        assert "the maximum context length is 4096 tokens" in error
        return
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 4096
    if path.startswith("/v1/"):
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert "the maximum context length is 4096 tokens" in error["message"]
    else:
        assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
        assert "exceeds the available context size (4096 tokens)" in error["message"]
    if words == 5_000:  # all of it was tokenized
        n = error["n_prompt_tokens"]
        tokens = server.post("/tokenize", {"content": "many " * words, "add_special": True}).json()["tokens"]
        assert n == len(tokens) or path in ("/v1/chat/completions", "/v1/responses")
        assert f"{n} tokens" in error["message"]
        assert "at least" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/props?autoload=false", None, 200),
        ("POST", "/props", {"x": 1}, 501),
        ("GET", "/lora-adapters", None, 200),
        ("POST", "/lora-adapters", [{"id": 0, "scale": 0.5}], 501),
        ("POST", "/slots/0?action=save", {"filename": "a"}, 501),
        ("POST", "/slots/0?action=erase", None, 501),
        ("GET", "/v1/health", None, 200),
        ("GET", "/models", None, 200),
        ("POST", "/v1/chat/completions/input_tokens", CHAT, 200),
        ("POST", "/chat/completions/input_tokens", CHAT, 200),
        ("POST", "/responses/input_tokens", {"input": "one two"}, 200),
        ("POST", "/v1/audio/transcriptions", {}, 501),
        ("POST", "/rerank", {}, 501),
        ("POST", "/models/load", {"model": "x"}, 404),
        ("GET", "/tools", None, 404),
    ],
)
def test_the_other_paths_of_llama_cpps_server(server, method, path, body, status):
    response = server.get(path) if method == "GET" else server.post(path, body)
    assert response.status_code == status, response.text
    if status == 200:
        assert "error" not in response.json()
    else:
        assert response.json()["error"]["message"]
    if path.endswith("input_tokens"):
        assert response.json()["input_tokens"] > 5
