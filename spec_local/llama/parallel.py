"""Evaluate many token sequences in one call, which reads the weights once for all of them.

Used to generate training data. Draft trees and rollback are not supported: see `spec_local.llama.context`.
"""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import Logits
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.context import MAX_SEQUENCES
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject
from spec_local.machine import default_threads

_MAX_PROMPT_TOKENS = 512  # maximum number of prompt tokens per call
_CACHE_STEP = 256  # llama.cpp rounds the cache of each sequence up to a multiple of this


class ParallelContext:
    """The KV caches of several sequences.

    Args:
        model: kept open as long as the context.
        n_sequences: 1 to 256.
        n_ctx: maximum number of tokens of a sequence; rounded up to a multiple of 256.
        threads: None: one per physical core.

    Attributes:
        lengths: number of tokens of each sequence.

    Raises:
        InvalidRequest: an argument is out of range.
        ContextOverflow: the caches do not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    def __init__(self, model: Model, n_sequences: int, n_ctx: int, *, threads: int | None = None) -> None:
        if not 1 <= n_sequences <= MAX_SEQUENCES or not 1 <= n_ctx <= 1 << 20:
            raise InvalidRequest(
                f"{n_sequences} sequences of {n_ctx} tokens: give 1 to {MAX_SEQUENCES}, of up to {1 << 20}"
            )
        self.model, self.n_sequences, self.n_vocab = model, n_sequences, model.vocabulary.n_tokens
        self.n_ctx = -(-n_ctx // _CACHE_STEP) * _CACHE_STEP
        need = model.kv_bytes(n_sequences * self.n_ctx)
        check_free_memory(need, f"for {n_sequences} sequences of {self.n_ctx} tokens")
        lib = self._lib = runtime.library()
        params = lib.llama_context_default_params()
        params.n_ctx = n_sequences * self.n_ctx
        params.n_batch = params.n_ubatch = max(_MAX_PROMPT_TOKENS, n_sequences)
        params.n_seq_max = params.n_outputs_max = n_sequences
        params.n_threads = params.n_threads_batch = default_threads() if threads is None else threads
        params.kv_unified = False  # otherwise attention reads the cells of all sequences
        runtime.clear_log()
        with runtime.deferred_signals():
            handle: int = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise BackendError(
                f"llama.cpp could not create a context for {n_sequences} sequences "
                f"({runtime.failure_reason()}): free some memory and try again"
            )
        self._native = NativeObject(lib.llama_free, handle, "context", model.handle)
        self.close = self._native.close
        self._memory_address: int = lib.llama_get_memory(self._native.pointer)
        self._batch = Batch(lib, int(params.n_batch))
        self.lengths = [0] * n_sequences

    def evaluate(self, new_tokens: Mapping[int, Sequence[int]]) -> Logits:
        """Append tokens to some of the sequences.

        Args:
            new_tokens: for each sequence number, one token or more.

        Returns:
            float32 (len(new_tokens), n_vocab): the logits after the last token of each sequence, in ascending
            order of their numbers; overwritten by the next call.

        Raises:
            InvalidRequest: no tokens, a token outside the vocabulary, or an unknown sequence.
            ContextOverflow: a sequence would exceed its cache; nothing has changed.
            BackendError: llama.cpp failed; all sequences are empty.
        """
        self._check(new_tokens)
        # llama.cpp evaluates consecutive sequence numbers together, and starts over after each gap.
        new_tokens = dict(sorted(new_tokens.items()))
        early = [
            (token, self.lengths[sequence] + i, sequence, False)
            for sequence, tokens in new_tokens.items()
            for i, token in enumerate(tokens[:-1])
        ]
        last = [
            (tokens[-1], self.lengths[sequence] + len(tokens) - 1, sequence, True)
            for sequence, tokens in new_tokens.items()
        ]
        done = False
        try:
            for start in range(0, len(early), _MAX_PROMPT_TOKENS):
                self._decode(early[start : start + _MAX_PROMPT_TOKENS])
            self._decode(last)
            done = True
        finally:
            if not done:
                with contextlib.suppress(Exception):
                    self._lib.llama_memory_clear(self._native.inner(self._memory_address), True)
                self.lengths = [0] * self.n_sequences
        for sequence, tokens in new_tokens.items():
            self.lengths[sequence] += len(tokens)
        pointer = self._lib.llama_get_logits(self._native.pointer)
        if not pointer:
            raise BackendError("llama.cpp returned no logits: use a model that generates text")
        logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (len(new_tokens), self.n_vocab))
        return logits

    def clear(self, sequence: int) -> None:
        """Empty a sequence, so that a new one can use its number."""
        self._lib.llama_memory_seq_rm(self._native.inner(self._memory_address), sequence, -1, -1)
        self.lengths[sequence] = 0

    def _check(self, new_tokens: Mapping[int, Sequence[int]]) -> None:
        self._check_open()
        if not new_tokens or not all(0 <= s < self.n_sequences and len(t) for s, t in new_tokens.items()):
            raise InvalidRequest(
                f"no tokens, or an unknown sequence: give tokens for sequences 0 to {self.n_sequences - 1}"
            )
        for sequence, tokens in new_tokens.items():
            if min(tokens) < 0 or max(tokens) >= self.n_vocab:
                raise InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.n_vocab - 1}")
            if self.lengths[sequence] + len(tokens) > self.n_ctx:
                raise ContextOverflow(f"sequence {sequence} would exceed its {self.n_ctx} tokens: clear it")

    def _check_open(self) -> None:
        _ = self._native.pointer, self.model.handle

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Evaluate (token, position, sequence, wants_logits) entries in one llama_decode call."""
        for i, entry in enumerate(entries):
            self._batch.put(i, *entry)
        self._batch.native.n_tokens = len(entries)
        runtime.clear_log()
        code = self._lib.llama_decode(self._native.pointer, self._batch.native)
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {len(entries)} tokens of {self.n_sequences} sequences "
                f"(code {code}, {runtime.failure_reason()}): try again with fewer"
            )
