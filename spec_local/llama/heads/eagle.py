"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), as GGUF files of llama.cpp's architecture ``eagle3``.

An encoder fuses the outputs of three layers of the main model into one vector. A decoder, usually of one
layer, reads it together with the next token. The head uses the main model's token embeddings unless it has
its own, and often has an output matrix for a part of the vocabulary only (the draft vocabulary); logits of
the other tokens are −∞. Further layers follow in the same file: see `spec_local.llama.later_model`.

P-EAGLE heads, which draft several tokens in one call, are in `spec_local.llama.heads.parallel_eagle`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits
from spec_local.errors import BackendError
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES, LlamaContext
from spec_local.llama.gguf_tensors import array, has_tensor
from spec_local.llama.heads.base import HeadContext
from spec_local.llama.heads.fit import difference, layer_inputs
from spec_local.llama.heads.later_layers import WithLaterLayers
from spec_local.llama.heads.one_token import OneTokenContext, OneTokenSequence
from spec_local.llama.heads.states import ReceivedStates
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.later_model import LaterModel
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, OutputView
from spec_local.llama.sequence import LlamaSequence

_OF_TOKENS = ("token_embd.weight", "output.weight")
_N_LAYERS_READ = 3  # llama.cpp accepts no other number


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that a head reads.

    Raises:
        ModelError: the head does not fit the main model.
        ModelFileError: its file lacks its later layers.
    """
    name, layers, n_vocab = head.path.name, head.target_layers, head.vocabulary.n_tokens
    owns_tokens = head.n_embd != main.n_embd and all(has_tensor(head.path, each) for each in _OF_TOKENS)
    own_width = None if owns_tokens else head.n_embd
    why = difference(main, head.number("target_hidden_size"), layers, n_vocab, own_width)
    if not why and head.n_layers != 1:
        why = f"it has {head.n_layers} layers instead of one"
    norm = array(head.path, f"{head.architecture}.output_norm")
    if norm is not None and norm.shape != (head.n_embd,):
        why = why or f"its output has a norm of width {len(norm)}"
    if head.n_later:
        LaterModel(head, weights=False).close()
    return layer_inputs(name, "an EAGLE-3 head", main, layers, why)


def open_eagle_sequences(head: Model, mains: Sequence[LlamaSequence]) -> Sequence[OneTokenSequence]:
    """Create a context for a head, with a sequence for each of the main model.

    Args:
        mains: opened with the `hidden_states` of this head.

    Raises:
        ModelError: the head does not fit.
        ContextOverflow, BackendError: see `OneTokenContext`.
    """
    hidden_states(head, mains[0].model)
    if head.n_later:
        layered = _LayeredContext(head, mains[0].context, len(mains))
        return [_LayeredSequence(layered, i) for i in range(len(mains))]
    context = _EagleContext(head, mains[0].context, len(mains))
    return [OneTokenSequence(context, i) for i in range(len(mains))]


class StateEncoder:
    """Fuses the states of the main model that a head has received.

    Args:
        context: the head's.
        width: of the main model's states.
        capacity: maximum number of states in a call, no more than the context has outputs.
        seq_id: a sequence that is empty between calls.
    """

    def __init__(self, context: HeadContext, width: int, capacity: int, seq_id: int) -> None:
        self._context, self._capacity = context, capacity
        self._extensions = runtime.extensions()
        self._batch = Batch(context.lib, capacity, width=width, has_tokens=False)
        self._outputs = OutputView(context.native, capacity, context.model.n_embd)
        norms = context.model.flag("norm_states", False)
        self._eps, self._width = _epsilon(context.model) if norms else None, width // _N_LAYERS_READ
        for i in range(capacity):  # llama.cpp reserves logits for each state
            self._batch.put(i, 0, i, seq_id, True)

    def encode(self, received: Sequence[ReceivedStates]) -> None:
        """Replace the states that are not encoded.

        Raises:
            BackendError: the call failed.
        """
        context = self._context
        waiting = [(each, position) for each in received for position in sorted(each.raw)]
        for start in range(0, len(waiting), self._capacity):
            part = waiting[start : start + self._capacity]
            for i, (states, position) in enumerate(part):
                self._batch.vectors[i] = states.get(position)
            if self._eps is not None:
                of_layers = self._batch.vectors[: len(part)].reshape(-1, self._width)
                self._batch.vectors[: len(part)] = _normed(of_layers, self._eps).reshape(len(part), -1)
            self._batch.set_size(len(part))
            runtime.clear_log()
            if code := context.lib.llama_encode(context.handle, self._batch.native):
                raise BackendError(
                    f"llama.cpp could not encode {len(part)} hidden states "
                    f"(code {code}, {runtime.failure_reason()}) with {context.model.path.name}: "
                    "use another draft, or `draft=none`"
                )
            pointer = self._extensions.llama_get_embeddings_nextn(context.handle)
            encoded = self._outputs.at(pointer)[: len(part)].copy()
            for (states, position), state in zip(part, encoded, strict=True):
                states.replace(position, state)


def _epsilon(head: Model) -> float:
    return float(head.text(f"{head.architecture}.attention.layer_norm_rms_epsilon") or 0)


def _normed(vectors: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Vectors (n, width), divided by the root of their mean square."""
    found: NDArray[np.float32] = vectors / np.sqrt(
        np.square(vectors).mean(1, keepdims=True) + np.float32(eps)
    )
    return found


