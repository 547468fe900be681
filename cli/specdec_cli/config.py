"""`specdec config`: the values of options in the environment and in the config file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import commands, config_edit, exits, render, settings

app = typer.Typer(
    help="Show and set options in the config file; show those set in the environment (SPECDEC_*).",
    no_args_is_help=True,
)


@app.command("path", cls=commands.Plain)
def show_path(config: commands.ConfigOption = None) -> None:
    """Print the path of the config file, even if it does not exist.

    Example:

      $EDITOR "$(specdec config path)"
    """
    with exits.guarded():
        render.write(f"{settings.path(config)}\n")


@app.command(cls=commands.Plain)
def show(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, Argument(help="Command, such as chat or models pull (default: all).")
    ] = None,
    all_: Annotated[bool, Option("--all", help="Also show options that have their default value.")] = False,
    config: commands.ConfigOption = None,
) -> None:
    """Print the options that are set, with their source: a variable, or a line of the config file.

    Examples:

      specdec config show
      specdec config show chat --all
    """
    with exits.guarded():
        root: Any = ctx.find_root().command
        commands = dict(settings.runnable(root))
        name = "-".join(command or [])
        if name and name not in commands:
            raise InvalidRequest(
                f"there is no command {' '.join(command or [])!r}: give one of {', '.join(commands)}"
            )
        wrong: list[Exception] = []
        file = None
        try:
            file = settings.read(root, config)
        except SpecLocalError as error:  # the environment can still be shown
            wrong.append(error)
        rows: dict[str, tuple[str, str]] = {}
        for each in [name] if name else commands:
            defaults = None
            try:
                defaults = file.defaults(commands[each]) if file else None
            except SpecLocalError as error:
                wrong.append(error)
            for option, row in _rows(commands[each], defaults, wrong):
                own = defaults and len(defaults.locations.get(option.name, ())) > 1 and not name
                key = max((opt for opt in option.opts if opt.startswith("--")), key=len)[2:]
                if own or rows.setdefault(key, row) != row:  # bench, for example, has its own defaults
                    rows[f"{each}.{key}"] = row
        cells = [(key, *row) for key, row in rows.items() if all_ or row[1] != "default"]
        if not cells and not wrong:
            render.note("no option is set: --all shows the defaults, specdec config set NAME VALUE sets one")
        width = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
        for line in cells:
            padded = "".join(cell.ljust(n) for cell, n in zip(line, width, strict=True)).rstrip()
            render.write((padded if sys.stdout.isatty() else "\t".join(line)) + "\n")
        for warning in settings.unknown_variables(root):
            render.note(f"specdec: {warning}")
        if wrong:
            raise wrong[0]


_Name = Annotated[
    str, Argument(metavar="NAME", help="Option, such as top-k; for one command, such as chat.top-k.")
]


@app.command(
    "set", cls=commands.Plain, context_settings={"ignore_unknown_options": True}
)  # for values such as -1
def set_value(
    ctx: typer.Context,
    name: _Name,
    values: Annotated[list[str], Argument(metavar="VALUE", help="Value; a repeatable option takes several.")],
    config: commands.ConfigOption = None,
) -> None:
    """Set an option in the config file, for all commands or for one.

    Examples:

      specdec config set main qwen2.5-coder-7b
      specdec config set chat.temp 0.5
      specdec config set stop END "User:"
    """
    with exits.guarded():
        setting, place = _editable(ctx, name, config)
        setting.write(place, values)
        render.note(f"set {name} in {place}")


@app.command(cls=commands.Plain)
def unset(ctx: typer.Context, name: _Name, config: commands.ConfigOption = None) -> None:
    """Remove an option from the config file.

    Example:

      specdec config unset chat.temp
    """
    with exits.guarded():
        setting, place = _editable(ctx, name, config)
        if not setting.remove(place):
            raise InvalidRequest(f"{name} is not set in {place}: see specdec config show")
        render.note(f"removed {name} from {place}")


def _editable(ctx: typer.Context, name: str, config: str | None) -> tuple[config_edit.Setting, Path]:
    """Return a setting, and the config file, if it has no errors that a change would hide."""
    root: Any = ctx.find_root().command
    place = settings.path(config)
    if place.exists():
        settings.read(root, config)
    return config_edit.Setting(dict(settings.runnable(root)), name), place


def _rows(
    command: Any, defaults: settings.FileDefaults | None, wrong: list[Exception]
) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Yield each option of a command with its value and source; append errors of values to `wrong`."""
    ctx = typer.Context(command, default_map=defaults)
    for option in settings.options(command).values():
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
