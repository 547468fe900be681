"""The logits of a head, by plain calls of llama.cpp that evaluate the whole history each time."""

import ctypes

import numpy as np

from spec_local.llama import runtime

_FLOATS = ctypes.POINTER(ctypes.c_float)


class ReferenceHead:
    """An EAGLE-3 head, or the layers for multi-token prediction if `head` is the main model itself.

    head: a `Model`. main: a `LlamaSequence` of the main model.
    """

    def __init__(self, head, main, n_ctx=256):
        self._lib, self._extensions = lib, extensions = runtime.library(), runtime.extensions()
        self._main = main  # the head uses its token embeddings
        self._is_eagle = head.is_head
        self._n_layers = 1 if self._is_eagle else head.n_nextn
        self._width, self._n_vocab = head.n_state, head.vocabulary.n_tokens
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        params.flash_attn_type = 0
        params.type_k = params.type_v = lib.GGML_TYPE_F16  # which the tests replace by F32
        if self._is_eagle:
            params.ctx_other = main.handle.address
        else:
            params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        self._context = lib.llama_init_from_model(head.handle, params)
        assert self._context
        extensions.llama_set_embeddings_nextn(self._context, True, True)
        self._batch = lib.llama_batch_init(n_ctx, 0, 1)

    def close(self):
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)

    def logits(self, tokens, states, drafted):
        """The logits after the history `tokens`, and after each of the draft tokens after it.

        states: the main model's, of all tokens of the history but the last.
        """
        self._clear()
        states = np.array(states, np.float32).reshape(len(tokens) - 1, -1)
        if self._is_eagle:
            features, tokens = self._encoded(states), tokens[1:]
        else:
            features = np.vstack([np.zeros((1, self._width), np.float32), states])
        if self._n_layers > 1:
            return self._logits_of_layers(tokens, features, drafted)
        n = len(tokens)
        if n > 1:
            self._decode(tokens[:-1], 0, features[:-1], wanted=False)
        rows, feature = [], features[-1]
        for i, token in enumerate([tokens[-1], *drafted]):
            self._decode([token], n - 1 + i, feature[None], wanted=True)
            rows.append(self._row(self._lib.llama_get_logits_ith(self._context, 0), self._n_vocab))
            feature = self._output()
        return rows

    def _logits_of_layers(self, tokens, features, drafted):
        """Each layer evaluates everything from the beginning, and draft tokens with the outputs so far."""
        rows = []
        for layer in range(1 + len(drafted)):
            self._clear()
            self._extensions.llama_set_nextn_layer_offset(self._context, layer)
            known = [*tokens, *drafted[:layer]]
            if len(known) > 1:
                self._decode(known[:-1], 0, features[:-1], wanted=False)
            self._decode(known[-1:], len(known) - 1, features[-1:], wanted=True)
            rows.append(self._row(self._lib.llama_get_logits_ith(self._context, 0), self._n_vocab))
            features = np.vstack([features, self._output()])
        return rows

    def _clear(self):
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _output(self):
        return self._row(self._extensions.llama_get_embeddings_nextn_ith(self._context, 0), self._width)

    def _encoded(self, states):
        batch = self._filled([0] * len(states), 0, states, True)
        batch.token = None
        assert self._lib.llama_encode(self._context, batch) == 0
        pointer = self._extensions.llama_get_embeddings_nextn(self._context)
        return self._row(pointer, len(states) * self._width).reshape(len(states), self._width)

    def _decode(self, tokens, position, features, wanted):
        assert self._lib.llama_decode(self._context, self._filled(tokens, position, features, wanted)) == 0

    def _filled(self, tokens, position, features, wanted):
        batch = self._batch
        self._features = np.ascontiguousarray(features, np.float32)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        return self._lib.llama_batch(
            n_tokens=len(tokens),
            token=batch.token,
            embd=self._features.ctypes.data_as(_FLOATS),
            pos=batch.pos,
            n_seq_id=batch.n_seq_id,
            seq_id=batch.seq_id,
            logits=batch.logits,
        )

    @staticmethod
    def _row(pointer, n):
        return np.ctypeslib.as_array(pointer, (n,)).copy()


class ReferenceAssistant:
    """A Gemma 4 assistant, on a context of the main model of its own.

    main, head: a `Model` each.
    """

    def __init__(self, main, head, n_ctx=256):
        self._lib, self._extensions = lib, extensions = runtime.library(), runtime.extensions()
        self._width, self._n_vocab = main.n_embd, head.vocabulary.n_tokens
        self._contexts = []
        for model in (main, head):
            params = lib.llama_context_default_params()
            params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = n_ctx
            params.n_threads = params.n_threads_batch = 1
            params.kv_unified = params.swa_full = True
            params.flash_attn_type = 0
            params.type_k = params.type_v = lib.GGML_TYPE_F16  # which the tests replace by F32
            params.ctx_other = self._contexts[0] if self._contexts else None
            self._contexts.append(lib.llama_init_from_model(model.handle, params))
            extensions.llama_set_embeddings_nextn(self._contexts[-1], True, model is head)
        self._batch = lib.llama_batch_init(n_ctx, 0, 1)

    def close(self):
        self._lib.llama_batch_free(self._batch)
        for context in reversed(self._contexts):
            self._lib.llama_free(context)

    def logits(self, tokens, drafted):
        """The logits after the history `tokens`, and after each of the draft tokens after it."""
        lib, (main, head) = self._lib, self._contexts
        lib.llama_memory_clear(lib.llama_get_memory(main), True)
        n = len(tokens) - 1
        assert lib.llama_decode(main, self._filled(tokens[:-1], range(n), None)) == 0
        pointer = self._extensions.llama_get_embeddings_nextn(main)
        state = np.ctypeslib.as_array(pointer, (n * self._width,)).reshape(n, -1)[-1].copy()
        rows = []
        for token in [tokens[-1], *drafted]:
            assert lib.llama_decode(head, self._filled([token], [n], state)) == 0
            rows.append(np.ctypeslib.as_array(lib.llama_get_logits_ith(head, 0), (self._n_vocab,)).copy())
            pointer = self._extensions.llama_get_embeddings_nextn_ith(head, 0)
            state = np.ctypeslib.as_array(pointer, (self._width,)).copy()
        return rows

    def _filled(self, tokens, positions, state):
        batch, self._state = self._batch, state
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, state is not None
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        return self._lib.llama_batch(
            n_tokens=len(tokens),
            token=batch.token,
            embd=None if state is None else state.ctypes.data_as(_FLOATS),
            pos=batch.pos,
            n_seq_id=batch.n_seq_id,
            seq_id=batch.seq_id,
            logits=batch.logits,
        )
