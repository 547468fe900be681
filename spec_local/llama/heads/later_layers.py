"""The context of the layers of an EAGLE-3 head after its first one: see `spec_local.llama.later_model`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits
from spec_local.llama.context import CACHE_TYPES, LlamaContext
from spec_local.llama.heads.base import CacheContext, HeadContext
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.later_model import LaterModel
from spec_local.llama.native_context import Batch, NativeContext, OutputView
from spec_local.llama.saved import Saved, SavedParts


class LaterContext(CacheContext):
    """The context of a head's later layers, with the same sequences and positions as that of the first one.

    Args:
        model: the later layers.
        first: the context of the first layer.
        main: the main model's context.
        n_cells, n_sequences: as of the first layer's context.
        n_outputs: maximum number of tokens with logits in a call.
        returns_states: keep the outputs of the last layer, of the tokens with logits.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    model: LaterModel

    def __init__(
        self,
        model: LaterModel,
        first: HeadContext,
        main: LlamaContext,
        *,
        n_cells: int,
        n_sequences: int,
        n_outputs: int,
        returns_states: bool,
    ) -> None:
        self.max_logits, self._states = n_outputs, None
        if returns_states:
            self._states = HiddenStates((model.n_layers - 1,)).capture(model, first.max_tokens)
        super().__init__(
            model,
            main,
            n_cells=n_cells,
            kv_bytes=model.kv_bytes(n_cells, CACHE_TYPES[main.cache_type]),
            max_tokens=first.max_tokens,
            n_sequences=n_sequences,
            n_outputs=max(n_outputs, n_sequences),
            capture=self._states,
        )
        self._batch = Batch(self.lib, self.max_tokens, width=model.n_embd, has_tokens=False)
        self._logits = OutputView(self.native, n_outputs, self.n_vocab)
        n_vocab = first.n_vocab
        self._all: Logits = np.full(
            (n_outputs if model.rows is not None else 0, n_vocab), -np.inf, np.float32
        )

    def evaluate(self, batch: Batch, inputs: NDArray[np.float32], wanted: Sequence[int]) -> Logits:
        """Evaluate the outputs of the first layer for a batch.

        Args:
            batch: that of the first layer.
            inputs: float32 (number of its entries, width).
            wanted: the entries whose logits are computed, ascending.

        Returns:
            their logits for all tokens, float32 (len(wanted), V); −∞ for those that the head cannot draft.
            The next call overwrites them.

        Raises:
            ContextOverflow: the cache has no room for the tokens.
            BackendError: the call failed.
        """
        self._batch.follow(batch, inputs, wanted)
        if self._states:
            self._states.begin()
        self._evaluate(self._batch)
        if self._states:
            self._states.finish(len(wanted), None)
        if not wanted:
            return self._all[:0]
        rows = self._logits.at(self.lib.llama_get_logits(self.handle))[: len(wanted)]
        if self.model.rows is None:
            return rows
        self._all[: len(wanted), self.model.rows] = rows
        return self._all[: len(wanted)]

    def states(self, n: int) -> NDArray[np.float32]:
        """The outputs of the last layer for the last call's `n` tokens with logits, float32 (n, width)."""
        assert self._states
        return self._states.at(range(n))


class WithLaterLayers(HeadContext):
    """The context of a head that has later layers or not: what is done to its cache is done to theirs."""

    later: LaterContext | None = None

    def open_later(
        self, main: LlamaContext, n_cells: int, n_sequences: int, n_outputs: int, *, returns_states: bool
    ) -> None:
        """Create the context of the later layers, if the head has any; see `LaterContext`."""
        if not self.model.n_later:
            return
        model = LaterModel(self.model)
        try:
            self.later = LaterContext(
                model,
                self,
                main,
                n_cells=n_cells,
                n_sequences=n_sequences,
                n_outputs=n_outputs,
                returns_states=returns_states,
            )
        except BaseException:
            model.close()
            raise
        self.saved = _SavedTwice(self, self.later.saved, n_sequences - 1)

    def close(self) -> None:
        """See `NativeContext.close`."""
        if self.later:
            self.later.close()
            self.later.model.close()
        super().close()

    def copy(self, source: int, seq_id: int, start: int, end: int) -> None:
        """See `NativeContext.copy`."""
        super().copy(source, seq_id, start, end)
        if self.later:
            self.later.copy(source, seq_id, start, end)

    def remove(self, seq_id: int, start: int) -> bool:
        """See `NativeContext.remove`; the first token has no pair: its entry, if any, is a placeholder."""
        start = 0 if start == 1 else start
        done = super().remove(seq_id, start)
        return (not self.later or self.later.remove(seq_id, start)) and done

    def length(self, seq_id: int) -> int:
        """See `NativeContext.length`."""
        n = super().length(seq_id)
        return min(n, self.later.length(seq_id)) if self.later else n


class _SavedTwice(SavedParts):
    """Copies parts of the caches of both contexts: the length of the first one's, and both."""

    def __init__(self, context: NativeContext, later: SavedParts, spare: int) -> None:
        super().__init__(context, spare, has_states=False)
        self._later = later

    def _get(self, seq_id: int, part: int) -> Saved:
        both = super()._get(seq_id, part), self._later._get(seq_id, part)
        return np.concatenate([np.array([len(both[0])], np.int64).view(np.uint8), *both])

    def _set(self, data: Saved, seq_id: int, part: int) -> bool:
        end = 8 + int(data[:8].view(np.int64)[0])
        return super()._set(data[8:end], seq_id, part) and self._later._set(data[end:], seq_id, part)
