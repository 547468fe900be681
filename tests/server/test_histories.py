"""Conversations that other programs wrote, sent to a real server over all protocols."""

import json

import httpx
import pytest

from tests.unit.test_server_history import HISTORIES, QUESTION

COUNTING = {
    "/apply-template": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses/input_tokens": "input",
}
ANSWERING = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
CUT = {"role": "assistant", "content": "\ud83d", "tool_calls": [
    {"function": {"name": "\udc00", "arguments": r'{"x": "\ud83d"}'}, "id": "\ud800"}]}  # fmt: skip


def post(server, path, body):
    """As bytes, since httpx refuses half characters."""
    return httpx.post(server.address + path, content=json.dumps(body).encode(), timeout=60)


@pytest.mark.parametrize("items", [items for items, _ in HISTORIES.values()], ids=HISTORIES)
def test_prompts(server, items):
    for path, field in COUNTING.items():
        response = post(server, path, {field: [*items, QUESTION]})
        assert response.status_code == 200, (path, response.text)


def test_answers(server):
    names = (
        "Ollama",
        "Home Assistant, n8n: OpenAI's first form",
        "Codex: summaries of reasoning, items of its own",
    )
    items = [item for name in names for item in HISTORIES[name][0]]
    for path, field in ANSWERING.items():
        for more in ({}, {"stream": True}):
            body = {field: [*items, CUT, QUESTION], "max_tokens": 2, "max_output_tokens": 2, **more}
            response = post(server, path, body)
            assert response.status_code == 200, (path, response.text)
            assert "error" not in response.text.replace('"error": null', "").replace('"error":null', "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a\ud83d", "max_tokens": 2}),
        ("/completion", {"prompt": "a\ud83d", "n_predict": 2, "stop": ["\udc00"]}),
        ("/tokenize", {"content": "a\ud83d"}),
        ("/v1/messages", {"system": "\ud83d", "messages": [QUESTION], "max_tokens": 2}),
        ("/v1/responses", {"instructions": "\ud83d", "input": "a\ud83d", "max_output_tokens": 2}),
    ],
)
def test_half_characters_in_any_text(server, path, body):
    assert post(server, path, body).status_code == 200


def test_a_question_that_cannot_be_read(server):
    for path, field in ANSWERING.items():
        body = {field: [QUESTION, {"role": "user", "content": [{"type": "smell"}]}], "max_tokens": 2}
        response = post(server, path, body)
        assert response.status_code == 400
        assert f"{field}[1].content: content of the type smell" in response.json()["error"]["message"]
