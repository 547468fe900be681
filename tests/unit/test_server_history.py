"""Conversations that other programs and servers wrote: they are read in all protocols, and never refused."""

import json
import re
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.chat.tool_use import ToolUse
from spec_local.errors import InvalidRequest
from spec_local.server.protocols.chat_completions import ChatCompletions
from spec_local.server.protocols.messages import Messages
from spec_local.server.protocols.responses import Responses
from tests.server_events import LOADED, check_requests
from tests.unit.test_chat_roles import ALL, template_of

KINDS = {ChatCompletions: "messages", Messages: "messages", Responses: "input"}
QUESTION = {"role": "user", "content": "Why?"}
UNREADABLE = "[{} left out: it cannot be read here]".format
DOCUMENT = "[document left out: this model reads text only]"
PICTURE = "[image left out: this model reads text only]"


def user(content):
    return {"role": "user", "content": content}


def answer(content=None, **more):
    return {"role": "assistant", "content": content, **more}


def part(kind, **more):
    return {"type": kind, **more}


def text(value):
    return part("text", text=value)


def called(arguments="{}", name="read", **more):
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def result(content="done", **more):
    return {"role": "tool", "content": content, "tool_call_id": "a", **more}


def calling(*ids, content="", arguments="{}", **more):
    calls = [called(arguments) | {"id": each} for each in ids or ("a",)]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


