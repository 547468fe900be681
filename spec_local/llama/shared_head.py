"""The llama.cpp context of a head that drafts one token per call; its rows share each call."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_local.core.language_model import Call, Logits
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.float_rows import FloatRows
from spec_local.llama.llama_head import HeadContext
from spec_local.llama.model import Model
from spec_local.llama.shared_context import MAX_SEQUENCES, SharedContext

_ROW_OUTPUTS, _MIN_OUTPUTS = 8, 32  # rows of logits per call: per row, and at least


class SharedHead(HeadContext):
    """What the rows of a head have in common: a `SharedModel`.

    Args:
        model, main, kv_bytes, params: see `HeadContext`.
        n_rows: number of rows.
        max_branches: maximum number of leaves of a row's tree; fewer if the rows together would have more of
            them than sequence ids, or than a call has tokens.

    Attributes:
        zeros: takes the place of an unknown state.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    encodes = False
    """Whether the main model's states are encoded before the head reads them."""
    skips_first = False
    """Whether there is no pair for the first token."""
    returns_all = False
    """Whether a call has logits for all tokens of a row or for none."""
    has_all_outputs = True
    """Whether llama.cpp computes the head's output for all tokens. Otherwise it does so only for those with
    logits, and the head drafts chains only."""

    def __init__(
        self,
        model: Model,
        main: SharedContext,
        n_rows: int,
        kv_bytes: int,
        *,
        max_branches: int = 1,
        **params: Any,
    ) -> None:
        self.has_guard = model.has_window
        # llama.cpp reserves a row of logits for each id, and has at most one per token of a call.
        most = min(MAX_SEQUENCES, main.max_tokens) - self.encodes
        n_ids = most // n_rows  # per row
        if n_ids < 1 + self.has_guard:
            raise InvalidRequest(
                f"{model.path.name} cannot draft for {n_rows} answers at the same time, but for "
                f"{most // (1 + self.has_guard)}: let fewer run, give a larger --ctx, or --draft none"
            )
        if not self.has_all_outputs:
            max_branches = 1  # else all leaves of a tree would need logits
        self.max_branches = max(1, min(max_branches, n_ids - self.has_guard))
        self.first_guard = n_rows * self.max_branches
        n_outputs = n_rows * max(_ROW_OUTPUTS, self.max_branches)
        self.max_logits = min(main.max_tokens, max(_MIN_OUTPUTS, n_outputs))
        self.encoder_sequence = n_rows * (self.max_branches + self.has_guard)  # does not enter the cache
        n_sequences = self.encoder_sequence + self.encodes
        self.zeros = np.zeros(model.n_embd, np.float32)
        # If outputs come only with logits, both are computed for the last token of each row.
        n_outputs = (
            self.max_logits if self.has_all_outputs else min(main.max_tokens, self.max_logits + n_rows)
        )
        super().__init__(
            model,
            main,
            n_cells=n_rows * main.n_ctx,
            kv_bytes=kv_bytes,
            max_tokens=main.max_tokens,
            n_sequences=n_sequences,
            n_outputs=max(n_outputs, n_sequences),
            **params,
        )
        # Masked, llama.cpp copies one output per token with logits, otherwise one per token. If the graph
        # computes fewer, it returns those of other tokens, or aborts.
        self._extensions.llama_set_embeddings_nextn(self.handle, True, not self.has_all_outputs)
        self._batch = Batch(self._lib, self.max_tokens, self.max_branches, width=model.n_embd)
        self._logits = FloatRows(self.native, n_outputs, self.n_vocab)
        self._outputs = FloatRows(self.native, self.max_tokens, model.n_embd)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove the entries of a row from a position on; returns whether llama.cpp did so."""
        if self.skips_first and start == 1:
            start = 0  # the first token has no pair: its entry, if any, is a placeholder
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def copy(self, source: int, sequence: int, start: int, end: int) -> None:
        """Add the entries of a sequence at positions from `start` to `end` − 1 to another one."""
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def decode(self, calls: Sequence[Call]) -> Sequence[Logits]:
        """Evaluate tokens of some of the rows in one call: see `SharedModel.decode`."""
        n_tokens = sum(len(call.tokens) for call in calls)
        n_logits = sum(call.n_logits for call in calls)
        if not 1 <= n_tokens <= self.max_tokens or n_logits > self.max_logits:
            raise InvalidRequest(f"{n_tokens} tokens and {n_logits} rows of logits in one call of a head")
        # If logits are computed for all tokens, llama.cpp returns the first rows of the batch.
        ordered = sorted(calls, key=lambda call: not call.n_logits)
        code, done = -1, False
        try:
            self._encode(calls)
            self._fill_batch(ordered)
            runtime.clear_log()
            code = self._lib.llama_decode(self.handle, self._batch.native)
            found = {} if code else self._results(ordered)
            done = not code
        finally:
            if not done:
                for call in calls:
                    call.row.resync()  # type: ignore[attr-defined]  # a HeadRow
        self._check_code(code, n_tokens)
        return [found[id(call)] for call in calls]

    def _encode(self, calls: Sequence[Call]) -> None:
        """Encode the states that the rows have received."""

    def _fill_batch(self, calls: Sequence[Call]) -> None:
        n = 0
        for call in calls:
            n_logits = self._n_computed(call)
            call.row.fill_batch(self._batch, n, call, n_logits)  # type: ignore[attr-defined]  # a HeadRow
            n += len(call.tokens)
        self._batch.native.n_tokens = n

    def _n_computed(self, call: Call) -> int:
        """Number of the last tokens of a call whose logits are computed."""
        return call.n_logits if self.has_all_outputs else max(1, call.n_logits)

    def _results(self, calls: Sequence[Call]) -> dict[int, Logits]:
        """The logits of each call, in the order of the batch; hands their outputs to the rows."""
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        logits: Logits = np.empty((0, self.n_vocab), np.float32)
        if any(call.n_logits for call in calls):
            logits = self._logits.at(self._lib.llama_get_logits(self.handle))
        found: dict[int, Logits] = {}
        n_tokens = n_logits = 0
        for call in calls:
            n_tokens += len(call.tokens)
            n_computed = self._n_computed(call)
            n_logits += n_computed
            end, n = (n_tokens, len(call.tokens)) if self.has_all_outputs else (n_logits, n_computed)
            call.row.on_evaluated(outputs[end - n : end])  # type: ignore[attr-defined]  # a HeadRow
            found[id(call)] = logits[n_logits - call.n_logits : n_logits]
        return found
