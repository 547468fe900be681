"""Bases of the contexts of ordinary models and heads, and of their rows."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.core.calls import Call
from spec_local.core.draft_vocabulary import DraftVocabulary
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime, thread_count
from spec_local.llama.batch import Batch
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject, Pointer


class NativeContext:
    """A ``llama_context`` and its KV cache.

    Args:
        model: kept open as long as the context.
        params: llama.cpp's parameters of the context, without those that follow from the other arguments.
        threads, cache_type, flash_attention: see `spec_local.llama.context.LlamaContext`.
        what: which context it is, for an error.
        advice: what to do if llama.cpp cannot create it.
        fixed_threads: use all threads even if other programs use their cores.
        parents: pointers to other objects that are freed later.

    Attributes:
        lib: llama.cpp's low-level API.
        native: owner of the ``llama_context``.
        rows: the rows (weak references).

    Raises:
        BackendError: llama.cpp could not create the context.
    """

    n_ctx: int
    max_tokens: int

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        threads: int,
        cache_type: str,
        flash_attention: bool | None,
        what: str,
        advice: str,
        fixed_threads: bool = False,
        parents: Sequence[Pointer] = (),
    ) -> None:
        self.model, self.n_vocab = model, model.vocabulary.n_tokens
        self.threads, self.cache_type, self.flash_attention = threads, cache_type, flash_attention
        self.rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lib = lib = runtime.library()
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = True  # otherwise a rollback reports success, but the tokens are gone
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        elif cache_type != "f16":
            params.flash_attn_type = 1
        runtime.clear_log()
        with runtime.deferred_signals():
            handle: int = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise BackendError(
                f"llama.cpp could not create a context {what} ({runtime.failure_reason()}): {advice}"
            )
        self.native = NativeObject(lib.llama_free, handle, "context", model.handle, *parents)
        self._thread_count = None if fixed_threads or model.is_on_gpu else thread_count.adaptive(threads)
        self._memory_address: int = lib.llama_get_memory(self.handle)

    def close(self) -> None:
        """Free the memory; logits that were returned must not be used any more."""
        self.native.close()

    def _decode(self, batch: Batch) -> int:
        """Call llama_decode, with as many threads as the processor has cores for; returns its code."""
        runtime.clear_log()
        if not self._thread_count:
            return int(self.lib.llama_decode(self.handle, batch.native))
        with self._thread_count.call() as n:
            self.lib.llama_set_n_threads(self.handle, n, n)
            return int(self.lib.llama_decode(self.handle, batch.native))

    @contextmanager
    def _only_drafted(self, calls: Sequence[Call[Any]]) -> Iterator[None]:
        """Within the block, compute only the output rows of tokens that the rows of these calls may draft.

        Those that the rows read now are among them.
        """
        tiles: list[NDArray[np.int32] | None] = []
        for call in calls:
            vocabulary: DraftVocabulary | None = call.row.draft_vocabulary
            if vocabulary:
                vocabulary.read(call.tokens)
            if call.n_logits:
                tiles.append(vocabulary.tiles if vocabulary else None)
        chosen = [each for each in tiles if each is not None]
        native = kernels.installed()
        if not native or not chosen or len(chosen) < len(tiles):
            yield
            return
        native.choose_rows(self.n_vocab, chosen[0] if len(chosen) == 1 else np.unique(np.concatenate(chosen)))
        try:
            yield
        finally:
            native.choose_rows(0, None)

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self.native.pointer

    @property
    def memory(self) -> Pointer:
        """llama.cpp's pointer to the KV cache."""
        return self.native.inner(self._memory_address)

    def copy(self, source: int, sequence: int, start: int, end: int) -> None:
        """Add the cells of a sequence at positions from `start` to `end` − 1 to another one; −1: all."""
        self.lib.llama_memory_seq_cp(self.memory, source, sequence, start, end)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove a sequence's cells from a position on; returns whether llama.cpp did so."""
        return bool(self.lib.llama_memory_seq_rm(self.memory, sequence, start, -1))

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence in the cache."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, sequence)) + 1


class NativeRow:
    """A row of a `NativeContext`.

    Args:
        context: what the rows have in common.
        sequence: the row's first sequence id, that of its history.
    """

    context: NativeContext
    can_be_limited = True
    """True if its calls can compute a part of the output rows: see `limit`."""
    draft_vocabulary: DraftVocabulary | None = None
    """The tokens whose output rows its calls compute; None: all. The main model's rows have none."""

    def __init__(self, context: NativeContext, sequence: int) -> None:
        self.context, self.model = context, context.model
        self.threads, self.cache_type = context.threads, context.cache_type
        self.n_vocab, self.n_ctx, self.max_tokens = context.n_vocab, context.n_ctx, context.max_tokens
        self._sequence = sequence
        self._cached: list[int] = []
        context.rows.add(self)

    def close(self) -> None:
        """Free the memory of all rows; logits that were returned must not be used any more."""
        self.context.close()

    @property
    def draft_tokens(self) -> NDArray[np.intp] | None:
        """See `LanguageModel.draft_tokens`."""
        return self.draft_vocabulary.tokens if self.draft_vocabulary else None

    def expect(self, tokens: Sequence[int]) -> None:
        """See `LanguageModel.expect`."""
        if self.draft_vocabulary:
            self.draft_vocabulary.read(tokens)

    def limit(self, vocabulary: DraftVocabulary | None) -> None:
        """Compute only the output rows of these tokens (None: all) in calls from now on.

        Without specdec's kernels, calls compute all rows, and only drafts are limited.
        """
        self.draft_vocabulary = vocabulary

    def _forget_text(self, length: int) -> None:
        """Draft no tokens of earlier texts if a history is cut to `length` tokens, less than half of it."""
        if self.draft_vocabulary and 2 * length < len(self._cached):
            self.draft_vocabulary.restart()
            self.draft_vocabulary.read(self._cached[:length])

    @property
    def is_open(self) -> bool:
        return self.context.native.is_open

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self.context.handle

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the history that have been evaluated. Do not change them."""
        return self._cached

    def _check_open(self) -> None:
        """Raise InvalidRequest if the context or the model is closed."""
        _ = self.handle, self.model.handle

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        """Check that tokens are in the vocabulary."""
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.n_vocab - 1}")

    def _check_room(self, n: int) -> None:
        """Check that the context has room for n tokens."""
        if n > self.n_ctx:
            raise ContextOverflow(
                f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger "
                "`n_ctx`"
            )

    def _check_length(self, length: int) -> None:
        """Check that the history can be truncated to a length."""
        if not 0 <= length <= len(self._cached):
            raise InvalidRequest(f"cannot truncate {len(self._cached)} tokens to {length}")


def check_parents(tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Check that each of the nodes of a tree has a parent."""
    if len(parents) != len(tokens):
        raise InvalidRequest(f"{len(tokens)} tokens with {len(parents)} parents: give one parent per token")