# name: items that programs send, and the messages that they are.
HISTORIES = {
    # Anthropic and what speaks its protocol.
    "Claude Code: tools that a search found": (
        [
            answer([part("tool_use", id="a", name="read", input={"q": "é"})]),
            user([part("tool_result", tool_use_id="a", content=[part("tool_reference", tool_name="Fetch")])]),
        ],
        [calling(arguments='{"q": "é"}'), result('[tool_reference: {"tool_name": "Fetch"}]')],
    ),
    "Claude Code: an empty result, and a reminder": (
        [answer([part("tool_use", id="a", name="read", input={})]),
         user([part("tool_result", tool_use_id="a", is_error=True), text("Go on.")])],
        [calling(), result(""), user("Go on.")],
    ),
    "reasoning in parts, its signature and its encryption": (
        [answer([part("thinking", thinking="Hm.", signature="x"), part("redacted_thinking", data="x"),
                 text("Yes.")])],
        [answer("Yes.", reasoning_content="Hm.")],
    ),
    "Cursor: Anthropic's parts in OpenAI's messages": (
        [answer([text("I look."), part("tool_use", id="a", name="read", input={"x": 1})]),
         user([part("tool_result", tool_use_id="a", content="done"), text("And?")])],
        [calling(content="I look.", arguments='{"x": 1}'), result(), user("And?")],
    ),
    "a result within an answer": (
        [answer([text("I look."), part("tool_use", id="a", name="read", input={}),
                 part("tool_result", tool_use_id="a", content="done"), text("So.")])],
        [calling(content="I look."), result(), answer("So.")],
    ),
    # Reasoning.
    "DeepSeek, llama.cpp": ([answer("Yes.", reasoning_content="Hm.")], None),
    "OpenRouter, vLLM": (
        [answer("Yes.", reasoning="Hm.", reasoning_details=[part("reasoning.text", text="Hm.")])],
        [answer("Yes.", reasoning_content="Hm.")],
    ),
    "OpenRouter: details only": (
        [answer("Yes.", reasoning=None, reasoning_details=[
            part("reasoning.text", text="H"), part("reasoning.summary", summary="m."),
            part("reasoning.encrypted", data="x")])],
        [answer("Yes.", reasoning_content="Hm.")],
    ),
    "LiteLLM": (
        [answer([], thinking_blocks=[part("thinking", thinking="Hm.", signature="x")],
                provider_specific_fields=None, tool_calls=[called("")], function_call=None)],
        [calling(reasoning_content="Hm.")],
    ),
    "Mistral": (
        [answer([part("thinking", thinking=[text("Hm."), part("reference", reference_ids=[1])]),
                 text("Yes.")], prefix=False)],
        [answer("Yes.", reasoning_content="Hm.")],
    ),
    "LangChain: content blocks": (
        [answer([part("reasoning", reasoning="Hm.", index=0), text("I read."),
                 part("tool_call", id="a", name="read", args={"x": 1}),
                 part("invalid_tool_call", id="b", name="read", args='{"x', error=None),
                 part("non_standard", value={})]),
         result(), result(tool_call_id="b")],
        [answer("I read.\n" + UNREADABLE("non_standard"), reasoning_content="Hm.",
                tool_calls=[called('{"x": 1}'), called('{"x') | {"id": "b"}]),
         result(), result(tool_call_id="b")],
    ),
    "LibreChat": (
        [answer([part("think", think="Hm."), part("text", text={"value": "Yes.", "annotations": []})])],
        [answer("Yes.", reasoning_content="Hm.")],
    ),
    "Zed, AI SDK: content in several texts": ([answer([text("A."), "B.", None])], [answer("A.\nB.")]),
    # Calls and results.
    "Ollama": (
        [user("Look.") | {"images": ["AA"]},
         answer("", thinking="Hm.", tool_calls=[{"function": {"name": "read", "arguments": {"x": 1}}}]),
         {"role": "tool", "content": "done", "tool_name": "read"}],
        [user(f"Look.\n{PICTURE}"), calling("call_1", arguments='{"x": 1}', reasoning_content="Hm."),
         result(tool_call_id="call_1", name="read")],
    ),
    "Gemini: ids that are empty": (
        [answer(tool_calls=[called('{"x": 1}', id=""), called('{"x": 2}', id="")]),
         result("1", tool_call_id=""), result("2", tool_call_id="")],
        [{"role": "assistant", "content": "", "tool_calls": [
            called('{"x": 1}', id="call_1"), called('{"x": 2}', id="call_2")]},
         result("1", tool_call_id="call_1"), result("2", tool_call_id="call_2")],
    ),
    "Ollama: results in another order": (
        [answer("", tool_calls=[{"function": {"name": name, "arguments": {}}} for name in ("read", "write")]),
         {"role": "tool", "content": "2", "tool_name": "write"}, {"role": "Tool", "content": "1"}],
        [answer("", tool_calls=[called(id="call_1"), called(name="write", id="call_2")]),
         result("2", tool_call_id="call_2", name="write"), result("1", tool_call_id="call_1")],
    ),
    "results that have ids, of calls that have none": (
        [answer(tool_calls=[called(id=None), called(id=None)]), result("1", tool_call_id="x"), result("2")],
        [calling("call_1", "call_2"), result("1", tool_call_id="call_1"), result("2", tool_call_id="call_2")],
    ),
    "an interrupted call gets no result of another one": (
        [answer(tool_calls=[called(id=None)]), user("Stop."), answer(tool_calls=[called(id=None)]),
         {"role": "tool", "content": "done"}],
        [calling("call_1"), user("Stop."), calling("call_2"), result(tool_call_id="call_2")],
    ),
    "Home Assistant, n8n: OpenAI's first form": (
        [answer(function_call={"name": "read", "arguments": '{"x": 1}'}),
         {"role": "function", "name": "read", "content": "done"}],
        [calling("call_1", arguments='{"x": 1}'), result(tool_call_id="call_1", name="read")],
    ),
    "arguments that are cut, null or empty": (
        [answer(tool_calls=[called('{"x": "a'), called(None, id="b"), called(" ", id="c")]),
         result(), result(tool_call_id="b"), result(None, tool_call_id="c")],
        [{"role": "assistant", "content": "", "tool_calls": [
            called('{"x": "a'), called(id="b"), called(id="c")]},
         result(), result(tool_call_id="b"), result("", tool_call_id="c")],
    ),
    "a result without a call, as after a cut at the beginning": (
        [{"role": "tool", "content": "done"}, result("1", tool_call_id="x")],
        [user("done"), result("1", tool_call_id="x")],
    ),
    "results that are no text": (
        [calling("a", "b", "c"), result({"rows": [1]}), result([{"id": 1}, {"id": 2}], tool_call_id="b"),
         result([text("3"), part("image", data="AA"), part("resource", uri="x"), 5], tool_call_id="c")],
        [calling("a", "b", "c"), result('{"rows": [1]}'), result('[{"id": 1}, {"id": 2}]', tool_call_id="b"),
         result("\n".join(["3", PICTURE, DOCUMENT, "5"]), tool_call_id="c")],
    ),
    "a call without a name, or of another kind": (
        [answer("I try.", tool_calls=[{"id": "a", "type": "function", "function": {"arguments": "{}"}}, 7]),
         result()],
        [answer('I try.\n[custom_tool_call: {"function": {"arguments": "{}"}}]'), user("done")],
    ),
    # OpenAI.
    "a refusal": (
        [answer(refusal="I cannot.", audio=None, annotations=[]),
         answer([part("refusal", refusal="Never.")])],
        [answer("I cannot."), answer("Never.")],
    ),
    "names, nulls and empty lists": (
        [{"role": "developer", "content": None, "name": "boss"}, user(None) | {"name": "Ada"}, user([]),
         answer(tool_calls=[], name="bot"), answer([], tool_calls=None)],
        [{"role": "system", "content": ""}, user(""), user(""), answer(""), answer("")],
    ),
    "Gemini: another name of the role, parts without a type": (
        [{"role": "model", "content": [{"text": "Yes."}]}], [answer("Yes.")],
    ),
    "Gemini, AI SDK: parts in place of content": (
        [{"role": "user", "parts": [{"text": "Hi."}]}, {"role": "model", "parts": [{"text": "Yes."}]}],
        [user("Hi."), answer("Yes.")],
    ),
    "a role that nobody knows": ([{"role": "environment", "content": "A"}], [user("A")]),
    "LangChain, ShareGPT, Llama, GLM: their roles": (
        [{"type": "system", "content": "Be."}, {"type": "human", "content": "A"},
         {"type": "ai", "content": "B"}, {"role": "gpt", "content": "C"}, calling(),
         {"role": "ipython", "content": "1"}, calling(), {"role": "observation", "content": "2"}],
        [{"role": "system", "content": "Be."}, user("A"), answer("B"), answer("C"), calling(), result("1"),
         calling(), result("2")],
    ),
    "parts of MCP and Mistral": (
        [user([text("Look."), part("resource", resource={"uri": "file:///a", "text": "A"}),
               part("resource", resource={"uri": "file:///a", "blob": "AAAA"}),
               part("resource_link", uri="file:///a", name="a"), part("document_url", document_url="x"),
               part("image_file", image_file={"file_id": "x"})])],
        [user("\n".join(["Look.", "file:///a", "A", DOCUMENT,
                         '[resource_link: {"uri": "file:///a", "name": "a"}]', DOCUMENT, PICTURE]))],
    ),
    "parts of kinds that nobody knows": (
        [user([text("Look."), part("smell", data="A" * 99), part("markdown", text="*x*"), part("image_url")]),
         answer([part("hologram")])],
        [user(f"Look.\n{UNREADABLE('smell')}\n*x*\n{PICTURE}"), answer(UNREADABLE("hologram"))],
    ),
    # Items of responses.
    "AI SDK, opencode: references to what another server stored": (
        [part("item_reference", id="rs_1"), part("item_reference", id="msg_1"), user("And?"),
         part("item_reference", id="fc_1"), part("function_call_output", call_id="c", output="done")],
        [answer(UNREADABLE("item_reference")), user("And?"), answer(UNREADABLE("item_reference")),
         result(tool_call_id="c")],
    ),
    "Codex: summaries of reasoning, items of its own": (
        [part("reasoning", summary=[part("summary_text", text="Hm.")], content=None, encrypted_content="x"),
         part("function_call", id=None, call_id="a", name="read", arguments="{}", status=None),
         part("function_call_output", call_id="a", output=[part("input_text", text="done")]),
         part("compaction", encrypted_content="x"), part("mcp_list_tools", tools=[])],
        [calling(reasoning_content="Hm."), result(), answer(UNREADABLE("compaction"))],
    ),
    "items in parts of an answer": (
        [answer([part("output_text", text="I read."), part("function_call", call_id="a", id="fc_1",
                 name="read", arguments="{}")]), result()],
        [calling(content="I read."), result()],
    ),
}  # fmt: skip


