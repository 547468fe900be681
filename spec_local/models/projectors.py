"""Find and check the projector of a main model: the file with which it sees images, or hears (``mmproj``).

A projector turns an image, or sound, into vectors of the width of the main model's embeddings, and belongs to
one model. Only the beginnings of files are read here, which is fast, and safe for damaged ones. What a
projector needs beyond that, such as a type that llama.cpp knows, shows when llama.cpp opens it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spec_local.errors import InvalidRequest, ModelFileError
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.llama import gguf_header
from spec_local.llama.gguf_header import Metadata
from spec_local.llama.model_file import check_gguf
from spec_local.llama.projector_header import Kinds, readable, type_of
from spec_local.models import file_names, ollama, program_folders
from spec_local.models.file_names import ANY, OTHER, SAME
from spec_local.models.names import FOUND_PROJECTOR, NO_PROJECTOR
from spec_local.system.files import expanded, format_size

_QUANTS = {0: "F32", 1: "F16", 7: "Q8_0", 32: "BF16"}  # by `general.file_type`; others rank alike
# The tensor whose shape has the width of a projector's vectors, and the dimension, by llama.cpp's
# `clip_n_mmproj_embd`. The key `projection_dim` comes second: old files have a width of CLIP's own there.
_WIDTHS = (
    ("mm.model.fc.weight", 1),  # Idefics 3 and SmolVLM, Llama 4, DeepSeek-OCR
    ("mm.model.mlp.3.weight", 1),  # InternVL
    ("mm.down.weight", 1),  # GLM-4V, CogVLM
    ("mm.model.peg.0.bias", 0),  # MobileVLM
    ("mm.2.bias", 0),  # Qwen2-VL to Qwen3-VL
    ("mm.2.weight", 1),  # LLaVA, Pixtral, Kimi-VL, LFM2-VL
    ("resampler.proj.weight", 0),  # MiniCPM-V
)
_INPUT_PROJECTION = "mm.input_projection.weight"  # of Gemma: transposed before Gemma 4
_TRANSPOSED = ("gemma3", "gemma3nv")
_FIXED = ("mlp", "ldp", "ldpv2", "gemma3", "idefics3", "internvl", "llama4", "janus_pro")  # size of an image
_MAX_PATCHES = 4 * 4096  # of other types: llama.cpp makes up to 4,096 vectors of an image, each of 4 patches
_MAX_FRAMES = 1500  # of sound: those of a window of 30 seconds, 20 ms each
_WIDE = 4096  # for a width that the file does not give
_ROWS = 6  # of the width of the encoder, for each patch: its input, residual, norm, queries, keys, values
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ProjectorFile:
    """Facts of a projector's file.

    type: llama.cpp's name of it, such as ``gemma3``. name: of the model in the file; may be empty.
    has_vision, has_audio: what it encodes. reads: the kinds of files, of these, that are supported here.
    image_size: width and height in pixels that it was trained for; many types accept others. None: unknown.
    width: numbers in a vector that the main model reads; None: unknown.
    quantization: F16, BF16, F32, Q8_0, or "". size: bytes of the file. buffers: bytes of memory, at most,
        that encoding an image takes beside that.
    """

    path: Path
    type: str
    name: str
    has_vision: bool
    has_audio: bool
    reads: Kinds
    image_size: int | None
    width: int | None
    quantization: str
    size: int
    buffers: int

    @property
    def memory(self) -> int:
        """Bytes of memory that a session needs for it, at most."""
        return self.size + self.buffers

    @property
    def description(self) -> str:
        """What it is, in words, such as ``projector for images of 896 × 896 pixels (gemma3), 851 MB``."""
        seen = [what for what, has in (("images", self.has_vision), ("sound", self.has_audio)) if has]
        size = f" of {self.image_size} × {self.image_size} pixels" if self.image_size else ""
        quant = f", {self.quantization}" if self.quantization else ""
        what = f"{' and '.join(reversed(seen))}{size if self.has_vision else ''}"
        return f"projector for {what} ({self.type}){quant}, {format_size(self.size)}"

    @property
    def senses(self) -> str:
        """What a model does with it: ``sees images``, ``hears sound``, or both."""
        return " and ".join({Image: "sees images", Audio: "hears sound"}[kind] for kind in self.reads)

    def mismatch(self, main: Metadata) -> str | None:
        """Why it is not for a main model with this metadata; None: it may be for it, or that is unknown."""
        if (wanted := _input_width(main)) is None or self.width is None or wanted == self.width:
            return None
        return f"it gives vectors of {self.width} numbers, and the model reads {wanted}"

    def fits(self, main: Metadata) -> bool:
        """Return whether it can be for a main model with this metadata (`gguf_header.read_metadata`)."""
        return self.mismatch(main) is None


def describe(path: Path) -> ProjectorFile:
    """Read what a projector's file says of it.

    Raises:
        ModelFileError: it cannot be read, or is no projector.
    """
    check_gguf(path)
    known = gguf_header.read_metadata(path)
    architecture = known.get("general.architecture", "")
    has_vision, has_audio = (bool(known.get(f"clip.has_{kind}_encoder")) for kind in ("vision", "audio"))
    if architecture != "clip" or not (has_vision or has_audio):
        what = f"its architecture is {architecture}" if architecture != "clip" else "it encodes nothing"
        raise ModelFileError(
            f"{path} is not a projector ({what}): give the main model's mmproj file, or `mmproj=none`"
        )
    prefix = "clip.vision" if has_vision else "clip.audio"
    kind = type_of(known, prefix.removeprefix("clip.")) or "mlp"
    size = known.get("clip.vision.image_size")
    return ProjectorFile(
        path=path,
        type=kind,
        name=str(known.get("general.name", "")),
        has_vision=has_vision,
        has_audio=has_audio,
        reads=readable(known),
        image_size=int(size) if isinstance(size, int) else None,
        width=_width(path, kind, known.get(f"{prefix}.projection_dim")),
        quantization=_QUANTS.get(int(known.get("general.file_type", -1)), ""),
        size=path.stat().st_size,
        buffers=_buffers(known, kind, prefix),
    )


def find_projector(main: Path, *, link: bool = True) -> ProjectorFile | None:
    """The projector that is beside a main model; None: there is none.

    These places are searched: the repository of the main model in a cache of the Hub; ollama's manifest of
    the model; what LM Studio and llama.cpp keep of the same repository; else the main model's folder, where
    the projector of another model is not taken: it has the name of the main model in its file's name or in
    its metadata, or names no model and can be for no other model of the folder. Of several, F16 comes before
    BF16, F32 and Q8_0.

    link: of ollama's blobs, whose names say nothing, return a link with the model's name.
    """
    try:
        return _found(main, link=link)
    except OSError:  # a folder that cannot be read, as if nothing was there
        return None


def resolve_projector(main: Path, given: Path | str) -> ProjectorFile | None:
    """Return the projector for a main model; None: it has none, and reads only text.

    given: a file, or the text ``auto`` or ``none``.

    Raises:
        ModelFileError: the file cannot be read, or is no projector that can be used.
        InvalidRequest: it is that of another model.
    """
    if given == NO_PROJECTOR:
        return None
    if given == FOUND_PROJECTOR:
        return find_projector(main)
    projector = describe(expanded(given))
    if not projector.reads:
        raise ModelFileError(
            f"{projector.path} is a projector for sound of the type {projector.type}, which is not "
            "supported: give another one, or `mmproj=none`"
        )
    if reason := projector.mismatch(gguf_header.read_metadata(main)):
        raise InvalidRequest(
            f"{projector.path} is the projector of another model than {main.name} ({reason}): give the one "
            "that was made for it, or `mmproj=none`"
        )
    return projector


def _found(main: Path, *, link: bool) -> ProjectorFile | None:
    metadata = gguf_header.read_metadata(main)
    if not gguf_header.generates_text(metadata):
        return None
    if ollama.keeps(main):  # beside it are the blobs of all models
        kept = ollama.projector(main)
        found = _usable(kept[1], metadata) if kept else None
        return (
            replace(found, path=ollama.linked(*kept, ollama.PROJECTOR)) if kept and found and link else found
        )
    for name, files in _repositories(main):
        if found := _best(name, files, metadata, OTHER):
            return found
    return None if _is_of_llama_cpp(main) else _in_folder(main, metadata)


def _repositories(main: Path) -> Iterator[tuple[str, Mapping[str, Path]]]:
    """The name of a main model among the files of its repository, and these by name: all are of one model."""
    for folder in main.parents:
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            name = main.relative_to(folder).as_posix()
            others = [other for other in program_folders.content(folder.parent) if other != folder]
            for snapshot in (folder, *others):
                paths = [path for path in snapshot.rglob("*.gguf") if file_names.is_projector(path.name)]
                yield name, {path.relative_to(snapshot).as_posix(): path for path in paths}
            return
    files = _projectors_beside(main)
    if files and _is_of_llama_cpp(main):
        from spec_local.models.local_stores import LLAMA_CPP_FILE  # takes 0.2 s, with huggingface-hub

        of_main = LLAMA_CPP_FILE.fullmatch(main.name)
        named = {name: found for name in files if (found := LLAMA_CPP_FILE.fullmatch(name))}
        if of_main:
            same = {name: found for name, found in named.items() if found.group(1, 2) == of_main.group(1, 2)}
            yield of_main[3], {found[3]: files[name] for name, found in same.items()}
    elif files and any(main.parent.parent.parent == root for root in program_folders.lm_studio()):
        yield main.name, files


def _is_of_llama_cpp(main: Path) -> bool:
    """Return whether a file is in llama.cpp's folder, which has those of all repositories side by side."""
    return main.parent in program_folders.llama_cpp()


