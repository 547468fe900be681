"""Find and delete models in the cache of the Hugging Face Hub, which all of its tools share.

Layout, names and locks are those of the package `huggingface-hub`:

    models--USER--REPO/blobs/HASH                 a file, named by its hash on the Hub: SHA-256, or git's
    models--USER--REPO/blobs/HASH.incomplete      a partial download
    models--USER--REPO/snapshots/COMMIT/FILE      a link to the blob
    models--USER--REPO/refs/REVISION              the commit of a branch or tag
    .locks/models--USER--REPO/HASH.lock           held during the download
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from spec_local.errors import InvalidRequest
from spec_local.models.file_names import HEAD, PART, base_name, best_projector, is_projector
from spec_local.system.files import opened, read_bytes
from spec_local.system.folders import user_folder

if constants.HF_HUB_CACHE.startswith("~"):  # no home directory is known
    constants.HF_HUB_CACHE = str(user_folder("cache") / "huggingface" / "hub")

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_REF = 1 << 10  # bytes of a ref, of which 40 are used
_LOCK_TIMEOUT_S = 0.3  # enough to acquire a free lock


@dataclass(frozen=True)
class HubModel:
    """One model on the Hub.

    repo: "user/repo". files: its parts in order; or quant: a part of its file name; without both, all files,
    as of a head in safetensors. revision: a branch, tag or commit. size: bytes of all parts, if known.
    sha256: of its only file, if known.
    """

    repo: str
    files: tuple[str, ...] = ()
    quant: str = ""
    revision: str = "main"
    size: int | None = None
    sha256: str | None = None

    def choose(self, names: Iterable[str]) -> tuple[str, ...]:
        """Choose the model's files from a repository's file names; none unless all of them exist.

        Raises:
            InvalidRequest: the quantization matches several models.
        """
        parts = self.present(names)
        split = PART.search(parts[0]) if parts and not self.files else None
        n_parts = len(self.files) or (int(split[2]) if split else 1)
        return parts if len(parts) == n_parts else ()

    def present(self, names: Iterable[str]) -> tuple[str, ...]:
        """As `choose`, but also if some of the files are missing."""
        known = set(names)
        if self.files:
            return tuple(file for file in self.files if file in known)
        quant = self.quant.lower()
        # A projector has to be asked for by the beginning of its name, too.
        of_projector = quant.startswith("mmproj")
        models = {n: [n] for n in filter(is_projector, known)} if of_projector else models_among(known)
        # A head has to be asked for by the beginning of its name.
        is_head = HEAD.match(quant) is not None
        names_of = {stem: base_name(stem).lower() for stem in models}
        matching = {
            stem: parts
            for stem, parts in models.items()
            if quant in names_of[stem] and is_head == (HEAD.match(names_of[stem]) is not None)
        }
        if len(matching) > 1:  # F16 does not match BF16
            word = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])")
            exact = {stem: parts for stem, parts in matching.items() if word.search(names_of[stem])}
            matching = exact or matching
        if len(matching) > 1:
            raise InvalidRequest(
                f"{self.quant} matches several files of {self.repo}: "
                f"choose one of {shortened(map(base_name, matching))}"
            )
        return tuple(next(iter(matching.values()), ()))

    def projector(self, names: Iterable[str]) -> str | None:
        """Choose the model's projector among a repository's file names; None: it has none, or needs none.

        Raises:
            InvalidRequest: see `choose`.
        """
        names = list(names)
        parts = self.choose(names)
        if not parts or is_projector(parts[0]) or HEAD.match(base_name(parts[0])):
            return None
        return best_projector(names, parts[0])


def models_among(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among a repository's files: the parts of each, by name."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        # not models: projectors for images, importance matrices
        if name.endswith(".gguf") and not re.search(r"mmproj|imatrix", name, re.IGNORECASE):
            models.setdefault(PART.sub("", name), []).append(name)
    return models


def cached_files(model: HubModel) -> list[Path]:
    """All files of a model, in order; none if one is missing or differs from models.toml.

    Compares names and sizes only, and never calls the Hub.

    Raises:
        InvalidRequest: the quantization matches several cached files.
    """
    for snapshot in snapshots(model):
        paths = [snapshot / name for name in model.choose(_names(snapshot))]
        if not paths or (model.size is not None and _size(paths) != model.size):
            continue
        known = blob_of(paths[0]).name
        if model.sha256 is None or not SHA256.fullmatch(known) or known == model.sha256:
            return paths
    return []


def cached_projectors(model: HubModel) -> list[Path]:
    """The projector of a model in each snapshot where the model may be, the most likely one first.

    Raises:
        InvalidRequest: see `cached_files`.
    """
    names = {snapshot: _names(snapshot) for snapshot in snapshots(model)}
    return [snapshot / name for snapshot, found in names.items() if (name := model.projector(found))]


def _names(snapshot: Path) -> list[str]:
    return [
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if os.path.isfile(path)
    ]


def remove(model: HubModel) -> None:
    """Delete a model's files, except those that another model shares, and interrupted downloads.

    With the last model of a repository, its projectors are deleted, too.

    After an error in between, a second call deletes the rest.

    Raises:
        OSError: a file cannot be deleted.
    """
    for path in _removable(model):
        blob = blob_of(path)
        others = [p for p in (repo_folder(model.repo) / "snapshots").rglob("*") if blob_of(p) == blob]
        for other in others:
            if other.name == path.name:  # the same file in any commit
                other.unlink()
        if all(other.name == path.name for other in others):
            blob.unlink(missing_ok=True)
    for path in _leftovers(model.repo):
        path.unlink(missing_ok=True)


def size_on_disk(model: HubModel) -> int:
    """Bytes that `remove` would free."""
    return _size([*_removable(model), *_leftovers(model.repo)])


def _removable(model: HubModel) -> list[Path]:
    """The cached files; if the model is incomplete, those that are there."""
    if not (model.files or model.quant):
        files = filter(os.path.isfile, (repo_folder(model.repo) / "snapshots").rglob("*"))
        return list({blob_of(path): path for path in files}.values())
    incomplete = ([s / name for name in model.present(_names(s))] for s in snapshots(model))
    found = cached_files(model) or next(filter(None, incomplete), [])
    # Projectors first: a second call after an error still finds the model.
    return [*_left_alone(model.repo, found), *found] if found else []


def _left_alone(repo: str, removed: list[Path]) -> list[Path]:
    """The projectors of a repository, each once, if it has no other model than those that are removed."""
    gone = {path.name for path in removed}
    files = [path for path in (repo_folder(repo) / "snapshots").rglob("*.gguf") if path.name not in gone]
    if models_among(path.name for path in files):
        return []
    return list({blob_of(path): path for path in files if is_projector(path.name)}.values())


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def repo_folder(repo: str) -> Path:
    """The folder of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE) / constants.REPO_ID_SEPARATOR.join(["models", *repo.split("/")])


