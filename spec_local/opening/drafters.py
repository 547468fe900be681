"""Find what can draft for a main model among the files on this machine, the most promising first:

1. the head that has learned from the user's answers (`spec_local.models.head_versions`);
2. a head beside the main model's file, or in the same repository of the Hub's cache, whatever its name;
3. the draft of a pair of models.toml, if the main model's file is that of the pair;
4. a small model with the same vocabulary, beside the main model, or where specdec and other programs keep
   theirs.

Only the beginnings of files are read here, which is fast, and safe for damaged ones. Whether a drafter can be
used shows when it is loaded (`spec_local.opening.loading`); `reject` remembers that it cannot.
"""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from spec_local.calibration.cost_store import Conditions
from spec_local.errors import SpecLocalError
from spec_local.llama import gguf_header
from spec_local.llama.compatibility import FIRST_COMPARED, MAX_SIZE_DIFFERENCE
from spec_local.llama.gguf_header import Metadata, Tokens
from spec_local.llama.gguf_tensors import parts
from spec_local.llama.runtime import fingerprint
from spec_local.models import catalog, local_stores
from spec_local.models.catalog import PairEntry
from spec_local.models.file_names import QUANT, letters
from spec_local.models.head_versions import HeadVersions
from spec_local.models.pairs import expectation
from spec_local.models.program_folders import content, size_of
from spec_local.system.files import format_size, read_bytes, write_atomically
from spec_local.system.folders import user_folder

_T = TypeVar("_T")
_MAX_LAYERS = 1 / 4  # of the main model's size, of layers for multi-token prediction in a file of their own
_BEST_SHARE = 1 / 16  # as in most pairs of models.toml; a larger draft model costs more than it gains
_ACCEPTANCE_RATE = 0.7  # usual within a family
_LEAST_GAIN = 1.1  # expected speed-up; less is not worth the memory
_MAX_FILES = 1000  # to look at, so that the search ends soon
_MAX_VERDICT = 1 << 16  # bytes of a reason
_MAX_COMPARED = 8  # vocabularies a start, 60 ms each; the next start goes on with others
_WIDTHS = {"gemma4-assistant": "embedding_length_out", "eagle3": "target_hidden_size"}
"""Fields with the width of the main model's hidden states, where it is not that of the head's own."""
_TUNED = re.compile(r"instruct|chat|[-_. ]it\b", re.IGNORECASE)
_FIRST_PART = re.compile(r"-00001-of-\d{5}\.gguf$")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Drafter:
    """A file that probably drafts for the main model.

    why: the reason to use it, for a message. is_of_pair: models.toml names it, so its vocabulary may differ.
    """

    path: Path
    why: str
    is_of_pair: bool = False


def find_drafters(conditions: Conditions, spare: int) -> Iterator[Drafter]:
    """The files to try, one after another; nothing is raised because of what is on the disk.

    Args:
        conditions: of the main model; costs measured under them decide whether a model pays.
        spare: bytes of memory that the weights of a drafter may take.
    """
    with contextlib.suppress(OSError, SpecLocalError):
        yield from _Search(conditions).drafters(spare)


def reject(main: Path, draft: Path, why: str) -> None:
    """Find a file no more for this main model, until one of them or the installation changes."""
    with contextlib.suppress(OSError):
        write_atomically(_verdict(fingerprint(main), draft), why.encode())


def offer(main: Path, spare: int) -> str | None:
    """A message about the draft of a pair that can be downloaded for a main model; None: there is none."""
    with contextlib.suppress(OSError, SpecLocalError):
        pairs = list(_pairs(main))
        if pairs and not any(catalog.find(pair.draft) for _, pair in pairs):
            name, size = pairs[0][1].draft, catalog.size(pairs[0][1].draft)
            if (size or 0) <= spare:
                how = f"specdec models pull {name}" + (f" ({format_size(size)})" if size else "")
                return f"no draft model for {main.name} is on this machine: run {how} to draft with one"
    return None


