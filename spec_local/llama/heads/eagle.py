"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), as GGUF files of llama.cpp's architecture ``eagle3``.

An encoder fuses the outputs of three layers of the main model into one vector. A decoder of one layer reads
it together with the next token. The head uses the main model's token embeddings unless it has its own, and
often has an output matrix for a part of the vocabulary only (the draft vocabulary); llama.cpp returns −∞ for
the other tokens.
"""

from collections.abc import Sequence

from spec_local.core.calls import Call
from spec_local.errors import BackendError
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES, LlamaContext
from spec_local.llama.gguf_tensors import has_tensor
from spec_local.llama.heads.fit import difference, layer_inputs
from spec_local.llama.heads.one_token import OneTokenContext, OneTokenSequence
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch
from spec_local.llama.sequence import LlamaSequence

_OF_TOKENS = ("token_embd.weight", "output.weight")


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that a head reads.

    Raises:
        ModelError: the head does not fit the main model.
    """
    name, layers, n_vocab = head.path.name, head.target_layers, head.vocabulary.n_tokens
    owns_tokens = head.n_embd != main.n_embd and all(has_tensor(head.path, each) for each in _OF_TOKENS)
    own_width = None if owns_tokens else head.n_embd
    why = difference(main, head.number("target_hidden_size"), layers, n_vocab, own_width)
    if not why and head.n_layers != 1:
        why = f"it has {head.n_layers} layers instead of one"
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
    context = _EagleContext(head, mains[0].context, len(mains))
    return [OneTokenSequence(context, i) for i in range(len(mains))]


class _EagleContext(OneTokenContext):
    encodes = skips_first = returns_all = True

    def __init__(self, model: Model, main: LlamaContext, n_parallel: int) -> None:
        kv_bytes = model.kv_bytes(n_parallel * main.n_ctx, CACHE_TYPES[main.cache_type])
        super().__init__(model, main, n_parallel, kv_bytes, main.max_branches, ctx_other=main.handle.address)
        width = len(model.target_layers) * main.model.n_embd
        # llama.cpp reserves logits for each state.
        self._encoder_batch = Batch(self.lib, self.max_logits, width=width, has_tokens=False)
        for i in range(self.max_logits):
            self._encoder_batch.put(i, 0, i, self.encoder_sequence, True)

    def _encode(self, calls: Sequence[Call[OneTokenSequence]]) -> None:
        received = [call.sequence.received for call in calls]
        waiting = [(each, position) for each in received for position in sorted(each.raw)]
        for start in range(0, len(waiting), self.max_logits):
            part = waiting[start : start + self.max_logits]
            for i, (states, position) in enumerate(part):
                self._encoder_batch.vectors[i] = states.get(position)
            self._encoder_batch.set_size(len(part))
            runtime.clear_log()
            if code := self.lib.llama_encode(self.handle, self._encoder_batch.native):
                raise BackendError(
                    f"llama.cpp could not encode {len(part)} hidden states "
                    f"(code {code}, {runtime.failure_reason()}) with {self.model.path.name}: "
                    "use another draft, or `draft=none`"
                )
            pointer = self._extensions.llama_get_embeddings_nextn(self.handle)
            encoded = self._outputs.at(pointer)[: len(part)].copy()
            for (states, position), state in zip(part, encoded, strict=True):
                states.replace(position, state)
