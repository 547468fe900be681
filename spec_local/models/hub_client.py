"""Requests to the Hugging Face Hub, none of whose answers is trusted.

The package `huggingface-hub` provides the HTTP client, the token and the error classes. The requests are made
here, because the package reads answers of any size, decompresses them, and expects well-formed JSON.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from huggingface_hub import constants
from pydantic import BaseModel, FailFast, Field, ValidationError

from spec_local.errors import DownloadError, InvalidRequest, SpecLocalError
from spec_local.models.hub_cache import part_of, part_size

TRIES = 5  # consecutive attempts without progress, of `_SLOWEST * PATIENCE_S` bytes
PAUSE_S = 1.0  # between attempts
PATIENCE_S = 60.0  # for at least `_SLOWEST` bytes per second; the client's own timeout is for silence
_SLOWEST = 1000  # bytes per second; a modem is faster
_LARGEST_LIST = 4 << 20  # bytes: about 10,000 files, and repositories with GGUF files have at most hundreds
_ERROR_HEADERS = ("X-Error-Code", "X-Error-Message", "Retry-After")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub. key: the name of its blob: its SHA-256, or its git hash if it is tiny."""

    size: int
    key: str


class _Lfs(BaseModel):
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Sibling(BaseModel):
    """A file of a repository, with the names of the Hub's JSON."""

    rfilename: str
    size: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]  # as file systems have
    blobId: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    lfs: _Lfs | None = None


class _Listing(BaseModel):
    sha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    siblings: Annotated[list[_Sibling], FailFast()] = []


