"""Where an option's value comes from: a flag, else SPECDEC_…, else the config file, else the default.

An option has one name: ``--top-k`` is ``SPECDEC_TOP_K`` in the environment and ``top-k`` in the file, at its top
level or in the table of one command (``[chat]``, ``[models-pull]``), which counts more. A value means what the same
text would mean after the flag. A list is a list in the file, and a JSON array, or one value, in the environment.

Typer has the order of the four and checks the values (see `specdec_cli.commands`); here the second and the third are read,
and named in errors.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperCommand, TyperGroup

from spec_local.errors import InvalidRequest

if TYPE_CHECKING:
    from spec_local.toml_file import ConfigFile

_PREFIX = "SPECDEC_"
_FILE = "SPECDEC_CONFIG"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an option was set to: its text, or texts where it can be repeated, and by what. error: what is wrong, told of it."""

    value: str | list[str]
    source: str
    error: Callable[[str], Exception]


def path(given: str | None = None) -> Path:
    """The config file: the one that was named, SPECDEC_CONFIG's, or the one in the user's config folder."""
    from spec_local.files import expanded

    if named := given or os.environ.get(_FILE):
        return expanded(named)
    import platformdirs

    return Path(platformdirs.user_config_dir("specdec")) / "config.toml"


def read(root: TyperGroup, given: str | None = None) -> "Config | None":
    """The config file, checked for names that do not exist; None: there is none, and none was named.

    Raises:
        ConfigError: it cannot be read, or says something impossible; tells where.
    """
    place = path(given)
    if not (given or os.environ.get(_FILE) or place.exists()):
        return None
    from spec_local.toml_file import ConfigFile

    return Config(place, ConfigFile(place, str(place), "correct it"), dict(runnable(root)))


class Config:
    """One config file."""

    def __init__(self, place: Path, file: "ConfigFile", commands: Mapping[str, TyperCommand]) -> None:
        self._folder, self._file, self._commands = place.absolute().parent, file, commands
        self._content = file.table()
        known = {key for command in commands.values() for key in keys(command)}
        for key, value in self._content.items():
            if isinstance(value, dict):
                if key not in commands:
                    raise file.error((key,), "there is no such command" + nearest(key, commands))
                own = keys(commands[key])
                for inner in value:
                    if inner not in own:
                        told = f"{key.replace('-', ' ')} has no such option{nearest(inner, own)}"
                        raise file.error((key, inner), told)
            elif key not in known:
                raise file.error((key,), "there is no such option" + nearest(key, known))

    def tables(self) -> list[str]:
        """The commands that have a table of their own."""
        return [key for key, value in self._content.items() if isinstance(value, dict)]

    def settings(self, name: str, *, own: bool = False) -> dict[str, Setting]:
        """What the file says of a command's options, by parameter. own: only in the command's table."""
        command, found = self._commands[name], dict[str, Setting]()
        tables: list[tuple[tuple[str, ...], Any]] = [((name,), self._content.get(name, {}))]
        if not own:
            tables.insert(0, ((), self._content))
        for table, content in tables:
            for key, param in keys(command).items():
                if key in content and key not in self._commands:
                    found[param] = self._setting(command, param, (*table, key), content[key])
        return found

    def _setting(self, command: TyperCommand, param: str, key: tuple[str, ...], value: Any) -> Setting:
        error = functools.partial(self._file.error, key)
        option = options(command)[param]
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, (list, dict)) for each in values):
            raise error("takes a value, and not a table or lists in a list")
        if isinstance(value, list) and not option.multiple:
            raise error("takes one value, and not a list")
        texts = [self._placed(command, option, _text(each)) for each in values]
        return Setting(texts if option.multiple else texts[0], self._file.place(key), error)

    def _placed(self, command: TyperCommand, option: Any, text: str) -> str:
        """A relative path is one beside the config file; so is a model's file, if it is there."""
        is_path = Path in _types(command, option.name)
        if text == "-" or not (is_path or "FILE" in (option.metavar or "")):
            return text
        from spec_local.files import expanded

        with contextlib.suppress(InvalidRequest):  # no such user: told where the file is asked for
            text = str(expanded(text)) if text.startswith("~") else text
        beside = self._folder / text
        with contextlib.suppress(ValueError, OSError):  # no path at all
            return str(beside) if is_path or beside.exists() else text
        return text


def environment(command: TyperCommand) -> dict[str, Setting]:
    """What the environment says of a command's options, by parameter. An empty variable says nothing."""
    found = {}
    for key, param in keys(command).items():
        name = variable(key)
        if not (text := os.environ.get(name)):
            continue
        value: str | list[str] = text
        if options(command)[param].multiple:
            with contextlib.suppress(ValueError):
                several = json.loads(text)
                value = [_text(each) for each in several] if isinstance(several, list) else text
            value = [value] if isinstance(value, str) else value
        found[param] = Setting(value, name, functools.partial(_wrong_variable, name))
    return found


def unknown_variables(root: TyperGroup) -> list[str]:
    """A warning for each SPECDEC_… that means nothing: it is a typing error, or of another version."""
    known = {variable(key) for _, command in runnable(root) for key in keys(command)} | {_FILE}
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)
    return [f"{name} is no option, and is ignored{nearest(name, known)}" for name in unknown]


def variable(key: str) -> str:
    """The environment's name of an option."""
    return _PREFIX + key.replace("-", "_").upper()


def options(command: TyperCommand) -> dict[str, Any]:
    """A command's options by parameter, but for the one that names the config file."""
    return {p.name: p for p in command.params if p.param_type_name == "option" and p.name != "config"}


def keys(command: TyperCommand) -> dict[str, str]:
    """The parameters that a command's options set, by the name of the option without its dashes."""
    long = [(opt[2:], name) for name, p in options(command).items() for opt in p.opts if opt[:2] == "--"]
    return dict(long)


def runnable(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand]]:
    """All commands by the name that a table in the file has; those of a group as ``models-pull``."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from runnable(command, f"{prefix}{name}-")
        elif isinstance(command, TyperCommand):
            yield prefix + name, command


def sentence(message: str) -> str:
    """What Typer says of a value, as a part of one of our lines."""
    message = message.removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def _types(command: TyperCommand, param: str) -> tuple[Any, ...]:
    """The types that a parameter's annotation is made of."""
    hint = inspect.signature(command.callback).parameters[param].annotation  # type: ignore[arg-type]
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    inner = [hint, *typing.get_args(hint)]
    return tuple(leaf for each in inner for leaf in (each, *typing.get_args(each)))


def _text(value: Any) -> str:
    """A value of TOML or JSON as one would type it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for who mistyped a name, to stand after it; "" if nothing known is like it."""
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _wrong_variable(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {what}; correct it, or unset it")