def messages_of(kind, items):
    exchange = kind({KINDS[kind]: items, "max_tokens": 9}, LOADED)
    check_requests(exchange.requests)
    return exchange.requests[0].messages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("items", "expected"), HISTORIES.values(), ids=HISTORIES)
def test_what_programs_send(kind, items, expected):
    given = json.loads(json.dumps([*items, QUESTION]))
    assert messages_of(kind, given) == [*(items if expected is None else expected), QUESTION]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([QUESTION, user([part("smell")])], "[1].content: content of the type smell is not supported"),
        ([QUESTION, user(None)], "[1].content is missing: give text"),
        ([QUESTION, user(5)], "[1].content: a part of the content is not an object"),
        ([QUESTION, user([part("image")])], ": the question is only '[image left out"),
        ([QUESTION, part("item_reference", id="msg_1")], "[1]: the type item_reference is not supported"),
        ([QUESTION, {"role": "king", "content": "x"}], "[1].role: give 'system', 'user', "),
        ([{"content": "x"}, QUESTION], "[0].role is missing: add it"),
        ([{"content": "x", "type": ["user"]}, QUESTION], "[0].role is missing: add it"),
        ([answer([part("thinking", thinking="x")] * 2, x=[] or None), 5], "[1]: give an object"),
    ],
)
def test_what_is_asked_now_must_be_readable(kind, items, error):
    with pytest.raises(InvalidRequest, match="^" + re.escape(KINDS[kind] + error)):
        messages_of(kind, items)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_answer_calls_tools(kind):
    """Programs send it once more after a call was interrupted."""
    found = messages_of(kind, [QUESTION, calling("a", "b")])
    lost = "[no result: the call was interrupted]"
    assert found == [QUESTION, calling("a", "b"), result(lost), result(lost, tool_call_id="b")]


