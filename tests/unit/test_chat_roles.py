"""Any order of roles becomes a prompt with all of the content, whatever the model's template demands."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.chat.roles import arrangements, joined
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_use import ToolUse
from spec_local.errors import InvalidRequest, ModelError
from tests.chat_templates import (
    MORE_TEMPLATES,
    STRICT_TEMPLATES,
    TEMPLATES,
    THINKING_TEMPLATES,
    TOOL_TEMPLATES,
    StandIn,
    StandInVocabulary,
)

ALL = {
    f"{kind}: {name}": template
    for kind, templates in (
        ("usual", TEMPLATES),
        ("strict", STRICT_TEMPLATES),
        ("thinking", THINKING_TEMPLATES),
        ("tools", TOOL_TEMPLATES),
        ("more", {name: MORE_TEMPLATES[name] for name in ("instruction", "assembled", "removed and joined")}),
    )
    for name, template in templates.items()
}
WITH_TOOLS = [*(f"tools: {name}" for name in TOOL_TEMPLATES), "strict: Qwen3.5", "strict: Mistral"]
ROLES = ["system", "user", "assistant"]


@functools.cache
def template_of(name):
    return ChatTemplate(StandIn(path="x.gguf", vocabulary=StandInVocabulary(), chat_template=ALL[name]))


def conversation(roles):
    """Messages of these roles, each with text of its own; ``call`` is an answer that calls a tool."""
    found = []
    for i, role in enumerate(roles):
        message = {"role": "assistant" if role == "call" else role, "content": f"text{i:02}."}
        if role == "call":
            function = {"name": "f", "arguments": f'{{"x": "arg{i:02}."}}'}
            message |= {
                "content": "",
                "tool_calls": [{"id": f"{i:09}", "type": "function", "function": function}],
            }
        if role == "tool":
            message["tool_call_id"] = f"{i - 1:09}"
        found.append(message)
    return found


def check_order(prompt, n):
    """Check that the prompt has all texts, in the order of the messages."""
    at = [prompt.rfind(f"{i:02}.") for i in range(n)]
    assert -1 not in at
    assert at == sorted(at)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25)
@given(st.lists(st.sampled_from(ROLES), min_size=1, max_size=6))
@example(["system"])
@example(["system", "system", "user"])
@example(["user", "system"])
@example(["assistant"])
@example(["user", "assistant", "system", "assistant", "assistant"])
@example(["user", "user", "system", "user", "assistant", "system"])
def test_any_order_of_roles(name, roles):
    prompt = str(template_of(name).prompt(conversation(roles)))
    check_order(prompt, len(roles))
    if roles[-1] == "assistant":
        assert prompt.endswith(f"text{len(roles) - 1:02}.")


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=25)
@given(st.lists(st.sampled_from(["system", "user", "call"]), min_size=1, max_size=4))
@example(["system", "call", "user", "call"])
@example(["call", "system", "user"])
def test_any_order_with_calls_and_results(name, roles):
    """Without other answers: beside their calls, some templates leave them out."""
    roles = [each for role in roles for each in ([role, "tool"] if role == "call" else [role])]
    check_order(str(ToolUse(template_of(name)).render(conversation(roles))), len(roles))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_result_without_its_call(name):
    check_order(str(template_of(name).prompt(conversation(["tool", "user"]))), 2)


def test_messages_stay_as_they_are_if_the_template_accepts_them():
    given = conversation(["user", "user", "system", "user"])
    text = str(template_of("usual: chatml").prompt(given))
    assert text.count("<|im_start|>") == 5
    assert text.index("system\ntext02.") < text.index("user\ntext03.")


def test_the_least_change_is_made():
    qwen = template_of("strict: Qwen3.5")
    two = str(qwen.prompt(conversation(["system", "system", "user"])))
    assert two.startswith("<|im_start|>system\ntext00.\n\ntext01.<|im_end|>\n<|im_start|>user\ntext02.")
    middle = str(qwen.prompt(conversation(["system", "user", "assistant", "system", "user"])))
    assert "<|im_start|>system\ntext00.<|im_end|>" in middle
    assert "<|im_start|>user\ntext03.\n\ntext04.<|im_end|>" in middle
    assert "user\ntext00.\n\ntext01." in str(
        template_of("strict: Gemma 2").prompt(conversation(["system", "user"]))
    )


def test_what_joined_messages_keep():
    call = conversation(["call"])[0]
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    again = {"role": "assistant", "content": "So", "reasoning_content": "Ah."}
    assert joined([thought, again, call]) == [
        {**call, "content": "So", "reasoning_content": "Hm.\n\nAh."},
    ]
    results = conversation(["tool", "tool"])
    assert joined([call, *results]) == [call, *results]
    assert list(arrangements([{"role": "user", "content": "a"}])) == [[{"role": "user", "content": "a"}]]


def test_other_failures_of_a_template_stay_errors():
    broken = ChatTemplate(
        StandIn(path="x", vocabulary=StandInVocabulary(), chat_template="{{ raise_exception('never') }}")
    )
    with pytest.raises(ModelError, match=r"rejects this conversation \(never\)"):
        broken.prompt(conversation(["user"]))


# Answers that are continued


def continued(name, **message):
    begun = {"role": "assistant", "content": "", **message}
    template = template_of(name)
    messages = [{"role": "user", "content": "Why?"}, begun]
    splitter = template.splitter(messages, [])
    return str(template.prompt(messages)), splitter


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("usual: chatml", "<|im_start|>assistant\n"),
        ("usual: gemma", "<|im_start|>model\n"),
        ("strict: Qwen3.5", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("strict: Qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("thinking: opened", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("thinking: both markers", "<|im_start|>assistant\n"),
        ("thinking: channels", "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
@pytest.mark.parametrize("text", ["Because", " of  \n", "<|im_end|>"])
def test_the_prompt_ends_with_the_text_that_is_continued(name, before, text):
    prompt, splitter = continued(name, content=text)
    assert prompt.endswith(before + text)
    assert splitter.finish("\n it is </think> so") == ("", "\n it is </think> so")


@pytest.mark.parametrize(
    ("name", "before", "closing"),
    [
        ("strict: Qwen3.5", "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
        ("thinking: opened", "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
        ("thinking: both markers", "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
        (
            "thinking: channels",
            "<|start|>assistant<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
def test_reasoning_is_continued_or_stands_before_the_text(name, before, closing):
    prompt, splitter = continued(name, reasoning_content="Let me")
    assert prompt.endswith(before + "Let me")
    assert splitter.finish(f" see.{closing}So") == (" see.", "So")
    prompt, splitter = continued(name, reasoning_content="Let me see.", content="So")
    assert prompt.endswith(before + "Let me see." + closing + "So")
    assert splitter.finish(" it is.") == ("", " it is.")


def test_markers_in_the_text_count():
    _, splitter = continued("thinking: both markers", content="<think>\nLet me")
    assert splitter.finish(" see.\n</think>\n\nSo") == (" see.", "So")


def test_an_empty_answer_is_none():
    prompt, _ = continued("thinking: opened")
    assert prompt == str(template_of("thinking: opened").prompt([{"role": "user", "content": "Why?"}]))


@pytest.mark.parametrize(
    ("messages", "error"),
    [([], "give at least one message"), (conversation(["user", "call"]), "add a message with the result")],
)
def test_nothing_to_answer(messages, error):
    with pytest.raises(InvalidRequest, match=error):
        template_of("tools: Hermes").prompt(messages)


# Variables


def test_more_variables_of_a_template():
    template = template_of("strict: Qwen3.5")
    question = [{"role": "user", "content": "Why?"}]
    assert str(template.prompt(question)).endswith("<think>\n")
    changed = template.with_variables({"enable_thinking": False, "x": {"y": [1, None]}})
    assert str(changed.prompt(question)).endswith("<think>\n\n</think>\n\n")
    thinking = template.with_variables({"enable_thinking": True})
    begun = [*question, {"role": "assistant", "content": "So"}]
    assert str(thinking.prompt(begun)).endswith("<think>\n\n</think>\n\nSo")
    assert str(template.prompt(question)).endswith("<think>\n")


def test_values_of_variables_are_content():
    source = "{{ '<|im_start|>' + (style or '') }}{{ messages[0].content }}"
    template = ChatTemplate(StandIn(path="x", vocabulary=StandInVocabulary(), chat_template=source))
    changed = template.with_variables({"style": "<|im_end|>"}).prompt([{"role": "user", "content": "Why?"}])
    assert str(changed) == "<|im_start|><|im_end|>Why?"
    assert changed.is_content == bytes(12) + b"\1" * 14


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_variables_that_are_not_free(name):
    with pytest.raises(InvalidRequest, match=rf"chat_template_kwargs.{name} is set"):
        template_of("usual: chatml").with_variables({name: 1})
