"""`specdec config`: what options are set to before any flag, and where."""

import sys
from enum import Enum
from typing import Annotated, Any

import typer
from typer import Argument

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import commands, exits, render, settings

app = typer.Typer(
    help="Options set beforehand: in the environment (SPECDEC_…) and in the config file.",
    no_args_is_help=True,
)


@app.command("path")
def show_path(config: commands.ConfigOption = None) -> None:
    """Print where the config file is, or would be.

    Example:

      $EDITOR "$(specdec config path)"
    """
    with exits.guarded():
        typer.echo(settings.path(config))


@app.command()
def show(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, Argument(help="A command, as in: chat, or: models pull (default: all of them).")
    ] = None,
    config: commands.ConfigOption = None,
) -> None:
    """Print what each option is set to, and where: an environment variable, a line of the config file, or the default.

    Examples:

      specdec config show

      specdec config show chat
    """
    with exits.guarded():
        root: Any = ctx.find_root().command
        commands = dict(settings.runnable(root))
        name = "-".join(command or [])
        if name and name not in commands:
            raise InvalidRequest(f"there is no command {' '.join(command or [])!r}: {', '.join(commands)}")
        shown = {name: commands[name]} if name else commands
        wrong: SpecLocalError | None = None
        try:
            file = settings.read(root, config)
        except SpecLocalError as error:  # what the environment says can be shown all the same
            file, wrong = None, error
        rows: dict[str, tuple[str, str]] = {}
        for each, its in shown.items():
            try:
                common = file.settings(each) if file else {}
                own = file.settings(each, own=True) if file and not name else {}
            except SpecLocalError as error:
                common, own, wrong = {}, {}, wrong or error
            for key, row in _rows(its, {k: v for k, v in common.items() if k not in own}).items():
                if rows.setdefault(key, row) != row:  # the defaults of a measurement, for instance
                    rows[f"{each}.{key}"] = row
            for key, row in _rows(its, own, every=False).items():
                rows[f"{each}.{key}"] = row
            wrong = wrong or _wrong(its, common | settings.environment(its))
        width = [max(len(cell) for cell in column) + 2 for column in zip(*_cells(rows), strict=True)]
        for cells in _cells(rows):
            padded = "".join(cell.ljust(n) for cell, n in zip(cells, width, strict=True)).rstrip()
            typer.echo(padded if sys.stdout.isatty() else "\t".join(cells))
        for warning in settings.unknown_variables(root):
            render.note(f"specdec: {warning}")
        if wrong:
            raise wrong


def _rows(
    command: Any, file: dict[str, settings.Setting], *, every: bool = True
) -> dict[str, tuple[str, str]]:
    """Value and source of a command's options by name. every: also of those that the file says nothing of."""
    told = settings.environment(command)
    rows = {}
    for name, option in settings.options(command).items():
        key = max((o for o in option.opts if o.startswith("--")), key=len)[2:]
        setting = told.get(name) or file.get(name)
        if name in file or (every and setting):
            assert setting
            rows[key] = (_shown(setting.value), setting.source)
        elif every:
            rows[key] = (_shown(option.default), "default")
    return rows


def _cells(rows: dict[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [(key, *row) for key, row in rows.items()]


def _wrong(command: Any, found: dict[str, settings.Setting]) -> SpecLocalError | None:
    """What running the command would complain about."""
    ctx = typer.Context(command)
    for name, setting in found.items():
        try:
            settings.options(command)[name].process_value(ctx, setting.value)
        except typer.BadParameter as error:
            told = setting.error(settings.sentence(error.message))
            assert isinstance(told, SpecLocalError)
            return told
    return None


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(repr, value)) if isinstance(value, list) else str(value)
