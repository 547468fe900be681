"""Additions to Typer: options set in the environment or the config file, and shared groups of options."""

import copy
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

from specdec_cli import exits, narrow_help, option_conflicts, own_process, render, settings, usage_errors

_WITH_CHILD = ("serve",)  # keep models in a child process of their own
SAMPLING, MACHINE, GENERAL, SPECULATION = SHARED = ("Sampling", "Machine", "General", "Speculation")
"""Panels of shared options, in the order of the help, where a command's own options precede them.

Options in no panel are those that people use every day: --help shows these, and --help-all also the panels.
"""
_WITH_PANELS = "specdec.help-all"  # in the `meta` of a context


class Plain(TyperCommand):
    """A command whose help can be read on a narrow terminal, too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not narrow_help.show(self, ctx):
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with usage_errors.of_command(ctx):
            return super().parse_args(ctx, args)


class Command(Plain):
    """A command whose options can also be set in the environment and in the config file.

    Its help fits on a screen: see `SHARED`.
    """

    _help_all: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings.add_variables(self)
        for param in self.params:
            _use_default_as_it_is(param)
        self.params.sort(key=_place_in_help)
        _omit_types_of_flags(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with exits.guarded():
            try:
                return super().parse_args(ctx, args)
            except typer.BadParameter as error:
                raise settings.explained(ctx, error) from None

    def invoke(self, ctx: Any) -> Any:
        with exits.guarded():
            option_conflicts.check(ctx)
            option_conflicts.switch_learning_off(ctx)
            if (workers := ctx.params.get("workers")) and self.name not in _WITH_CHILD:
                code = own_process.run(workers)
                if code is not None:
                    raise typer.Exit(code)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.default_map = None  # help shows specdec's own defaults, not those of the config file
        shown = self if ctx.meta.get(_WITH_PANELS) else self._everyday(ctx)
        super(Command, shown).format_help(ctx, formatter)

    def _everyday(self, ctx: Any) -> "Command":
        """Return a copy, for its help, with the options in no panel; shell completion and hints know all."""
        shown = copy.copy(self)
        if self._panels():
            shown.params = [param for param in self.params if not _panel(param)]
        return shown

    def _panels(self) -> list[str]:
        """Return the panels that --help omits: all, unless they are few options that every command has."""
        panels = list(dict.fromkeys(filter(None, map(_panel, self.params))))
        return panels if panels != [GENERAL] else []

    def get_params(self, ctx: Any) -> Any:
        return [*super().get_params(ctx), self._help_all_option(ctx)]

    def get_help_option(self, ctx: Any) -> Any:
        return _omit_types_of_flags([super().get_help_option(ctx)])[0]

    def _help_all_option(self, ctx: Any) -> Any:
        """Return the option --help-all, always the same object, which Click needs."""
        if not self._help_all:
            self._help_all = option = copy.copy(self.get_help_option(ctx))
            show_help = option.callback

            def show_all(ctx: Any, param: Any, value: bool) -> None:
                ctx.meta[_WITH_PANELS] = value
                show_help(ctx, param, value)

            option.name, option.opts, option.callback = "help_all", ["--help-all"], show_all
            option.hidden = not self._panels()
            option.help = f"Show all {len(settings.options(self)) + 1} options."
        return self._help_all


class Group(TyperGroup):
    """A group of commands whose own options are all flags."""

    def get_params(self, ctx: Any) -> Any:
        params = _omit_types_of_flags(super().get_params(ctx))
        for param in params:
            param.rich_help_panel = None  # they are few: one panel
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not narrow_help.show(self, ctx):
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and param.default is None:
                param.default = False  # for None, Typer would import pydantic, which slows --help down
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with usage_errors.in_one_line(), usage_errors.of_completion():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with usage_errors.in_one_line():
            return super().invoke(ctx)


def _omit_types_of_flags(params: list[Any]) -> list[Any]:
    """Make help show no type of value for options that take none."""
    for param in params:
        if getattr(param, "is_flag", False) or getattr(param, "count", False):
            param.metavar = ""
    return params


def _use_default_as_it_is(param: Any) -> None:
    """Do not convert the default of a parameter, for which Typer builds a validator: 1 ms for each."""
    convert = param.process_value

    def process(ctx: Any, value: Any) -> Any:
        if param.required or getattr(ctx.get_parameter_source(param.name), "name", "") != "DEFAULT":
            return convert(ctx, value)
        if value is None and param.multiple:
            value = ()
        return param.callback(ctx, param, value) if param.callback else value

    param.process_value = process


def _panel(param: Any) -> str | None:
    return getattr(param, "rich_help_panel", None)


def _place_in_help(param: Any) -> int:
    """Return a sort key: first what people need first, speculation last."""
    panel = _panel(param)
    if panel is None:
        return 0
    return 2 + SHARED.index(panel) if panel in SHARED else 1


def adopt(app: typer.Typer) -> None:
    """Make every command under `app` a `Command`, with the options that all commands have."""
    for command in app.registered_commands:
        assert command.callback
        command.cls, command.callback = Command, _with_common(_flattened(command.callback))
    for group in app.registered_groups:
        assert group.typer_instance
        group.cls = Group
        adopt(group.typer_instance)


def no_color(value: bool) -> None:
    """Apply --no-color: set the variable that every coloured output checks."""
    if value:
        os.environ["NO_COLOR"] = "1"


def use_config(ctx: typer.Context, file: str | None) -> None:
    """Make the values in the config file the defaults of this command."""
    if ctx.resilient_parsing:  # shell completion
        return
    root: Any = ctx.find_root().command
    for warning in settings.unknown_variables(root):
        render.note(f"specdec: {warning}")
    if config := settings.read(root, file):
        command: Any = ctx.command
        ctx.default_map = config.defaults(command)


NoColor = Annotated[
    bool,
    Option(
        "--no-color",
        callback=no_color,
        is_eager=True,
        help="Disable colours, as NO_COLOR=1 does.",
        rich_help_panel=GENERAL,
    ),
]
_CONFIG = {
    "metavar": "FILE",
    "envvar": settings.FILE_VARIABLE,
    "show_envvar": False,
    "help": "Use this config file (default: see specdec config path).",
    "rich_help_panel": GENERAL,
}
ConfigOption = Annotated[str | None, Option(**_CONFIG)]


def _with_common(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*, config: str | None, no_color: bool, **values: Any) -> None:
        command(**values)

    kind = inspect.Parameter.KEYWORD_ONLY
    use = Annotated[str | None, Option(**_CONFIG, is_eager=True, callback=use_config)]
    common = {"config": (use, None), "no_color": (NoColor, False)}
    more = [inspect.Parameter(n, kind, annotation=hint, default=value) for n, (hint, value) in common.items()]
    own = [p.replace(kind=kind) for p in inspect.signature(command, eval_str=True).parameters.values()]
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return run


def _flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters by their fields, which Typer can read."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    shared: list[inspect.Parameter] = []  # these precede the command's own ones in its help
    own: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not dataclasses.is_dataclass(kind):
            own.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = typing.cast("type[Any]", kind)
        field_hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            shared.append(
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

    wrapper.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*shared, *own)}
    return wrapper
