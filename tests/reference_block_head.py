"""The logits of a DFlash or DSpark head, by plain calls of llama.cpp that read the whole history anew."""

import ctypes

import numpy as np

from spec_local.llama import runtime

_FLOATS = ctypes.POINTER(ctypes.c_float)


class ReferenceBlockHead:
    """A head (a `Model`) with a context of its own.

    main: a `LlamaSequence` of the main model. block: its `BlockFormat`.

    Attributes:
        n_drafted: number of draft tokens in a block.
    """

    def __init__(self, head, main, block, n_ctx=256):
        self._lib = lib = runtime.library()
        self._main, self._head = main, head  # the head uses tensors of the main model
        self._n_skipped, self.n_drafted = block.n_skipped, 1
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 0
        params.type_k = params.type_v = lib.GGML_TYPE_F16  # which the tests replace by F32
        params.swa_full = True
        params.ctx_other = main.handle.address
        self._context = lib.llama_init_from_model(head.handle, params)
        assert self._context
        lib.llama_set_causal_attn(self._context, block.is_causal)
        self._batch = lib.llama_batch_init(4 * n_ctx, 0, 1)

    def close(self):
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)

    def logits(self, tokens, states, drafted):
        """The logits after the history `tokens`, and after each of the draft tokens after it.

        states: the main model's, of all tokens of the history but the last.
        """
        lib, n = self._lib, len(tokens)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        states = np.array(states, np.float32).reshape(n - 1, -1)
        if n > 1:
            self._decode([0] * (n - 1), 0, states)
        block = [tokens[-1]] + [self._head.vocabulary.mask] * (self.n_drafted + self._n_skipped - 1)
        self._decode(block, n - 1, None)
        rows = range(self._n_skipped, self._n_skipped + 1 + len(drafted))
        get = lib.llama_get_logits_ith
        n_vocab = self._head.vocabulary.n_tokens
        return [np.ctypeslib.as_array(get(self._context, i), (n_vocab,)).copy() for i in rows]

    def _decode(self, tokens, position, states):
        batch, n = self._batch, len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.logits[i] = token, states is None
            for axis in range(4):  # the second to fourth position are for heads that rotate by several
                batch.pos[axis * n + i] = position + i if axis < 3 else 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        fields = {"pos": batch.pos, "n_seq_id": batch.n_seq_id, "seq_id": batch.seq_id}
        fields |= {"token": batch.token} if states is None else {"embd": states.ctypes.data_as(_FLOATS)}
        call = self._lib.llama_batch(n_tokens=n, logits=batch.logits, **fields)
        assert self._lib.llama_decode(self._context, call) == 0
