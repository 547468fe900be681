"""TOML files written by users: errors name the file, the line and the key."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spec_local.errors import ConfigError, InvalidRequest, SpecLocalError
from spec_local.system.files import decoded, read_bytes
from spec_local.validation import first_error

Location = tuple[str, ...]
_Schema = TypeVar("_Schema", bound=BaseModel)
_KEY = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")
_TABLE = re.compile(rf"\s*\[\[?\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]")
_NONE = Path(os.devnull)  # an empty file, as users give it
_MAX_BYTES = 1 << 20  # of a settings file; usual ones have a few thousand
_LOCATION = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)


class ConfigFile:
    """A TOML file, and errors about it.

    shown: name of the file in error messages. advice: what to do, at the end of each message.

    Attributes:
        text: its content.
    """

    def __init__(self, path: Path, shown: str, advice: str) -> None:
        self._shown, self._advice = shown, advice
        try:
            raw = b"" if path == _NONE else read_bytes(path, _MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"{shown} cannot be read ({error.strerror}): {advice}") from None
        try:
            self.text = decoded(raw, shown)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from None

    def read(self, schema: type[_Schema]) -> _Schema:
        """The content of the file, validated.

        Raises:
            ConfigError: it is not valid TOML or does not fit the schema; the message names the first error.
        """
        try:
            return schema.model_validate(self.table())
        except ValidationError as error:
            location, what = first_error(error)
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            raise self.error(location, what + more) from None

    def table(self) -> dict[str, Any]:
        """The content of the file, unvalidated.

        Raises:
            ConfigError: it is not valid TOML.
        """
        return parse(self.text, self._shown, self._advice, ConfigError)

    def place(self, location: Location) -> str:
        """The location of a key, as ``file:line``."""
        return f"{self._shown}:{_line(self.text, location)}"

    def error(self, location: Location, what: str) -> ConfigError:
        """An error about the value at this key."""
        where = f"{self._shown}, line {_line(self.text, location)}, {'.'.join(location)}"
        return ConfigError(f"{where}: {what}; {self._advice}")


def parse(text: str, shown: str, advice: str, kind: type[SpecLocalError]) -> dict[str, Any]:
    """Parse TOML.

    Args:
        shown, advice: see `ConfigFile`. kind: of the error.

    Raises:
        kind: it is not valid, or nested too deeply, or has a number that is too long.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, line = str(error), 1
        if found := _LOCATION.fullmatch(what):
            what, line = found[1], int(found[2] or len(text.splitlines()) or 1)
        what = f"line {line}, {what}"
    except RecursionError:
        what = "its values are nested too deeply"
    except ValueError:
        what = "a number in it is too long"
    raise kind(f"{shown}, {what}; {advice}")


def _line(text: str, location: Location) -> int:
    """The line of a key, or of the innermost table that contains it."""
    best, depth = 1, 0
    table: Location = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            table = keys = _keys(found[1])
        elif found := _ASSIGNMENT.match(line):
            keys = table + _keys(found[1])
        else:
            continue
        if len(keys) > depth and location[: len(keys)] == keys:
            best, depth = number, len(keys)
    return best


def _keys(dotted: str) -> Location:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, dotted))
