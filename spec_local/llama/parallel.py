"""Many texts at once over one model: a call reads the weights once for all of them.

For writing a great deal of text. There is no tree and no rolling back: see `spec_local.llama.context` for these.
"""

import contextlib
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import Logits
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.context import MAX_SEQUENCES, free_context
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.machine import default_threads

_CALL = 512  # tokens of a prompt that are read in one call
_STEP = 256  # llama.cpp makes each text's cache a multiple of this


class Parallel:
    """The KV caches of some texts, which are read side by side.

    Args:
        model: stays alive as long as this.
        n_texts: 1 to 256.
        n_ctx: tokens that each of them can hold; it may get some more.
        threads: None: one per physical core.

    Attributes:
        lengths: tokens of each text.

    Raises:
        InvalidRequest: an argument is out of range.
        ContextOverflow: the caches would not fit into free memory.
        BackendError: llama.cpp could not make the context.
    """

    def __init__(self, model: Model, n_texts: int, n_ctx: int, *, threads: int | None = None) -> None:
        if not 1 <= n_texts <= MAX_SEQUENCES or not 1 <= n_ctx <= 1 << 20:
            raise InvalidRequest(
                f"{n_texts} texts of {n_ctx} tokens: give 1 to {MAX_SEQUENCES}, of up to {1 << 20}"
            )
        self.model, self.n_texts, self.n_vocab = model, n_texts, model.vocabulary.n_tokens
        self.n_ctx = -(-n_ctx // _STEP) * _STEP
        check_free_memory(model.kv_bytes(n_texts * self.n_ctx), f"for {n_texts} texts of {self.n_ctx} tokens")
        lib = self._lib = runtime.library()
        params = lib.llama_context_default_params()
        params.n_ctx = n_texts * self.n_ctx
        params.n_batch = params.n_ubatch = max(_CALL, n_texts)
        params.n_seq_max = params.n_outputs_max = n_texts
        params.n_threads = params.n_threads_batch = default_threads() if threads is None else threads
        params.kv_unified = False  # a text sees no cells but its own: attention does not grow with the others
        runtime.clear_log()
        with runtime.deferred_signals():
            self._handle = lib.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise BackendError(
                f"llama.cpp could not make a context for {n_texts} texts ({runtime.failure_reason()}): "
                "free some memory and try again"
            )
        self.close = weakref.finalize(self, free_context, lib, self._handle, model)
        self._memory = lib.llama_get_memory(self._handle)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self._batch)
        self._capacity = int(params.n_batch)
        self.lengths = [0] * n_texts

    def read(self, texts: Mapping[int, Sequence[int]]) -> Logits:
        """Append tokens to some texts.

        Args:
            texts: by the number of the text, its next tokens, one at least.

        Returns:
            float32 (len(texts), n_vocab): the logits after the last token of each, by ascending text; valid until the next
            call.

        Raises:
            InvalidRequest: no tokens, one outside of the vocabulary, or an unknown text.
            ContextOverflow: a text grows beyond its cache; nothing has changed.
            BackendError: llama.cpp failed; all texts are forgotten.
        """
        self._check(texts)
        # llama.cpp evaluates neighbouring sequences together, and starts anew wherever one is left out.
        texts = dict(sorted(texts.items()))
        early = [
            (text, token, self.lengths[text] + i, False)
            for text, tokens in texts.items()
            for i, token in enumerate(tokens[:-1])
        ]
        last = [
            (text, tokens[-1], self.lengths[text] + len(tokens) - 1, True) for text, tokens in texts.items()
        ]
        done = False
        try:
            for start in range(0, len(early), _CALL):
                self._decode(early[start : start + _CALL])
            self._decode(last)
            done = True
        finally:
            if not done:
                with contextlib.suppress(Exception):
                    self._lib.llama_memory_clear(self._memory, True)
                self.lengths = [0] * self.n_texts
        for text, tokens in texts.items():
            self.lengths[text] += len(tokens)
        pointer = self._lib.llama_get_logits(self._handle)
        if not pointer:
            raise BackendError("llama.cpp returned no logits: this model cannot write text")
        logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (len(texts), self.n_vocab))
        return logits

    def forget(self, text: int) -> None:
        """Empty a text, for another one to take its place."""
        self._check_open()
        self._lib.llama_memory_seq_rm(self._memory, text, -1, -1)
        self.lengths[text] = 0

    def _check(self, texts: Mapping[int, Sequence[int]]) -> None:
        self._check_open()
        if not texts or not all(0 <= text < self.n_texts and len(tokens) for text, tokens in texts.items()):
            raise InvalidRequest(
                f"an unknown text, or one without tokens: give tokens of some of the texts 0 to {self.n_texts - 1}"
            )
        for text, tokens in texts.items():
            if min(tokens) < 0 or max(tokens) >= self.n_vocab:
                raise InvalidRequest(f"a token is outside of the vocabulary: give 0 to {self.n_vocab - 1}")
            if self.lengths[text] + len(tokens) > self.n_ctx:
                raise ContextOverflow(f"text {text} does not fit into its {self.n_ctx} tokens: forget it")

    def _check_open(self) -> None:
        if not (self.close.alive and self.model.close.alive):
            raise InvalidRequest("the context or its model is closed: open it again")

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Entries: text, token, position, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (text, token, position, wanted) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = text
            batch.logits[i] = wanted
        runtime.clear_log()
        code = self._lib.llama_decode(self._handle, batch)
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {len(entries)} tokens of {self.n_texts} texts "
                f"(code {code}, {runtime.failure_reason()}): try again with fewer"
            )
