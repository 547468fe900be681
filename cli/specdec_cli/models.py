"""`specdec models`: models by name, from the catalog and from the Hugging Face Hub."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.llama import gguf_header
from spec_local.models import catalog, local_stores, published_heads
from spec_local.models.catalog import PairEntry, PublishedAcceptance
from spec_local.models.expected_gains import ExpectedGain, expected_gains
from spec_local.models.local_stores import StoredModel
from spec_local.models.projectors import find_projector
from spec_local.system.files import format_size
from spec_local.text import counted
from specdec_cli import models_view, progress, render
from specdec_cli.models_view import ListedModel
from specdec_cli.signatures.stores import (
    ModelsListOptions,
    ModelsPathOptions,
    ModelsPullOptions,
    ModelsRmOptions,
    ModelsShowOptions,
)


def list_models(options: ModelsListOptions) -> None:
    here: list[ListedModel] = []
    missing: list[ListedModel] = []
    files: dict[str, Path] = {}
    for name, entry in catalog.models().items():
        if found := catalog.find(name):
            files[name] = found
        text = _with_sight(entry.description, found) if found else entry.description
        row = ListedModel(name, catalog.size(name), _state(name), entry.licence, text)
        (here if found else missing).append(row)
    here += map(_stored, catalog.stored_models())
    gains = expected_gains(files=files)
    mains = list(dict.fromkeys(pair.main for pair in catalog.pairs().values()))
    pairs = [
        ListedModel(
            name,
            catalog.pair_size(pair),
            "pair",
            f"{pair.main} + {pair.draft}",
            _recommendation(pair, gains.get(name)),
        )
        for name, pair in sorted(catalog.pairs().items(), key=lambda item: mains.index(item[1].main))
        if not options.local or {pair.main, pair.draft} <= files.keys()
    ]
    models_view.show(
        [
            models_view.Section("On this machine", here, "state"),
            models_view.Section("To download", [] if options.local else missing, "kind"),
            models_view.Section("Pairs of a main and a draft model, with the size of both", pairs, "kind"),
        ]
    )


def _stored(model: StoredModel) -> ListedModel:
    state = "downloaded" if model.program == local_stores.HUB else f"in {model.program}"
    licence = str(model.metadata.get("general.license", ""))
    text = _with_sight(gguf_header.describe(model.metadata), model.path)
    return ListedModel(model.name, model.size, state, licence, text)


def _with_sight(text: str, main: Path) -> str:
    """The description of a model, with a word if it has a projector and thus sees images or hears sound."""
    found = find_projector(main, link=False)
    return f"{text}; {found.senses}" if found else text


def _recommendation(pair: PairEntry, expected: ExpectedGain | None) -> str:
    """A pair's note and gain; where there are several drafts for the main model, what each gains here."""
    gain = pair.gain
    if expected and (expected.n_rivals or not gain):
        gain = _gain_here(expected)
        if expected.is_best and expected.n_rivals:
            gain += f"; the best draft for {pair.main}"
    return f"{pair.note}; {gain}" if gain else pair.note


def _gain_here(gain: ExpectedGain) -> str:
    how = "by measured calls" if gain.is_measured else "estimated"
    return (
        f"about {gain.speedup:.1f} times as fast here, {how}"
        if gain.draft_length
        else f"not faster here, {how}"
    )


def pull(options: ModelsPullOptions) -> None:
    for model in _members(options.name):
        with download_progress() as on_progress:
            found = published_heads.pull(model, render.note, on_progress, options.offline)
        render.write(f"{found}\n")


def path(options: ModelsPathOptions) -> None:
    for model in _members(options.name):
        found = catalog.find(model)
        if not found:
            raise DownloadError(f"the model {model} has not been downloaded: run specdec models pull {model}")
        render.write(f"{found}\n")


