"""A GGUF model loaded by llama.cpp."""

import ctypes
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import ModelError
from spec_local.images.media import Media
from spec_local.llama import runtime
from spec_local.llama.devices import OFFLOADED, Offload, usable_gpus
from spec_local.llama.gguf_header import HEADS
from spec_local.llama.gguf_tensors import (
    array,
    bytes_by_type,
    end_of_tensors,
    has_layer,
    has_tensor,
    integers,
    parts,
)
from spec_local.llama.memory import mapped_files, release_mapped_file, shortage
from spec_local.llama.model_file import check_header, failure
from spec_local.llama.native_object import NativeObject, Pointer
from spec_local.llama.vocabulary import Vocabulary
from spec_local.llama.workers import devices as devices_of
from spec_local.text import printable

_SIZE_LABEL = re.compile(r"\d[\w.x-]{0,20}")  # 135M, 0.5B, 8x7B, 30B-A3B
_FEW = 0.01  # of the bytes of all weights: norms and biases have less
_MAX_WINDOW = 1 << 20  # tokens, several times those of known models; llama.cpp allocates it for each branch


class ImageReader(Protocol):
    """What reads images or sound for a model: see `spec_local.llama.projector.Projector`."""

    @property
    def max_span(self) -> int: ...

    @property
    def reads(self) -> tuple[type[Media], ...]: ...

    def items(self, image: Media) -> Sequence[int]: ...

    def close(self) -> None: ...


