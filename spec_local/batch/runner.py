"""Answer many prompts of a file; the answers are written to another, in JSON Lines.

A batch that was stopped or killed can be resumed: its output (`spec_local.batch.answers`) records the index
of each prompt and a hash of everything that affects the answer. If a prompt or a setting has changed since,
this is an error, so that answers are never assigned to the wrong prompts. BatchOutput that were removed are
generated again, and failed prompts are retried by the next run.
"""

import codecs
import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec_local.answers import json as answer_json
from spec_local.batch.answers import BatchOutput, BatchPrompt
from spec_local.chat.messages import Message
from spec_local.chat.request import ChatRequest
from spec_local.core.sampling_settings import UNCHANGED
from spec_local.engine.events import Failed, Statistics
from spec_local.engine.prefill import check_prompt
from spec_local.errors import (
    ContextOverflow,
    DeadEnd,
    InternalError,
    InvalidRequest,
    ModelError,
    SpecLocalError,
)
from spec_local.images.media import MAX_IMAGES
from spec_local.reasoning.markers import Splitter
from spec_local.session import ChatPrompt, Done, Session, Text
from spec_local.settings import GenerationSettings
from spec_local.system.files import expanded
from spec_local.validation import describe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SPEED = {field.name for field in fields(GenerationSettings) if field.metadata.get("affects") == "speed"}


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant"]
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | int | None = None
    prompt: str = ""
    messages: list[_Message] = []
    system: str | None = None
    images: list[str] = []
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The result of a prompt: the statistics of its answer, or an error.

    cut_short: whether something other than the model ended the answer.
    """

    entry: BatchPrompt
    statistics: Statistics | None = None
    cut_short: bool = False
    error: str = ""


def read_entries(
    lines: Iterable[bytes],
    name: str,
    main: Path,
    settings: GenerationSettings,
    *,
    system: str | None = None,
    raw: bool = False,
) -> list[BatchPrompt]:
    """Parse a file of prompts, one a line; empty lines are ignored.

    If the file's name ends with ``.jsonl`` or its first line begins with a brace, each line is a JSON object
    with ``prompt`` or ``messages`` (role and content), and optionally ``id``, ``system``, ``images`` (files
    that stand before the prompt), ``suffix``, ``seed`` and ``max_tokens``. Otherwise each line is the text of
    a prompt. Images are read when their prompt is answered, which fails if one is damaged.

    Args:
        lines: of the file.
        name: of the file; images' paths are relative to its folder, if it has one.
        main: the main model's file; a batch cannot be resumed with a file of another name or size.
        settings: for every answer; a line's own seed and max_tokens take precedence. The seed is that of
            the first prompt and increases by one with each prompt, so that an answer does not depend on
            the others.
        system: system message for lines that have neither a system message nor messages.
        raw: whether to leave out the chat template.

    Raises:
        InvalidRequest: a line is invalid, or there are no prompts.
        OSError: the model's file cannot be found.
    """
    entries: list[BatchPrompt] = []
    model = [main.name, main.stat().st_size]
    is_json = name.endswith(".jsonl")
    for number, text in enumerate(lines, 1):
        text = text.removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")
        if not text.strip():
            continue
        index = len(entries)
        is_json = is_json or (not entries and text.lstrip().startswith(b"{"))
        try:
            line = _Line.model_validate_json(text) if is_json else _Line(prompt=_decoded(text))
            in_chat = not raw and not line.messages and line.suffix is None
            request = ChatRequest(
                line.prompt,
                messages=[Message(role=m.role, content=m.content) for m in line.messages],
                system=system if line.system is None and in_chat else line.system,
                suffix=line.suffix,
                raw=raw,
            )
            own = _own_settings(line, settings, index)
            images = _images(line, Path(name).parent)
        except ValidationError as error:
            raise InvalidRequest(f"{name}, line {number}: {describe(error)}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}, line {number}: {error}") from None
        key = _key(request, own, [*model, *((path.name, path.stat().st_size) for path in images)])
        entries.append(BatchPrompt(index, line.id, request, own, key, images))
    if not entries:
        raise InvalidRequest(f"{name} has no prompts: give one a line, as text or in JSON")
    return entries


def _images(line: _Line, folder: Path) -> list[Path]:
    """The files of a line's images."""
    if line.images and (line.messages or line.suffix is not None):
        raise InvalidRequest("images stand before a prompt: give one in place of messages or a suffix")
    if len(line.images) > MAX_IMAGES:
        raise InvalidRequest(f"it has {len(line.images)} images: give at most {MAX_IMAGES}")
    paths = [folder / expanded(each) for each in line.images]
    if missing := [path for path in paths if not path.is_file()]:
        raise InvalidRequest(f"the image {missing[0]} does not exist, or is no file: correct its path")
    return paths


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"it is not UTF-8 (byte {error.start}): convert the file first") from None


