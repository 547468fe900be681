"""Published heads, in safetensors: download them, find their main models, and convert them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from spec_local.conversion.checkpoint import read_config
from spec_local.conversion.convert import convert_head, converted, is_head
from spec_local.errors import DownloadError, InvalidRequest
from spec_local.llama import gguf_header
from spec_local.models import catalog, hub_cache, ollama
from spec_local.models.file_names import series
from spec_local.models.hub import Log, Progress, pull_files
from spec_local.models.hub_cache import HubModel
from spec_local.models.program_folders import content

_CONFIG, _MASK = "config.json", "mask_embedding.pt"
_WEIGHTS = re.compile(r"[^/]+\.safetensors"), re.compile(r"pytorch_model[^/]*\.bin")
"""Names of files with tensors; the second ones are read if there are none of the first."""
_MAX_BESIDE = 100  # files to look at in a head's folder
_ADVICE = "run specdec draft convert {} --main MAIN with its GGUF file"


def fetch(repo: str, log: Log, progress: Progress | None = None, offline: bool = False) -> Path:
    """Return the folder of a head on the Hub; missing files are downloaded.

    Raises:
        InvalidRequest: it is no repository, or not that of a head.
        DownloadError: the download failed.
    """
    if Path(repo).exists():
        raise InvalidRequest(
            f"{repo} is a file: give the folder that contains it; a head in GGUF needs no conversion"
        )
    if not catalog.is_repository(repo):
        raise InvalidRequest(f"{repo} is neither a folder nor a repository (user/repo): check the name")
    folder, names = _described(repo, offline)
    if not _is_head(folder, names):
        raise InvalidRequest(
            f"{repo} is no head in safetensors, as its config.json says: give that of a head"
        )
    if offline or constants.HF_HUB_OFFLINE:
        return folder
    folder, _ = pull_files(repo, lambda names: [*_weights(names), _CONFIG, _MASK], log, progress)
    return folder


def _described(repo: str, offline: bool) -> tuple[Path, list[str]]:
    """A repository's folder, of which only config.json is downloaded, and the names of all its files."""
    if offline or constants.HF_HUB_OFFLINE:
        for snapshot in hub_cache.snapshots(HubModel(repo)):
            names = [path.name for path in content(snapshot)]
            if _CONFIG in names and _weights(names):
                return snapshot, names
        raise DownloadError(
            f"{repo} has not been downloaded, and specdec is offline: run this again when online"
        )
    return pull_files(repo, lambda names: [_CONFIG], lambda line: None)


def _is_head(folder: Path, names: list[str]) -> bool:
    return bool(_weights(names)) and _CONFIG in names and is_head(read_config(folder / _CONFIG))


def _weights(names: Iterable[str]) -> list[str]:
    """Those of a repository's files that have the tensors."""
    found = ([name for name in names if kind.fullmatch(name)] for kind in _WEIGHTS)
    return next(filter(None, found), [])


def convert(
    folder: Path,
    name: str,
    main: Path,
    output: Path | None = None,
    kind: str = "Q8_0",
    *,
    force: bool = False,
    log: Log,
) -> Path:
    """Convert a head, and return the path of its GGUF file; see `spec_local.conversion.convert.convert_head`.

    Args:
        name: the folder or the repository, as the user gave it.

    Raises:
        InvalidRequest: the main model is ollama's, which deletes files beside its own, so it needs an output.
    """
    if output is None and ollama.keeps(main):
        raise InvalidRequest(
            f"{main.name} belongs to ollama, which deletes files beside its own: give the head another place "
            f"with specdec draft convert {name} and `output`"
        )
    return convert_head(folder, main, output, kind, name=Path(name).absolute().name, force=force, log=log)


def pull(name: str, log: Log, progress: Progress | None = None, offline: bool = False) -> Path:
    """Download a model by name, as `catalog.pull`; a head in safetensors is converted, unless this was done.

    Args:
        name: also a repository (user/repo) of a head.

    Raises:
        InvalidRequest: a repository has no head in safetensors, or its main model is not on this machine.
        DownloadError: the download failed.
    """
    if found := catalog.to_convert(name):
        repo, place = found
        main = _main_of_pair(name, repo)
    elif catalog.is_repository(name):
        repo, place, main = name, None, None
    else:
        return catalog.pull(name, log, progress, offline)
    if not main:
        folder, names = _described(repo, offline)
        if not _is_head(folder, names):
            raise catalog.unknown(repo)
        main = find_main(folder, repo)
        if done := converted(main, repo.rpartition("/")[2]):
            return done
    return convert(fetch(repo, log, progress, offline), repo, main, place, log=log)


def _main_of_pair(head: str, repo: str) -> Path:
    """The main model of a pair with this head."""
    mains = [pair.main for pair in catalog.pairs().values() if pair.draft == head]
    if main := next((path for each in mains if (path := catalog.find(each))), None):
        return main
    advice = f"run specdec models pull {mains[0]} first" if mains else _ADVICE.format(repo)
    raise InvalidRequest(f"{head} is converted for its main model, which is not here: {advice}")


def find_main(folder: Path, name: str) -> Path:
    """The main model of a head: the only model beside it, or the one that its config.json names.

    Args:
        name: the folder or the repository, as the user gave it.

    Raises:
        InvalidRequest: there is no such model on this machine.
    """
    folders = folder.absolute(), folder.absolute().parent
    beside = list(_models([path for each in folders for path in content(each, "*.gguf")]))
    if len(beside) == 1:
        return beside[0]
    named = _named_main(read_config(folder / _CONFIG))
    if not (wanted := series(named)):
        raise InvalidRequest(f"{name} does not name its main model: {_ADVICE.format(name)}")
    known = [path for each in catalog.models() if (path := catalog.find(each))]
    for path in [*beside, *known, *(model.path for model in catalog.stored_models())]:
        if series(path.name) == wanted:
            return path
    raise InvalidRequest(f"{name} is for {named}, which is not on this machine: {_ADVICE.format(name)}")


def _models(paths: list[Path]) -> Iterator[Path]:
    """Those that are models, neither heads nor projectors."""
    for path in islice(paths, _MAX_BESIDE):
        metadata = gguf_header.read_metadata(path)
        if (
            gguf_header.generates_text(metadata)
            and metadata.get("general.architecture") not in gguf_header.HEADS
        ):
            yield path


def _named_main(config: Mapping[str, Any]) -> str:
    """The main model that a configuration names; "": none."""
    for keys in (("speculators_config", "verifier", "name_or_path"), ("base_model",), ("target_model",)):
        found: Any = config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    return ""