class Model:
    """The weights and the vocabulary of a GGUF file.

    A damaged file can crash llama.cpp, and with it this process: `setup.probe.check_model_files` tests
    it in a child process first. Any number of threads may use a model at the same time.

    Args:
        path: the file; for a split model, its first part.
        offload: where its layers run; on the CPU without a GPU.
        n_offloaded: number of layers on GPUs, where fewer fit than `offload` asks for.
        weights: False reads only the header; such a model has all properties below, but cannot be evaluated.
        workers: addresses of workers that hold the layers that are offloaded, with this machine's GPUs; see
            `spec_local.llama.workers`.
        load_mtp: load the layers for multi-token prediction, if the file has any. Those of a file without
            other layers are always loaded.

    Attributes:
        native: owner of the ``llama_model``.

    Raises:
        ModelFileError: the file cannot be loaded; the message quotes llama.cpp's reason.
        ContextOverflow: there is not enough memory for it.
        ModelError: the model does not generate text token by token.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        offload: Offload = OFFLOADED,
        n_offloaded: int | None = None,
        weights: bool = True,
        load_mtp: bool = False,
        workers: Sequence[str] = (),
    ) -> None:
        self.path, self.offload, self._has_weights = Path(path), offload, weights
        self.workers = tuple(workers)
        self.n_offloaded = offload.layers if n_offloaded is None else n_offloaded
        self._gpus = usable_gpus(offload)
        self.projector: ImageReader | None = None
        """Reads images or sound for it; None: it reads only text."""
        check_header(self.path)
        self._lib = lib = runtime.library()
        self.native = self._load(load_mtp)
        if not load_mtp and self.is_mtp_file:
            self.native.close()
            self.native = self._load(True)
        handle = lib.llama_model_get_vocab(self.handle)
        self.vocabulary = Vocabulary(lib, handle, self.native)
        has_encoder = lib.llama_model_has_encoder(self.handle) and not self.is_head
        if not lib.llama_model_has_decoder(self.handle) or has_encoder:
            raise ModelError(
                f"{self.path} is an encoder model: use one that generates text, such as Qwen or Llama"
            )
        if lib.llama_model_is_diffusion(self.handle):
            raise ModelError(f"{self.path} is a diffusion model: use one that generates text token by token")
        has_tokenizer = self.vocabulary.type != lib.LLAMA_VOCAB_TYPE_NONE or self.is_head
        if not has_tokenizer or not self.vocabulary.n_tokens:
            raise ModelError(f"{self.path} has no tokenizer: use a complete GGUF file")
        if damage := self._damage():
            raise ModelError(f"{self.path} is damaged ({damage}): download it again")

    def _load(self, load_mtp: bool) -> NativeObject:
        lib, self._load_mtp = self._lib, load_mtp
        params = lib.llama_model_default_params()
        params.n_gpu_layers = max(-1, min(self.n_offloaded, 2**31 - 1))
        params.load_mtp = load_mtp
        # Otherwise layers that are not on a GPU are in memory that it can read, and neither specdec's CPU
        # kernels nor llama.cpp's own repack them.
        params.no_host = True
        # With an empty list, llama.cpp does not even prepare a GPU.
        is_chosen = self.offload.gpu or not self.offload.layers
        devices = devices_of(self.workers, [gpu.pointer for gpu in self._gpus] if is_chosen else None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        if not self._has_weights:
            # Not vocab_only: with it, llama.cpp crashes in calls for the model's shape. mmap is not
            # supported here, either.
            params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        with runtime.deferred_signals():
            with runtime.unlogged():
                handle = self._read(params)
            if not handle:  # again, for the reason in the log
                runtime.clear_log()
                handle = self._read(params)
        if not handle:
            reason = runtime.failure_reason()
            size = sum(part.stat().st_size for part in parts(self.path))
            if self._has_weights and (short := shortage(self.path, size, reason, on_gpu=self.is_on_gpu)):
                raise short
            raise failure(self.path, reason)
        found = NativeObject(functools.partial(_free, lib), handle, "model")
        release_mapped_file(self.path)
        return found

    def _read(self, params: Any) -> int:
        """The address of the ``llama_model`` in the file; 0: llama.cpp did not load it."""
        return int(self._lib.llama_model_load_from_file(os.fsencode(self.path), params) or 0)

    def _damage(self) -> str | None:
        """Return what llama.cpp does not check, and would hang or crash on later; else None."""
        lib = self._lib
        if not self.vocabulary.can_tokenize:
            return "its tokenizer would not end"
        if lib.llama_model_n_swa(self.handle) > _MAX_WINDOW:
            return "its sliding window is too large"
        rotated = [self.number(f"rope.dimension_count{layers}") for layers in ("", "_swa")]
        if 0 in rotated and lib.llama_model_rope_type(self.handle) != lib.LLAMA_ROPE_TYPE_NONE:
            return "its rotary position embedding has no dimension"
        return None

    def close(self) -> None:
        """Free the memory as soon as no call uses it and all contexts of this model are closed."""
        if self.projector:
            self.projector.close()
        self.native.close()

    def image_tokens(self, image: Media) -> Sequence[int]:
        """The tokens and cells of an image or sound: see `spec_local.core.span`.

        Raises:
            ModelError: the model has no projector that reads it, or one that is damaged or of another model.
            BackendError, InvalidRequest: see `Projector.items`.
        """
        return self._projector_of([image]).items(image)

    def check_reads(self, images: Iterable[Media]) -> None:
        """Raise ModelError if the model has no projector for these images and sounds.

        A projector that is damaged shows with the first one.
        """
        self._projector_of(images)

    def _projector_of(self, images: Iterable[Media]) -> ImageReader:
        reads = self.projector.reads if self.projector else ()
        for what in (each.noun.replace("image", "images") for each in images if not isinstance(each, reads)):
            why = "has a projector that reads no" if reads else "has no projector, and reads no"
            raise ModelError(f"{self.name} {why} {what}: give its mmproj file (`mmproj`)")
        assert self.projector
        return self.projector

    def tokenize(self, parts: Sequence[str | Media]) -> list[int]:
        """The tokens of a prompt without a chat template, of texts, images and sounds in any order.

        Each text is tokenized for itself, as by libmtmd.

        Raises:
            InvalidRequest, ModelError, BackendError: see `image_tokens` and `Vocabulary.tokenize`.
        """
        found = [] if isinstance(parts[0], str) else self.vocabulary.tokenize("", add_special=True)
        for i, part in enumerate(parts):
            if isinstance(part, Media):
                found += self.image_tokens(part)
            else:
                found += self.vocabulary.tokenize(part, add_special=not i)
        return found

    @property
    def is_open(self) -> bool:
        return self.native.is_open

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the model; see `NativeObject.pointer`."""
        return self.native.pointer

    @property
    def is_on_gpu(self) -> bool:
        """True if a GPU, or another machine, holds some of its layers."""
        return bool(self.workers or (self._gpus and self.n_offloaded))

    @property
    def uses_cpu(self) -> bool:
        """True if this machine's CPU computes some of its layers."""
        return not self.is_on_gpu or 0 <= self.n_offloaded <= self.n_layers

    @property
    def has_own_memory(self) -> bool:
        """True if all of it is in the memory of separate GPUs, and none in that of this machine."""
        return bool(self._gpus) and not (self.uses_cpu or any(gpu.is_integrated for gpu in self._gpus))

    @property
    def device(self) -> str:
        """Where its layers run on this machine, such as ``CPU`` or ``vulkan0 (20 of 33 layers)``."""
        if not self._gpus or not self.n_offloaded:
            return "CPU"
        names, n = " and ".join(gpu.name for gpu in self._gpus), self.n_layers + 1  # and the output matrix
        return f"{names} ({self.n_offloaded} of {n} layers)" if self.uses_cpu else names

    @property
    def name(self) -> str:
        """The file's name, with U+FFFD in place of bytes that are not UTF-8."""
        return printable(self.path.name)

    @functools.cached_property
    def n_ctx_train(self) -> int:
        """Context length in training, in tokens; 0 if unknown."""
        return max(0, int(self._lib.llama_model_n_ctx_train(self.handle)))

    @functools.cached_property
    def n_ctx_original(self) -> int | None:
        """Context length before extension (longrope), or None. Longer contexts use different rotations."""
        return self.number("rope.scaling.original_context_length")

    def n_ctx(self, wanted: int) -> int:
        """Return the wanted context length, limited to the training context if that is known."""
        return min(wanted, self.n_ctx_train or wanted)

    @functools.cached_property
    def architecture(self) -> str:
        """Architecture, such as ``qwen2``."""
        return self.text("general.architecture") or ""

    @property
    def is_head(self) -> bool:
        """True if it is a head: it reads another model's hidden states and shares its tokens."""
        return self.architecture in HEADS or self.is_mtp_file

    @functools.cached_property
    def is_mtp_file(self) -> bool:
        """True if its only layers are those for multi-token prediction of a model in another file."""
        has_any = bool(self.number("nextn_predict_layers"))
        return has_any and not any(has_layer(part, 0) for part in parts(self.path))

    @functools.cached_property
    def n_layers(self) -> int:
        """Number of layers, without those for multi-token prediction."""
        return int(self._lib.llama_model_n_layer(self.handle))

    @functools.cached_property
    def n_later(self) -> int:
        """Number of layers in a second model of a head's file: see `spec_local.llama.later_model`."""
        return (self.number("later_layers") or 0) if self.is_head else 0

    @functools.cached_property
    def n_nextn(self) -> int:
        """Number of layers for multi-token prediction; 0 if they are not loaded."""
        n = int(self._lib.llama_model_n_layer_nextn(self.handle)) if self._load_mtp else 0
        if not n:
            return 0
        # Some headers list layers of another file. llama.cpp aborts the process if it evaluates them.
        name = f"blk.{self.n_layers}.nextn.eh_proj.weight"
        return n if any(has_tensor(part, name) for part in parts(self.path)) else 0

    @functools.cached_property
    def n_embd(self) -> int:
        """Width of the hidden states."""
        return int(self._lib.llama_model_n_embd(self.handle))

    @functools.cached_property
    def n_state(self) -> int:
        """Width of the states that layers for multi-token prediction read: several, of residual streams."""
        return int(self._lib.llama_model_n_embd_out(self.handle))

    @functools.cached_property
    def n_embd_input(self) -> int:
        """Width of the vectors that it takes in place of tokens; some have more for later layers."""
        return int(self._lib.llama_model_n_embd_inp(self.handle))

    @functools.cached_property
    def n_axes(self) -> int:
        """Number of positions by which each vector in place of a token is rotated: 4 with M-RoPE, else 1."""
        lib = self._lib
        several = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
        return 4 if lib.llama_model_rope_type(self.handle) in several else 1

    @functools.cached_property
    def target_layers(self) -> tuple[int, ...]:
        """Numbers of the main model's layers whose input a head reads."""
        n, ids = (runtime.target_layers(name)(self.handle) for name in ("_n", ""))
        return tuple(ids[:n])

    @functools.cached_property
    def draft_tokens(self) -> NDArray[np.intp] | None:
        """The tokens that a head can draft, ascending; None: all of them."""
        if not self.is_head:
            return None
        key = f"{self.architecture}.draft_tokens"
        ids = array(self.path, key) if self.n_later else integers(self.path, "d2t")
        return None if ids is None else np.unique(ids).astype(np.intp)

    @functools.cached_property
    def size(self) -> int:
        """Size of all tensors in bytes."""
        later = self.path.stat().st_size - end_of_tensors(self.path) if self.n_later else 0
        return int(self._lib.llama_model_size(self.handle)) + max(0, later)

    @functools.cached_property
    def bytes_by_type(self) -> dict[str, int]:
        """Size of all tensors by type, such as ``Q4_K``."""
        total: dict[str, int] = {}
        for part in parts(self.path):
            for kind, size in bytes_by_type(part).items():
                total[kind] = total.get(kind, 0) + size
        return total

    @property
    def types(self) -> set[str]:
        """Types of the weights, without those that take next to no memory, such as the norms' F32."""
        sizes = self.bytes_by_type
        return {kind for kind, size in sizes.items() if size > _FEW * sum(sizes.values())}

    @functools.cached_property
    def parameters(self) -> str:
        """Number of parameters as the model is named, such as ``0.5B``; counted if the file has no name."""
        label = self.text("general.size_label") or ""
        return label if _SIZE_LABEL.fullmatch(label) else size_label(self._n_parameters)

    @functools.cached_property
    def _n_parameters(self) -> int:
        return int(self._lib.llama_model_n_params(self.handle))

    @functools.cached_property
    def description(self) -> str:
        """Architecture, number of parameters and quantization, such as ``qwen2 1.5B Q4_K - Medium``."""
        buffer = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self.handle, buffer, len(buffer))
        # The second word is llama.cpp's own name for the number of parameters: 256M for a model of 135M.
        architecture, _, rest = buffer.value.decode("utf-8", "replace").partition(" ")
        kind = rest.partition(" ")[2].removeprefix("(guessed) ")  # heads do not state it
        return f"{architecture} {self.parameters} {kind}"

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """True if some layers are recurrent: they have one state for all tokens, which has no positions."""
        return self.is_hybrid or bool(self._lib.llama_model_is_recurrent(self.handle))

    @functools.cached_property
    def is_hybrid(self) -> bool:
        """True if some layers are recurrent, and others are not."""
        return bool(self._lib.llama_model_is_hybrid(self.handle))

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent layers' state of one sequence; 0: there are none, or no weights."""
        if not self.is_recurrent or not self._has_weights:
            return 0
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32, 1, 1, 1
        context = lib.llama_init_from_model(self.handle, params)
        if not context:
            return 0
        try:
            if lib.llama_decode(context, lib.llama_batch_get_one((ctypes.c_int32 * 1)(0), 1)):
                return 0
            return int(lib.llama_state_seq_get_size_ext(context, 0, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))
        finally:
            lib.llama_free(context)

    @functools.cached_property
    def has_window(self) -> bool:
        """True if some layers use sliding-window attention."""
        return bool(self._lib.llama_model_n_swa(self.handle) > 0)

    @functools.cached_property
    def n_experts(self) -> int:
        """Number of experts of a layer; 0: a dense model."""
        return self.number("expert_count") or 0

    @functools.cached_property
    def chat_template(self) -> str | None:
        """The Jinja chat template in the file, or None."""
        text = self._lib.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    def kv_bytes(self, n_ctx: int, bytes_per_value: float = 2.0) -> int:
        """Return the size in bytes of a KV cache of `n_ctx` tokens: all layers, without sliding windows."""
        lib = self._lib
        if lib.llama_model_is_recurrent(self.handle):
            return 0  # the size of a recurrent state does not depend on the context length
        head = lib.llama_model_n_embd(self.handle) // max(1, lib.llama_model_n_head(self.handle))
        # In Qwen3 and Gemma, heads are wider than n_embd / n_head.
        lengths = [self.number(f"attention.{part}_length") for part in ("key", "value")]
        width = sum(head if n is None else n for n in lengths)
        n_heads = max(1, lib.llama_model_n_head_kv(self.handle))
        return int((self.n_layers + self.n_later) * n_heads * width * n_ctx * bytes_per_value)

    def number(self, key: str) -> int | None:
        """A number in the file's header, by its name without the architecture; None: there is none."""
        value = self.text(f"{self.architecture}.{key}")
        return int(value) if value and value.isdecimal() else None

    def flag(self, key: str, default: bool) -> bool:
        """A truth value in the file's header, by its name without the architecture."""
        value = self.text(f"{self.architecture}.{key}")
        return default if value is None else value == "true"

    def text(self, key: str) -> str | None:
        """A value in the file's header as text, by its full name; None: there is none."""
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else None


def size_label(n: int) -> str:
    """Format a number of parameters with two or three digits: 3.7M, 135M, 0.5B, 8B, 32B."""
    in_millions = n < 450_000_000  # published models are named 410M and less, or 0.5B and more
    number, unit = (n / 1e6, "M") if in_millions else (n / 1e9, "B")
    return f"{number:.{int(number < 10)}f}".removesuffix(".0") + unit


def _free(lib: Any, address: int) -> None:
    with mapped_files:
        lib.llama_model_free(address)
