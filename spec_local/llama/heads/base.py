"""The base of all heads on llama.cpp: their context and cache, and the attributes of their rows."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spec_local.core.calls import Call
from spec_local.core.language_model import Rollback, RowMethods, States
from spec_local.errors import BackendError, ContextOverflow
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES, LlamaContext
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_object import ContextOwner, ContextUser, NativeObject, Pointer


class HeadContext(ContextOwner):
    """The llama.cpp context of a head, with the settings of the main model's context.

    Args:
        model: the head's file.
        main: the main model's context, which is kept open as long as this one.
        n_cells: number of entries of the cache.
        kv_bytes: size of the cache.
        max_tokens: maximum number of tokens per call.
        n_sequences: number of sequence ids.
        n_outputs: maximum number of rows of logits that llama.cpp computes in a call.
        params: other fields of llama.cpp's context parameters.

    Attributes:
        rows: the rows (weak references).

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    def __init__(
        self,
        model: Model,
        main: LlamaContext,
        *,
        n_cells: int,
        kv_bytes: int,
        max_tokens: int,
        n_sequences: int,
        n_outputs: int,
        **params: Any,
    ) -> None:
        self.model, self.n_vocab, self.n_ctx = model, model.vocabulary.n_tokens, main.n_ctx
        self.threads, self.cache_type = main.threads, main.cache_type
        self.max_tokens = max_tokens
        self.rows: weakref.WeakSet[Any] = weakref.WeakSet()
        check_free_memory(kv_bytes, f"for the cache of {model.path.name}")
        self._lib = lib = runtime.library()
        self._extensions = runtime.extensions()
        given = lib.llama_context_default_params()
        given.n_ctx = n_cells
        given.n_ubatch = max_tokens
        # For a model with an encoder, it is also the limit of rows of logits, and each sequence needs one.
        given.n_batch = max(max_tokens, n_sequences)
        given.n_seq_max = n_sequences
        given.n_outputs_max = n_outputs
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
                "give a smaller --ctx, or --draft none"
            )
        self.native = NativeObject(lib.llama_free, handle, "context", model.handle, main.handle)
        self._memory_address: int = lib.llama_get_memory(self.handle)

    @property
    def _memory(self) -> Pointer:
        return self.native.inner(self._memory_address)

    def length(self, sequence: int) -> int:
        """Number of tokens in the cache of a row."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def _check_code(self, code: int, n_tokens: int) -> None:
        """Raise an error if a call of llama_decode has failed."""
        if code == 1:
            raise ContextOverflow(f"the cache of a head has no room for {n_tokens} more tokens")
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {n_tokens} tokens of {self.model.path.name} "
                f"(code {code}, {runtime.failure_reason()}): use another draft, or --draft none"
            )


class HeadRow(ContextUser, RowMethods, ABC):
    """A row of a head, as a session sees it: a `Row` and a `Head`.

    Args:
        context: what the rows have in common.
        index: number of this row.
    """

    rollback: Rollback = "any"
    pad_to = None
    context: HeadContext
    max_branches: int
    max_logits: int
    drafts_blocks = False

    def __init__(self, context: HeadContext, index: int) -> None:
        self.context, self.model = context, context.model
        self.n_vocab, self.n_ctx = context.n_vocab, context.n_ctx
        self.max_tokens = context.max_tokens
        self.draft_tokens = context.model.draft_tokens
        self.threads, self.cache_type = context.threads, context.cache_type
        self._sequence = index
        self._cached: list[int] = []
        self._assumes_states = False
        context.rows.add(self)

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the history that have been evaluated. Do not change them."""
        return self._cached

    def begin_draft(self, n: int) -> None:
        """See `Head.begin_draft`."""

    @contextmanager
    def known_states(self) -> Iterator[None]:
        """Evaluate tokens as if their states were known, and zero, to measure calls; for a ``with`` block."""
        self._assumes_states = True
        try:
            yield
        finally:
            self._assumes_states = False

    @property
    def max_draft(self) -> int:
        """See `Head.max_draft`: any number."""
        return self.n_ctx

    @property
    @abstractmethod
    def n_received(self) -> int:
        """See `Head.n_received`."""

    @abstractmethod
    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""

    @abstractmethod
    async def read(self) -> None:
        """Evaluate the tokens that were received: see `Head.read`."""

    @abstractmethod
    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call[Any]:
        """Prepare a call: see `Row.call`."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `LanguageModel.commit`."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `LanguageModel.truncate`."""

    @abstractmethod
    def resync(self) -> None:
        """Discard the tree, and what llama.cpp's cache lacks, after a failed or interrupted call."""
