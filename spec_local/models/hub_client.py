"""Requests to the Hugging Face Hub, made by the package `huggingface-hub`.

Not with its `hf_hub_download`, which restarts an interrupted download from the beginning
(https://github.com/huggingface/huggingface_hub/issues/4196), makes a file visible to other programs before
its hash is checked, and takes the names of files in the cache from unchecked headers.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from spec_local.errors import DownloadError, InvalidRequest, SpecLocalError
from spec_local.models.hub_cache import COMMIT, is_key, part_of, part_size
from spec_local.system.files import format_size, is_full

BLOCK = 1 << 20
"""Bytes between two updates of the progress: the most that an interruption loses."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub. key: the name of its blob: its SHA-256, or its git hash if it is tiny."""

    size: int
    key: str


def list_files(repo: str, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """The commit of a revision, and its files by name; without those whose names are unsafe as paths.

    Raises:
        DownloadError: the answer is not that of a Hub.
        InvalidRequest: `repo` is not a repository name.
        Exception: one that `download_errors` translates.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    with _calling_hub():
        try:
            found = HfApi(library_name="specdec").model_info(
                repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        except HFValidationError:
            raise InvalidRequest(f"{repo} is not a valid repository name: use user/repo") from None
        commit = found.sha or ""
        if not COMMIT.fullmatch(commit):
            raise ValueError("the list of files has no commit")
        files = {}
        for file in filter(lambda file: _is_safe(file.rfilename), found.siblings or ()):
            size, key = file.size, file.lfs.sha256 if file.lfs else file.blob_id
            if type(size) is not int or size < 0 or not is_key(key or ""):
                raise ValueError(f"{file.rfilename} has no size or no hash")
            files[file.rfilename] = RemoteFile(size, str(key))
        return commit, files


def _is_safe(name: str) -> bool:
    """Return whether a name is a path below its repository that a terminal can show."""
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def download(
    repo: str, commit: str, name: str, blob: Path, size: int, on_progress: Callable[[int], None]
) -> None:
    """Download a file of `size` bytes into the partial file of a blob; resume after an interruption.

    The caller checks the hash: a server that does not say how much it sends may have sent less.

    Raises:
        DownloadError: the file is too large for HTTP, or the server offers another number of bytes.
        Exception: one that `download_errors` translates.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise DownloadError(
            f"{name} has {format_size(size)}, and the Hub sends at most "
            f"{format_size(constants.MAX_HTTP_DOWNLOAD_SIZE)} per file to specdec: choose a smaller "
            f"quantization, or run hf download {repo} {name}"
        )

    part, url = part_of(blob), hf_hub_url(repo, name, revision=commit)
    if part_size(blob) < size:
        with _calling_hub():
            # Its errors come at once; `http_get` waits as long as a busy server asks for.
            get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, library_name="specdec")
            headers = build_hf_headers(library_name="specdec", headers={"Accept-Encoding": "identity"})
            constants.DOWNLOAD_CHUNK_SIZE = BLOCK
            progress = _progress_class(name, size, on_progress)
            with part.open("ab") as out:
                http_get(url, out, resume_size=part_size(blob), headers=headers, tqdm_class=progress)
    part.touch()  # an empty file needs no request


def _progress_class(name: str, size: int, on_progress: Callable[[int], None]) -> type[Any]:
    """Return a class for `http_get` in place of tqdm's bar; it ends a download of another size."""

    class Progress:
        def __init__(self, total: int | None, initial: int, **settings: Any) -> None:
            if total not in (None, size):
                raise DownloadError(
                    f"the server offers {name} with {total} bytes instead of {size}: "
                    "try again later, or check HF_ENDPOINT"
                )
            self._done = initial

        def __enter__(self) -> "Progress":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, n: int) -> None:  # before the bytes are written
            self._done += n
            if self._done > size:
                raise DownloadError(f"the server sent more than {size} bytes of {name}: try again later")
            on_progress(self._done)

    return Progress


@contextlib.contextmanager
def _calling_hub() -> Iterator[None]:
    """Silence the package, and translate its errors for settings and answers that it does not expect."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the exceptions contain everything needed
    try:
        yield
    except (SpecLocalError, HTTPError):
        raise
    except Exception as error:  # of several libraries
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise DownloadError(
            f"{constants.ENDPOINT} does not respond like the Hugging Face Hub ({_reason(error)}): "
            "check the network, HF_ENDPOINT, HF_TOKEN and the settings of your proxy"
        ) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def download_errors(repo: str) -> Iterator[None]:
    """Turn errors of the Hub, the network and the disk into a `DownloadError` of one line."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
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
    except HTTPError as error:
        why = (
            f"the Hub (Hugging Face, {constants.ENDPOINT}) cannot be reached ({_reason(error)}): check the "
            "network and try again, the download will resume; HF_ENDPOINT names a mirror, and with "
            "HF_HUB_OFFLINE=1 only what was downloaded is used"
        )
    except OSError as error:
        advice = "check its free space and permissions"
        if is_full(error):
            advice = (
                "the disk is full, and nothing was lost; free some space or set HF_HOME to a larger disk, "
                "and run this again: the download will resume"
            )
        why = f"cannot write {repo} to {constants.HF_HUB_CACHE} ({error.strerror or error}): {advice}"
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
            wait = f"{retry_after} s" if (retry_after or "").isdigit() else "a few minutes"
            return f"too many requests to the Hub (429): wait {wait}, or log in with hf auth login"
        case _:
            return f"the Hub returned status {status} for {repo}: try again later; the download will resume"