def test_a_last_item_that_says_nothing():
    assert messages_of(Responses, [QUESTION, part("mcp_list_tools", tools=[])]) == [QUESTION]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [190, 300])
def test_deep_nesting(kind, depth):
    """It is read down to the limit of the parser of bodies."""
    for wrap in (lambda value: [value], lambda value: {"type": "thinking", "thinking": value}):
        deep = "x"
        for _ in range(depth):
            deep = wrap(deep)
        for item in (answer(reasoning=deep), answer([deep]), answer(tool_calls=[called(deep)]), result(deep)):
            with nullcontext() if depth < 200 else pytest.raises(InvalidRequest, match="recursion limit"):
                assert messages_of(kind, [item, QUESTION])[-1] == QUESTION


def test_markers_that_another_server_has_left_in_an_answer():
    """The template of gpt-oss refuses them."""
    end = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for written in ("<|channel|>final<|message|>Yes.", f"<|channel|>analysis<|message|>Hm.{end}Yes."):
        prompt = str(template_of("thinking: channels").render([QUESTION, answer(written), QUESTION]))
        assert prompt == str(template_of("thinking: channels").render([QUESTION, answer("Yes."), QUESTION]))


SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "b", "read", "{}", "{"])
KEYS = st.sampled_from(
    """content type text name function arguments id call_id tool_use_id tool_call_id tool_calls input output
    reasoning reasoning_content thinking summary function_call refusal images source""".split()  # noqa: SIM905
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
TYPES = sorted(
    {each["type"] for items, _ in HISTORIES.values() for item in items
     for each in (item, *(item.get("content") or ())) if isinstance(each, dict) and "type" in each}
)  # fmt: skip
PARTS = st.builds(lambda kind, more: more | {"type": kind}, st.sampled_from(TYPES),
                  st.dictionaries(KEYS, VALUES, max_size=3))  # fmt: skip
ITEMS = st.builds(
    lambda role, content, more: more | {"role": role, "content": content},
    st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]),
    SCALARS | VALUES | st.lists(PARTS | VALUES, max_size=3),
    st.dictionaries(KEYS, VALUES, max_size=3),
)
KNOWN = st.sampled_from([items for items, _ in HISTORIES.values()])


@settings(max_examples=60)
@given(st.lists(KNOWN | st.lists(ITEMS | PARTS, max_size=2), max_size=4), st.data())
def test_any_history(parts, data):
    """Whatever was said before, the question is read, and the template of any model gets a prompt of it."""
    items = [*(item for part in parts for item in part), QUESTION]
    found = [messages_of(kind, items) for kind in KINDS]
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == QUESTION
    template = template_of(data.draw(st.sampled_from(sorted(ALL))))
    assert "Why?" in str(ToolUse(template, []).render(found[0]))
