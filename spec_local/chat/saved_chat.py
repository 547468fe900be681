"""Conversations in JSON files, which can be read, edited, and continued with any model.

An answer is saved with its tokens and its offset in the rendered conversation. Both are checked on loading:
tokens that do not spell the text (because the file was edited or the model differs) are ignored, and the text
is tokenized, and so are all answers if the file names another model. Images are saved as their files, in
base64.
"""

import base64
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from spec_local.chat.conversation import AnswerTokens, Conversation
from spec_local.chat.messages import Role, messages_of
from spec_local.chat.template import ChatTemplate
from spec_local.errors import InvalidRequest
from spec_local.images import media
from spec_local.images.media import Media
from spec_local.images.media_file import MediaFile
from spec_local.llama.model import Model
from spec_local.system.files import decoded, limited, reading, saving
from spec_local.system.json_file import parse
from spec_local.text import bytes_of, printable
from spec_local.validation import describe

_VERSION: Final = 1
_OWN = ("role", "content", "images")  # keys of a message that are not saved as they are
_MAX_TEXT = 1 << 26  # bytes: several times the text that fits into any context
_BEGINNING = re.compile(rb'\s*{\s*"format"\s*:\s*"specdec conversation"')
"""Of the files that `save` writes; of others, no images are expected."""
_MAX_BYTES = _MAX_TEXT + media.MAX_IMAGES * media.MAX_BYTES // 3 * 4


class _Generated(BaseModel):
    """See `AnswerTokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    offset: NonNegativeInt
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class _SavedImage(BaseModel):
    """at: its place, as in `Message`. name: of its file, without the folder. data: the file in base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    at: NonNegativeInt
    name: str
    data: str

    @classmethod
    def of(cls, at: int, image: Media) -> "_SavedImage":
        name = printable(os.path.basename(image.name))
        return cls(at=at, name=name, data=base64.b64encode(image.data).decode())


class _Message(BaseModel):
    """bytes: the content in base64 if it is not UTF-8; `content` is then only for human readers.

    reasoning_content, tool_calls: those of an answer, with U+FFFD for bytes that are not UTF-8.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Role
    content: str
    images: list[_SavedImage] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    bytes: str | None = None
    generated: _Generated | None = None


class _File(BaseModel):
    """model: the file name of the main model. paths: see `save`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["specdec conversation"]
    version: Literal[1]
    model: str
    paths: list[str] = []
    messages: list[_Message]


def save(conversation: Conversation, path: Path, paths: Sequence[Path] = ()) -> None:
    """Write a conversation atomically; only the user can read the file.

    Args:
        paths: of the main and the draft model, for `paths_of`.

    Raises:
        InvalidRequest: the file cannot be written; an existing file is unchanged.
    """
    answers, messages = conversation.answer_tokens, []
    for i, message in enumerate(conversation.messages):
        answer, content = answers.get(i), printable(message["content"])
        others = {key: value for key, value in message.items() if key not in _OWN}
        images = [_SavedImage.of(*each) for each in message.get("images", ())]
        raw = None if content == message["content"] else base64.b64encode(bytes_of(message["content"]))
        messages.append(
            _Message(
                role=message["role"],
                content=content,
                images=images or None,
                **json.loads(printable(json.dumps(others, ensure_ascii=False))),
                bytes=raw.decode() if raw else None,
                generated=_Generated(offset=answer.offset, tokens=answer.tokens) if answer else None,
            )
        )
    file = _File(
        format="specdec conversation",
        version=_VERSION,
        model=conversation.model.name,
        paths=[printable(str(path.absolute())) for path in paths],
        messages=messages,
    )
    with saving(path) as temporary:
        temporary.write_text(_json(file), encoding="utf-8")


def paths_of(path: Path) -> list[Path]:
    """The files of the main and the draft model with which a conversation was saved, as far as they exist.

    Raises:
        InvalidRequest: the file cannot be read, or is not a conversation.
    """
    files = map(Path, _read(path).paths)
    return list(itertools.takewhile(Path.is_file, files))


def load(
    path: Path, model: Model, template: ChatTemplate, log: Callable[[str], None] = lambda line: None
) -> Conversation:
    """Read a conversation, to continue it with any model.

    Args:
        log: receives one line if it was saved with another model.

    Raises:
        InvalidRequest: the file cannot be read, or is not a conversation; the message names the first error.
        ModelError: the model's template rejects the messages.
    """
    file = _read(path)
    loaded = [_message(path, i, m) for i, m in enumerate(file.messages)]
    try:
        messages = messages_of(loaded)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path} is not a saved conversation: {error}") from None
    conversation = Conversation(model, template, messages)
    if file.model != (name := model.name):  # its tokens would split the text in other places
        log(f"this conversation was with {file.model}; {name} goes on with it: give the other as main model")
        return conversation
    conversation.restore(
        {
            i: AnswerTokens(m.generated.offset, m.generated.tokens)
            for i, m in enumerate(file.messages)
            if m.generated and m.role == "assistant"
        }
    )
    return conversation


def is_saved(path: Path) -> bool:
    """Return whether a file is a conversation that `load` reads."""
    try:
        return bool(_read(path))
    except InvalidRequest:
        return False


def _read(path: Path) -> _File:
    with reading(path) as opened:
        most = _MAX_BYTES if _BEGINNING.match(opened.peek(1000)) else _MAX_TEXT
        text = limited(opened.read(most + 1), str(path), most)
    content = parse(decoded(text, str(path)), str(path), "give a file saved by specdec")
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > _VERSION:
        raise InvalidRequest(f"{path} was written by a newer specdec (format {version}): update specdec")
    try:
        return _File.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(
            f"{path} is not a saved conversation ({describe(error)}): fix or delete the file"
        ) from None


def _message(path: Path, i: int, message: _Message) -> dict[str, object]:
    if message.role == "system" and i:
        raise InvalidRequest(f"{path}: messages.{i} is a system message: only the first message can be one")
    content = message.content
    if message.bytes is not None:
        try:
            content = base64.b64decode(message.bytes, validate=True).decode("utf-8", "surrogateescape")
        except ValueError:
            raise InvalidRequest(f"{path}: messages.{i}.bytes is not base64: fix or delete it") from None
    bytes_of(content)
    bytes_of(message.reasoning_content or "")
    images = [
        (each.at, _image(path, f"messages.{i}.images.{n}", each))
        for n, each in enumerate(message.images or ())
    ]
    others = message.model_dump(exclude={"bytes", "generated", "content", "images"})
    return others | {"content": content, "images": images}


def _image(path: Path, where: str, saved: _SavedImage) -> Media:
    try:
        return MediaFile.of_base64(saved.data, saved.name)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {where}: {error}") from None


def _json(file: _File) -> str:
    """Format with one line per message, so that files can be read and compared."""
    head: dict[str, Any] = file.model_dump(exclude={"messages", *(() if file.paths else ("paths",))})
    lines = [json.dumps(m.model_dump(exclude_none=True), ensure_ascii=False) for m in file.messages]
    body = ",\n".join(f"  {line}" for line in lines)
    return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "messages": [\n{body}\n]}}\n'