def run(
    session: Session,
    entries: Iterable[BatchPrompt],
    answers: BatchOutput,
    *,
    n_parallel: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[BatchOutcome]:
    """Answer prompts, several at the same time; yields outcomes in the order in which they are complete.

    A beginning that prompts share, such as a system message, is evaluated once.

    Args:
        entries: as given by `BatchOutput.unanswered`.
        n_parallel: maximum number of answers at the same time; None: as many as the session was opened for.
        cancelled: returns True to stop; unfinished answers are dropped.

    Raises:
        InvalidRequest: the session is in use, or was closed; unfinished answers are dropped.
        OSError: an answer could not be written; the answers before it are complete.
        SpecLocalError: a failure that is not specific to one prompt.
    """
    started: list[BatchPrompt] = []  # by the index of the session's events
    splitters: list[Splitter] = []  # by the same
    steps: dict[int, list[Text]] = {}
    failures: list[tuple[BatchPrompt, SpecLocalError]] = []

    def prompts() -> Iterator[ChatPrompt | Sequence[int]]:
        for entry in entries:
            if cancelled():
                return
            try:
                tokens = entry.with_images.tokens(session.main.model, session.main.n_ctx)
                check_prompt(session.main, tokens)
            except (ContextOverflow, InvalidRequest, ModelError) as error:
                failures.append((entry, error))
                continue
            started.append(entry)
            splitters.append(entry.request.splitter(session.main.model, tokens))
            is_chat = not entry.request.is_plain(session.main.model)
            yield ChatPrompt(tokens, splitters[-1]) if is_chat else tokens

    def failed() -> Iterator[BatchOutcome]:
        while failures:
            entry, error = failures.pop(0)
            session.check_open()  # otherwise the prompt is not to blame
            answers.append(_head(entry) | {"error": str(error)})
            yield BatchOutcome(entry, error=str(error))

    events = session.generate_many(
        prompts(),
        (started[-1].settings for _ in itertools.count()),  # of the prompt that was taken last
        n_parallel=n_parallel,
        cancelled=lambda index: cancelled(),
    )
    with contextlib.closing(events):
        for index, event in events:
            yield from failed()
            entry = started[index]
            if isinstance(event, Text):
                steps.setdefault(index, []).append(event)
            elif isinstance(event, Failed):
                # A prompt that is too long, a grammar that allows no token, and a defect concern one prompt.
                if not isinstance(event.error, ContextOverflow | DeadEnd | InvalidRequest | InternalError):
                    raise event.error
                failures.append((entry, event.error))
                yield from failed()
            elif isinstance(event, Done) and event.reason != "cancelled":
                seed = {} if entry.settings.seed is None else {"seed": entry.settings.seed}
                answer = answer_json.whole(session.main.model, steps.pop(index, []), event, splitters[index])
                answers.append(_head(entry) | seed | answer)
                yield BatchOutcome(entry, event.statistics, event.cut_short)
    if not cancelled():
        session.check_open()  # otherwise prompts are left
    yield from failed()


def _head(entry: BatchPrompt) -> dict[str, Any]:
    return {"index": entry.index, "id": entry.id, "key": entry.key}


def _own_settings(line: _Line, settings: GenerationSettings, index: int) -> GenerationSettings:
    seed = line.seed
    if seed is None and settings.seed is not None:
        seed = settings.seed + index
    max_tokens = settings.max_tokens if line.max_tokens is None else line.max_tokens
    return replace(settings, seed=seed, max_tokens=max_tokens)


def _key(request: ChatRequest, settings: GenerationSettings, model: Sequence[object]) -> str:
    """Compute the key of an entry. Defaults are left out, so that settings added later do not change it.

    Of the sampling settings, those are left out that leave the distribution unchanged, whatever the default.
    """
    changed = _non_defaults(settings) | {"sampling": _non_defaults(settings.sampling, UNCHANGED)}
    facts = [_non_defaults(request), {k: v for k, v in changed.items() if k not in _SPEED}, model]
    text = json.dumps(facts, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _non_defaults(
    instance: "DataclassInstance", defaults: "DataclassInstance | None" = None
) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, or from those of another instance."""
    found = {}
    for field in fields(instance):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        default = getattr(defaults, field.name, default)
        value = getattr(instance, field.name)
        if isinstance(default, tuple):  # any other sequence is accepted for it
            default, value = list(default), list(value)
        if value != default:
            found[field.name] = value
    return found
