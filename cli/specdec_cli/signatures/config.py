"""The options of `specdec config`."""

from dataclasses import dataclass
from functools import partial

from typer import Context

from specdec_cli.commands import config_option
from specdec_cli.parameters import REQUIRED, argument, option

_name = partial(
    argument,
    default=REQUIRED,
    metavar="NAME",
    help="Option, such as top-k; for one command, such as chat.top-k.",
)


@dataclass(frozen=True, kw_only=True)
class ConfigPathOptions:
    """Print the path of the config file, even if it does not exist.

    Example:

      $EDITOR "$(specdec config path)"
    """

    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigShowOptions:
    """Print the options that are set, with their source: a variable, or a line of the config file.

    Examples:

      specdec config show
      specdec config show chat --all
    """

    ctx: Context
    command: list[str] | None = argument(help="Command, such as chat or models pull (default: all).")
    all_: bool = option("--all", default=False, help="Also show options that have their default value.")
    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigSetOptions:
    """Set an option in the config file, for all commands or for one.

    Examples:

      specdec config set main qwen2.5-coder-7b
      specdec config set chat.temp 0.5
      specdec config set stop END "User:"
    """

    ctx: Context
    name: str = _name()
    values: list[str] = argument(
        default=REQUIRED, metavar="VALUE", help="Value; a repeatable option takes several."
    )
    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigUnsetOptions:
    """Remove an option from the config file.

    Example:

      specdec config unset chat.temp
    """

    ctx: Context
    name: str = _name()
    config: str | None = config_option()
