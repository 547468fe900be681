"""Option values from environment variables and the config file.

An option has one name: ``--top-k`` is ``SPECDEC_TOP_K`` in the environment and ``top-k`` in the file, at the
top level or in the table of a command (``[chat]``, ``[models-pull]``), which takes precedence. Values have
the same meaning as on the command line. A list is a list in the file, and a JSON array or a single value
in the environment.

Click selects the value: command line, variable (`envvar`), file (`default_map`), default. This module reads
the file, names the variables, and names the source of an invalid value.
"""

import contextlib
import json
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from spec_local import kernels
from spec_local.errors import InvalidRequest
from spec_local.system.files import expanded
from specdec_cli.names import nearest

if TYPE_CHECKING:
    from spec_local.system.toml_file import ConfigFile, Location

FILE_VARIABLE = "SPECDEC_CONFIG"
_PREFIX = "SPECDEC_"


def path(given: str | None = None) -> Path:
    """Return the path of the config file: the given one, or the one in the user's config folder."""
    if given:
        return expanded(given)
    from spec_local.system.folders import user_folder

    return user_folder("config") / "config.toml"


class FileDefaults(dict[str, Any]):
    """Values of one command's options in the config file, by parameter: a `default_map` for Click."""

    def __init__(self, file: "ConfigFile", locations: "dict[str, Location]") -> None:
        super().__init__()
        self.file, self.locations = file, locations


def read(root: TyperGroup, given: str | None = None) -> "Config | None":
    """Read the config file and check its names; None if there is none and `given` names none.

    Raises:
        ConfigError: the file cannot be read, or has an unknown table or key.
    """
    place = path(given)
    return Config(place, dict(runnable(root))) if given or place.exists() else None


class Config:
    """The config file, checked for unknown tables and keys."""

    def __init__(self, place: Path, commands: dict[str, TyperCommand]) -> None:
        from spec_local.system.toml_file import ConfigFile

        self._folder, self._commands = place.absolute().parent, commands
        self._file = file = ConfigFile(place, str(place), "correct it")
        self._content = file.table()
        known = {key for command in commands.values() for key in options(command)}
        for key, value in self._content.items():
            if isinstance(value, dict):
                if key not in commands:
                    raise file.error((key,), "there is no such command" + nearest(key, commands))
                own = options(commands[key])
                for inner in value:
                    if inner not in own:
                        what = f"{key.replace('-', ' ')} has no such option{nearest(inner, own)}"
                        raise file.error((key, inner), what)
            elif key not in known:
                raise file.error((key,), "there is no such option" + nearest(key, known))

    def defaults(self, command: TyperCommand) -> FileDefaults:
        """Return the values of a command's options.

        Raises:
            ConfigError: a table or a nested list, or a list for an option that is not repeatable.
        """
        name = next(name for name, each in self._commands.items() if each is command)
        top = {key: value for key, value in self._content.items() if key not in self._commands}
        own = self._content.get(name, {})
        known = options(command)
        locations: dict[str, Location] = {each.name: (key,) for key, each in known.items() if key in top}
        locations |= {each.name: (name, key) for key, each in known.items() if key in own}
        defaults = FileDefaults(self._file, locations)
        for param, (*table, key) in locations.items():
            value = (own if table else top)[key]
            defaults[param] = self._texts(known[key], value, locations[param])
        return defaults

    def _texts(self, option: Any, value: Any, location: "Location") -> str | list[str]:
        """Return what to type on the command line for a value: a list if the option is repeatable."""
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, (list, dict)) for each in values):
            raise self._file.error(location, "takes a value, not a table or a nested list")
        if isinstance(value, list) and not option.multiple:
            raise self._file.error(location, "takes one value, not a list")
        texts = [_text(each) for each in values]
        if may_be_file(option):
            texts = [self._resolved(text, takes_path(option)) for text in texts]
        return texts if option.multiple else texts[0]

    def _resolved(self, text: str, is_path: bool) -> str:
        """Resolve a path against the config file's folder, or a possible model name if such a file exists."""
        if text == "-":
            return text
        with contextlib.suppress(InvalidRequest):  # an unknown user: reported when the file is opened
            text = str(expanded(text)) if text.startswith("~") else text
        beside = self._folder / text
        with contextlib.suppress(ValueError, OSError):  # not a valid path
            return str(beside) if is_path or beside.exists() else text
        return text