@dataclass(frozen=True, slots=True)
class _File:
    """A model. size: bytes of all its parts, of which `path` is the first."""

    path: Path
    size: int
    metadata: Metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str) -> int | None:
        """A number in the header, by its name without the architecture."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) else None

    @property
    def active_size(self) -> int:
        """Bytes that a token reads at least: of a mixture of experts, the share of the experts in use."""
        used, n = self.number("expert_used_count"), self.number("expert_count")
        return self.size * used // n if used and n else self.size

    @property
    def family(self) -> str:
        """Name without size and version of training; empty if unknown."""
        return letters(str(self.metadata.get("general.basename", "")))

    @property
    def is_tuned(self) -> bool:
        """True if it was trained to answer, as far as its names say."""
        names = [self.metadata.get(f"general.{key}", "") for key in ("finetune", "name")]
        return any(_TUNED.search(str(name)) for name in (*names, self.path.stem))


_Candidate = tuple[Drafter, _File]


class _Search:
    """The search for drafters of one main model."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._main = _read(conditions.path)
        self._key = fingerprint(conditions.path)
        self._n_compared = 0
        self._beside = _files(_beside(conditions.path), self._main.size)

    def drafters(self, spare: int) -> Iterator[Drafter]:
        seen = {os.path.realpath(self._main.path)}
        versions = HeadVersions(self._main.path)
        for version in versions.usable():  # not compared here: one that cannot be loaded is rolled back
            head = versions.path(version)
            if version.size <= spare and not _verdict(self._key, head).exists():
                yield Drafter(head, "a head that has learned from your answers")
        sources = (self._heads(), self._of_pairs(), self._small_models())
        for drafter, file in itertools.chain.from_iterable(map(_readable, sources)):
            path = os.path.realpath(file.path)
            if path in seen or file.size > spare:
                continue
            seen.add(path)
            if (self._is_head(file) or self._pays(drafter, file)) and self._may_fit(drafter, file):
                yield drafter

    def _heads(self) -> Iterator[_Candidate]:
        """Heads beside the main model; first those whose names contain its name."""
        name = letters(QUANT.sub("", self._main.path.stem))
        heads = filter(self._is_head, self._beside)
        for head in sorted(heads, key=lambda head: name not in letters(head.path.stem)):
            yield Drafter(head.path, "a head beside the main model"), head

    def _is_head(self, file: _File) -> bool:
        """Return whether a file is a head for a model like this one, as far as its header says."""
        width = _WIDTHS.get(file.architecture, "embedding_length")
        if (file.number(width) or file.number("embedding_length")) != self._main.number("embedding_length"):
            return False
        # Layers for multi-token prediction, and not the same model in a smaller quantization.
        are_layers = file.architecture == self._main.architecture and file.number("nextn_predict_layers")
        is_small = file.size <= self._main.size * _MAX_LAYERS
        return file.architecture in gguf_header.HEADS or bool(are_layers and is_small)

    def _of_pairs(self) -> Iterator[_Candidate]:
        for name, pair in _pairs(self._main.path):
            if path := catalog.find(pair.draft):
                yield Drafter(path, f"the draft of the pair {name}", is_of_pair=True), _read(path)

    def _small_models(self) -> Iterator[_Candidate]:
        """Models whose headers say that they are of the main model's family, the most promising first."""
        elsewhere = (*content(catalog.folder(), "*.gguf"), *_readable(local_stores.files()))
        most = self._main.active_size // 2  # with more, no draft model pays
        files = (*self._beside, *_files(elsewhere, most))
        for file in sorted(filter(self._is_related, files), key=self._rank):
            if file.size <= most:
                share = f"1/{self._main.size / file.size:.0f}"
                yield Drafter(file.path, f"same vocabulary, {share} of the size"), file

    def _is_related(self, file: _File) -> bool:
        # Mixtures of experts have the name of the dense models with an addition: qwen3 and qwen3moe.
        if not file.architecture or not self._main.architecture.startswith(file.architecture):
            return False
        n, n_main = (each.number("vocab_size") for each in (file, self._main))
        differs = n is not None and n_main is not None and abs(n - n_main) > MAX_SIZE_DIFFERENCE
        return not differs and gguf_header.generates_text(file.metadata)

    def _rank(self, file: _File) -> tuple[bool, bool, bool, int]:
        is_large = file.size > self._main.active_size * _BEST_SHARE
        return (
            file.family != self._main.family,
            file.is_tuned != self._main.is_tuned,
            is_large,
            file.size if is_large else -file.size,
        )

    def _pays(self, drafter: Drafter, file: _File) -> bool:
        """Return whether drafting with a model probably pays, as `specdec models check` expects it."""
        n_ctx = self._conditions.n_ctx
        length = min(n_ctx, file.number("context_length") or n_ctx)
        drafting = replace(self._conditions, path=file.path, n_ctx=length, workers=())
        share = file.size / self._main.active_size
        found = expectation(self._conditions, drafting, share, [_ACCEPTANCE_RATE])
        pays = found is not None and found.speedups[0].speedup >= _LEAST_GAIN
        return pays or (drafter.is_of_pair and not (found and found.is_measured))

    def _may_fit(self, drafter: Drafter, file: _File) -> bool:
        """Return whether a file has not been rejected, and a model has the main model's tokens."""
        verdict = _verdict(self._key, file.path)
        with contextlib.suppress(OSError):
            return not read_bytes(verdict, _MAX_VERDICT)
        if drafter.is_of_pair or self._is_head(file):  # loading it shows more
            return True
        if self._n_compared == _MAX_COMPARED:
            return False
        self._n_compared += 1
        same = _share_tokens(self._tokens, gguf_header.read_tokens(file.path))
        with contextlib.suppress(OSError):  # without a cache folder, they are compared again next time
            write_atomically(verdict, b"" if same else b"another vocabulary")
        return same

    @functools.cached_property
    def _tokens(self) -> Tokens | None:
        return gguf_header.read_tokens(self._main.path)


