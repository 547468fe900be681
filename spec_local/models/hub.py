"""Fetching models from the Hugging Face hub into its cache.

The package `huggingface-hub` speaks with the hub. The fetching itself is done here, for two reasons: what the
package fetches can be seen by every program before its hash has been looked at, and an interrupted download
starts again from nothing.
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
    some,
)

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with how many bytes of a pull are here, and of how many."""

TRIES = 5  # in a row that bring nothing
PAUSE_S = 1.0  # before each but the first
_KEY = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class _RemoteFile:
    """What the hub says of a file. key: the name of its blob, which is its SHA-256 for all but tiny files."""

    size: int
    key: str


def pull(
    model: HubModel, name: str, log: Notice, progress: Progress | None = None, offline: bool = False
) -> Path:
    """The first file of a model; what is here already is only checked, what is not is fetched.

    Two pulls of one file take turns, and the second finds it done.

    Raises:
        DownloadError: it cannot be had, or is not what was expected; what came and was wrong is deleted.
        InvalidRequest: no file, or several, are of the quantization.
    """
    here = cached_files(model)
    damaged = [path for path in here if not _intact(path, model.sha256)]
    if here and not damaged:
        return here[0]
    for path in damaged:
        blob_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        log(f"{path.name} was damaged, and is deleted")
    if offline or constants.HF_HUB_OFFLINE:
        raise DownloadError(
            f"the model {name} is not here, and specdec is offline: run specdec models pull {name} with a network"
        )
    with _told(model.repo):
        commit, remote = _listing(model)
        wanted = _chosen(model, name, remote)
        total = sum(file.size for file in wanted.values())
        folder = repo_folder(model.repo)
        _make_room(name, wanted, folder, log)
        done = 0
        for file, known in wanted.items():
            before = done

            def tell(n: int, before: int = before) -> None:
                if progress:
                    progress(before + n, total)

            _fetch(model, commit, file, known, log, tell)
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
    """The commit that the revision means, and the files there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters is told by the errors
    try:
        info = HfApi(library_name="specdec").model_info(
            model.repo,
            revision=model.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except HFValidationError:
        raise InvalidRequest(f"{model.repo} is no name of a repo: name one as user/repo") from None
    except (ValueError, KeyError, TypeError):  # a proxy's page, or another server's
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer as the hub does: check the network and HF_ENDPOINT"
        ) from None
    files = {
        file.rfilename: _RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or []
    }
    # these become names on disk
    if not COMMIT.fullmatch(info.sha or "") or not all(_KEY.fullmatch(file.key) for file in files.values()):
        raise DownloadError(f"the hub tells no hashes of {model.repo}: try again later")
    return str(info.sha), {name: file for name, file in files.items() if _is_below(name)}


def _chosen(model: HubModel, name: str, remote: dict[str, _RemoteFile]) -> dict[str, _RemoteFile]:
    wanted = {file: remote[file] for file in model.choose(remote)}
    if not wanted and model.files:
        missing = next(file for file in model.files if file not in remote)
        raise DownloadError(
            f"{model.repo} has no file {missing} at revision {model.revision}: correct {name} in models.toml"
        )
    if not wanted:
        there = [base_name(stem) for stem in models_among(remote)]
        raise InvalidRequest(
            f"no file of {model.repo} is of quantization {model.quant}: "
            + (f"name one of {some(there)}" if there else "it has no GGUF file; look for a repo that has")
        )
    said = sum(file.size for file in wanted.values())
    if model.size is not None and said != model.size:
        raise DownloadError(
            f"{name} has {said} bytes on the hub, not the {model.size} of models.toml: "
            "it has changed there; pin its revision or correct its size"
        )
    key = next(iter(wanted.values())).key
    if model.sha256 and SHA256.fullmatch(key) and key != model.sha256:
        raise DownloadError(
            f"{name} has SHA-256 {key} on the hub, not {model.sha256}: "
            "it has changed there; pin its revision or correct models.toml"
        )
    return wanted


def _make_room(name: str, wanted: dict[str, _RemoteFile], folder: Path, log: Notice) -> None:
    """Say what is going to be fetched, if anything; see that there is room for it."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in wanted.values() if not _complete(blobs, file)]
    if not missing:
        return
    came = sum(part_size(blobs / file.key) for file in missing)
    rest = sum(file.size for file in missing) - came
    again = f", {format_size(came)} of it here already" if came else ""
    log(f"downloading {name}: {format_size(rest + came)}{again} into {folder.parent}")
    free = shutil.disk_usage(blobs).free
    if free < rest:
        raise DownloadError(
            f"{name} needs {format_size(rest)}, and {folder.parent} has {format_size(free)} left: "
            "make room there, or set HF_HOME to a larger disk"
        )