class _EagleContext(OneTokenContext):
    encodes = skips_first = returns_all = True

    def __init__(self, model: Model, main: LlamaContext, n_parallel: int) -> None:
        kv_bytes = model.kv_bytes(n_parallel * main.n_ctx, CACHE_TYPES[main.cache_type])
        super().__init__(model, main, n_parallel, kv_bytes, main.max_branches, ctx_other=main.handle.address)
        width = len(model.target_layers) * main.model.n_embd
        self._encoder = StateEncoder(self, width, self.max_logits, self.encoder_sequence)
        self._output_norm = array(model.path, f"{model.architecture}.output_norm")

    def read_again(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `OneTokenContext.read_again`: EAGLE-3.1 reads the normalized output."""
        if self._output_norm is None:
            return outputs
        return _normed(outputs, _epsilon(self.model)) * self._output_norm

    def _encode(self, calls: Sequence[Call[OneTokenSequence]]) -> None:
        self._encoder.encode([call.sequence.received for call in calls])


class _LayeredContext(WithLaterLayers, _EagleContext):
    """The context of a head with later layers, whose outputs and logits replace those of the first one."""

    def __init__(self, model: Model, main: LlamaContext, n_parallel: int) -> None:
        super().__init__(model, main, n_parallel)
        n_cells, n_sequences = n_parallel * main.n_ctx, self.encoder_sequence + 1
        self.open_later(main, n_cells, n_sequences, self.max_tokens, returns_states=True)
        self._logits_of_all: Logits = np.empty((0, self.n_vocab), np.float32)
        self._n_rows: list[int] = []

    def _n_computed(self, call: Call[Any]) -> int:
        return 0  # of the first layer, no logits are needed

    def _evaluate(self, batch: Batch, calls: Sequence[Call[Any]] = ()) -> None:
        super()._evaluate(batch)
        wanted: list[int] = []
        self._n_rows, end = [], 0
        for call in calls:
            n, end = len(call.tokens), end + len(call.tokens)
            # Without logits, the last token's output may be needed; in a tree, each token may have children.
            is_chain = list(call.parents[1:]) == list(range(call.parents[0] + 1, call.parents[0] + n))
            self._n_rows.append(call.n_logits or (1 if is_chain else n))
            wanted += range(end - self._n_rows[-1], end)
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        assert self.later
        self._logits_of_all = self.later.evaluate(batch, outputs[:end], wanted)

    def _results(self, calls: Sequence[Call[OneTokenSequence]]) -> dict[int, Logits]:
        assert self.later
        outputs, end, found = self.later.states(sum(self._n_rows)), 0, dict[int, Logits]()
        for call, n in zip(calls, self._n_rows, strict=True):
            end += n
            call.sequence.on_evaluated(self.read_again(outputs[end - n : end]))
            found[id(call)] = self._logits_of_all[end - call.n_logits : end]
        return found


class _LayeredSequence(OneTokenSequence):
    can_be_limited = False
