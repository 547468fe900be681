"""The llama.cpp context of a head that drafts a block of tokens in one call; its rows share each call.

The cache has an entry for each token of the history whose state the main model has computed. A block is
evaluated after them: the last token of the history (the anchor), and mask tokens in place of those to draft.
Its entries are removed again right after the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_local.core.language_model import Call, Logits
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.float_rows import FloatRows
from spec_local.llama.llama_head import HeadContext
from spec_local.llama.model import Model
from spec_local.llama.shared_context import CACHE_TYPES, SharedContext

if TYPE_CHECKING:
    from spec_local.llama.block_head import BlockRow


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a head drafts.

    Attributes:
        size: maximum number of tokens in a block, the anchor included.
        n_skipped: number of first tokens of a block whose logits belong to no draft token: 1 if the output of
            a mask token predicts the token at its own position, 0 if each output predicts the next token.
        mask: the mask token.
        is_causal: whether the tokens of a block attend only to those before them.
    """

    size: int
    n_skipped: int
    mask: int
    is_causal: bool

    @property
    def n_drafted(self) -> int:
        """Maximum number of draft tokens in a block."""
        return self.size - self.n_skipped


class SharedBlockHead(HeadContext):
    """What the rows of a head that drafts blocks have in common: a `SharedModel`.

    The tokens of a row's call are those whose states enter the cache, in order. If it has rows of logits, its
    last token is instead the anchor of a block of that many tokens.

    Args:
        model, main: see `HeadContext`.
        n_rows: number of rows.
        block: how the head drafts.

    Attributes:
        n_calls: number of calls so far. Each overwrites the logits of the one before.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    def __init__(self, model: Model, main: SharedContext, n_rows: int, block: BlockFormat) -> None:
        self.block, self.n_calls = block, 0
        self.max_logits = n_rows * block.size
        n_cells = n_rows * (main.n_ctx + block.size)
        width = len(model.target_layers) * model.n_embd
        self.zeros = np.zeros(width, np.float32)
        lib = runtime.library()
        super().__init__(
            model,
            main,
            n_cells=n_cells,
            kv_bytes=model.kv_bytes(n_cells, CACHE_TYPES[main.cache_type])
            + self.max_logits * model.vocabulary.n_tokens * np.dtype(np.float32).itemsize,
            max_tokens=max(main.max_tokens, self.max_logits),  # all blocks must be in one physical batch
            n_sequences=n_rows,
            n_outputs=self.max_logits,
            ctx_other=main.handle.address,
        )
        lib.llama_set_causal_attn(self.handle, block.is_causal)
        rotates_by_several = lib.llama_model_rope_type(model.handle) == lib.LLAMA_ROPE_TYPE_MROPE
        self._states = Batch(
            lib, self.max_tokens, width=width, has_tokens=False, n_positions=4 if rotates_by_several else 1
        )
        self._blocks = Batch(lib, self.max_logits)
        self._logits = FloatRows(self.native, self.max_logits, self.n_vocab)

    def decode(self, calls: Sequence[Call]) -> Sequence[Logits]:
        """Add states to the cache, and draft blocks, for some of the rows: see `SharedModel.decode`."""
        # All blocks of a call have the same size, as llama.cpp requires for DSpark.
        size = max(call.n_logits for call in calls)
        drafting = [call for call in calls if call.n_logits]
        n_tokens = sum(len(call.tokens) for call in calls)
        if size * len(drafting) > self.max_logits:
            raise InvalidRequest(f"{len(drafting)} blocks of {size} tokens in one call of a head")
        self.n_calls += 1
        code, done = -1, False
        try:
            anchors = [_row(call).n_stored + len(call.tokens) - 1 for call in drafting]
            runtime.clear_log()
            code = self._store_states(calls)
            if not code and drafting:
                code = self._decode_blocks(drafting, anchors, size)
            done = not code
        finally:
            for call in calls:
                self.remove(_row(call).sequence, _row(call).n_stored)
                if not done:
                    _row(call).resync()
        self._check_code(code, n_tokens)
        return self._results(calls, size)

    def _store_states(self, calls: Sequence[Call]) -> int:
        """Add the rows' states to the cache, in as few calls as possible; returns llama.cpp's code."""
        missing = [
            (row, position)
            for call in calls
            for row in (_row(call),)
            for position in range(row.n_stored, row.n_stored + len(call.tokens) - (call.n_logits > 0))
        ]
        for start in range(0, len(missing), self.max_tokens):
            part = missing[start : start + self.max_tokens]
            for i, (row, position) in enumerate(part):
                self._states.put(i, 0, position, row.sequence, False)
                self._states.vectors[i] = row.state(position)
            self._states.set_size(len(part))
            if code := int(self._lib.llama_decode(self.handle, self._states.native)):
                return code
            for row, position in dict(part).items():  # the last position of each row
                row.on_stored(position + 1)
        return 0

    def _decode_blocks(self, calls: Sequence[Call], anchors: Sequence[int], size: int) -> int:
        """Evaluate the rows' blocks in one call; returns llama.cpp's code."""
        for i, (call, anchor) in enumerate(zip(calls, anchors, strict=True)):
            for j in range(size):
                token = self.block.mask if j else call.tokens[-1]
                # Logits for all tokens: llama.cpp computes all, and would return the first rows otherwise.
                self._blocks.put(i * size + j, token, anchor + j, _row(call).sequence, True)
        self._blocks.set_size(len(calls) * size)
        return int(self._lib.llama_decode(self.handle, self._blocks.native))

    def _results(self, calls: Sequence[Call], size: int) -> Sequence[Logits]:
        nothing: Logits = np.empty((0, self.n_vocab), np.float32)
        logits = self._logits.at(self._lib.llama_get_logits(self.handle)) if size else nothing
        found: list[Logits] = []
        n = 0
        for call in calls:
            found.append(logits[n : n + call.n_logits])
            n += size if call.n_logits else 0
        return found

    def remove(self, sequence: int, start: int) -> None:
        """Remove the entries of a row from a position on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let a row, which must be empty, share the first entries of another one."""
        if length:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, length)


def _row(call: Call) -> "BlockRow":
    row: Any = call.row
    found: BlockRow = row
    return found