def _projectors_beside(main: Path) -> dict[str, Path]:
    paths = program_folders.content(main.parent, "*.gguf")
    return {path.name: path for path in paths if file_names.is_projector(path.name)}


def _in_folder(main: Path, metadata: Metadata) -> ProjectorFile | None:
    """The projector in a folder that may have several models."""
    files = _projectors_beside(main)
    if found := _best(main.name, files, metadata, ANY + 1):
        return found
    nameless = {name: path for name, path in files.items() if file_names.likeness(main.name, name) == ANY}
    others = _others(main) if nameless else {}

    def is_for_no_other(projector: ProjectorFile) -> bool:
        return not any(projector.fits(other) for other in others.values())

    return _best(main.name, nameless, metadata, ANY, is_for_no_other)


def _others(main: Path) -> dict[Path, Metadata]:
    """The other models in a main model's folder that a projector could be for, with their metadata."""
    mine = file_names.series(main.name)
    found = {}
    for path in program_folders.content(main.parent, "*.gguf"):
        is_model = not (file_names.is_projector(path.name) or file_names.HEAD.match(path.name))
        if is_model and path != main and file_names.series(path.name) != mine:
            metadata = gguf_header.read_metadata(path)
            if gguf_header.generates_text(metadata):
                found[path] = metadata
    return found


