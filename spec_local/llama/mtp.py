"""Layers for multi-token prediction (NextN) in the main model's own file.

The layer reads a token beside the state that the main model's output matrix reads.
"""

from collections.abc import Sequence

from spec_local.errors import ModelError
from spec_local.llama import runtime
from spec_local.llama.context import Context
from spec_local.llama.heads import HeadRow
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.shared_context import CACHE_TYPES, SharedContext
from spec_local.llama.shared_head import SharedHead

HIDDEN_STATES = HiddenStates()
"""The hidden states that the layer reads."""
# Those in which llama.cpp has one such layer that drafts any number of tokens, in a cache of its own.
_ARCHITECTURES = {
    *("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2", "nemotron_h_moe", "cohere2moe"),
    *("hy_v3", "bailingmoe3"),
}


def has_mtp(model: Model) -> bool:
    """Whether a model's file has a usable layer for multi-token prediction, loaded or not."""
    return model.number("nextn_predict_layers") == 1 and model.architecture in _ARCHITECTURES


def open_mtp_rows(mains: Sequence[Context], *, max_branches: int | None = None) -> Sequence[HeadRow]:
    """Create a context for a model's layer for multi-token prediction, with a row for each of its rows.

    Args:
        mains: of a model with ``load_mtp``, opened with `HIDDEN_STATES`.
        max_branches: see `SharedHead`; None: as many as the main model's rows have.

    Raises:
        ModelError: the file has no such layer.
        ContextOverflow, BackendError: see `SharedHead`.
    """
    model = mains[0].model
    if not model.n_nextn or not has_mtp(model):
        raise ModelError(f"{model.path.name} has no layer for multi-token prediction: draft without it")
    shared = _SharedMtp(model, mains[0].shared, len(mains), max_branches or mains[0].max_branches)
    return [HeadRow(shared, i) for i in range(len(mains))]


class _SharedMtp(SharedHead):
    def __init__(self, model: Model, main: SharedContext, n_rows: int, max_branches: int) -> None:
        kv_bytes = model.kv_bytes(n_rows * main.n_ctx, CACHE_TYPES[main.cache_type]) // model.n_layers
        kind = runtime.library().LLAMA_CONTEXT_TYPE_MTP
        super().__init__(model, main, n_rows, kv_bytes, max_branches=max_branches, ctx_type=kind)
