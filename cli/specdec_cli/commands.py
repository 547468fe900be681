"""Additions to Typer: commands whose options are dataclasses, and can be set in the environment or a file."""

import copy
import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from specdec_cli import exits, narrow_help, option_conflicts, own_process, render, settings, usage_errors
from specdec_cli.parameters import option, parameters, record

_WITH_CHILD = ("serve",)  # keep models in a child process of their own
SAMPLING, MACHINE, GENERAL, SPECULATION = SHARED = ("Sampling", "Machine", "General", "Speculation")
"""Panels of shared options, in the order of the help, where a command's own options precede them.

Options in no panel are those that people use every day: --help shows these, and --help-all also the panels.
"""
_WITH_PANELS = "specdec.help-all"  # in the `meta` of a context


class _Help:
    """Help that can be read on a narrow terminal, too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not narrow_help.show(self, ctx):
            super().format_help(ctx, formatter)  # type: ignore[misc]


class PlainCommand(_Help, TyperCommand):
    """A command whose errors are shown in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with usage_errors.of_command(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with exits.guarded():
            self.prepare(ctx)
            return super().invoke(ctx)

    def prepare(self, ctx: Any) -> None:
        """Check the values of all options."""


class ConfigurableCommand(PlainCommand):
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

    def prepare(self, ctx: Any) -> None:
        option_conflicts.check(ctx)
        option_conflicts.switch_learning_off(ctx)
        if (workers := ctx.params.get("workers")) and self.name not in _WITH_CHILD:
            code = own_process.run(workers)
            if code is not None:
                raise typer.Exit(code)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.default_map = None  # help shows specdec's own defaults, not those of the config file
        shown = self if ctx.meta.get(_WITH_PANELS) else self._everyday(ctx)
        super(ConfigurableCommand, shown).format_help(ctx, formatter)

    def _everyday(self, ctx: Any) -> "ConfigurableCommand":
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
            n_options = len({each.name for each in settings.options(self).values()})
            option.help = f"Show all {n_options + 1} options."
        return self._help_all


class CommandGroup(_Help, TyperGroup):
    """A group of commands whose own options are all flags."""

    def get_params(self, ctx: Any) -> Any:
        params = _omit_types_of_flags(super().get_params(ctx))
        for param in params:
            param.rich_help_panel = None  # they are few: one panel
        return params

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
        if param.required or settings.kind_of_source(ctx, param.name) != "DEFAULT":
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
config_option = functools.partial(
    option,
    metavar="FILE",
    envvar=settings.FILE_VARIABLE,
    show_envvar=False,
    help="Use this config file (default: see specdec config path).",
    rich_help_panel=GENERAL,
)


@dataclasses.dataclass(frozen=True)
class _General:
    """The options of all commands that can be configured."""

    config: str | None = config_option(is_eager=True, callback=use_config)
    no_color: NoColor = False


def add(
    app: typer.Typer, name: str, options: type[Any], body: str, *, configurable: bool = True, **more: Any
) -> None:
    """Add a command.

    Args:
        options: a dataclass. Its fields are the command's parameters; those of a field that is a dataclass
            itself, such as `ModelOptions`, are as well. Its documentation is the command's help.
        body: module and name of the function that runs the command, which takes `options`.
        configurable: whether options can also be set elsewhere, and --config names the file. A command that
            is not works with a broken config file.
    """

    def run(**values: Any) -> None:
        body_of(body)(record(options, values))

    found = [*parameters(options), *(parameters(_General) if configurable else ())]
    run.__doc__ = options.__doc__
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in found}
    app.command(name, cls=ConfigurableCommand if configurable else PlainCommand, **more)(run)


def body_of(command: str) -> Callable[[Any], None]:
    """Return the function that runs a command, such as "chat:chat", and import its module.

    This is where imports are lazy, so that --help is fast: a module of `signatures` imports little, and that
    of a body all that it needs.
    """
    module, _, function = command.partition(":")
    body: Callable[[Any], None] = getattr(importlib.import_module(f"specdec_cli.{module}"), function)
    return body
