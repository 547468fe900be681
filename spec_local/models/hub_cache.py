"""The cache of the Hugging Face hub, which all of its tools share: which models are in it, and how they get out.

Its layout, its names and its locks are those of the package `huggingface-hub`:

    models--USER--REPO/blobs/HASH                 a file, named by the SHA-256 that the hub has of it
    models--USER--REPO/blobs/HASH.incomplete      as much of it as has come
    models--USER--REPO/snapshots/COMMIT/FILE      a link to its blob
    models--USER--REPO/refs/REVISION              the commit that a branch or tag meant
    .locks/models--USER--REPO/HASH.lock           held by who fetches it
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from spec_local.errors import InvalidRequest

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SOON_S = 0.3  # a lock that is free is had by then


@dataclass(frozen=True)
class HubModel:
    """One model of the hub.

    repo: as "user/repo". files: its parts, the first one first; or quant: what the name of its file holds.
    revision: a branch, a tag or a commit. size: bytes of all parts; sha256: of its only file; if known.
    """

    repo: str
    files: tuple[str, ...] = ()
    quant: str = ""
    revision: str = "main"
    size: int | None = None
    sha256: str | None = None

    def choose(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of a repo's files it is made of; none if they are not (all) among them.

        Raises:
            InvalidRequest: several models have the quantization in their name.
        """
        known = set(names)
        if self.files:
            return self.files if known.issuperset(self.files) else ()
        models = models_among(known)
        quant = self.quant.lower()
        held = {stem: parts for stem, parts in models.items() if quant in base_name(stem).lower()}
        if len(held) > 1:  # F16 means F16 although it is a part of BF16
            word = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])")
            exact = {stem: parts for stem, parts in held.items() if word.search(base_name(stem).lower())}
            held = exact or held
        if len(held) > 1:
            raise InvalidRequest(
                f"{self.quant} means several files of {self.repo}: name one of {some(map(base_name, held))}"
            )
        parts = next(iter(held.values()), [])
        split = _PART.search(parts[0]) if parts else None
        return tuple(parts) if not split or len(parts) == int(split[2]) else ()


def models_among(names: Iterable[str]) -> dict[str, list[str]]:
    """The models that a repo's files make: a name each, and its parts."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        # beside models, repos hold what belongs to them: projectors for images, importance matrices
        if name.endswith(".gguf") and not re.search(r"mmproj|imatrix", name, re.IGNORECASE):
            models.setdefault(_PART.sub("", name), []).append(name)
    return models


def cached_files(model: HubModel) -> list[Path]:
    """All files of a model, the first part first; none if one is missing, or is not what models.toml says.

    Looks at sizes and names only, and never asks the hub.

    Raises:
        InvalidRequest: its quantization means several files that are here.
    """
    for snapshot in _snapshots(model):
        names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf") if p.is_file()]
        paths = [snapshot / name for name in model.choose(names)]
        if not paths or (model.size is not None and _size(paths) != model.size):
            continue
        known = blob_of(paths[0]).name
        if model.sha256 is None or not SHA256.fullmatch(known) or known == model.sha256:
            return paths
    return []


def remove(model: HubModel) -> None:
    """Delete a model's files, save those that are another model's too, and what is left of cut downloads."""
    for path in cached_files(model):
        blob = blob_of(path)
        others = [p for p in (repo_folder(model.repo) / "snapshots").rglob("*") if blob_of(p) == blob]
        for other in others:
            if other.name == path.name:  # the same file, in this commit or in others
                other.unlink()
        if all(other.name == path.name for other in others):
            blob.unlink(missing_ok=True)
    for part in _leftovers(model.repo):
        part.unlink(missing_ok=True)


def size_on_disk(model: HubModel) -> int:
    """Bytes that `remove` would free."""
    return _size([*cached_files(model), *_leftovers(model.repo)])


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def repo_folder(repo: str) -> Path:
    """Where the cache keeps what is known of a repo."""
    return Path(constants.HF_HUB_CACHE) / constants.REPO_ID_SEPARATOR.join(["models", *repo.split("/")])


def _snapshots(model: HubModel) -> Iterator[Path]:
    """Where a model's files may be, the likeliest first."""
    folder = repo_folder(model.repo) / "snapshots"
    if COMMIT.fullmatch(model.revision):
        yield folder / model.revision
        return
    try:
        first = folder / (repo_folder(model.repo) / "refs" / model.revision).read_text().strip()
    except OSError:
        return
    yield first
    if model.revision != "main":
        return
    # Not pinned: fetching one file moves the ref on, and the others are still good.
    others = [snapshot for snapshot in folder.glob("*") if snapshot != first]
    yield from sorted(others, key=lambda snapshot: snapshot.stat().st_mtime, reverse=True)


def blob_of(pointer: Path) -> Path:
    """The file that a snapshot's link leads to, one step far."""
    if not pointer.is_symlink():
        return pointer
    return Path(os.path.normpath(pointer.parent / pointer.readlink()))


def part_of(blob: Path) -> Path:
    """Where a blob is while it comes."""
    return blob.with_name(f"{blob.name}.incomplete")


def part_size(blob: Path) -> int:
    """How many bytes of it have come."""
    part = part_of(blob)
    return part.stat().st_size if part.is_file() else 0


def link(blob: Path, pointer: Path) -> None:
    """Let a file of a snapshot be this blob."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_symlink() and not pointer.exists():
        pointer.unlink()
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:  # the other pull was quicker
        pass
    except OSError:  # a disk without links
        blob.replace(pointer)


@contextlib.contextmanager
def locked(repo: str, key: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a blob; `waiting` is called if somebody else holds it."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = Path(constants.HF_HUB_CACHE) / ".locks" / repo_folder(repo).name / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(path, timeout=_SOON_S))
        except TimeoutError:
            waiting()
            stack.enter_context(WeakFileLock(path))
        yield


def _leftovers(repo: str) -> list[Path]:
    """Parts of downloads that nobody is at."""

    class Busy(Exception):
        pass

    def busy() -> None:
        raise Busy

    left = []
    for part in (repo_folder(repo) / "blobs").glob("*.incomplete"):
        with contextlib.suppress(Busy), locked(repo, part.name.split(".")[0], busy):
            left.append(part)
    return left


def base_name(name: str) -> str:
    """A file's name without the folders of its repo."""
    return name.rpartition("/")[2]


def some(names: Iterable[str]) -> str:
    """The first names of many."""
    listed = sorted(names)
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