def _best(
    name: str,
    files: Mapping[str, Path],
    metadata: Metadata,
    least: int,
    accepted: Callable[[ProjectorFile], bool] = lambda projector: True,
) -> ProjectorFile | None:
    """The projector for a main model among files by their names.

    Args:
        name, metadata: of the main model.
        least: how well its name has to fit that of the main model; see `file_names.likeness`.
    """
    found = []
    for each, path in files.items():
        shared = file_names.depth(name, each)
        if shared is None or not (projector := _usable(path, metadata)) or not accepted(projector):
            continue
        same = projector.name and projector.name.lower() == str(metadata.get("general.name", "")).lower()
        likeness = SAME if same else file_names.likeness(name, each)
        if likeness >= least:
            rank = -likeness, -shared, file_names.rank(projector.quantization), each
            found.append((rank, projector))
    return min(found, key=lambda ranked: ranked[0])[1] if found else None


def _usable(path: Path, metadata: Metadata) -> ProjectorFile | None:
    """The facts of a projector that can be for a main model; None: it is something else."""
    try:
        projector = describe(path)
    except (ModelFileError, OSError):
        return None
    return projector if projector.reads and projector.fits(metadata) else None


def _input_width(main: Metadata) -> int | None:
    """Numbers in a vector that a main model reads in place of a token; None: unknown."""
    architecture = main.get("general.architecture")
    width = main.get(f"{architecture}.embedding_length")
    more = main.get(f"{architecture}.n_deepstack_layers", 0)
    return width * (1 + int(more)) if isinstance(width, int) else None


def _width(path: Path, kind: str, stated: str | int | float | None) -> int | None:
    """Numbers in a projector's vectors, from the shapes of its tensors or, without them, as it is stated."""
    shapes = gguf_header.read_shapes(path)
    widths = (*_WIDTHS, (_INPUT_PROJECTION, 0 if kind in _TRANSPOSED else 1))
    known = (shapes[name][axis] for name, axis in widths if len(shapes.get(name, ())) > axis)
    width = next(known, int(stated) if isinstance(stated, int) else None)
    # Qwen3-VL's vectors have parts that are added in later layers.
    n_deepstack = sum(name.startswith("v.deepstack.") and name.endswith(".fc2.weight") for name in shapes)
    return None if width is None else width * (1 + n_deepstack)


def _buffers(known: Metadata, kind: str, prefix: str) -> int:
    """Bytes that encoding an image takes at most: of one layer's values for all patches, in F32.

    Each patch has a row of the feed-forward layer, and some of the encoder's width; attention has no matrix
    of its own with llama.cpp's flash attention. llama.cpp reserved 22 of these 31 MB for a projector of
    SmolVLM's shape, and 127 of 184 MB for one of Gemma 3's.
    """
    names = ("embedding_length", "feed_forward_length", "image_size", "patch_size")
    width, inner, size, patch = (known.get(f"{prefix}.{name}") for name in names)
    n_patches = _MAX_PATCHES if prefix == "clip.vision" else _MAX_FRAMES
    if kind in _FIXED and isinstance(size, int) and isinstance(patch, int) and size >= patch > 0:
        n_patches = min(n_patches, (size // patch) ** 2)
    sizes = (value if isinstance(value, int) else _WIDE for value in (width, inner))
    return n_patches * (_ROWS * next(sizes) + next(sizes)) * _F32_BYTES
