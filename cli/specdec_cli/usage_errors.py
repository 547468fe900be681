"""Errors of the command line in one line, which says what to do."""

import contextlib
from collections.abc import Iterator
from typing import Any

import typer

from specdec_cli import exits, names, render, settings

_MEANT = {
    "config get": "config show",
    "config list": "config show",
    "download": "models pull",
    "help": "--help",
    "ls": "models list",
    "version": "--version",
}
"""Commands of other programs."""
_N_OWNERS = 2  # other commands that have an option


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Report usage errors like all others, instead of in a box of several lines."""
    try:
        yield
    except Exception as raised:
        error: Any = raised
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        render.error(_with_hint(error))
        raise typer.Exit(exits.USAGE) from None


@contextlib.contextmanager
def of_completion() -> Iterator[None]:
    """Report in one line that --install-completion, which Typer runs, found no home directory it can use."""
    try:
        yield
    except (BrokenPipeError, typer.Exit, typer.Abort):  # --help has been shown
        raise
    except (OSError, RuntimeError) as error:
        why = str(error).rstrip(".")
        render.error(
            f"completion cannot be installed ({why}): set HOME to your folder, or see --show-completion"
        )
        raise typer.Exit(exits.FAILURE) from None


@contextlib.contextmanager
def of_command(context: Any) -> Iterator[None]:
    """Let usage errors name the command, of which some do not know it."""
    try:
        yield
    except Exception as raised:
        error: Any = raised
        if hasattr(error, "format_message") and getattr(error, "ctx", None) is None:
            error.ctx = context
        raise


def _with_hint(error: Any) -> str:
    """Return the message of a usage error, and what to do: the name that was meant, or where all are."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "specdec"
    if context and (option := getattr(error, "option_name", "")) and hasattr(error, "possibilities"):
        what = f"no such option {option}"
        return f"{what}: {_for_option(option, context) or f'see {path} --help'}"
    what = settings.shortened(error.format_message().partition(" Did you mean ")[0])
    name = what.removeprefix("no such command ")
    if name != what and context:
        return f"{what}: {_for_command(name, context) or f'see {path} --help'}"
    takes_prompt = context and any(param.name == "prompt" for param in context.command.params)
    if takes_prompt and "extra argument" in what:
        return f"{what}: put the prompt in quotes"
    return f"{what}: see {path} --help"


def _for_option(option: str, context: Any) -> str:
    """Return the option that was meant, or the commands that have this one."""
    root = context.find_root().command
    commands = dict(settings.runnable(root))
    others = [name.replace("-", " ") for name, each in commands.items() if option in _spellings(each)]
    if context.command is root and others:
        return f"give it after a command, as in specdec {others[0]} {option}"
    own = ["help", *(each[2:] for each in _spellings(context.command) if each.startswith("--"))]
    near = names.hint(option[2:], own, "--{}".format) if option.startswith("--") else ""
    if not others or near.startswith("use"):
        return near
    owners = " and ".join(f"specdec {name}" for name in others[:_N_OWNERS])
    return f"{owners} {'has' if len(others[:_N_OWNERS]) == 1 else 'have'} it"


def _spellings(command: Any) -> list[str]:
    """Return the options of a command as they are typed."""
    return [opt for param in command.params for opt in (*param.opts, *param.secondary_opts)]


def _for_command(quoted: str, context: Any) -> str:
    """Return the command that was meant; a prompt or a model belongs to `run`."""
    name = quoted[1:-1]
    if " " in name or ".gguf" in name:
        return f"did you mean specdec run {quoted}?"
    if near := names.close(name, context.command.commands):
        return f"did you mean {' or '.join(map(repr, near))}?"
    meant = _MEANT.get(f"{context.command_path} {name}".removeprefix("specdec "))
    if not meant and context.parent is None:
        below = (each for each, _ in settings.runnable(context.command) if each.endswith(f"-{name}"))
        meant = next(below, "").replace("-", " ")
    return f"did you mean specdec {meant}?" if meant else ""
