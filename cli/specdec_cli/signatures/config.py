"""The options of `specdec config`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Context, Option

from specdec_cli.commands import ConfigOption

_Name = Annotated[
    str, Argument(metavar="NAME", help="Option, such as top-k; for one command, such as chat.top-k.")
]


@dataclass(frozen=True, kw_only=True)
class ConfigPathOptions:
    """Print the path of the config file, even if it does not exist.

    Example:

      $EDITOR "$(specdec config path)"
    """

    config: ConfigOption = None


@dataclass(frozen=True, kw_only=True)
class ConfigShowOptions:
    """Print the options that are set, with their source: a variable, or a line of the config file.

    Examples:

      specdec config show
      specdec config show chat --all
    """

    ctx: Context
    command: Annotated[
        list[str] | None, Argument(help="Command, such as chat or models pull (default: all).")
    ] = None
    all_: Annotated[bool, Option("--all", help="Also show options that have their default value.")] = False
    config: ConfigOption = None


@dataclass(frozen=True, kw_only=True)
class ConfigSetOptions:
    """Set an option in the config file, for all commands or for one.

    Examples:

      specdec config set main qwen2.5-coder-7b
      specdec config set chat.temp 0.5
      specdec config set stop END "User:"
    """

    ctx: Context
    name: _Name
    values: Annotated[list[str], Argument(metavar="VALUE", help="Value; a repeatable option takes several.")]
    config: ConfigOption = None


@dataclass(frozen=True, kw_only=True)
class ConfigUnsetOptions:
    """Remove an option from the config file.

    Example:

      specdec config unset chat.temp
    """

    ctx: Context
    name: _Name
    config: ConfigOption = None
