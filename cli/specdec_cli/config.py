"""`specdec config`: the values of options in the environment and in the config file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import config_edit, render, settings
from specdec_cli.signatures.machine import (
    ConfigPathOptions,
    ConfigSetOptions,
    ConfigShowOptions,
    ConfigUnsetOptions,
)


def show_path(options: ConfigPathOptions) -> None:
    render.write(f"{settings.path(options.config)}\n")


def show(options: ConfigShowOptions) -> None:
    root: Any = options.ctx.find_root().command
    commands = dict(settings.runnable(root))
    words = options.command or []
    name = "-".join(words)
    if name and name not in commands:
        raise InvalidRequest(f"there is no command {' '.join(words)!r}: give one of {', '.join(commands)}")
    wrong: list[Exception] = []
    file = None
    try:
        file = settings.read(root, options.config)
    except SpecLocalError as error:  # the environment can still be shown
        wrong.append(error)
    rows = _all_rows({name: commands[name]} if name else commands, file, wrong)
    cells = [(key, *row) for key, row in rows.items() if options.all_ or row[1] != "default"]
    if not cells and not wrong:
        render.note("no option is set: --all shows the defaults, specdec config set NAME VALUE sets one")
    if sys.stdout.isatty() and cells:
        render.table(cells)
    else:
        render.write("".join("\t".join(line) + "\n" for line in cells))
    for warning in settings.unknown_variables(root):
        render.note(f"specdec: {warning}")
    if wrong:
        raise wrong[0]


def set_value(options: ConfigSetOptions) -> None:
    setting, place = _editable(options)
    setting.write(place, options.values)
    render.note(f"set {options.name} in {place}")


def unset(options: ConfigUnsetOptions) -> None:
    setting, place = _editable(options)
    if not setting.remove(place):
        raise InvalidRequest(f"{options.name} is not set in {place}: see specdec config show")
    render.note(f"removed {options.name} from {place}")


def _editable(options: ConfigSetOptions | ConfigUnsetOptions) -> tuple[config_edit.ConfigSetting, Path]:
    """Return a setting, and the config file, if it has no errors that a change would hide."""
    root: Any = options.ctx.find_root().command
    place = settings.path(options.config)
    if place.exists():
        settings.read(root, options.config)
    return config_edit.ConfigSetting(dict(settings.runnable(root)), options.name), place


def _all_rows(
    commands: dict[str, TyperCommand], file: settings.Config | None, wrong: list[Exception]
) -> dict[str, tuple[str, str]]:
    """Return values and sources of the options of commands, by name; append errors to `wrong`.

    An option that differs between commands is named with each of them.
    """
    rows: dict[str, tuple[str, str]] = {}
    for each, command in commands.items():
        defaults = None
        try:
            defaults = file.defaults(command) if file else None
        except SpecLocalError as error:
            wrong.append(error)
        for option, row in _rows(command, defaults, wrong):
            is_own = defaults and len(defaults.locations.get(option.name, ())) > 1 and len(commands) > 1
            key = max((opt for opt in option.opts if opt.startswith("--")), key=len)[2:]
            if is_own or rows.setdefault(key, row) != row:  # bench, for example, has its own defaults
                rows[f"{each}.{key}"] = row
    return rows


def _rows(
    command: Any, defaults: settings.FileDefaults | None, wrong: list[Exception]
) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Yield each option of a command with its value and source; append errors of values to `wrong`."""
    ctx = typer.Context(command, default_map=defaults)
    for option in dict.fromkeys(settings.options(command).values()):
        value, source = option.consume_value(ctx, {})
        ctx.set_parameter_source(option.name, source)
        place = settings.source(ctx, option)
        yield option, (_shown(value), place)
        if place != "default":
            try:
                option.process_value(ctx, value)
            except typer.BadParameter as error:
                wrong.append(settings.explained(ctx, error))


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(repr, value)) if isinstance(value, list) else str(value)
