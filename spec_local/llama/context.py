"""A llama.cpp context: the KV cache of one or several sequences, and one call to extend them.

llama.cpp answers a wrong call with an assertion that kills the process, so that every argument is checked
here first. Positions are never passed in: a token's position is the length of its sequence's cache.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.language_model import Logits
from spec_local.llama import runtime
from spec_local.llama.model import Model

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
CACHE_TYPES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # name of --cache-type: bytes a value


def default_threads() -> int:
    """Threads that decode fastest on most machines: one per physical core."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Row:
    """What one `Context.evaluate_rows` call appends to one sequence."""

    sequence: int
    tokens: Sequence[int]
    n_logits: int


class Context:
    """KV caches of `n_sequences` sequences over one model. Sequence 0 speaks `LanguageModel`.

    Args:
        model: stays alive as long as the context.
        n_ctx: tokens that all sequences together can hold.
        n_sequences: 1 to 256; they share one cache (`kv_unified`), so that they may share a prefix.
        max_tokens: most tokens a call; also the physical batch, so that one call is one pass over the weights.
            Prefill is no faster with more (on a CPU), the compute buffers grow with it, and Ctrl-C waits for it.
        max_logits: most rows of logits a call; llama.cpp reserves memory for them.
        threads: for single tokens and for batches alike; None: one per physical core.
        cache_type: ``f16``, ``q8_0`` or ``q4_0`` keys and values.
        flash_attention: None leaves it to llama.cpp; a quantized cache needs it.

    Raises:
        InvalidRequest: an argument is out of range.
        ContextOverflow: the cache would not fit into free memory.
        BackendError: llama.cpp could not make the context.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 4096,
        n_sequences: int = 1,
        max_tokens: int = 96,
        max_logits: int = 65,
        threads: int | None = None,
        cache_type: str = "f16",
        flash_attention: bool | None = None,
    ) -> None:
        threads = default_threads() if threads is None else threads
        for name, value, low, high in [
            ("the context length", n_ctx, 1, 1 << 24),
            ("the number of sequences", n_sequences, 1, MAX_SEQUENCES),
            ("the batch size", max_tokens, 1, 1 << 16),
            ("the number of logit rows", max_logits, 1, 1 << 16),
            ("the number of threads", threads, 1, 512),
        ]:
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}: give {low} to {high}")
        if cache_type not in CACHE_TYPES:
            raise InvalidRequest(f"cache type {cache_type!r} is unknown: give {', '.join(CACHE_TYPES)}")
        if cache_type != "f16" and flash_attention is False:
            raise InvalidRequest(f"a {cache_type} cache needs flash attention: leave it on")
        need = model.kv_bytes(n_ctx, CACHE_TYPES[cache_type])
        need += 2 * n_ctx * min(max_tokens, n_ctx)  # the attention mask, in f16
        free = psutil.virtual_memory().available
        if need > free:
            raise ContextOverflow(
                f"a context of {n_ctx} tokens needs {need >> 20} MiB and {free >> 20} MiB are free: give a smaller --ctx"
            )
        self.model = model
        self.n_vocab = model.vocabulary.n_tokens
        self.n_ctx = n_ctx
        self.max_tokens = max_tokens = min(max_tokens, n_ctx)
        self.max_logits = min(max_logits, max_tokens)
        self._lib = lib = runtime.library()
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = max_tokens
        # llama.cpp reserves a compute buffer of n_outputs_max rows, and asserts on it; a row a sequence is
        # the least that it takes.
        params.n_outputs_max = max(self.max_logits, n_sequences)
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True  # with a cut window, rolling back reports success and loses tokens
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        elif cache_type != "f16":
            params.flash_attn_type = 1
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        runtime.forget_complaints()
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise BackendError(
                f"llama.cpp could not make a context of {n_ctx} tokens "
                f"({runtime.reason('it gave no reason')}): give a smaller --ctx or another --cache-type"
            )
        self._owner = _Owner()
        # The model must outlive the context, and weakref.finalize runs newest first at exit.
        self.close = weakref.finalize(self._owner, _free, lib, self.handle, model)
        self._memory = lib.llama_get_memory(self.handle)
        self._tokens: list[list[int]] = [[] for _ in range(n_sequences)]
        self._make_batch(max_tokens)
        self._logits: Logits = np.empty((0, self.n_vocab), np.float32)
        self._logits_address = 0

    def _make_batch(self, capacity: int) -> None:
        """One batch for all calls: numpy arrays that llama.cpp reads in place."""
        sequences = np.zeros((capacity, 1), np.int32)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "token": np.zeros(capacity, np.int32),
            "pos": np.zeros(capacity, np.int32),
            "logits": np.zeros(capacity, np.int8),
            "n_seq_id": np.ones(capacity, np.int32),
            "seq_id": sequences.ctypes.data + np.arange(capacity, dtype=np.uint64) * sequences.itemsize,
        }
        batch = self._batch = self._lib.llama_batch()
        for name, array in arrays.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, dict(batch._fields_)[name]))
        self._arrays = arrays  # nobody else would keep them
        # A call has few tokens, and for few entries a memoryview is several times quicker than numpy.
        self._ids, self._positions, self._wanted = (arrays[name].data for name in ("token", "pos", "logits"))
        self._sequences = sequences[:, 0].data

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of sequence 0, in order."""
        return self._tokens[0]

    def tokens(self, sequence: int) -> Sequence[int]:
        """The cached tokens of a sequence, in order. Do not change them."""
        self._check_sequence(sequence)
        return self._tokens[sequence]

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to sequence 0: see `LanguageModel.evaluate`."""
        return self.evaluate_rows([Row(0, tokens, n_logits)])

    def evaluate_rows(self, rows: Sequence[Row]) -> Logits:
        """Append tokens to several sequences in ONE llama_decode.

        Returns:
            float32 (sum of the rows' n_logits, n_vocab), in the order of the rows; a view that the
            next call overwrites or moves: copy what you want to keep.

        Raises:
            InvalidRequest: a sequence, a token or a size out of range, or a sequence named twice.
            ContextOverflow: the caches have no room for the tokens; nothing has changed.
            BackendError: llama.cpp failed; each cache holds what it held, or a prefix of what was asked (a
                recurrent model's may hold nothing).
        """
        n_tokens, n_logits = self._fill_batch(rows)
        self._batch.n_tokens = n_tokens
        runtime.forget_complaints()
        lengths = [len(self._tokens[row.sequence]) for row in rows]
        code = -1
        try:
            for row in rows:
                self._tokens[row.sequence].extend(row.tokens)
            code = self._lib.llama_decode(self.handle, self._batch)
        finally:
            if code:  # failed, or interrupted by a Python signal handler: believe the cache, not the plan
                for row, length in zip(rows, lengths, strict=True):
                    self._resync(row.sequence, length)
        if code == 1:
            raise ContextOverflow(
                f"the KV cache has no room for {n_tokens} more tokens: start a new conversation or give a larger --ctx"
            )
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {n_tokens} tokens "
                f"(code {code}, {runtime.reason('no reason given')}): try again, and run specdec doctor if it stays so"
            )
        return self._read_logits(n_logits)

    def _fill_batch(self, rows: Sequence[Row]) -> tuple[int, int]:
        """Check what is asked and write it into the batch; its numbers of tokens and of rows of logits."""
        n_tokens = sum(len(row.tokens) for row in rows)
        n_logits = sum(row.n_logits for row in rows)
        if not 1 <= n_tokens <= self.max_tokens:
            raise InvalidRequest(f"{n_tokens} tokens in one call: give 1 to {self.max_tokens}")
        if n_logits > self.max_logits:
            raise InvalidRequest(f"{n_logits} rows of logits in one call: ask for at most {self.max_logits}")
        if len(rows) > 1 and len({row.sequence for row in rows}) < len(rows):
            raise InvalidRequest("a sequence stands twice in one call: put its tokens into one row")
        i = 0
        for row in rows:
            tokens = row.tokens
            n = len(tokens)
            self._check_sequence(row.sequence)
            if not 0 <= row.n_logits <= n or not n:
                raise InvalidRequest(f"{row.n_logits} rows of logits of {n} tokens: ask for 0 to all")
            if min(tokens) < 0 or max(tokens) >= self.n_vocab:
                raise InvalidRequest(f"a token is outside of the vocabulary: give 0 to {self.n_vocab - 1}")
            start = len(self._tokens[row.sequence])
            if start + n > self.n_ctx:
                raise ContextOverflow(
                    f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger --ctx"
                )
            for j, token in enumerate(tokens):
                self._ids[i] = token
                self._positions[i] = start + j
                self._sequences[i] = row.sequence
                self._wanted[i] = j >= n - row.n_logits
                i += 1
        return n_tokens, n_logits

    def _read_logits(self, n: int) -> Logits:
        if not n:
            return np.empty((0, self.n_vocab), np.float32)
        pointer = self._lib.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp returned no logits: this model cannot write text")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            view = (ctypes.c_float * (self.max_logits * self.n_vocab)).from_address(address)
            view.owner = self._owner  # type: ignore[attr-defined]  # who holds the logits holds their memory
            flat: Logits = np.frombuffer(memoryview(view), np.float32)
            self._logits, self._logits_address = flat.reshape(-1, self.n_vocab), address
        return self._logits[:n]

    def trim(self, length: int, sequence: int = 0) -> None:
        """Roll a sequence's cache back to its first `length` tokens.

        Raises:
            ModelError: a recurrent or hybrid model cannot forget its last tokens (forgetting all works).
        """
        self._check_sequence(sequence)
        tokens = self._tokens[sequence]
        if not 0 <= length <= len(tokens):
            raise InvalidRequest(f"cannot trim {len(tokens)} cached tokens to {length}")
        if length == len(tokens):
            return
        removed = False
        try:
            removed = self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1)
        finally:  # an interrupt may come between the two: believe the cache
            del tokens[self._cached_length(sequence) :]
        if not removed:
            raise ModelError(
                "this model is recurrent and cannot roll its state back: use it without a draft (--no-spec)"
            )

    def fork(self, source: int, target: int) -> None:
        """Make sequence `target` hold what `source` holds, sharing the cells (no data is copied)."""
        self._check_sequence(source)
        self._check_sequence(target)
        if source == target:
            return
        self.trim(0, target)
        try:
            self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        finally:
            self._tokens[target] = list(self._tokens[source][: self._cached_length(target)])

    def _check_sequence(self, sequence: int) -> None:
        # A negative one would mean every sequence to llama.cpp, and the last to a list.
        if not 0 <= sequence < len(self._tokens):
            raise InvalidRequest(f"sequence {sequence} does not exist: give 0 to {len(self._tokens) - 1}")
        if not (self.close.alive and self.model.close.alive):
            raise InvalidRequest("the context or its model is closed: open it again")

    def _cached_length(self, sequence: int) -> int:
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def _resync(self, sequence: int, before: int) -> None:
        """Make the token list say what the cache holds, after a call that began at length `before`."""
        length = self._cached_length(sequence)
        if length != before and not self.model.can_roll_back:
            length = 0  # the one running state may have been left half-way: nothing of it can be trusted
        del self._tokens[sequence][length:]
        self._lib.llama_memory_seq_rm(self._memory, sequence, len(self._tokens[sequence]), -1)


class _Owner:
    """Lives as long as the context or anybody's view of its logits; the context is freed after it."""


def _free(lib: Any, handle: int, model: Model) -> None:
    if model.close.alive:  # llama.cpp reads the model while it frees; losing memory is better than a crash
        lib.llama_free(handle)