def add_variables(command: TyperCommand) -> None:
    """Let each option of a command be set by an environment variable, which its help does not show.

    Click's `auto_envvar_prefix` would use the names of Python parameters, some of which differ (``--for``).
    """
    for key, option in options(command).items():
        option.envvar = [*(option.envvar or ()), variable(key)]
        option.show_envvar = False
        if option.multiple:
            option.value_from_envvar = lambda ctx, option=option: _elements(option.resolve_envvar_value(ctx))


def _elements(text: str | None) -> list[str] | None:
    """Split the value of a repeatable option's variable: a JSON array, else a single value."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(several := json.loads(text or ""), list):
            return [_text(each) for each in several]
    return [text] if text else None


def kind_of_source(ctx: Any, param: str) -> str:
    """Return "COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP" (of the config file), "DEFAULT", or ""."""
    return getattr(ctx.get_parameter_source(param), "name", "")


def source(ctx: typer.Context, option: Any) -> str:
    """Return where an option's value comes from: a variable, a line of the config file, or "default"."""
    match kind_of_source(ctx, option.name):
        case "ENVIRONMENT":
            return _set_variable(option)
        case "DEFAULT_MAP":
            defaults = typing.cast(FileDefaults, ctx.default_map)
            return defaults.file.place(defaults.locations[option.name])
    return "default"


def explained(ctx: typer.Context, error: typer.BadParameter) -> Exception:
    """Return the error of an invalid value, with the variable or the file and key that set it."""
    what = shortened(error.message)
    option: Any = error.param
    match option and kind_of_source(ctx, option.name):
        case "ENVIRONMENT":
            return InvalidRequest(f"{_set_variable(option)}: {what}; correct it, or unset it")
        case "DEFAULT_MAP":
            defaults = typing.cast(FileDefaults, ctx.default_map)
            return defaults.file.error(defaults.locations[option.name], what)
    return error


def shortened(message: str) -> str:
    """Return the message of a usage error as a part of a line, without what pydantic adds to it."""
    what = message.replace("Value error, ", "").partition(", unable to parse")[0].rstrip(".")
    return what[:1].lower() + what[1:]


def _set_variable(option: Any) -> str:
    names: list[str] = option.envvar
    return next(name for name in names if os.environ.get(name))


def unknown_variables(root: TyperGroup) -> list[str]:
    """Return a warning for each SPECDEC_* variable that sets no option."""
    known = {key for _, command in runnable(root) for key in options(command)}
    others = {FILE_VARIABLE, kernels.INSTRUCTION_SET}
    unknown = {name for name in os.environ if name.startswith(_PREFIX)} - others - set(map(variable, known))
    known |= {_key(name) for name in others}
    return [
        f"{name} is not an option and is ignored{nearest(_key(name), known, variable)}"
        for name in sorted(unknown)
    ]


def _key(variable: str) -> str:
    """Return the name of an option, from that of its environment variable."""
    return variable.removeprefix(_PREFIX).lower().replace("_", "-")


def variable(key: str) -> str:
    """Return the environment variable of an option."""
    return _PREFIX + key.replace("-", "_").upper()


def options(command: TyperCommand) -> dict[str, Any]:
    """Return a command's options by their long names, except the one that selects the config file."""
    found = (p for p in command.params if p.param_type_name == "option" and p.name != "config")
    return {opt[2:]: option for option in found for opt in option.opts if opt.startswith("--")}


def runnable(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand]]:
    """Yield the commands with the names of their tables in the file; those of a group as ``models-pull``.

    The commands of ``config`` are not among them: they must work with a broken file.
    """
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from runnable(command, f"{prefix}{name}-")
        elif isinstance(command, TyperCommand) and prefix != "config-":
            yield prefix + name, command


def may_be_file(option: Any) -> bool:
    """Return whether an option takes a file, or a name that may be one."""
    return takes_path(option) or "FILE" in (option.metavar or "")


def takes_path(option: Any) -> bool:
    """Return whether an option takes a path, and no name that is not one."""
    return option.type_descriptor.annotation in (Path, list[Path])


def lasting(option: Any, value: str) -> str:
    """Return what means in any folder what a value of an option means in the current one."""
    if value in ("", "-") or value.startswith("~") or not may_be_file(option):
        return value
    with contextlib.suppress(ValueError, OSError):  # not a valid path
        if takes_path(option) or Path(value).exists():
            return str(Path(value).absolute())
    return value


def _text(value: Any) -> str:
    """Return a TOML or JSON value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
