"""`specdec datastore`: the texts that are kept for guessing."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from spec_local.errors import InvalidRequest
from spec_local.files import format_size
from specdec_cli import exits, progress, render
from specdec_cli.options import MainArgument, resolve

if TYPE_CHECKING:
    from spec_local.datastore.text_store import Contents

app = typer.Typer(
    help="Texts that are kept for guessing, with --datastore: show, add to and delete them.",
    no_args_is_help=True,
)

_SHOWN = 3


@app.command()
def show() -> None:
    """Show what is kept, by vocabulary.

    Example:

      specdec datastore show
    """
    with exits.guarded():
        from spec_local.datastore import text_store

        render.prepare_stdout()
        kept = [text_store.contents(folder) for folder in text_store.stores()]
        if not kept:
            render.note(
                "nothing is kept: --datastore keeps answers, and specdec datastore add the texts of files"
            )
        render.write("\n".join(map(_described, kept)))


@app.command()
def add(
    main: MainArgument,
    paths: Annotated[
        list[Path],
        Argument(metavar="FILES", help="Files of text, and folders of them.", show_default=False),
    ],
) -> None:
    """Keep the texts of files: a model that quotes or edits them is guessed right.

    A file that is added again takes the place of its older state. No weights are loaded.

    Examples:

      specdec datastore add coder-7b src README.md

      specdec datastore add main.gguf notes.txt
    """
    with exits.guarded():
        from spec_local.datastore import text_sources, text_store
        from spec_local.files import expanded
        from spec_local.llama.headers import open_header

        files = text_sources.files([expanded(path) for path in paths])
        model = open_header(resolve(main))
        with progress.bar("reading", len(files)) as advance:
            found = text_sources.read(files, model.vocabulary, text_store.MOST_TOKENS, lambda: advance(1))
        for reason, skipped in found.skipped.items():
            more = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
            render.note(f"skipped, {reason}: {', '.join(map(str, skipped[:_SHOWN]))}{more}")
        if not found.texts:
            raise InvalidRequest("none of these files is kept: name files of text")
        store = text_store.of_model(model, render.note)
        store.add(found.texts)
        n_tokens = sum(len(text.tokens) for text in found.texts)
        render.note(
            f"added {_count(len(found.texts), 'file')} of {_count(n_tokens, 'token')}; the store holds "
            f"{store.contents().n_tokens:,} of at most {text_store.MOST_TOKENS:,}"
        )


@app.command()
def clear(yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete all that is kept; asks first, on a terminal.

    Example:

      specdec datastore clear --yes
    """
    with exits.guarded():
        from spec_local.datastore import text_store

        folders = text_store.stores()
        if not folders:
            render.note("nothing is kept")
            return
        kept = [text_store.contents(folder) for folder in folders]
        what = f"{_count(sum(each.n_texts for each in kept), 'text')} ({format_size(sum(each.size for each in kept))})"
        if not yes:
            if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
                raise InvalidRequest(f"this would delete {what}: say --yes to do it")
            try:
                if not typer.confirm(f"Delete {what}?", err=True):
                    return
            except typer.Abort:  # Ctrl-C, Ctrl-D
                raise KeyboardInterrupt from None
        for folder in folders:
            text_store.clear(folder)
        render.note(f"deleted {what}")


def _described(kept: "Contents") -> str:
    rows = [
        ("models", ", ".join(kept.models)),
        ("texts", f"{kept.n_texts:,}"),
        ("tokens", f"{kept.n_tokens:,}"),
        ("size", format_size(kept.size)),
        ("path", str(kept.folder)),
    ]
    return "".join(f"{name:<8}{text}\n" for name, text in rows)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")
