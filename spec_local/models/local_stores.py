"""Models that other programs keep on this machine; they are used where they are, without a copy.

Those of the Hugging Face Hub's cache, LM Studio and llama.cpp are named ``user/repo:quant``, like files of
the Hub (`spec_local.models.hub_cache`), and those of ollama as in ollama (`spec_local.models.ollama`).
Nothing here raises an error because of what these programs keep: what cannot be read is left out.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spec_local.errors import InvalidRequest
from spec_local.llama import gguf_header
from spec_local.models import hub_cache, ollama, program_folders
from spec_local.models.file_names import QUANT, base_name
from spec_local.models.hub_cache import HubModel, models_among

HUB, LM_STUDIO, LLAMA_CPP = "Hugging Face Hub", "LM Studio", "llama.cpp"
LLAMA_CPP_FILE = re.compile(r"([^_]+)_(.+?-GGUF)_(.+\.gguf)", re.IGNORECASE)
"""USER_REPO_FILE.gguf: the name of a file that llama.cpp keeps."""
_Repository = tuple[str, str, dict[str, Path]]  # the program, "user/repo", and the paths of its files by name


@dataclass(frozen=True)
class StoredModel:
    """A model that a program keeps: its name here, its file (the first one, if it is split) and all bytes."""

    name: str
    program: str
    path: Path
    size: int

    @functools.cached_property
    def metadata(self) -> gguf_header.Metadata:
        """See `gguf_header.read_metadata`."""
        return gguf_header.read_metadata(self.path)


def stored_models() -> Iterator[StoredModel]:
    """All models and heads that generate text, under the names by which they are found.

    Names are made of those of folders and files, and may have characters that a user cannot give.
    """
    known: set[str] = set()
    of_ollama = ((name, ollama.PROGRAM, [path]) for name, path in ollama.models())
    for name, program, paths in (*_of_repositories(), *of_ollama):
        sizes = [program_folders.size_of(path) or 0 for path in paths]
        model = StoredModel(name, program, paths[0], sum(sizes))
        if name not in known and all(sizes) and gguf_header.generates_text(model.metadata):
            yield model
        known.add(name)


def files() -> Iterator[Path]:
    """All GGUF files of all programs, with names that describe them."""
    for _, _, found in (*_hub(), *_lm_studio(), *_llama_cpp()):
        yield from (path for name, path in found.items() if name.endswith(".gguf"))
    for name, path in ollama.models():
        yield ollama.linked(name, path)


def find_files(model: HubModel) -> tuple[str, list[Path]] | None:
    """The program that keeps a model of the Hub, outside of the Hub's cache, and the model's files.

    Raises:
        InvalidRequest: the quantization matches several files.
    """
    for program, repo, files in (*_lm_studio(model.repo), *_llama_cpp()):
        paths = [files[name] for name in model.choose(files)] if repo == model.repo else []
        if paths and model.size in (None, sum(program_folders.size_of(path) or 0 for path in paths)):
            return program, paths
    return None


def _of_repositories() -> Iterator[tuple[str, str, list[Path]]]:
    """The complete models of all repositories, each by the shortest name that selects it."""
    for program, repo, files in (*_hub(), *_lm_studio(), *_llama_cpp()):  # in the order of `catalog.find`
        for stem, parts in models_among(files).items():
            base = base_name(stem).removesuffix(".gguf")
            for quant in (*QUANT.findall(base)[-1:], base):
                if _selects(quant, repo, files, parts):
                    yield f"{repo}:{quant}", program, [files[part] for part in parts]
                    break


def _selects(quant: str, repo: str, files: Iterable[str], parts: list[str]) -> bool:
    candidates = [file for file in files if quant.lower() in base_name(file).lower()]  # `choose` is slow
    try:
        return HubModel(repo=repo, quant=quant).choose(candidates) == tuple(parts)
    except InvalidRequest:
        return False


def _hub() -> Iterator[_Repository]:
    for repo, files in hub_cache.cached_repositories():
        yield HUB, repo, files


def _lm_studio(repo: str = "*/*") -> Iterator[_Repository]:
    """USER/REPO/FILE.gguf"""
    for root in program_folders.lm_studio():
        for folder in program_folders.content(root, repo):
            files = {path.name: path for path in program_folders.content(folder)}
            yield LM_STUDIO, f"{folder.parent.name}/{folder.name}", files


def _llama_cpp() -> Iterator[_Repository]:
    """USER_REPO_FILE.gguf; where the name of the repository ends is known only if it ends with -GGUF."""
    found: dict[str, dict[str, Path]] = {}
    for path in (path for root in program_folders.llama_cpp() for path in program_folders.content(root)):
        if match := LLAMA_CPP_FILE.fullmatch(path.name):
            found.setdefault(f"{match[1]}/{match[2]}", {})[match[3]] = path
    for repo, files in found.items():
        yield LLAMA_CPP, repo, files
