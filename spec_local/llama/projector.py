"""A projector (mmproj): turns pictures and sound into vectors that the main model reads in place of tokens.

libmtmd prepares a picture: it is scaled, perhaps cut into tiles, and each tile becomes a span, with tokens
around it as the model expects them. So does each window of a sound, of 30 seconds in most models. The vectors
are computed when a span is evaluated: if the main model knows the picture already, they are not needed.
"""

import ctypes
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.core.span import Span, Vectors
from spec_local.errors import BackendError, InvalidRequest, ModelFileError
from spec_local.images.audio import Audio
from spec_local.images.container import damaged
from spec_local.images.image import Image
from spec_local.images.media import Media
from spec_local.images.sound import MIN_SECONDS
from spec_local.llama import gguf_header, mtmd, runtime
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject
from spec_local.llama.projector_header import readable

_KEPT_IMAGES = 64  # whose tokens are kept; two conversations at their limit
_KEPT_FILES = 256 << 20  # bytes of their files: dozens of photos
_MAX_SPANS = {"gemma3": 256, "gemma4v": 1120, "gemma4uv": 1120}
"""Most cells of a picture whose cells attend to all of it, by the projector's type, as in libmtmd."""
_PLACED_BY_TEXT = ("hunyuanvl", "deepseek4v")
"""Types whose pictures depend on the text before them, which `items` does not know."""
_PLACEHOLDERS = (
    *("<image_soft_token>", "<|image_pad|>", "<image>", "<|image|>", "[IMG]"),
    *("<|AUDIO|>", "[AUDIO]"),
)
"""How models name the token that stands for each cell of a picture or sound."""
_BYTES = ctypes.POINTER(ctypes.c_uint8)
_FLOAT_BYTES = 4
_BEYOND = bytes(4096)  # after an encoded sound: what miniaudio reads of a damaged frame is still memory
_LOUDEST = 1e6  # where full scale is 1, or 32,768 in some files: the squares of larger samples can overflow
_WINDOW_S = 30  # seconds of a sound that are encoded at a time, by all types of more than one window