def list_files(repo: str, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """The commit of a revision, and its files by name; without those whose names are unsafe as paths.

    Raises:
        DownloadError: the answer is not that of a Hub.
        InvalidRequest: `repo` is not a repository name.
        Exception: one that `download_errors` translates.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise InvalidRequest(f"{repo} is not a valid repository name: use user/repo") from None
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
    with _get(url, repo, constants.HF_HUB_ETAG_TIMEOUT) as answer:
        body = bytearray()
        for block in _blocks(answer):
            body += block
            if len(body) > _LARGEST_LIST:
                raise DownloadError(
                    f"the list of files in {repo} has more than {_LARGEST_LIST >> 20} MiB: "
                    "check HF_ENDPOINT, or choose another repository"
                )
    try:
        found = _Listing.model_validate_json(bytes(body))
    except ValidationError:  # the page of a proxy or of another server
        raise DownloadError(
            f"{constants.ENDPOINT} does not respond like the Hugging Face Hub: "
            "check the network and HF_ENDPOINT"
        ) from None
    return found.sha, {
        file.rfilename: RemoteFile(file.size, file.lfs.sha256 if file.lfs else file.blobId)
        for file in found.siblings
        if _is_safe(file.rfilename)
    }


def _is_safe(name: str) -> bool:
    """Return whether a name is a path below its repository that a terminal can show."""
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def download(
    repo: str, commit: str, name: str, blob: Path, size: int, on_progress: Callable[[int], None]
) -> None:
    """Download a file of `size` bytes into the partial file of a blob; resume after an interruption.

    Raises:
        DownloadError: the server offers or sends another number of bytes.
        Exception: one that `download_errors` translates.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    part = part_of(blob)
    if part_size(blob) > size:
        part.unlink()
    url, failures = hf_hub_url(repo, name, revision=commit), 0
    while (have := part_size(blob)) < size:
        wanted = {"Range": f"bytes={have}-"} if have else {}
        try:
            with _get(url, repo, constants.HF_HUB_DOWNLOAD_TIMEOUT, wanted) as answer:
                start = done = _offered(answer, name, have, size)
                with part.open("ab" if start else "wb") as out:
                    for block in _blocks(answer):
                        done += len(block)
                        if done > size:
                            break
                        out.write(block)
                        on_progress(done)
        except HfHubHTTPError:
            raise
        except _network_error():
            failures = 0 if part_size(blob) - have > _SLOWEST * PATIENCE_S else failures + 1
            if failures == TRIES:
                raise
            time.sleep(PAUSE_S)
        else:
            if done != size:  # it was not this file
                os.truncate(part, start)
                found = f"more than {size}" if done > size else f"{done} of {size}"
                raise DownloadError(f"the server sent {found} bytes of {name}: try again later")
    part.touch()  # an empty file needs no request


def _offered(answer: Any, name: str, have: int, size: int) -> int:
    """The position in the file where the body begins: `have`, or 0 if the server does not support ranges.

    Raises:
        DownloadError: it is not the rest of the file; what has been downloaded is kept.
    """
    start = have if answer.status_code == 206 else 0
    length = answer.headers.get("Content-Length", str(size - start))
    found = answer.headers.get("Content-Range", f"bytes {start}-") if start else f"bytes {start}-"
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        why = "compressed, which was not requested"
    elif length != str(size - start):
        why = f"with {length} bytes instead of {size - start}"
    elif not found.startswith(f"bytes {start}-"):
        why = f"from another position than byte {start}"
    else:
        return start
    raise DownloadError(f"the server offers {name} {why}: try again later, or check HF_ENDPOINT")


@contextlib.contextmanager
def _get(url: str, repo: str, timeout: float, headers: dict[str, str] | None = None) -> Iterator[Any]:
    """Request a URL: an HTTP answer of status 200 or 206, whose body has not been read."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the exceptions contain everything needed
    try:
        client = get_session()
        client.cookies.clear()  # those of a hostile answer could make every later request fail
        every = build_hf_headers(library_name="specdec") | {"Accept-Encoding": "identity"}
        request = client.build_request("GET", url, headers=every | (headers or {}), timeout=timeout)
    except Exception as error:  # of several libraries; nothing has been sent
        raise DownloadError(
            f"cannot request {url} ({error}): check HF_ENDPOINT, HF_TOKEN and the settings of your proxy"
        ) from None
    for _ in range(client.max_redirects):
        try:
            answer = client.send(request, stream=True, follow_redirects=False)
        except ValueError as error:  # the address of a redirect
            raise DownloadError(f"the Hub refers to an invalid address ({error}): try again later") from None
        with contextlib.closing(answer):
            if answer.next_request is not None:  # the client would read the whole body of a redirect
                request = answer.next_request
                continue
            # Likewise, the package would read the whole body of an error.
            known = ((name, answer.headers.get(name)) for name in _ERROR_HEADERS)
            kept = {name: value for name, value in known if value and value.isascii()}
            hf_raise_for_status(type(answer)(answer.status_code, headers=kept, request=answer.request))
            if answer.status_code not in (200, 206):
                raise DownloadError(_refusal(repo, answer.status_code, None))
            yield answer
            return
    raise DownloadError(f"the Hub redirects requests for {repo} without end: try again later")


def _blocks(answer: Any) -> Iterator[bytes]:
    """The body of an answer, undecoded.

    Raises:
        DownloadError: it arrives too slowly.
    """
    since, received = time.monotonic(), 0
    for block in answer.iter_raw():
        yield block
        received += len(block)
        if (now := time.monotonic()) - since > PATIENCE_S:
            if received < _SLOWEST * PATIENCE_S:
                raise DownloadError(
                    f"the server sent only {received} bytes in {now - since:.0f} s: try again later; "
                    "the download will resume"
                )
            since, received = now, 0


def _network_error() -> type[Exception]:
    """The base exception of the HTTP library, which depends on the version of huggingface-hub."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError


@contextlib.contextmanager
def download_errors(repo: str) -> Iterator[None]:
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
            wait = f"{retry_after} s" if (retry_after or "").isdigit() else "a few minutes"
            return f"too many requests to the Hub (429): wait {wait}, or log in with hf auth login"
        case _:
            return f"the Hub returned status {status} for {repo}: try again later; the download will resume"
