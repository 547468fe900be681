"""Many prompts from a file of JSON lines, and their answers into another.

A run that was killed goes on where it was: the file of answers (`spec_local.batch.answers`) says what is done, by the number
of the prompt and a hash of all that decides what may be said. A prompt or a setting that has changed since is an error,
never an answer that stays beside the wrong prompt; lines that are removed from the file are answered anew. Prompts that
failed are tried again by the next run.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec_local import answer_json
from spec_local.batch.answers import Answers
from spec_local.chat.request import Request
from spec_local.chat.template import Message
from spec_local.engine.decoding import check_prompt
from spec_local.engine.events import Statistics
from spec_local.errors import ContextOverflow, DeadEnd, InvalidRequest, ModelError
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from spec_local.validation import describe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SPEED = {
    setting.name for setting in fields(GenerationSettings) if setting.metadata.get("affects") == "speed"
}


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
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt of a batch.

    index: its number, from 0. id: what the person calls it. settings: for its answer. key: a hash of what decides what
    may be said, but for the length of the context and the precision of its cache.
    """

    index: int
    id: str | int | None
    request: Request
    settings: GenerationSettings
    key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a prompt: an answer with its statistics, or an error."""

    entry: Entry
    statistics: Statistics | None = None
    error: str = ""


def read_entries(
    lines: Iterable[bytes],
    name: str,
    main: Path,
    settings: GenerationSettings,
    *,
    system: str | None = None,
    raw: bool = False,
) -> list[Entry]:
    """The prompts of a file of JSON lines: each an object with ``prompt`` or ``messages`` (role and content), and perhaps
    ``id``, ``system``, ``suffix``, ``seed``, ``max_tokens``. Empty lines do not count.

    Args:
        lines: as the file has them.
        name: what errors call the file.
        main: the model's file; another name or size makes it another batch.
        settings: for every answer. A line's own seed and max_tokens go before; the settings' seed is for the first prompt,
            the next number for the second, and so on, so that an answer depends on no other.
        system: for lines that have none, and no messages.
        raw: no chat template.

    Raises:
        InvalidRequest: a line makes no sense, or there is none.
        OSError: the model's file cannot be found.
    """
    entries: list[Entry] = []
    model = [main.name, main.stat().st_size]
    for number, text in enumerate(lines, 1):
        text = text.removeprefix(codecs.BOM_UTF8)
        if not text.strip():
            continue
        index = len(entries)
        try:
            line = _Line.model_validate_json(text)
            in_chat = not raw and not line.messages and line.suffix is None
            request = Request(
                line.prompt,
                messages=[Message(role=m.role, content=m.content) for m in line.messages],
                system=system if line.system is None and in_chat else line.system,
                suffix=line.suffix,
                raw=raw,
            )
            own = _own_settings(line, settings, index)
        except ValidationError as error:
            raise InvalidRequest(f"{name}, line {number}: {describe(error)}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}, line {number}: {error}") from None
        entries.append(Entry(index, line.id, request, own, _key(request, own, model)))
    if not entries:
        raise InvalidRequest(
            f'{name} has no prompts: give lines such as {{"prompt": "Why is the sky blue?"}}'
        )
    return entries


def run(
    session: Session,
    entries: Iterable[Entry],
    answers: Answers,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Answer prompts in their order: those of `Answers.left`, so that none is answered twice.

    What neighbours have in common at their beginning, such as a system message, is evaluated once.

    Args:
        cancelled: True ends the run; the answer that was under way is not kept.

    Raises:
        OSError: an answer could not be written; those before it are whole.
        SpecLocalError: what no single prompt is to blame for.
    """
    for entry in entries:
        if cancelled():
            return
        head: dict[str, Any] = {"index": entry.index, "id": entry.id, "key": entry.key}
        try:
            tokens = entry.request.tokens(session.main.model)
            check_prompt(session.main, tokens)
        except (ContextOverflow, InvalidRequest, ModelError) as error:
            answers.append(head | {"error": str(error)})
            yield Outcome(entry, error=str(error))
            continue
        answer = session.generate(tokens, entry.settings, cancelled=cancelled)
        try:
            events = list(answer)
        except (DeadEnd, InvalidRequest) as error:  # a grammar in which this answer has come to nothing
            answers.append(head | {"error": str(error)})
            yield Outcome(entry, error=str(error))
            continue
        done = events[-1]
        assert isinstance(done, Done)
        if done.reason == "cancelled":
            return
        if entry.settings.seed is not None:
            head["seed"] = entry.settings.seed
        steps = [event for event in events if isinstance(event, Text)]
        answers.append(head | answer_json.whole(session, steps, done))
        yield Outcome(entry, done.statistics)


def _own_settings(line: _Line, settings: GenerationSettings, index: int) -> GenerationSettings:
    seed = line.seed
    if seed is None and settings.seed is not None:
        seed = settings.seed + index
    max_tokens = settings.max_tokens if line.max_tokens is None else line.max_tokens
    return replace(settings, seed=seed, max_tokens=max_tokens)


def _key(request: Request, settings: GenerationSettings, model: Sequence[object]) -> str:
    """A hash of all that decides what may be said. What is as usual does not count, so that settings may be added."""
    chosen = _unusual(settings) | {"sampling": _unusual(settings.sampling)}
    facts = [_unusual(request), {k: v for k, v in chosen.items() if k not in _SPEED}, model]
    text = json.dumps(facts, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unusual(thing: "DataclassInstance") -> dict[str, Any]:
    """The fields that are not as they are by default."""
    found = {}
    for member in fields(thing):
        usual = member.default if member.default_factory is MISSING else member.default_factory()
        value = getattr(thing, member.name)
        if isinstance(usual, tuple):  # a list may stand for it
            usual, value = list(usual), list(value)
        if value != usual:
            found[member.name] = value
    return found
