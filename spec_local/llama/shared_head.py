"""A llama.cpp context of a head, whose rows share each call."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_local.core.language_model import Call, Logits
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.float_rows import FloatRows
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject, Pointer
from spec_local.llama.shared_context import CACHE_TYPES, SharedContext

if TYPE_CHECKING:
    from spec_local.llama.heads import HeadRow

_ROW_OUTPUTS, _MIN_OUTPUTS = 8, 32  # rows of logits of a call: for each row, and at least


class SharedHead:
    """What the rows of a head have in common: a `SharedModel`.

    Its settings are those of the main model's context.

    Args:
        model: the head's file.
        main: the main model's context, which is kept open as long as this one.
        n_rows: number of rows.
        kv_bytes: size of the cache.
        params: fields of llama.cpp's context parameters.

    Attributes:
        rows: the `HeadRow` of each row (weak references).
        zeros: a state of zeros, where none is known.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    encodes = False
    """Whether the main model's states are encoded before the head reads them."""
    skips_first = False
    """Whether there is no pair for the first token."""
    returns_all = False
    """Whether a call has logits for all tokens of a row or for none."""

    def __init__(self, model: Model, main: SharedContext, n_rows: int, kv_bytes: int, **params: Any) -> None:
        self.model, self.n_vocab, self.n_ctx = model, model.vocabulary.n_tokens, main.n_ctx
        self.threads, self.cache_type = main.threads, main.cache_type
        self.max_tokens = main.max_tokens
        self.max_logits = min(self.max_tokens, max(_MIN_OUTPUTS, _ROW_OUTPUTS * n_rows))
        self.zeros = np.zeros(model.n_embd, np.float32)
        self.rows: weakref.WeakSet[HeadRow] = weakref.WeakSet()
        check_free_memory(kv_bytes, f"for the cache of {model.path.name}")
        self._lib = lib = runtime.library()
        self._extensions = runtime.extensions()
        given = lib.llama_context_default_params()
        given.n_ctx = n_rows * self.n_ctx
        given.n_batch = given.n_ubatch = self.max_tokens
        given.n_seq_max = n_rows + 1  # one for the states to encode, which do not enter the cache
        given.n_outputs_max = max(self.max_logits, n_rows + 1)
        given.n_threads = given.n_threads_batch = self.threads
        given.kv_unified = given.swa_full = True
        given.type_k = given.type_v = getattr(lib, f"GGML_TYPE_{self.cache_type.upper()}")
        if main.flash_attention is not None:
            given.flash_attn_type = int(main.flash_attention)
        elif CACHE_TYPES[self.cache_type] < CACHE_TYPES["f16"]:
            given.flash_attn_type = 1
        for name, value in params.items():
            setattr(given, name, value)
        runtime.clear_log()
        with runtime.deferred_signals():
            handle: int = lib.llama_init_from_model(model.handle, given)
        if not handle:
            raise BackendError(
                f"llama.cpp could not create a context for {model.path.name} ({runtime.failure_reason()}): "
                "give a smaller --ctx, or draft without it"
            )
        self.native = NativeObject(lib.llama_free, handle, "context", model.handle, main.handle)
        # Not masked: masked, llama.cpp returns the rows of the first tokens instead of the wanted ones.
        self._extensions.llama_set_embeddings_nextn(self.handle, True, False)
        self._memory_address: int = lib.llama_get_memory(self.handle)
        self._batch = Batch(lib, self.max_tokens, width=model.n_embd)
        self._logits = FloatRows(self.native, self.max_logits, self.n_vocab)
        self._outputs = FloatRows(self.native, self.max_tokens, model.n_embd)

    def close(self) -> None:
        """Free the memory; logits that were returned must not be used any more."""
        self.native.close()

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self.native.pointer

    @property
    def _memory(self) -> Pointer:
        return self.native.inner(self._memory_address)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove the entries of a row from a position on; returns whether llama.cpp did so."""
        if self.skips_first and start == 1:
            start = 0  # the first token's entry, if there is one, only took the place of a missing one
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let a row, which must be empty, share the first entries of another one."""
        if length > self.skips_first:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, int(self.skips_first), length)

    def length(self, sequence: int) -> int:
        """Number of tokens in the cache of a row."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def decode(self, calls: Sequence[Call]) -> Sequence[Logits]:
        """Evaluate tokens of some of the rows in one call: see `SharedModel.decode`."""
        n_tokens = sum(len(call.tokens) for call in calls)
        n_logits = sum(call.n_logits for call in calls)
        if not 1 <= n_tokens <= self.max_tokens or n_logits > self.max_logits:
            raise InvalidRequest(f"{n_tokens} tokens and {n_logits} rows of logits in one call of a head")
        # Where logits of all tokens are computed, llama.cpp returns those of the first ones of the batch.
        ordered = sorted(calls, key=lambda call: not call.n_logits)
        code, done = -1, False
        try:
            self._encode(calls)
            self._fill_batch(ordered)
            runtime.clear_log()
            code = self._lib.llama_decode(self.handle, self._batch.native)
            found = {} if code else self._results(ordered)
            done = not code
        finally:
            if not done:
                for call in calls:
                    call.row.resync()  # type: ignore[attr-defined]  # a HeadRow
        if code == 1:
            raise ContextOverflow(f"the cache of a head has no room for {n_tokens} more tokens")
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {n_tokens} tokens of {self.model.path.name} "
                f"(code {code}, {runtime.failure_reason()}): draft without it"
            )
        return [found[id(call)] for call in calls]

    def _encode(self, calls: Sequence[Call]) -> None:
        """Encode the states that the rows have received."""

    def _fill_batch(self, calls: Sequence[Call]) -> None:
        n = 0
        for call in calls:
            call.row.fill_batch(self._batch, n, call, call.n_logits)  # type: ignore[attr-defined]  # a HeadRow
            n += len(call.tokens)
        self._batch.native.n_tokens = n

    def _results(self, calls: Sequence[Call]) -> dict[int, Logits]:
        """The logits of each call, in the order of the batch; hands their outputs to the rows."""
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        logits: Logits = np.empty((0, self.n_vocab), np.float32)
        if any(call.n_logits for call in calls):
            logits = self._logits.at(self._lib.llama_get_logits(self.handle))
        found: dict[int, Logits] = {}
        n_tokens = n_logits = 0
        for call in calls:
            n_tokens += len(call.tokens)
            call.row.on_evaluated(outputs[n_tokens - 1])  # type: ignore[attr-defined]  # a HeadRow
            found[id(call)] = logits[n_logits : n_logits + call.n_logits]
            n_logits += call.n_logits
        return found
