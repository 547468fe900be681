"""Whether messages mean the same, and calls in them."""

import pytest

from spec_local.chat.meaning import arguments_key, meaning_of, same_message
from spec_local.reasoning.markers import Splitter, markers_of
from spec_local.server.supervision.engine_process import _n_common


def called(arguments, name="weather", id="a", content="I look.", **more):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [2, {"c": "é"}]}', '{"b":[2,{"c":"\\u00e9"}],\n"a":1}'),
        ('{"a": 1.0, "b": [-3.0, 0.0]}', '{"a": 1, "b": [-3, 0]}'),
        ('{"a": "line\nbreak"}', '{"a": "line\\nbreak"}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
    ],
)
def test_the_same_arguments_in_another_form(one, other):
    assert arguments_key(one) == arguments_key(other)
    assert same_message(called(one), called(other, id="b", content="I look. \n", reasoning_content="Hm."))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": false}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": "x"}', '{"a": "x "}'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992.0}'),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": 1', '{ "a": 1'),
        ("[1]", "[ 1]"),
        ('JSON {"a": 1}', '{"a": 1}'),
    ],
)
def test_other_arguments(one, other):
    assert arguments_key(one) != arguments_key(other)
    assert not same_message(called(one), called(other))


def test_arguments_that_are_nested_deeply():
    for n in (400, 900, 100_000):
        text = '{"a":' * n + "1" + "}" * n
        assert arguments_key(text) == arguments_key(text)


def test_other_messages():
    message = {"role": "assistant", "content": "It is 5."}
    assert same_message(message, {**message, "content": " It is 5.\n"})
    assert not same_message(message, {**message, "content": "It is  5."})
    assert not same_message(message, {**message, "role": "user"})
    user = {"role": "user", "content": "x"}
    assert not same_message(user, {**user, "content": "x "})  # a question is not stripped
    assert not same_message(called("{}"), called("{}", name="now"))
    assert not same_message(called("{}"), message | {"content": "I look."})


def test_messages_that_two_conversations_begin_with():
    asked = {"role": "user", "content": "Rain?"}
    ours = [asked, called('{"a": 1, "b": 2}'), {"role": "tool", "content": "x", "tool_call_id": "a"}]
    theirs = [asked, called('{"b":2,"a":1}'), {"role": "tool", "content": "x", "tool_call_id": "a"}, asked]
    assert _n_common(ours, theirs) == 3
    assert _n_common(theirs, ours[:2]) == 2
    assert _n_common([], ours) == 0
    assert _n_common([*ours[:2], asked], theirs) == 2


HERMES = "<think> </think> <tool_call>"


def meaning(text, template=HERMES, tools=({"function": {"name": "f"}},)):
    return meaning_of(text, template, Splitter(markers_of(template)), tools)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (" Yes.\n", "Yes.", True),
        ("Yes.", "Yes!", False),
        ("<think>\nHm. \n</think>\n\nYes.", "<think>\nHm.\n</think>\nYes.", True),
        ("<think>\nHm.\n</think>\n\nYes.", "Yes.", False),
        ("<think>\n\n</think>\n\nYes.", "Yes.", False),
        ('A\n<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
         'A<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n', True),
        ('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
         '<tool_call>{"name":"f","arguments":{"x":1}}', False),
        ('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
         '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>' * 2, False),
        ('{"name":"f","arguments":{"x":1}}',
         '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', False),
    ],
)  # fmt: skip
def test_texts_of_answers(one, other, same):
    assert (meaning(one) == meaning(other)) is same


def test_without_tools_calls_are_text():
    text = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
    assert meaning(text, tools=()).text == text
    assert meaning(text, template="").text == text
