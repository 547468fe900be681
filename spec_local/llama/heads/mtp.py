"""Layers for multi-token prediction (NextN), in the main model's own file or in one beside it.

The input of such a layer is a token, and the main model's state of the token before it: the state that the
output matrix reads.
"""

import sys
from collections.abc import Sequence

from spec_local.errors import ModelError
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES, LlamaContext
from spec_local.llama.graphs import mtp_layers
from spec_local.llama.heads.chained import ChainedSequence
from spec_local.llama.heads.one_token import OneTokenContext, OneTokenSequence
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.sequence import LlamaSequence

HIDDEN_STATES = HiddenStates()
"""The hidden states that the layers read."""


def has_mtp(model: Model) -> bool:
    """Return whether a model's file has usable layers for multi-token prediction, loaded or not."""
    return bool(model.number("nextn_predict_layers")) and mtp_layers(model.path).n_usable > 0


def why_not(model: Model) -> str:
    """Return why a model has no usable layers for multi-token prediction."""
    return mtp_layers(model.path).why


def max_draft(model: Model) -> int:
    """Maximum number of draft tokens: one for each of several layers; a single layer drafts any number."""
    return model.n_nextn if model.n_nextn > 1 else sys.maxsize


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that layers in a file of their own read.

    Raises:
        ModelError: they do not fit the main model.
    """
    if not has_mtp(head):
        raise ModelError(
            f"{head.path.name}: llama.cpp cannot evaluate its layers for multi-token prediction "
            f"({why_not(head)}); use another draft"
        )
    if why := _difference(head, main):
        raise ModelError(
            f"{head.path.name} has layers for multi-token prediction of another model ({why}): "
            f"use the file that was made for {main.path.name}"
        )
    return HIDDEN_STATES


def _difference(head: Model, main: Model) -> str | None:
    """Return why layers do not fit, or None. llama.cpp would abort the process, or draft nonsense."""
    for what, ours, theirs in (
        ("architecture", head.architecture, main.architecture),
        ("width", head.n_embd, main.n_embd),
        ("number of layers", head.n_layers, main.n_layers),
        ("number of tokens", head.vocabulary.n_tokens, main.vocabulary.n_tokens),
    ):
        if ours != theirs:
            return f"{what} {ours} against {theirs}"
    return None


def open_mtp_sequences(
    mains: Sequence[LlamaSequence], head: Model | None = None
) -> Sequence[OneTokenSequence]:
    """Create contexts for layers for multi-token prediction, with a sequence for each of the main model.

    Args:
        mains: opened with `HIDDEN_STATES`.
        head: the file with the layers; None: the main model's own, opened with ``load_mtp``.

    Raises:
        ModelError: the file has no such layer, or it was not loaded, or does not fit.
        ContextOverflow, BackendError: see `OneTokenContext`.
    """
    model = head or mains[0].model
    if head:
        hidden_states(head, mains[0].model)
    if not model.n_nextn or not has_mtp(model):
        raise ModelError(f"{model.path.name} has no layer for multi-token prediction: draft without it")
    n_parallel, n_layers = len(mains), model.n_nextn
    layers = [_MtpContext(model, mains[0].context, n_parallel, i) for i in range(n_layers)]
    if n_layers == 1:
        return [OneTokenSequence(layers[0], i) for i in range(n_parallel)]
    return [ChainedSequence(layers, i) for i in range(n_parallel)]


class _MtpContext(OneTokenContext):
    def __init__(self, model: Model, main: LlamaContext, n_parallel: int, layer: int) -> None:
        # llama.cpp gives each context a cache for all of these layers.
        kv_bytes = model.kv_bytes(n_parallel * main.n_ctx, CACHE_TYPES[main.cache_type])
        kv_bytes = kv_bytes * model.n_nextn // model.n_layers
        self.has_all_outputs = mtp_layers(model.path).has_all_outputs
        kind = runtime.library().LLAMA_CONTEXT_TYPE_MTP
        max_branches = main.max_branches if model.n_nextn == 1 else 1  # several layers draft chains only
        super().__init__(model, main, n_parallel, kv_bytes, max_branches, ctx_type=kind)
        self._extensions.llama_set_nextn_layer_offset(self.handle, layer)
