"""P-EAGLE heads (Hui et al. 2026, arXiv 2602.01469): EAGLE-3 heads that draft a block in one call.

Like those of other EAGLE-3 heads, entry i of the cache is a pair: token i, and the encoded state of token
i − 1. A block begins with the pair of the last token, whose logits are those of the first draft token. Each
further one has the embedding of the mask token, and a vector from training in place of a state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import MAX_DRAFT
from spec_local.errors import ModelError
from spec_local.llama.context import LlamaContext
from spec_local.llama.gguf_tensors import array
from spec_local.llama.heads.block import BlockContext, BlockFormat, BlockSequence
from spec_local.llama.heads.eagle import StateEncoder
from spec_local.llama.heads.later_layers import WithLaterLayers
from spec_local.llama.model import Model
from spec_local.llama.native_context import OutputView
from spec_local.llama.sequence import LlamaSequence


def is_parallel(head: Model) -> bool:
    """Return whether an EAGLE-3 head drafts blocks."""
    return head.number("block_size") is not None


def block_format(head: Model) -> BlockFormat:
    """The format of the blocks that a head drafts.

    Raises:
        ModelError: its file is incomplete.
    """
    size, mask = head.number("block_size") or 0, head.vocabulary.mask
    if not 0 <= mask < head.vocabulary.n_tokens or size < 1 or _mask_state(head) is None:
        raise ModelError(f"{head.path.name} is an incomplete P-EAGLE head: convert it again")
    return BlockFormat(min(size, MAX_DRAFT), 0, mask, is_causal=True)


def _mask_state(head: Model) -> NDArray[np.float32] | None:
    """What takes the place of encoded states; None: the file has no such vector."""
    found = array(head.path, f"{head.architecture}.mask_state")
    if found is None or found.dtype != np.float32 or found.shape != (head.n_embd,):
        return None
    return found.astype(np.float32) if np.isfinite(found).all() else None


def open_parallel_sequences(head: Model, mains: Sequence[LlamaSequence]) -> Sequence[BlockSequence]:
    """Create a context for a head that fits, with a sequence for each of the main model.

    Raises:
        ModelError: the head is incomplete.
        ContextOverflow, BackendError: see `BlockContext`.
    """
    context = _ParallelContext(head, mains[0].context, len(mains), block_format(head))
    return [_ParallelSequence(context, i) for i in range(len(mains))]


class _ParallelContext(WithLaterLayers, BlockContext):
    encodes = True

    def __init__(self, model: Model, main: LlamaContext, n_parallel: int, block: BlockFormat) -> None:
        super().__init__(model, main, n_parallel, block)
        n_cells = n_parallel * (main.n_ctx + block.size)
        self.open_later(main, n_cells, n_parallel + 1, self.max_logits, returns_states=False)
        self._extensions.llama_set_embeddings_nextn(self.handle, True, False)
        self._first_outputs = OutputView(self.native, self.max_tokens, model.n_embd)
        width = len(model.target_layers) * main.model.n_embd
        self._encoder = StateEncoder(self, width, self.n_outputs, n_parallel)
        self._mask_state = _mask_state(model)
        self._rows: Logits = np.empty((0, self.n_vocab), np.float32)

    def _draft(
        self,
        calls: Sequence[Call[BlockSequence]],
        drafting: Sequence[Call[BlockSequence]],
        anchors: Sequence[int],
        size: int,
    ) -> None:
        self._encoder.encode([call.sequence.received for call in calls])
        missing = [each for each in self._missing(calls) if each[1]]  # the first token has no pair
        # llama.cpp computes the logits of all tokens of the first layer's context, or returns wrong ones.
        room = (self.max_tokens if self.later else self.max_logits) - size * len(drafting)
        while missing and (len(missing) > room or not drafting):
            self._evaluate_pairs(missing[: self.max_tokens], (), (), 0)
            del missing[: self.max_tokens]
        if drafting:
            self._evaluate_pairs(missing, drafting, anchors, size)
        for call in calls:
            call.sequence.on_stored(call.sequence.n_stored + len(call.tokens) - (call.n_logits > 0))

    def _evaluate_pairs(
        self,
        missing: Sequence[tuple[BlockSequence, int, int]],
        drafting: Sequence[Call[BlockSequence]],
        anchors: Sequence[int],
        size: int,
    ) -> None:
        """Evaluate entries of the cache, and blocks after them, in one call."""
        batch, n, wants_logits = self._states, 0, bool(drafting) and not self.later
        for sequence, position, token in missing:
            batch.put(n, token, position, sequence.seq_id, wants_logits)
            batch.vectors[n] = sequence.state(position - 1)
            n += 1
        for call, anchor in zip(drafting, anchors, strict=True):
            for i in range(size):
                token = self.block.mask if i else call.tokens[-1]
                batch.put(n, token, anchor + i, call.sequence.seq_id, wants_logits)
                batch.vectors[n] = self._mask_state if i else call.sequence.state(anchor - 1)
                n += 1
        batch.set_size(n)
        self._evaluate(batch)
        if self.later:
            outputs = self._first_outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
            self._rows = self.later.evaluate(batch, outputs[:n], range(len(missing), n))
        elif drafting:
            self._rows = self._logits.at(self.lib.llama_get_logits(self.handle))[len(missing) :]

    def _block_logits(self) -> Logits:
        return self._rows


class _ParallelSequence(BlockSequence):
    _reads_state_before = True