def _readable(found: Iterable[_T]) -> Iterator[_T]:
    """The same, up to what cannot be read."""
    with contextlib.suppress(OSError, SpecLocalError):
        yield from found


def _read(path: Path) -> _File:
    several = parts(path) if _FIRST_PART.search(path.name) else [path]
    return _File(path, sum(size_of(part) or 0 for part in several), gguf_header.read_metadata(path))


def _files(paths: Iterable[Path], max_size: int) -> list[_File]:
    """Files of up to `max_size` bytes, each once, without later parts of split models."""
    # realpath, as `Path.resolve` raises an error for links to each other.
    several = {os.path.realpath(path): path for path in itertools.islice(paths, _MAX_FILES)}
    return [
        _read(path)
        for path in several.values()
        if 0 < (size_of(path) or 0) <= max_size and not _LATER_PART.search(path.name)
    ]


def _beside(main: Path) -> Iterator[Path]:
    """The files in the same folder, and in the same repository of the Hub's cache at any commit."""
    yield from content(main.parent, "*.gguf")
    for folder in main.absolute().parents:
        if folder.name == "snapshots":
            yield from content(folder, "**/*.gguf")


def _pairs(main: Path) -> Iterator[tuple[str, PairEntry]]:
    """The pairs of models.toml with a main model whose file has this name."""
    for name, pair in catalog.pairs().items():
        entry = catalog.models().get(pair.main)
        if entry and (entry.file or entry.files[0]).rpartition("/")[2] == main.name:
            yield name, pair


def _verdict(main: str, draft: Path) -> Path:
    """The file with the reason why a draft is not used; it is empty for one that may be.

    main: the fingerprint of the main model.
    """
    return user_folder("cache") / "drafters" / fingerprint(draft, main)


def _share_tokens(main: Tokens | None, draft: Tokens | None) -> bool:
    """Apply the rule of `spec_local.llama.compatibility` to the tokens in two files."""
    if not main or not draft or main.tokenizer != draft.tokenizer:
        return False
    end = min(len(main), len(draft))
    return (
        abs(len(main) - len(draft)) <= MAX_SIZE_DIFFERENCE
        and end > FIRST_COMPARED
        and main.between(FIRST_COMPARED, end) == draft.between(FIRST_COMPARED, end)
    )