def _complete(blobs: Path, file: _RemoteFile) -> bool:
    blob = blobs / file.key
    return blob.is_file() and blob.stat().st_size == file.size


def _fetch(
    model: HubModel, commit: str, file: str, known: _RemoteFile, log: Notice, tell: Callable[[int], None]
) -> None:
    """Bring a file's blob here, unless it is; nobody else does so meanwhile."""
    from huggingface_hub import hf_hub_url

    blobs = repo_folder(model.repo) / "blobs"
    blob = blobs / known.key
    with locked(model.repo, known.key, lambda: log(f"another program is at {file}: waiting for it")):
        if _complete(blobs, known):
            return
        _download(hf_hub_url(model.repo, file, revision=commit), blob, known.size, tell)
        part = part_of(blob)
        try:
            size = part.stat().st_size
            if size != known.size:
                raise DownloadError(
                    f"{file} came with {size} bytes instead of {known.size}: it was not kept; try again"
                )
            expected = known.key if SHA256.fullmatch(known.key) else model.sha256
            if expected and (found := sha256(part)) != expected:
                raise DownloadError(f"{file} has SHA-256 {found}, not {expected}: it was not kept; try again")
            part.replace(blob)
        except DownloadError:
            part.unlink()
            raise


def _download(url: str, blob: Path, size: int, tell: Callable[[int], None]) -> None:
    """Append to a blob's part until the hub has no more; goes on where a cut connection stopped."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    part = part_of(blob)
    if part_size(blob) > size:
        part.unlink()
    part.touch()
    vain = 0
    while (have := part_size(blob)) < size:
        headers = build_hf_headers(library_name="specdec") | {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as answer:
                hf_raise_for_status(answer)
                # a server that knows no ranges sends all of it again
                with part.open("ab" if answer.status_code == 206 else "wb") as out:
                    for block in answer.iter_bytes():
                        out.write(block)
                        tell(out.tell())
            return
        except HfHubHTTPError:
            raise
        except _network_error():
            vain = 0 if part_size(blob) > have else vain + 1
            if vain == TRIES:
                raise
            time.sleep(PAUSE_S)


def _network_error() -> type[Exception]:
    """What the package's HTTP library raises; which library that is depends on its version."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError


@contextlib.contextmanager
def _told(repo: str) -> Iterator[None]:
    """Turn what the hub, the network or the disk say into one line that says what to do."""
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
        why = f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then log in with hf auth login"
    except RepositoryNotFoundError:
        why = f"the hub shows no model {repo}: check the name; if it is private, log in with hf auth login"
    except RevisionNotFoundError:
        why = f"{repo} has no such revision: correct the revision in models.toml"
    except EntryNotFoundError:
        why = f"a file of {repo} is gone from the hub: try again"
    except HfHubHTTPError as error:
        why = _refusal(repo, error.response.status_code, error.response.headers.get("Retry-After"))
    except _network_error() as error:
        reason = str(error) or type(error).__name__
        why = f"the hub cannot be reached ({reason}): check the network, and try again; what has come is kept"
    except OSError as error:
        why = f"{repo} could not be written to {constants.HF_HUB_CACHE} ({error.strerror or error}): make room there"
    else:
        return
    raise DownloadError(why)


def _refusal(repo: str, status: int, retry_after: str | None) -> str:
    match status:
        case 401:
            return f"the hub does not know your token (401, {repo}): log in with hf auth login, or unset HF_TOKEN"
        case 403:
            return f"the hub refuses {repo} to you (403): ask for access at {constants.ENDPOINT}/{repo}"
        case 429:
            wait = f"{retry_after} s" if retry_after else "some minutes"
            return f"the hub has had too many requests from here (429): wait {wait}, or log in with hf auth login"
        case _:
            return f"the hub answers {status} for {repo}: try again later; what has come is kept"


def _is_below(name: str) -> bool:
    return not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))