def cached_repositories() -> Iterator[tuple[str, dict[str, Path]]]:
    """Every repository of a user in the cache: "user/repo", and the paths of its GGUF files by name.

    A repository comes once for each commit, in the order in which `cached_files` searches them.
    """
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repo = folder.name.replace("--", "/").removeprefix("models/")
        for snapshot in snapshots(HubModel(repo=repo)):
            yield repo, {name: snapshot / name for name in _names(snapshot)}


def snapshots(model: HubModel) -> Iterator[Path]:
    """Folders where a model's files may be, the most likely one first."""
    folder = repo_folder(model.repo) / "snapshots"
    if COMMIT.fullmatch(model.revision):
        yield folder / model.revision
        return
    try:
        commit = read_bytes(repo_folder(model.repo) / "refs" / model.revision, _MAX_REF)[:40].decode("ascii")
    except (OSError, ValueError):
        return
    if not COMMIT.fullmatch(commit):  # damaged; `pull` writes it again
        return
    yield (first := folder / commit)
    if model.revision != "main":
        return
    # A download moves the ref; the files of earlier commits are still valid.
    others = [snapshot for snapshot in folder.glob("*") if snapshot != first]
    yield from sorted(others, key=lambda snapshot: snapshot.stat().st_mtime, reverse=True)


def blob_of(pointer: Path) -> Path:
    """The target of a snapshot's link, one level deep."""
    if not pointer.is_symlink():
        return pointer
    return Path(os.path.normpath(pointer.parent / pointer.readlink()))


def is_key(name: str) -> bool:
    """Return whether a name can be that of a blob."""
    return bool(SHA256.fullmatch(name) or COMMIT.fullmatch(name))


def matches(path: Path, key: str) -> bool:
    """Return whether a file has the hash that its blob's name gives: a SHA-256, or that of a blob of git."""
    with opened(path) as file:
        if SHA256.fullmatch(key):
            return hashlib.file_digest(file, "sha256").hexdigest() == key
        header = b"blob %d\0" % os.fstat(file.fileno()).st_size
        return (
            hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest() == key
        )


def part_of(blob: Path) -> Path:
    """The partial file of a blob during its download."""
    return blob.with_name(f"{blob.name}.incomplete")


def part_size(blob: Path) -> int:
    """Bytes of the partial file."""
    part = part_of(blob)
    return part.stat().st_size if part.is_file() else 0


def link(blob: Path, pointer: Path) -> None:
    """Link a file of a snapshot to its blob."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_symlink() and not pointer.exists():
        pointer.unlink()
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:  # created by another process in the meantime
        pass
    except OSError:  # the file system has no links
        blob.replace(pointer)


@contextlib.contextmanager
def locked(repo: str, key: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a blob; `waiting` is called if another process holds it."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = Path(constants.HF_HUB_CACHE) / ".locks" / repo_folder(repo).name / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(path, timeout=_LOCK_TIMEOUT_S))
        except TimeoutError:
            waiting()
            stack.enter_context(WeakFileLock(path))
        yield


def _leftovers(repo: str) -> Iterator[Path]:
    """Partial files, and files without a link, of downloads that no process continues; each with its lock."""

    class _Busy(Exception):
        pass

    def busy() -> None:
        raise _Busy

    folder = repo_folder(repo)
    linked = {blob_of(path) for path in (folder / "snapshots").rglob("*")}
    for path in set((folder / "blobs").glob("*")) - linked:
        with contextlib.suppress(_Busy), locked(repo, path.name.split(".")[0], busy):
            yield path


def shortened(names: Iterable[str]) -> str:
    """The first 12 names, sorted, and the number of the others."""
    listed = sorted(names)
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
