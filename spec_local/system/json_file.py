"""JSON files: those that specdec has written, and those of users, whose errors name the file and the line."""

import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import from_json

from spec_local.errors import InvalidRequest
from spec_local.system.files import read_bytes

_Kind = TypeVar("_Kind")
_PLACE = re.compile(r"(.*) at line (\d+) column \d+", re.DOTALL)


class JsonRecord(BaseModel):
    """The content of a file that specdec writes and reads again."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_record(path: Path, kind: type[_Kind], max_bytes: int) -> _Kind:
    """The content of a file that specdec has written, validated.

    kind: a `JsonRecord`, or another type that pydantic can validate.

    Raises:
        OSError: it is not a regular file, cannot be read, or is larger than `max_bytes`.
        ValueError: it is damaged.
    """
    return TypeAdapter(kind).validate_json(read_bytes(path, max_bytes))


def parse(text: str, source: str, advice: str, first_line: int = 1) -> Any:
    """Parse what a user has written; nesting and the length of numbers are limited.

    Args:
        source: the name of the file. advice: what to do, at the end of an error.
        first_line: number of the text's first line in the file.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        what, line = str(error), first_line
        if found := _PLACE.fullmatch(what):
            what, line = found[1], line + int(found[2]) - 1
        raise InvalidRequest(f"{source}, line {line} is not valid JSON ({what}): {advice}") from None
