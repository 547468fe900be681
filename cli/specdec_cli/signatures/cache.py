"""The options of `specdec cache`."""

from dataclasses import dataclass

from specdec_cli import options


@dataclass(frozen=True, kw_only=True)
class CacheShowOptions:
    """Show how much is kept for each model, and when it was last used.

    A model has several lines if it was used with different settings. In a file or
    a pipe, each line has tabs between model, files, bytes and date.

    Example:

      specdec cache show
    """

    prompt_cache: str | None = options.prompt_cache_option(hidden=True)


@dataclass(frozen=True, kw_only=True)
class CacheClearOptions:
    """Delete what is kept for all models. Running programs are not interrupted.

    Asks for confirmation on a terminal. Running programs keep what they have read
    in memory, and go on writing what they read from now on.

    Example:

      specdec cache clear --yes
    """

    yes: bool = options.yes_option()
