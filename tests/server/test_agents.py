"""Turns of coding agents, in the shapes that they send: a question, a call, its result, a side request."""

import json

import httpx
import pytest

LIMIT = 40  # tokens; agents ask for tens of thousands


@pytest.fixture(scope="module")
def ask(server):
    """Send a body; return the events of the stream, or the object."""

    def send(path, body, headers=None):
        with httpx.stream("POST", server.address + path, json=body, headers=headers, timeout=60) as response:
            response.read()
            assert response.status_code == 200, response.text
            if not body.get("stream"):
                return response.json()
            lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]

    return send


def tool(name, properties, **more):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}\n\nUse it with care.", **more, "schema": schema}


# The model writes at random: without choices, its texts and numbers would go on beyond the limit.
READ = tool("Read", {"file_path": {"enum": ["/main.py", "/a.py"], "description": "An absolute path."}})
RUN = tool(
    "Run",
    {
        "command": {"type": "array", "items": {"enum": ["ls", "cat"]}, "maxItems": 2},
        "timeout_ms": {"type": "number", "enum": [1000, 60000]},
        "mode": {"enum": ["wait", "background"], "default": "wait"},
    },
)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_an_agent_with_messages(ask):
    def anthropic_tool(given):
        return {"name": given["name"], "description": given["description"], "input_schema": given["schema"]}

    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "You write code."}, {"type": "text", "text": "Be brief.", **cached}]
    server_tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = {
        "model": "main",
        "max_tokens": LIMIT,
        "stream": True,
        "system": system,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                    {"type": "text", "text": "What is in main.py?", **cached},
                ],
            }
        ],
        "tools": [anthropic_tool(READ), anthropic_tool(RUN), server_tool],
        "metadata": {"user_id": json.dumps({"device": "d", "session": "s"})},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14",
        "x-app": "cli",
    }
    counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
    n_prompt = ask("/v1/messages/count_tokens?beta=true", counted, headers)["input_tokens"]
    events = ask("/v1/messages?beta=true", body, headers)
    first, *_, last = (event for event in events if event["type"] != "ping")  # sent while it waits
    usage = first["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert last["type"] == "message_stop"
    forced = body | {"tool_choice": {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}}
    events = ask(
        "/v1/messages?beta=true", forced | {"max_tokens": 200, "thinking": {"type": "disabled"}}, headers
    )
    (start,) = (e for e in events if e["type"] == "content_block_start")
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert set(json.loads("".join(pieces))) == {"file_path"}
    call = start["content_block"]
    result = [
        {"type": "text", "text": "print('hello')"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ]
    body["messages"] += [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "none"},
                {"type": "text", "text": "I will look."},
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["name"],
                    "input": {"file_path": "/main.py"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "The user has opened another file."},
    ]
    *_, last = ask("/v1/messages?beta=true", body, headers)
    assert last["type"] == "message_stop"
    title = tool("", {"title": {"enum": ["Main", "Other"]}})["schema"]
    side = {
        "model": "main",
        "max_tokens": 64,
        "system": "Name this conversation.",
        "messages": [{"role": "user", "content": "What is in main.py?"}],
        "output_config": {"format": {"type": "json_schema", "schema": title}},
        "tools": [],
    }
    (block,) = ask("/v1/messages", side, headers)["content"]
    assert json.loads(block["text"])["title"] in ("Main", "Other")
    # Words that the answer must begin with.
    begun = [*side["messages"], {"role": "assistant", "content": "In main.py there is"}]
    assert ask("/v1/messages", side | {"messages": begun, "output_config": {}, "max_tokens": 4}, headers)[
        "content"
    ]


def test_an_agent_with_responses(ask):
    def function(given):
        return {
            "type": "function",
            "name": given["name"],
            "description": given["description"],
            "strict": False,
            "parameters": given["schema"],
        }

    def message(role, text):
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    patch = {
        "type": "custom",
        "name": "edit",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    }
    body = {
        "model": "main",
        "instructions": "You write code in a terminal.",
        "input": [
            message("developer", "<permissions>Ask before you write.</permissions>"),
            message("user", "<environment><cwd>/work</cwd></environment>"),
            message("user", "What is in main.py?"),
        ],
        "tools": [function(READ), function(RUN), patch, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"session": "s"},
        "max_output_tokens": LIMIT,
    }
    *_, last = ask("/v1/responses", body)
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["parallel_tool_calls"] is False
    forced = body | {"tool_choice": {"type": "function", "name": "Read"}, "max_output_tokens": 200}
    *_, last = ask("/v1/responses", forced)
    (call,) = (item for item in last["response"]["output"] if item["type"] == "function_call")
    assert set(json.loads(call["arguments"])) == {"file_path"}
    body["input"] += [
        {"type": "reasoning", "summary": [], "encrypted_content": "none"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "print('hello')"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "hello"}},
        {"type": "custom_tool_call", "call_id": "c2", "name": "edit", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done."},
        message("developer", "The user has interrupted you."),
    ]
    *_, last = ask("/v1/responses", body)
    assert last["type"] in ("response.completed", "response.incomplete")
    form = {
        "type": "json_schema",
        "name": "out",
        "strict": True,
        "schema": tool("", {"ok": {"type": "boolean"}})["schema"],
    }
    final = body | {"text": {"format": form}, "max_output_tokens": 400, "stream": False}
    output = ask("/v1/responses", final | {"tool_choice": "none"})["output"]
    (text,) = (part["text"] for item in output if item["type"] == "message" for part in item["content"])
    assert isinstance(json.loads(text)["ok"], bool)
    assert ask("/v1/responses", final)["output"]  # a call, or the object
    assert ask("/v1/responses", {"model": "main", "instructions": "Say hello.", "max_output_tokens": 4})[
        "output"
    ]


def test_an_agent_with_chat_completions(ask):
    def function(given):
        return {
            "type": "function",
            "function": {
                "name": given["name"],
                "description": given["description"],
                "parameters": given["schema"],
            },
        }

    body = {
        "model": "main",
        "messages": [
            {"role": "system", "content": "You write code."},
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "What is in main.py?"}]},
        ],
        "tools": [function(READ), function(RUN)],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": LIMIT,
        "reasoning_effort": "medium",
        "n": 1,
        "store": False,
        "user": "u",
        "temperature": 0.2,
    }
    *_, last = ask("/v1/chat/completions", body)
    assert last["usage"]["completion_tokens"] <= LIMIT
    forced = body | {"tool_choice": "required", "max_completion_tokens": 300, "parallel_tool_calls": False}
    chunks = ask("/v1/chat/completions", forced)
    parts = [
        call for c in chunks for choice in c["choices"] for call in choice["delta"].get("tool_calls") or ()
    ]
    name = parts[0]["function"]["name"]
    arguments = "".join(part["function"].get("arguments", "") for part in parts)
    assert set(json.loads(arguments)) == set({"Read": READ, "Run": RUN}[name]["schema"]["properties"])
    call = {"id": parts[0]["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "hello"}]},
        {"role": "user", "content": [image, {"type": "text", "text": "And this?"}]},
        {"role": "assistant", "content": "It is"},
    ]
    *_, last = ask("/v1/chat/completions", body)
    assert last["usage"]["completion_tokens"] <= LIMIT
