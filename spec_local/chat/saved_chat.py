"""Conversations in files (JSON), to be gone on with later; people may read and edit them.

An answer is kept with the tokens that the model said and with its place in the conversation's text. Whoever loads
it believes neither: tokens that do not spell what stands there (the file was edited, or the model is another) are
left out, and the text is tokenized anew.
"""

import base64
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from spec_local.chat.conversation import ChatTemplate, Conversation, Message, Said
from spec_local.core.text import bytes_of, printable
from spec_local.errors import InvalidRequest
from spec_local.files import reading, saving
from spec_local.llama.model import Model
from spec_local.validation import told

_VERSION: Final = 1
_MAX_BYTES = 1 << 26  # several times what any tokenizer takes


class _Said(BaseModel):
    """at: bytes of the rendered conversation before the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    at: NonNegativeInt
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class _Message(BaseModel):
    """bytes: of a content that is not UTF-8, in base64; the content is then for people who look."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant"]
    content: str
    bytes: str | None = None
    said: _Said | None = None


class _File(BaseModel):
    """model: for people who look."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["specdec conversation"]
    version: Literal[1]
    model: str
    messages: list[_Message]


def save(conversation: Conversation, path: Path) -> None:
    """Write a conversation, atomically, for the user alone to read.

    Raises:
        InvalidRequest: the file cannot be written; what was there is still there.
    """
    said, messages = conversation.said, []
    for i, message in enumerate(conversation.messages):
        answer, readable = said.get(i), printable(message["content"])
        kept = (
            None
            if readable == message["content"]
            else base64.b64encode(bytes_of(message["content"])).decode()
        )
        messages.append(
            _Message(
                role=message["role"],
                content=readable,
                bytes=kept,
                said=_Said(at=answer.at, tokens=answer.tokens) if answer else None,
            )
        )
    file = _File(
        format="specdec conversation",
        version=_VERSION,
        model=printable(conversation.model.path.name),
        messages=messages,
    )
    with saving(path) as temporary:
        temporary.write_text(_json(file), encoding="utf-8")


def load(path: Path, model: Model, template: ChatTemplate) -> Conversation:
    """Read a conversation, to be gone on with by any model.

    Raises:
        InvalidRequest: the file cannot be read, or is no conversation; says the first place that is wrong.
        ModelError: the model's template refuses it.
    """
    with reading(path) as opened:
        text = opened.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise InvalidRequest(f"{path} has more than {_MAX_BYTES >> 20} MiB: it is no conversation")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no JSON ({error}): give a file that specdec has saved") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > _VERSION:
        raise InvalidRequest(f"{path} was written by a newer specdec (format {version}): update specdec")
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(f"{path} is no saved conversation ({told(error)}): mend or delete it") from None
    messages = [_message(path, i, message) for i, message in enumerate(file.messages)]
    conversation = Conversation(model, template, messages)
    conversation.recall(
        {
            i: Said(m.said.at, m.said.tokens)
            for i, m in enumerate(file.messages)
            if m.said and m.role == "assistant"
        }
    )
    return conversation


def _message(path: Path, i: int, message: _Message) -> Message:
    if message.role == "system" and i:
        raise InvalidRequest(f"{path}: messages.{i} is a system message: only the first can be")
    content = message.content
    if message.bytes is not None:
        try:
            content = base64.b64decode(message.bytes, validate=True).decode("utf-8", "surrogateescape")
        except ValueError:
            raise InvalidRequest(f"{path}: messages.{i}.bytes is no base64: mend or delete it") from None
    bytes_of(content)
    return {"role": message.role, "content": content}


def _json(file: _File) -> str:
    """One line a message: for people who look, and for diff."""
    head: dict[str, Any] = file.model_dump(exclude={"messages"})
    lines = [json.dumps(m.model_dump(exclude_none=True), ensure_ascii=False) for m in file.messages]
    body = ",\n".join(f"  {line}" for line in lines)
    return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "messages": [\n{body}\n]}}\n'
