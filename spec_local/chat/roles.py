"""Other arrangements of a conversation, for templates that do not accept its roles in their order.

Many templates demand one system message at the start, or that the roles of user and assistant alternate.
"""

from collections.abc import Iterator, Sequence

from spec_local.chat.messages import Message

_GAP = "\n\n"
"""Between the texts of messages that become one."""


def arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages as they are, and then in forms that more and more templates accept.

    All have all of the content, in its order: neighbours of the same role become one message, then later
    system messages become the user's, then all of them, then user and assistant alternate, and at last calls
    and results are text: some templates accept no result without its call, or one call at a time.
    """
    merged = joined([*map(_users, messages)])
    last: list[Message] | None = None
    for arranged in (
        [*messages],
        joined(messages),
        joined([*messages[:1], *map(_users, messages[1:])]),
        merged,
        joined(_alternating(merged)),
        joined(_alternating(joined([*map(_users, without_calls(messages))]))),
    ):
        if arranged != last:
            yield arranged
        last = arranged


def joined(messages: Sequence[Message]) -> list[Message]:
    """The messages, with neighbours of the same role as one; results of tools stay apart."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if not last or message["role"] == "tool" or last["role"] != message["role"] or "tool_calls" in last:
            found.append(message)
        else:
            found[-1] = _one(last, message)
    return found


def without_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with calls of tools as text of the assistant, and their results as the user's.

    Empty answers are left out: some templates refuse them.
    """
    made = map(_without_calls, messages)
    return [message for message in made if message["content"] or message["role"] != "assistant"]


def _without_calls(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = (f"[tool_call: {function['name']} {function['arguments']}]" for function in functions)
    made: Message = {"role": "assistant", "content": _text(message["content"], *calls)}
    if "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    return made


def _one(first: Message, second: Message) -> Message:
    """Both messages as one. The calls of tools and the name are those of the second."""
    one = second | {"content": _text(first["content"], second["content"])}
    if reasoning := _text(first.get("reasoning_content", ""), second.get("reasoning_content", "")):
        one["reasoning_content"] = reasoning
    return one


def _text(*texts: str) -> str:
    return _GAP.join(filter(None, texts))


def _users(message: Message) -> Message:
    return {"role": "user", "content": message["content"]} if message["role"] == "system" else message


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """The messages, beginning with the user's: results without a call are too, text after a result is its."""
    found: list[Message] = [{"role": "user", "content": ""}]
    for message in messages:
        last = found[-1]
        follows_call = last["role"] == "tool" or "tool_calls" in last
        if message["role"] == "tool" and not follows_call:
            message = {"role": "user", "content": message["content"]}
        if message["role"] == "user" and last["role"] == "tool":
            found[-1] = last | {"content": _text(last["content"], message["content"])}
        else:
            found.append(message)
    return found
