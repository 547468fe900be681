"""DFlash, DFlash2 and DSpark heads, as GGUF files of llama.cpp's architecture ``dflash``.

DFlash: Chen et al. 2026, arXiv 2602.06036. DSpark: DeepSeek-AI 2026, arXiv 2607.05147. They draft a block of
tokens in one call, by filling in mask tokens. They read the outputs of several of the main model's layers,
which an encoder fuses and each layer of the head turns into keys and values of its own. The main model's
token embeddings and output matrix are used if the file has none. In DSpark, a first-order Markov model
corrects the logits of each draft token for the most probable token before it. In DFlash2, short convolutions
along the block stand before and after attention and feed-forward network, and a selector scores pairs of
candidates: see `spec_local.llama.heads.lattice`.
"""

from collections.abc import Sequence

from spec_local.core.proposal import MAX_DRAFT
from spec_local.errors import ModelError
from spec_local.llama.gguf_tensors import has_tensor, numbers, tensor_types
from spec_local.llama.heads.block import BlockContext, BlockFormat, BlockSequence
from spec_local.llama.heads.fit import difference, layer_inputs
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.sequence import LlamaSequence

_DEFAULT_SIZE = 16  # of a block, where a file does not state it; as in llama.cpp
_WINDOWS = "dflash.attention.sliding_window_pattern"
# llama.cpp has room for 12 nodes of a DFlash2 graph per tensor of the file, and for 1024 at least.
_ROOM, _ROOM_OF_TENSOR = 1024, 12
# Nodes of such a graph: in all, in each layer, and for each tap of the four convolutions of a layer. Counted
# with 1 to 8 layers, and as many taps as do not abort the process.
_NODES, _NODES_OF_LAYER, _NODES_OF_TAP = 90, 78, 8


def kind_of(head: Model) -> str:
    """The kind of head in a file, for messages."""
    if _has_selector(head):
        return "a DFlash2 head"
    return "a DSpark head" if _is_dspark(head) else "a DFlash head"


def _is_dspark(head: Model) -> bool:
    return has_tensor(head.path, "markov_w1.weight")


def _has_selector(head: Model) -> bool:
    return has_tensor(head.path, "selector_hidden.weight")


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that a head reads.

    Raises:
        ModelError: the head does not fit the main model, or is of a kind that is not supported.
    """
    block_format(head)
    layers = head.target_layers
    why = difference(main, head.n_embd, layers, head.vocabulary.n_tokens)
    return layer_inputs(head.path.name, kind_of(head), main, layers, why)


def block_format(head: Model) -> BlockFormat:
    """The format of the blocks that a head drafts.

    Raises:
        ModelError: its file is incomplete, or it is of a kind that is not supported.
    """
    name, is_dspark, has_selector = head.path.name, _is_dspark(head), _has_selector(head)
    if head.number("hyper_connection.count"):
        raise ModelError(f"{name} is a DSpark head of DeepSeek-V4, which is not supported: use another draft")
    size = head.number("block_size")
    if size is None and not is_dspark:
        size = _DEFAULT_SIZE
    n_skipped = 0 if is_dspark and head.flag("sample_from_anchor", True) else 1
    why = None
    if head.vocabulary.mask < 0:
        why = "no mask token"
    elif size is None:
        why = "no block size"
    elif size <= n_skipped:
        why = "blocks without draft tokens"
    elif head.draft_tokens is not None and not has_tensor(head.path, "output.weight"):
        why = "a draft vocabulary but no output matrix for it"
    elif head.has_window and not any(numbers(head.path, _WINDOWS, head.n_layers) or ()):
        why = "a window of attention in no layer"  # llama.cpp would abort the process
    if why or size is None:
        raise ModelError(f"{name} is an incomplete head ({why}): convert or download it again")
    if has_selector and (why := _flaw_of_selector(head)):
        raise ModelError(f"{name} is a DFlash2 head that llama.cpp cannot run ({why}): use another draft")
    size = min(size, MAX_DRAFT + n_skipped)  # no more are drafted, and the batch has room for a block
    n_candidates = (head.number("selector_top_k") or 0) if has_selector else 0
    is_causal = head.flag("attention.causal", False)
    return BlockFormat(size, n_skipped, head.vocabulary.mask, is_causal, n_candidates)


def _flaw_of_selector(head: Model) -> str | None:
    """What llama.cpp does not check when it loads a DFlash2 head, and would abort the process for later."""
    if _is_dspark(head):
        return "a selector and a Markov model"
    kernel, types = head.number("conv_kernel_size") or 0, tensor_types(head.path)
    if others := {kind for name, kind in types.items() if name.endswith("conv_base")} - {"F32"}:
        return f"convolutions in {others.pop()}"
    nodes = _NODES + head.n_layers * (_NODES_OF_LAYER + 4 * _NODES_OF_TAP * kernel)
    if nodes > max(_ROOM, _ROOM_OF_TENSOR * len(types)):
        return f"convolutions over {kernel} tokens need a larger graph"
    return None


def n_drafted(head: Model) -> int:
    """Maximum number of draft tokens per call; raises the errors of `block_format`."""
    return block_format(head).n_drafted


def open_block_sequences(head: Model, mains: Sequence[LlamaSequence]) -> Sequence[BlockSequence]:
    """Create a context for a head, with a sequence for each of the main model.

    Args:
        mains: opened with the `hidden_states` of this head.

    Raises:
        ModelError: the head does not fit.
        ContextOverflow, BackendError: see `BlockContext`.
    """
    hidden_states(head, mains[0].model)
    context = BlockContext(head, mains[0].context, len(mains), block_format(head))
    return [BlockSequence(context, i) for i in range(len(mains))]
