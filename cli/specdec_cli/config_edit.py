"""Changes of the config file, which keep its comments and its order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomlkit
import typer
from tomlkit import TOMLDocument
from typer.core import TyperCommand

from spec_local.errors import InvalidRequest
from spec_local.system.files import replacing
from spec_local.system.toml_file import ConfigFile
from spec_local.text import printable
from specdec_cli import names, settings


class ConfigSetting:
    """An option in the config file: ``top-k`` for all commands, ``chat.top-k`` for one.

    Raises:
        InvalidRequest: there is no such command or option.
    """

    def __init__(self, commands: dict[str, TyperCommand], name: str) -> None:
        self.name = name
        *table, self.key = name.split(".")
        self.table = ".".join(table)
        if table and self.table not in commands:
            raise InvalidRequest(
                f"{name}: there is no command {self.table}{names.nearest(self.table, commands)}"
            )
        among = [commands[self.table]] if table else list(commands.values())
        self._commands = [command for command in among if self.key in settings.options(command)]
        if not self._commands:
            known = {key for command in among for key in settings.options(command)}
            hint = names.hint(self.key, known, lambda key: ".".join((*table, key)))
            raise InvalidRequest(
                f"there is no option {name}" + (f" ({hint})" if hint else ": see specdec config show --all")
            )

    def write(self, place: Path, values: Sequence[str]) -> None:
        """Set the option, after a check of the values, which are those of the command line.

        Raises:
            InvalidRequest: a value is invalid.
            OSError: the file cannot be written.
        """
        option = self._option(self._commands[0])
        if len(values) > 1 and not option.multiple:
            raise InvalidRequest(f"{self.name} takes one value: quote one that has spaces")
        for each in self._commands:
            self._check(each, values)
        texts = [settings.lasting(option, value) for value in values]
        new = [_toml(text) for text in texts] if option.multiple else _toml(texts[0])

        def set_(document: TOMLDocument) -> None:
            table: Any = document.setdefault(self.table, {}) if self.table else document
            table[self.key] = new

        _edit(place, set_)

    def remove(self, place: Path) -> bool:
        """Remove the option from the file; returns whether it was there."""
        found = False

        def unset(document: TOMLDocument) -> None:
            nonlocal found
            table: Any = document.get(self.table, {}) if self.table else document
            found = table.pop(self.key, None) is not None
            if self.table and not table:
                document.pop(self.table, None)

        if place.exists():
            _edit(place, unset)
        return found

    def _option(self, command: TyperCommand) -> Any:
        return settings.options(command)[self.key]

    def _check(self, command: TyperCommand, values: Sequence[str]) -> None:
        option = self._option(command)
        try:
            option.process_value(typer.Context(command), list(values) if option.multiple else values[0])
        except typer.BadParameter as error:
            raise InvalidRequest(f"{self.name}: {settings.shortened(error.message)}") from None


def _toml(text: str) -> bool | int | float | str:
    """Return a value whose text in TOML is as typed: numbers and switches without quotes."""
    if (shown := printable(text)) != text:
        raise InvalidRequest(f"{shown} is not UTF-8, which a config file must be: rename the file")
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            if str(number := kind(text)) == text:
                return number
        except ValueError:
            pass
    return text


def _edit(place: Path, change: Callable[[TOMLDocument], None]) -> None:
    text = ConfigFile(place, str(place), "correct it").text if place.exists() else ""
    document = tomlkit.parse(text)
    change(document)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place.resolve()) as temporary:
        temporary.write_text(tomlkit.dumps(document).rstrip() + "\n", encoding="utf-8")
