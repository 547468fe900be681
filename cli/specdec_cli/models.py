"""`specdec models`: models by name, from the catalog and from the Hugging Face Hub."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.system.files import format_size
from specdec_cli import completion, exits, progress, render

if TYPE_CHECKING:
    from spec_local.models.catalog import PairEntry
    from spec_local.models.local_stores import StoredModel
    from specdec_cli.models_view import Row

app = typer.Typer(
    help="List, download, locate and delete models by name, and check pairs.", no_args_is_help=True
)
_Name = Annotated[
    str,
    Argument(
        metavar="NAME",
        help="Name of a model or pair, user/repo:quant, or a name in ollama.",
        autocompletion=completion.names,
    ),
]


@app.command("list")
def list_models(
    local: Annotated[bool, Option("--local", help="List only what is on this machine.")] = False,
) -> None:
    """List models and pairs: those on this machine, including other programs' models, and those to download.

    In a file or a pipe, each is a line with tabs between name, state, licence,
    description and size in bytes. A pair has the names of its models in place of
    the licence, and the size of both.

    Examples:

      specdec models list --local
      specdec models list | grep coder
    """
    with exits.guarded():
        from spec_local.models import catalog
        from specdec_cli import models_view

        here: list[models_view.Row] = []
        missing: list[models_view.Row] = []
        for name, entry in catalog.models().items():
            found = catalog.find(name) is not None
            row = models_view.Row(name, catalog.size(name), _state(name), entry.licence, entry.description)
            (here if found else missing).append(row)
        here += map(_stored_row, catalog.stored_models())
        pairs = [
            models_view.Row(
                name, catalog.pair_size(pair), "pair", f"{pair.main} + {pair.draft}", _recommendation(pair)
            )
            for name, pair in catalog.pairs().items()
            if not local or (catalog.find(pair.main) and catalog.find(pair.draft))
        ]
        models_view.show(
            [
                models_view.Group("On this machine", here, "state"),
                models_view.Group("To download", [] if local else missing, "kind"),
                models_view.Group("Pairs of a main and a draft model, with the size of both", pairs, "kind"),
            ]
        )


def _stored_row(model: "StoredModel") -> "Row":
    from spec_local.llama import gguf_header
    from spec_local.models import local_stores
    from specdec_cli import models_view

    state = "downloaded" if model.program == local_stores.HUB else f"in {model.program}"
    licence = str(model.metadata.get("general.license", ""))
    text = gguf_header.describe(model.metadata)
    return models_view.Row(model.name, model.size, state, licence, text)


def _recommendation(pair: "PairEntry") -> str:
    return f"{pair.note}; {pair.gain}" if pair.gain else pair.note


@app.command()
def pull(
    name: _Name = "starter",
    offline: Annotated[
        bool, Option("--offline", help="Do not use the network: only verify downloaded files.")
    ] = False,
) -> None:
    """Download and verify a model, or both models of a pair, and print the path.

    Examples:

      specdec models pull starter
      specdec models pull coder-7b
      specdec models pull bartowski/Llama-3.2-3B-Instruct-GGUF:Q5_K_M
    """
    with exits.guarded():
        from spec_local.models import catalog

        for model in _members(name):
            with _progress() as on_progress:
                found = catalog.pull(model, render.note, on_progress, offline)
            render.write(f"{found}\n")


@app.command()
def path(name: _Name = "starter") -> None:
    """Print the path of a model's file, or of the first part of a split model.

    Example:

      ls -lh "$(specdec models path starter)"
    """
    with exits.guarded():
        from spec_local.models import catalog

        for model in _members(name):
            found = catalog.find(model)
            if not found:
                raise DownloadError(
                    f"the model {model} has not been downloaded: run specdec models pull {model}"
                )
            render.write(f"{found}\n")


@app.command()
def show(name: _Name = "starter") -> None:
    """Print the details of a model, or of both models of a pair.

    Example:

      specdec models show coder-7b
    """
    with exits.guarded():
        from spec_local.models import catalog

        if name in catalog.pairs():
            _print(_pair_details(name, catalog.pairs()[name]))
        for model in _members(name):
            if name in catalog.pairs():
                render.write("\n")
            files = catalog.local_files(model)
            pairs = [p for p, pair in catalog.pairs().items() if model in (pair.main, pair.draft)]
            _print(
                {
                    "model": model,
                    "state": _state(model),
                    **_details(model),
                    "pairs": ", ".join(pairs),
                    "path": "\n".join(map(str, files)),
                }
            )


@app.command()
def rm(
    name: _Name,
    yes: Annotated[bool, Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete the files of a model, including incomplete downloads.

    Example:

      specdec models rm qwen3-4b --yes
    """
    with exits.guarded():
        from spec_local.models import catalog

        if name in catalog.pairs():
            pair = catalog.pairs()[name]
            raise InvalidRequest(
                f"{name} is a pair, and other pairs may use its models: give {pair.main} or {pair.draft}"
            )
        size = catalog.size_on_disk(name)
        if not size:
            raise DownloadError(f"the model {name} has not been downloaded: see specdec models list")
        refusal = InvalidRequest(f"deleting {name} frees {format_size(size)}: pass --yes to confirm")
        if not yes and not render.confirmed(f"Delete {name} ({format_size(size)})?", refusal):
            return
        catalog.remove(name)
        render.note(f"deleted {name}: {format_size(size)} freed")


def _members(name: str) -> list[str]:
    """The names of a pair's two models, or of the one model."""
    from spec_local.models import catalog

    pair = catalog.pairs().get(name)
    return [pair.main, pair.draft] if pair else [name]


def _state(name: str) -> str:
    from spec_local.models import catalog

    if catalog.find(name):
        program = catalog.program(name)
        return f"in {program}" if program else "downloaded"
    size = catalog.size(name)
    return f"{format_size(size)} to download" if size else "not downloaded"


def _pair_details(name: str, pair: "PairEntry") -> dict[str, str]:
    from spec_local.models import catalog

    size = catalog.pair_size(pair)
    memory = f"{format_size(size)} for both models, and their KV caches" if size else ""
    return {
        "pair": name,
        "main": pair.main,
        "draft": pair.draft,
        "note": pair.note,
        "gain": pair.gain or "",
        "memory": memory,
    }


def _details(name: str) -> dict[str, str]:
    from spec_local.llama import gguf_header
    from spec_local.models import catalog

    if name not in catalog.models():
        path = catalog.find(name)
        text = gguf_header.describe(gguf_header.read_metadata(path)) if path else ""
        return {"description": text, "size": _size(name)}
    entry = catalog.entry(name)
    return {
        "description": entry.description,
        "licence": entry.licence,
        "repo": entry.repo or "",
        "revision": entry.revision if entry.repo else "",
        "package": entry.pypi or ("spec-local" if entry.shipped else ""),
        "file": "\n".join(entry.files) or entry.file or "",
        "size": _size(name),
        "sha256": entry.sha256 or "",
        "template": entry.template or "",
    }


def _size(name: str) -> str:
    """The size of a model in bytes, if it is known exactly."""
    from spec_local.models import catalog

    size, entry = catalog.size(name), catalog.models().get(name)
    if catalog.find(name) or (entry and entry.size):
        return f"{size} bytes"
    return f"about {format_size(size)}" if size else ""


def _print(details: dict[str, str]) -> None:
    for key, value in details.items():
        for i, line in enumerate(value.splitlines()):
            render.write(f"{'' if i else key:12}{line}\n")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error, if it is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=render.console(sys.stderr), transient=True)
    with progress.live(bar):
        task = bar.add_task("", total=None, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield update
