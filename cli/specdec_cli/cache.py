"""`specdec cache`: show and delete what the prompt cache keeps on disk."""

import sys
from collections.abc import Sequence

from spec_local.errors import SpecLocalError
from spec_local.prompt_cache import folder as files
from spec_local.prompt_cache.folder import Usage
from spec_local.system.files import format_size
from spec_local.text import counted
from specdec_cli import render
from specdec_cli.options import cache_limit
from specdec_cli.signatures.stores import CacheClearOptions, CacheShowOptions

_HEADINGS = ("model", "files", "size", "last used")


def show(options: CacheShowOptions) -> None:
    folder = files.default_folder()
    found = files.usage(folder)
    if sys.stdout.isatty():
        render.table([_HEADINGS, *(_row(each, format_size(each.n_bytes)) for each in found)], right=(1, 2))
    else:
        for each in found:
            render.write("\t".join(_row(each, str(each.n_bytes))) + "\n")
    if not found:
        render.note(f"the prompt cache is empty; it is kept in {folder}")
        return
    limit = cache_limit(options.prompt_cache) if options.prompt_cache else files.default_limit(folder)
    of = f"of at most {format_size(limit)} " if limit != "off" and limit else ""
    render.note(f"{_size(found)} {of}in {folder}")


def clear(options: CacheClearOptions) -> None:
    folder = files.default_folder()
    found = files.usage(folder)
    if not found:
        files.clear(folder)  # what has no entries: empty folders, unfinished files
        render.note("the prompt cache is empty")
        return
    n_files = sum(each.n_files for each in found)
    text = f"{counted(n_files, 'file', separator=',')} of prompts and answers ({_size(found)})"
    if not render.confirmed_deletion(text, options.yes):
        return
    freed = files.clear(folder)
    if not freed:
        raise SpecLocalError(f"nothing in {folder} could be deleted: check its permissions")
    render.note(f"{format_size(freed)} freed")
    if left := files.usage(folder):
        render.note(f"{_size(left)} remain, in {', '.join(str(each.identity_dir) for each in left)}")


def _size(found: Sequence[Usage]) -> str:
    return format_size(sum(each.n_bytes for each in found))


def _row(usage: Usage, size: str) -> tuple[str, ...]:
    name = " ".join(usage.name.split()) or usage.identity_dir.name
    return name, str(usage.n_files), size, render.date(usage.last_used)
