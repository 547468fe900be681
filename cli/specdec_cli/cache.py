"""`specdec cache`: show and delete what the prompt cache keeps on disk."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.system.files import format_size
from spec_local.text import counted
from specdec_cli import exits, render
from specdec_cli.options import PROMPT_CACHE, cache_limit

if TYPE_CHECKING:
    from spec_local.prompt_cache.folder import Usage

app = typer.Typer(
    help="Show and delete the prompts and answers that --prompt-cache keeps on disk.", no_args_is_help=True
)

_HEADINGS = ("model", "files", "size", "last used")


@app.command()
def show(
    prompt_cache: Annotated[str | None, Option(**PROMPT_CACHE, hidden=True)] = None,  # as it is set elsewhere
) -> None:
    """Show how much is kept for each model, and when it was last used.

    A model has several lines if it was used with different settings. In a file or
    a pipe, each line has tabs between model, files, bytes and date.

    Example:

      specdec cache show
    """
    with exits.guarded():
        from spec_local.prompt_cache import folder as files

        folder = files.default_folder()
        found = files.usage(folder)
        if sys.stdout.isatty():
            _write_table([_HEADINGS, *(_row(each, format_size(each.n_bytes)) for each in found)])
        else:
            for each in found:
                render.write("\t".join(_row(each, str(each.n_bytes))) + "\n")
        if not found:
            render.note(f"the prompt cache is empty; it is kept in {folder}")
            return
        limit = cache_limit(prompt_cache)
        of = f"of at most {format_size(limit)} " if limit != "off" and limit else ""
        render.note(f"{_size(found)} {of}in {folder}")


@app.command()
def clear(yes: Annotated[bool, Option("--yes", "-y", help="Delete without asking.")] = False) -> None:
    """Delete what is kept for all models. Running programs are not interrupted.

    Asks for confirmation on a terminal. Running programs keep what they have read
    in memory, and go on writing what they read from now on.

    Example:

      specdec cache clear --yes
    """
    with exits.guarded():
        from spec_local.prompt_cache import folder as files

        folder = files.default_folder()
        found = files.usage(folder)
        if not found:
            files.clear(folder)  # what has no entries: empty folders, unfinished files
            render.note("the prompt cache is empty")
            return
        n_files = sum(each.n_files for each in found)
        text = f"{counted(n_files, 'file', separator=',')} of prompts and answers ({_size(found)})"
        refusal = InvalidRequest(f"this would delete {text}: pass --yes to confirm")
        if not yes and not render.confirmed(f"Delete {text}?", refusal):
            return
        freed = files.clear(folder)
        if not freed:
            raise SpecLocalError(f"nothing in {folder} could be deleted: check its permissions")
        render.note(f"{format_size(freed)} freed")
        if left := files.usage(folder):
            render.note(f"{_size(left)} remain, in {', '.join(str(each.identity_dir) for each in left)}")


def _size(found: "Sequence[Usage]") -> str:
    return format_size(sum(each.n_bytes for each in found))


def _row(usage: "Usage", size: str) -> tuple[str, ...]:
    name = " ".join(usage.name.split()) or usage.identity_dir.name
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(usage.last_used))
    return name, str(usage.n_files), size, used


def _write_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, files, size, used in rows:
        cells = (name.ljust(widths[0]), files.rjust(widths[1]), size.rjust(widths[2]), used)
        render.write("  ".join(cells) + "\n")