def show(options: ModelsShowOptions) -> None:
    name, pairs = options.name, catalog.pairs()
    if name in pairs:
        _print(_pair_details(name, pairs[name]))
    for model in _members(name):
        if name in pairs:
            render.write("\n")
        files = catalog.local_files(model)
        of_model = [p for p, pair in pairs.items() if model in (pair.main, pair.draft)]
        _print(
            {
                "model": model,
                "state": _state(model),
                **_details(model),
                "pairs": ", ".join(of_model),
                "projector": _projector(files[0]) if files else "",
                "path": "\n".join(map(str, files)),
            }
        )


def _projector(main: Path) -> str:
    found = find_projector(main)
    return f"{found.description}\n{found.path}" if found else ""


def rm(options: ModelsRmOptions) -> None:
    name = options.name
    if name in catalog.pairs():
        pair = catalog.pairs()[name]
        raise InvalidRequest(
            f"{name} is a pair, and other pairs may use its models: give {pair.main} or {pair.draft}"
        )
    size = catalog.size_on_disk(name)
    if not size:
        raise DownloadError(f"the model {name} has not been downloaded: see specdec models list")
    refusal = InvalidRequest(f"deleting {name} frees {format_size(size)}: pass --yes to confirm")
    if not options.yes and not render.confirmed(f"Delete {name} ({format_size(size)})?", refusal):
        return
    catalog.remove(name)
    render.note(f"deleted {name}: {format_size(size)} freed")


def _members(name: str) -> list[str]:
    """The names of a pair's two models, or of the one model."""
    pair = catalog.pairs().get(name)
    return [pair.main, pair.draft] if pair else [name]


def _state(name: str) -> str:
    if catalog.find(name):
        program = catalog.program(name)
        return f"in {program}" if program else "downloaded"
    if (entry := catalog.models().get(name)) and entry.checkpoint:
        return "to convert"
    size = catalog.size(name)
    return f"{format_size(size)} to download" if size else "not downloaded"


def _pair_details(name: str, pair: PairEntry) -> dict[str, str]:
    size = catalog.pair_size(pair)
    memory = f"{format_size(size)} for both models, and their KV caches" if size else ""
    files = {each: path for each in (pair.main, pair.draft) if (path := catalog.find(each))}
    expected = expected_gains(files=files).get(name)
    return {
        "pair": name,
        "main": pair.main,
        "draft": pair.draft,
        "note": pair.note,
        "gain": pair.gain or "",
        "expected": _gain_here(expected) if expected else "",
        "accepted": _accepted(pair.acceptance) if pair.acceptance else "",
        "memory": memory,
    }


def _accepted(known: PublishedAcceptance) -> str:
    at = "" if known.temperature is None else f" at temperature {known.temperature:g}"
    drafted = counted(known.draft, "draft token")
    return f"{known.per_step:g} tokens per step with {drafted}{at}\n{known.source}"


def _details(name: str) -> dict[str, str]:
    if name not in catalog.models():
        path = catalog.find(name)
        text = gguf_header.describe(gguf_header.read_metadata(path)) if path else ""
        return {"description": text, "size": _size(name)}
    entry = catalog.entry(name)
    return {
        "description": entry.description,
        "licence": entry.licence,
        "repo": entry.repo or entry.checkpoint or "",
        "revision": entry.revision if entry.repo else "",
        "package": entry.pypi or ("spec-local" if entry.shipped else ""),
        "file": "\n".join(entry.files) or entry.file or "",
        "size": _size(name),
        "sha256": entry.sha256 or "",
        "template": entry.template or "",
    }


def _size(name: str) -> str:
    """The size of a model in bytes, if it is known exactly."""
    size, entry = catalog.size(name), catalog.models().get(name)
    if catalog.find(name) or (entry and entry.size):
        return f"{size} bytes"
    return f"about {format_size(size)}" if size else ""


def _print(details: dict[str, str]) -> None:
    for key, value in details.items():
        for i, line in enumerate(value.splitlines()):
            render.write(f"{'' if i else key:12}{line}\n")


@contextlib.contextmanager
def download_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error, if it is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=render.console(sys.stderr), transient=True)
    with progress.live(bar):
        task = bar.add_task("", total=None, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield update
