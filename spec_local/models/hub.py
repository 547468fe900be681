"""Download models from the Hugging Face Hub into its cache, and verify them."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.models.file_names import base_name
from spec_local.models.hub_cache import (
    SHA256,
    HubModel,
    blob_of,
    cached_files,
    cached_projectors,
    is_key,
    link,
    locked,
    matches,
    models_among,
    part_of,
    part_size,
    repo_folder,
    shortened,
)
from spec_local.models.hub_client import RemoteFile, download, download_errors, list_files
from spec_local.system.files import format_size, write_atomically

Log = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the downloaded and the total number of bytes."""


def pull(
    model: HubModel, name: str, log: Log, progress: Progress | None = None, offline: bool = False
) -> Path:
    """Return the first file of a model; verify files in the cache, download missing ones.

    A model that is downloaded gets the projector of its repository, if there is one, so that it sees images.

    If several processes pull the same file, one of them downloads it and the others wait.

    Raises:
        DownloadError: the download failed, or a file is not the expected one; a wrong file is deleted.
        InvalidRequest: no file, or several, match the quantization.
    """
    with download_errors(model.repo):
        cached = cached_files(model)
        damaged = [path for path in cached if not _intact(path, model.sha256)]
        damaged += [path for path in cached_projectors(model) if not _intact(path, None)]
        if cached and not damaged:
            return cached[0]
        for path in damaged:
            blob_of(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            log(f"deleted {path.name}: it is damaged")
        if offline or constants.HF_HUB_OFFLINE:
            why = "specdec is offline" if offline else "HF_HUB_OFFLINE is set"
            raise DownloadError(
                f"the model {name} has not been downloaded, and {why}: "
                f"run specdec models pull {name} when online"
            )
        commit, remote = list_files(model.repo, model.revision)
        wanted = _chosen(model, name, remote)
        first = next(iter(wanted))
        projector = model.projector(remote)
        if projector:
            # Before the model, so that an interrupted download is resumed with both.
            wanted = {projector: remote[projector], **wanted}
        return _download(model, name, commit, wanted, log, progress, projector) / first


def pull_files(
    repo: str, wanted: Callable[[Iterable[str]], list[str]], log: Log, progress: Progress | None = None
) -> tuple[Path, list[str]]:
    """Download files of a repository that the cache lacks.

    Args:
        wanted: called with all names; returns those to download, which may be missing.

    Returns:
        The folder that contains them, and the names of all files of the repository.

    Raises:
        DownloadError: see `pull`.
    """
    with download_errors(repo):
        commit, remote = list_files(repo, "main")
        chosen = {name: remote[name] for name in wanted(list(remote)) if name in remote}
        return _download(HubModel(repo), repo, commit, chosen, log, progress), list(remote)


def _download(
    model: HubModel,
    name: str,
    commit: str,
    wanted: dict[str, RemoteFile],
    log: Log,
    progress: Progress | None,
    projector: str | None = None,
) -> Path:
    """Download what the cache lacks, and return the folder of the commit."""
    total = sum(file.size for file in wanted.values())
    folder = repo_folder(model.repo)
    _check_room(name, wanted, folder, log, projector)
    if model.revision != commit:  # before the files, so that `remove` finds those of a failed download
        write_atomically(folder / "refs" / model.revision, commit.encode())
    done = 0
    for file, known in wanted.items():
        before = done

        def on_progress(n: int, before: int = before) -> None:
            if progress:
                progress(before + n, total)

        # The hash in models.toml is that of the model.
        of_file = replace(model, sha256=None) if file == projector else model
        _fetch(of_file, commit, file, known, log, on_progress)
        done += known.size
    return folder / "snapshots" / commit


def _intact(path: Path, expected: str | None) -> bool:
    key = expected or blob_of(path).name
    return not is_key(key) or matches(path, key)  # a file that is not a link has no key


def _chosen(model: HubModel, name: str, remote: dict[str, RemoteFile]) -> dict[str, RemoteFile]:
    wanted = {file: remote[file] for file in model.choose(remote)}
    if not wanted and model.files:
        missing = next(file for file in model.files if file not in remote)
        raise DownloadError(
            f"{model.repo} has no file {missing} at revision {model.revision}: correct {name} in models.toml"
        )
    if not wanted:
        names = [base_name(stem) for stem in models_among(remote)]
        raise InvalidRequest(
            f"{model.repo} has no {model.quant} file: "
            + (f"choose one of {shortened(names)}" if names else _without_gguf(remote))
        )
    size = sum(file.size for file in wanted.values())
    if model.size is not None and size != model.size:
        raise DownloadError(
            f"{name} has {size} bytes on the Hub, not {model.size} as in models.toml: "
            "the file has changed; pin a revision or correct the size"
        )
    key = next(iter(wanted.values())).key
    if model.sha256 and SHA256.fullmatch(key) and key != model.sha256:
        raise DownloadError(
            f"{name} has SHA-256 {key} on the Hub, not {model.sha256}: "
            "the file has changed; pin a revision or correct models.toml"
        )
    return wanted


def _without_gguf(names: Iterable[str]) -> str:
    if any(name.endswith(".safetensors") for name in names):
        return (
            "its weights are in safetensors format; choose a repository with GGUF files of this model, often "
            "named like it with -GGUF, or convert it: a head with specdec draft convert, a model with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    return "it has no GGUF files; choose another repository"


def _check_room(
    name: str, wanted: dict[str, RemoteFile], folder: Path, log: Log, projector: str | None
) -> None:
    """Log the size of the download, if any, and check the free disk space."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in wanted.values() if not _complete(blobs / file.key, file)]
    if not missing:
        return
    done = sum(part_size(blobs / file.key) for file in missing)
    rest = sum(file.size for file in missing) - done
    resumed = f", {format_size(done)} of it already downloaded" if done else ""
    part = f", with {format_size(wanted[projector].size)} of the projector for images" if projector else ""
    log(f"downloading {name}: {format_size(rest + done)}{part}{resumed} into {folder.parent}")
    free = shutil.disk_usage(blobs).free
    if free < rest:
        raise DownloadError(
            f"{name} needs {format_size(rest)} and {folder.parent} has {format_size(free)} free: "
            "free some space or set HF_HOME to a larger disk"
        )


def _complete(blob: Path, file: RemoteFile) -> bool:
    return blob.is_file() and blob.stat().st_size == file.size


def _fetch(
    model: HubModel, commit: str, file: str, known: RemoteFile, log: Log, on_progress: Callable[[int], None]
) -> None:
    """Download a file unless the cache has it, under the lock of its blob."""
    folder = repo_folder(model.repo)
    blob = folder / "blobs" / known.key
    with locked(model.repo, known.key, lambda: log(f"waiting for another process that downloads {file}")):
        if not _complete(blob, known):
            download(model.repo, commit, file, blob, known.size, on_progress)
            part = part_of(blob)
            for key in (known.key, model.sha256 or known.key):
                if not matches(part, key):
                    part.unlink()
                    raise DownloadError(f"{file} does not have the hash {key}: it was deleted; try again")
            with part.open("rb") as content:
                os.fsync(content.fileno())  # the name promises the content, also after a power loss
            part.replace(blob)
        link(blob, folder / "snapshots" / commit / file)
