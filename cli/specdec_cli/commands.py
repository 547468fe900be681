"""What Typer's commands are here besides: their options can be set beforehand, and groups of them are shared.

A command takes a dataclass, such as `specdec_cli.options.ModelOptions`; `flattened` spreads its fields out into parameters
that Typer understands, and puts them together again.
"""

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from specdec_cli import exits, render, settings


class Command(TyperCommand):
    """A command whose options can be set beforehand, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with exits.guarded():
            ctx.default_map = asked = _Asked(ctx, self)
            try:
                return super().parse_args(ctx, args)
            except typer.BadParameter as error:
                setting = asked.used.get(error.param.name) if error.param else None
                if setting is None:
                    raise
                raise setting.error(settings.sentence(error.message)) from None


class Group(TyperGroup):
    """A group of commands, all of whose own options are flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and param.default is None:
                param.default = False  # to check a None, Typer would import pydantic, and help would wait
        return super().parse_args(ctx, args)


class _Asked(dict[str, Any]):
    """What Typer asks for defaults, by parameter; reads nothing before it is asked, so that --help works whatever is wrong."""

    def __init__(self, ctx: Any, command: "Command") -> None:
        self._ctx, self._command = ctx, command
        self.used: dict[str, settings.Setting] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if self._ctx.resilient_parsing:  # a shell asks for completions, or help for the defaults of everybody
            return default
        if name not in settings.options(self._command) or name not in self._found:
            return default
        self.used[name] = self._found[name]
        return self.used[name].value

    @functools.cached_property
    def _found(self) -> dict[str, settings.Setting]:
        root = self._ctx.find_root().command
        for warning in settings.unknown_variables(root):
            render.note(f"specdec: {warning}")
        commands = dict(settings.runnable(root))
        name = next(name for name, command in commands.items() if command is self._command)
        file = settings.read(root, self._ctx.params.get("config"))
        return (
            settings.environment(self._command)
            if file is None
            else file.settings(name) | settings.environment(self._command)
        )


def adopt(app: typer.Typer) -> None:
    """Let every command under `app` be one whose options can be set beforehand, with the options that all have."""
    for command in app.registered_commands:
        assert command.callback
        command.cls, command.callback = Command, _with_common(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance
        group.cls = Group
        adopt(group.typer_instance)


def no_color(value: bool) -> None:
    """What --no-color does: everything that could be coloured asks for this."""
    if value:
        os.environ["NO_COLOR"] = "1"


NoColor = Annotated[
    bool, Option("--no-color", callback=no_color, is_eager=True, help="No colours (as NO_COLOR=1).")
]
ConfigOption = Annotated[
    str | None,
    Option(metavar="FILE", is_eager=True, help="Take this config file (default: see specdec config path)."),
]


def _with_common(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*, config: str | None, no_color: bool, **values: Any) -> None:
        command(**values)

    kind = inspect.Parameter.KEYWORD_ONLY
    common = {"config": (ConfigOption, None), "no_color": (NoColor, False)}
    more = [inspect.Parameter(n, kind, annotation=hint, default=value) for n, (hint, value) in common.items()]
    own = [p.replace(kind=kind) for p in inspect.signature(command, eval_str=True).parameters.values()]
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return run


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters by their fields, for Typer to read."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not dataclasses.is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = typing.cast("type[Any]", kind)
        field_hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field_hints[field.name],
                )
            )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})
        command(**values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
