"""Download models from the Hugging Face Hub into its cache.

The package `huggingface-hub` makes the requests. The download itself is done here, for two reasons: the
package makes a file visible to other programs before its hash is checked, and it restarts an interrupted
download from the beginning.
"""

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from spec_local.errors import DownloadError, InvalidRequest, SpecLocalError
from spec_local.files import format_size, sha256, write_atomically
from spec_local.models.hub_cache import (
    COMMIT,
    SHA256,
    HubModel,
    base_name,
    blob_of,
    cached_files,
    link,
    locked,
    models_among,
    part_of,
    part_size,
    repo_folder,
    shortened,
)

Log = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the downloaded and the total number of bytes."""

TRIES = 5  # consecutive attempts without progress
PAUSE_S = 1.0  # between attempts
_KEY = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class _RemoteFile:
    """A file on the Hub. key: the name of its blob, which is its SHA-256 for all but tiny files."""

    size: int
    key: str


def pull(
    model: HubModel, name: str, log: Log, progress: Progress | None = None, offline: bool = False
) -> Path:
    """Return the first file of a model; verify files in the cache, download missing ones.

    If several processes pull the same file, one of them downloads it and the others wait.

    Raises:
        DownloadError: the download failed, or a file is not the expected one; a wrong file is deleted.
        InvalidRequest: no file, or several, match the quantization.
    """
    cached = cached_files(model)
    damaged = [path for path in cached if not _intact(path, model.sha256)]
    if cached and not damaged:
        return cached[0]
    for path in damaged:
        blob_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        log(f"deleted {path.name}: it is damaged")
    if offline or constants.HF_HUB_OFFLINE:
        raise DownloadError(
            f"the model {name} has not been downloaded, and specdec is offline: "
            f"run specdec models pull {name} when online"
        )
    with _download_errors(model.repo):
        commit, remote = _listing(model)
        wanted = _chosen(model, name, remote)
        total = sum(file.size for file in wanted.values())
        folder = repo_folder(model.repo)
        _check_room(name, wanted, folder, log)
        done = 0
        for file, known in wanted.items():
            before = done

            def on_progress(n: int, before: int = before) -> None:
                if progress:
                    progress(before + n, total)

            _fetch(model, commit, file, known, log, on_progress)
            done += known.size
        for file, known in wanted.items():
            link(folder / "blobs" / known.key, folder / "snapshots" / commit / file)
        if model.revision != commit:
            write_atomically(folder / "refs" / model.revision, commit.encode())
        return folder / "snapshots" / commit / next(iter(wanted))


def _intact(path: Path, expected: str | None) -> bool:
    key = blob_of(path).name
    expected = expected or (key if SHA256.fullmatch(key) else None)
    return expected is None or sha256(path) == expected


def _listing(model: HubModel) -> tuple[str, dict[str, _RemoteFile]]:
    """The commit of the revision, and its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the exceptions contain everything needed
    try:
        info = HfApi(library_name="specdec").model_info(
            model.repo,
            revision=model.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except HFValidationError:
        raise InvalidRequest(f"{model.repo} is not a valid repository name: use user/repo") from None
    except (ValueError, KeyError, TypeError):  # the page of a proxy or of another server
        raise DownloadError(
            f"{constants.ENDPOINT} does not respond like the Hugging Face Hub: "
            "check the network and HF_ENDPOINT"
        ) from None
    files = {
        file.rfilename: _RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or []
    }
    # These become file names.
    if not COMMIT.fullmatch(info.sha or "") or not all(_KEY.fullmatch(file.key) for file in files.values()):
        raise DownloadError(f"the Hub returned no file hashes for {model.repo}: try again later")
    return str(info.sha), {name: file for name, file in files.items() if _is_below(name)}


def _chosen(model: HubModel, name: str, remote: dict[str, _RemoteFile]) -> dict[str, _RemoteFile]:
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
            + (
                f"choose one of {shortened(names)}"
                if names
                else "it has no GGUF files; choose another repository"
            )
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


def _check_room(name: str, wanted: dict[str, _RemoteFile], folder: Path, log: Log) -> None:
    """Log the size of the download, if any, and check the free disk space."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in wanted.values() if not _complete(blobs, file)]
    if not missing:
        return
    done = sum(part_size(blobs / file.key) for file in missing)
    rest = sum(file.size for file in missing) - done
    resumed = f", {format_size(done)} of it already downloaded" if done else ""
    log(f"downloading {name}: {format_size(rest + done)}{resumed} into {folder.parent}")
    free = shutil.disk_usage(blobs).free
    if free < rest:
        raise DownloadError(
            f"{name} needs {format_size(rest)} and {folder.parent} has {format_size(free)} free: "
            "free some space or set HF_HOME to a larger disk"
        )


def _complete(blobs: Path, file: _RemoteFile) -> bool:
    blob = blobs / file.key
    return blob.is_file() and blob.stat().st_size == file.size


def _fetch(
    model: HubModel, commit: str, file: str, known: _RemoteFile, log: Log, on_progress: Callable[[int], None]
) -> None:
    """Download the blob of a file unless the cache has it, under the lock of that blob."""
    from huggingface_hub import hf_hub_url

    blobs = repo_folder(model.repo) / "blobs"
    blob = blobs / known.key
    with locked(model.repo, known.key, lambda: log(f"waiting for another process that downloads {file}")):
        if _complete(blobs, known):
            return
        _download(hf_hub_url(model.repo, file, revision=commit), blob, known.size, on_progress)
        part = part_of(blob)
        try:
            size = part.stat().st_size
            if size != known.size:
                raise DownloadError(
                    f"{file} has {size} bytes instead of {known.size}: it was deleted; try again"
                )
            expected = known.key if SHA256.fullmatch(known.key) else model.sha256
            if expected and (found := sha256(part)) != expected:
                raise DownloadError(f"{file} has SHA-256 {found}, not {expected}: it was deleted; try again")
            part.replace(blob)
        except DownloadError:
            part.unlink()
            raise


def _download(url: str, blob: Path, size: int, on_progress: Callable[[int], None]) -> None:
    """Download into the partial file of a blob; resume after an interrupted connection."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    part = part_of(blob)
    if part_size(blob) > size:
        part.unlink()
    part.touch()
    failures = 0
    while (have := part_size(blob)) < size:
        headers = build_hf_headers(library_name="specdec") | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as answer:
                hf_raise_for_status(answer)
                # a server that does not support ranges sends the whole file
                with part.open("ab" if answer.status_code == 206 else "wb") as out:
                    for block in answer.iter_bytes():
                        out.write(block)
                        on_progress(out.tell())
            return
        except HfHubHTTPError:
            raise
        except _network_error():
            failures = 0 if part_size(blob) > have else failures + 1
            if failures == TRIES:
                raise
            time.sleep(PAUSE_S)


def _network_error() -> type[Exception]:
    """The base exception of the HTTP library, which depends on the version of huggingface-hub."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError


@contextlib.contextmanager
def _download_errors(repo: str) -> Iterator[None]:
    """Turn errors of the Hub, the network and the disk into a `DownloadError` of one line."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except SpecLocalError:
        raise
    except GatedRepoError:
        why = (
            f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, "
            "then log in with hf auth login"
        )
    except RepositoryNotFoundError:
        why = f"the Hub has no model {repo}: check the name; if it is private, log in with hf auth login"
    except RevisionNotFoundError:
        why = f"{repo} has no such revision: correct the revision in models.toml"
    except EntryNotFoundError:
        why = f"a file of {repo} was removed from the Hub: try again"
    except HfHubHTTPError as error:
        why = _refusal(repo, error.response.status_code, error.response.headers.get("Retry-After"))
    except _network_error() as error:
        reason = str(error) or type(error).__name__
        why = f"cannot reach the Hub ({reason}): check the network and try again; the download will resume"
    except OSError as error:
        why = (
            f"cannot write {repo} to {constants.HF_HUB_CACHE} ({error.strerror or error}): "
            "check its free space and permissions"
        )
    else:
        return
    raise DownloadError(why)


def _refusal(repo: str, status: int, retry_after: str | None) -> str:
    match status:
        case 401:
            return f"the Hub rejected your token (401, {repo}): log in with hf auth login, or unset HF_TOKEN"
        case 403:
            return f"you have no access to {repo} (403): request it at {constants.ENDPOINT}/{repo}"
        case 429:
            wait = f"{retry_after} s" if retry_after else "a few minutes"
            return f"too many requests to the Hub (429): wait {wait}, or log in with hf auth login"
        case _:
            return f"the Hub returned status {status} for {repo}: try again later; the download will resume"


def _is_below(name: str) -> bool:
    return not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))