class Projector:
    """The projector of a main model. Any number of threads may use it.

    Args:
        path: its file.
        kind: its type, as in the file.
        model: the main model, which stays open as long as it.
        threads: number of threads for encoding.
        check: called before the file is opened for the first time; raises its error.

    Raises (with the first picture):
        ModelFileError: the file cannot be loaded, or is of another model.
        BackendError: libmtmd is missing.

    Attributes:
        kept_bytes: of vectors that are kept: those of dozens of images.
        reads: the kinds of files that it reads.
        max_span: maximum number of cells of a picture that must be evaluated in one call; 0: any part can.
    """

    kept_bytes = 256 << 20

    def __init__(
        self, path: Path, model: Model, kind: str, threads: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self._model, self._threads = path, model, threads
        self.reads = readable(gguf_header.read_metadata(path))
        self.max_span = _MAX_SPANS.get(kind, 0)
        self._kind, self._check, self._lock = kind, check, threading.RLock()
        self._native: NativeObject | None = None
        self._items: OrderedDict[bytes, tuple[Media, Sequence[int]]] = OrderedDict()  # by the file's hash
        self._vectors: OrderedDict[bytes, Sequence[Vectors]] = OrderedDict()  # of its spans
        # Copies of a file that has been replaced meanwhile would be cells of another picture.
        stat = path.stat()
        self._identity = f"{path.name} {stat.st_size} {stat.st_mtime_ns} {model.path.name}".encode()

    def close(self) -> None:
        """Free the memory as soon as no call uses it."""
        with self._lock:
            if self._native:
                self._native.close()
            self._native = None
            self._items.clear()
            self._vectors.clear()

    def items(self, image: Media) -> Sequence[int]:
        """The tokens and cells of a picture or sound, as they stand in a prompt.

        Raises:
            ModelFileError, BackendError: see the class.
            InvalidRequest: the picture cannot be prepared.
        """
        with self._lock:
            known = self._items.pop(image.hash, None)
            found = known[1] if known else self._prepared(image)
            self._items[image.hash] = image, found
            while len(self._items) > 1 and (
                len(self._items) > _KEPT_IMAGES
                or sum(len(each.data) for each, _ in self._items.values()) > _KEPT_FILES
            ):
                self._items.popitem(last=False)
            return found

    def _prepared(self, image: Media) -> Sequence[int]:
        lib, found, n_spans = mtmd.library(), list[int](), 0
        with self._chunks(image) as chunks:
            for chunk in chunks.all():
                if lib.mtmd_input_chunk_get_type(chunk) == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    found += chunks.tokens(chunk)
                    continue
                span = Span(
                    hashlib.sha256(b"%s %s %d" % (self._identity, image.hash, n_spans)).digest(),
                    chunks.offsets(chunk),
                    int(lib.mtmd_input_chunk_get_n_pos(chunk)),
                    lambda number=n_spans: self._encoded(image, number),  # type: ignore[misc]
                    is_causal=not lib.mtmd_decode_use_non_causal(self._handle, chunk),
                    placeholder=self._placeholder,
                )
                n_spans += 1
                found += span.cells
        if not n_spans:
            raise InvalidRequest(f"{image!r} has no tokens for {self.path.name}: use another {image.noun}")
        return found

    def _encoded(self, image: Media, number: int) -> Vectors:
        """The vectors of a span of a picture."""
        with self._lock:
            if (found := self._vectors.pop(image.hash, None)) is None:
                found = self.encode(image)
            self._vectors[image.hash] = found
            while len(self._vectors) > 1 and self._n_bytes > self.kept_bytes:
                self._vectors.popitem(last=False)
            return found[number]

    @property
    def _n_bytes(self) -> int:
        return sum(each.nbytes for vectors in self._vectors.values() for each in vectors)

    def encode(self, image: Media) -> Sequence[Vectors]:
        """Compute the vectors of each span of an image.

        Raises:
            BackendError: libmtmd cannot.
        """
        lib, found, width = mtmd.library(), list[Vectors](), self._model.n_embd_input
        with self._chunks(image) as chunks:
            for chunk in chunks.all():
                if lib.mtmd_input_chunk_get_type(chunk) == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    continue
                runtime.clear_log()
                code = lib.mtmd_encode_chunk(self._handle, chunk)
                output = None if code else lib.mtmd_get_output_embd(self._handle)
                if not output:
                    raise BackendError(
                        f"{self.path.name} could not read {image!r} ({runtime.failure_reason()}): use another"
                    )
                n = int(lib.mtmd_input_chunk_get_n_tokens(chunk))
                found.append(np.ctypeslib.as_array(output, (n, width)).copy())
        return found

    def _chunks(self, image: Media) -> "_Chunks":
        return _Chunks(self._handle, image, self._model.n_axes)

    @property
    def _handle(self) -> Any:
        """libmtmd's context, opened with the first picture."""
        if self._native:
            return self._native.pointer
        if self._kind in _PLACED_BY_TEXT:
            raise ModelFileError(f"{self.path.name} is of the type {self._kind}, which is not supported yet")
        lib = mtmd.library()
        self._check()
        params = lib.mtmd_context_params_default()
        params.use_gpu, params.n_threads = self._model.is_on_gpu, self._threads
        params.print_timings = params.warmup = False
        runtime.clear_log()
        with runtime.deferred_signals():
            handle = lib.mtmd_init_from_file(str(self.path).encode(), self._model.handle, params)
        if not handle:
            raise ModelFileError(
                f"{self.path.name} cannot be used with {self._model.path.name} "
                f"({runtime.failure_reason()}): give the projector of this model (`mmproj`)"
            )
        self._native = NativeObject(lib.mtmd_free, handle, "projector", self._model.handle)
        return self._native.pointer

    @property
    def _placeholder(self) -> int:
        vocabulary = self._model.vocabulary
        found = [token for name in _PLACEHOLDERS for token in vocabulary.control(name)]
        return found[0] if found else max(0, vocabulary.bos)


class _Chunks:
    """libmtmd's parts of a picture or sound; for a ``with`` block.

    Args:
        handle: libmtmd's context.
        n_axes: see `Model.n_axes`.
    """

    def __init__(self, handle: Any, image: Media, n_axes: int) -> None:
        self._lib, self._handle, self._image, self._n_axes = mtmd.library(), handle, image, n_axes

    def __enter__(self) -> "_Chunks":
        lib, bitmap = self._lib, self._bitmap()
        self._chunks = lib.mtmd_input_chunks_init()
        try:
            runtime.clear_log()
            part = lib.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(lib.mtmd_input_part) * 1)(ctypes.pointer(part))
            if lib.mtmd_tokenize_from_parts(self._handle, self._chunks, parts, 1, False):
                raise InvalidRequest(
                    f"{self._image!r} cannot be prepared ({runtime.failure_reason()}): use another"
                )
        except BaseException:
            lib.mtmd_input_chunks_free(self._chunks)
            raise
        finally:
            lib.mtmd_bitmap_free(bitmap)
        return self

    def _bitmap(self) -> Any:
        lib, file = self._lib, self._image
        if isinstance(file, Image):
            pixels = np.ascontiguousarray(file.pixels())
            height, width, _ = pixels.shape
            return lib.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(_BYTES))
        assert isinstance(file, Audio)
        encoded = np.frombuffer(file.samples_file() + _BEYOND, np.uint8)
        data, size = encoded.ctypes.data_as(_BYTES), len(encoded) - len(_BEYOND)
        decoded = lib.mtmd_helper_bitmap_init_from_buf(self._handle, data, size, False)
        if not decoded:
            raise Media.named(damaged("it cannot be decoded", "sound"), file.name)
        try:
            n = lib.mtmd_bitmap_get_n_bytes(decoded) // _FLOAT_BYTES
            samples = ctypes.cast(lib.mtmd_bitmap_get_data(decoded), ctypes.POINTER(ctypes.c_float))
            return self._audible(np.ctypeslib.as_array(samples, (n,)) if n else np.zeros(0, np.float32))
        finally:
            lib.mtmd_bitmap_free(decoded)

    def _audible(self, samples: NDArray[np.float32]) -> Any:
        """libmtmd's copy of samples with which its encoders neither abort nor compute what is no number."""
        rate = int(self._lib.mtmd_get_audio_sample_rate(self._handle))
        least = int(MIN_SECONDS * rate)
        if len(samples) % (_WINDOW_S * rate) < least:  # the last window is too short
            samples = samples[: len(samples) // (_WINDOW_S * rate) * (_WINDOW_S * rate)]
        if not len(samples) or not max(samples.max(), -samples.min()) < _LOUDEST:  # or one is not a number
            raise Media.named(damaged("its samples are no sound", "sound"), self._image.name)
        data = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self._lib.mtmd_bitmap_init_from_audio(len(samples), data)

    def __exit__(self, *_: object) -> None:
        self._lib.mtmd_input_chunks_free(self._chunks)

    def all(self) -> list[Any]:
        """libmtmd's chunks."""
        n = self._lib.mtmd_input_chunks_size(self._chunks)
        return [self._lib.mtmd_input_chunks_get(self._chunks, i) for i in range(n)]

    def tokens(self, chunk: Any) -> list[int]:
        """The tokens of a chunk of text."""
        n = ctypes.c_size_t()
        found = self._lib.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        return list(found[: n.value])

    def offsets(self, chunk: Any) -> NDArray[np.int32]:
        """The positions of the cells of a picture or sound, as in `Span`."""
        n = int(self._lib.mtmd_input_chunk_get_n_tokens(chunk))
        if self._n_axes == 1:
            return np.arange(n, dtype=np.int32)[:, None]
        if isinstance(self._image, Audio):  # all of libmtmd's axes have the same positions
            return np.repeat(np.arange(n, dtype=np.int32)[:, None], self._n_axes, axis=1)
        image = self._lib.mtmd_input_chunk_get_tokens_image(chunk)
        found = [self._lib.mtmd_image_tokens_get_decoder_pos(image, 1, i) for i in range(n)]
        offsets = np.array([(each.t, each.y, each.x, each.z) for each in found], np.int32) - 1
        return offsets if (offsets[:, 3] >= 0).any() else offsets[:, :3]  # else the last one is always 0
