"""The base of all heads on llama.cpp: their context and cache, and what their sequences have in common."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spec_local.core.calls import Call, Logits
from spec_local.core.sequence import Limits, States
from spec_local.core.span import Cell
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.context import LlamaContext
from spec_local.llama.heads.states import ReceivedStates
from spec_local.llama.hidden_states import Capture
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, NativeContext
from spec_local.llama.rollback import RollsBack
from spec_local.llama.saved import Progress, Saved, SavedParts
from spec_local.llama.sequence import NativeSequence

_MAX_UNREAD = 32  # tokens whose states are kept until they enter the cache in one call


class CacheContext(NativeContext):
    """A llama.cpp context for layers of a head, with the settings of the main model's context.

    Args:
        model: the head's file.
        main: the main model's context, which is kept open as long as this one.
        n_cells: number of entries of the cache.
        kv_bytes: size of the cache.
        max_tokens: maximum number of tokens per call.
        n_sequences: number of sequence ids; the last one is empty between calls.
        n_outputs: maximum number of tokens with logits that llama.cpp computes in a call.
        capture: of the states of its layers.
        params: other fields of llama.cpp's context parameters.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    max_logits: int
    saved: SavedParts
    """Copies of parts of the cache, in a prompt cache."""

    def __init__(
        self,
        model: Model,
        main: LlamaContext,
        *,
        n_cells: int,
        kv_bytes: int,
        max_tokens: int,
        n_sequences: int,
        n_outputs: int,
        capture: Capture | None = None,
        **params: Any,
    ) -> None:
        self.n_ctx, self.max_tokens = main.n_ctx, max_tokens
        if not model.has_own_memory:
            check_free_memory(kv_bytes, f"for the cache of {model.path.name}")
        self._extensions = runtime.extensions()
        given = runtime.library().llama_context_default_params()
        given.n_ctx = n_cells
        given.n_ubatch = max_tokens
        # For a model with an encoder, it is also the limit of logits, and each sequence needs one.
        given.n_batch = max(max_tokens, n_sequences)
        given.n_seq_max = n_sequences
        given.n_outputs_max = n_outputs
        given.kv_unified = True
        for name, value in params.items():
            setattr(given, name, value)
        if capture:
            capture.prepare(given)
        super().__init__(
            model,
            given,
            threads=main.threads,
            cache_type=main.cache_type,
            flash_attention=main.flash_attention,
            what=f"for {model.path.name}",
            advice="give a smaller `n_ctx`, or `draft=none`",
            parents=[main.handle],
        )
        self.saved = SavedParts(self, n_sequences - 1, has_states=False)

    def _evaluate(self, batch: Batch, calls: Sequence[Call[Any]] = ()) -> None:
        """Call llama_decode.

        Args:
            calls: those that it is for, which may be limited: see `NativeSequence.limit`.

        Raises:
            ContextOverflow: the cache has no room for the tokens.
            BackendError: the call failed.
        """
        limited = self.is_limited and calls
        code = self._decode_limited(calls, batch) if limited else self._decode(batch)
        n = batch.native.n_tokens
        if code == 1:
            raise ContextOverflow(f"the cache of a head has no room for {n} more tokens")
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {n} tokens of {self.model.path.name} "
                f"(code {code}, {runtime.failure_reason()}): use another draft, or `draft=none`"
            )


class HeadContext(CacheContext, ABC):
    """The context that the sequences of a head share."""

    @abstractmethod
    def decode(self, calls: Sequence[Call[Any]]) -> Sequence[Logits]:
        """Make one call for some of the sequences: see `Context.decode`."""


class HeadSequence(NativeSequence, RollsBack, ABC):
    """A sequence of a head, as a session sees it: a `Head`.

    Args:
        context: what the sequences have in common.
        seq_id: the first of llama.cpp's ids of this one.
        max_branches, max_draft, drafts_blocks: see `Limits`.
        max_logits: see `Limits`; None: as many as the context has.

    Attributes:
        n_received: number of tokens, from the first one of the history, whose states are known or no longer
            needed.
    """

    pad_to = None
    context: HeadContext
    n_received: int

    def __init__(
        self,
        context: HeadContext,
        seq_id: int,
        max_branches: int,
        max_draft: int = sys.maxsize,
        *,
        max_logits: int | None = None,
        drafts_blocks: bool = False,
    ) -> None:
        limits = Limits(
            context.n_vocab,
            context.n_ctx,
            context.max_tokens,
            max_logits or context.max_logits,
            max_branches,
            max_rollback=context.n_ctx,
            max_draft=min(max_draft, context.n_ctx),
            drafts_blocks=drafts_blocks,
            draft_tokens=context.model.draft_tokens,
        )
        super().__init__(context, seq_id, limits)
        self._cached: list[int] = []
        self._assumes_states = False

    @property
    def cached(self) -> Sequence[int]:  # type: ignore[override]  # that of several layers is made on demand
        """See `ModelSequence.cached`."""
        return self._cached

    def _check_positions(self, positions: Sequence[int] | None) -> None:
        """Check that no positions are given."""
        if positions is not None:
            raise InvalidRequest("a head numbers its tokens itself: give no positions")

    def _check_call(self, tokens: Sequence[int], n_logits: int) -> None:
        """Check that tokens can be evaluated in one call."""
        self._check_open()
        n = len(tokens)
        if not 1 <= n <= self.limits.max_tokens or not 0 <= n_logits <= min(n, self.limits.max_logits):
            raise InvalidRequest(f"{n} tokens and {n_logits} logits in one call of a head")
        is_known = min(tokens) >= 0 or all(token >= 0 or isinstance(token, Cell) for token in tokens)
        if not is_known or max(tokens) >= self.limits.n_vocab:
            raise self._unknown_token()

    def _joined(self, parts: Sequence[Logits]) -> Logits:
        """The logits of several calls."""
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.limits.n_vocab), np.float32)

    @contextmanager
    def known_states(self) -> Iterator[None]:
        """Evaluate tokens as if their states were known, and zero, to measure calls; for a ``with`` block."""
        self._assumes_states = True
        try:
            yield
        finally:
            self._assumes_states = False

    @abstractmethod
    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""

    @abstractmethod
    async def read(self) -> None:
        """Evaluate the tokens that were received: see `Head.read`."""

    @abstractmethod
    async def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Logits:
        """Evaluate tokens: see `ModelSequence.call`."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `ModelSequence.commit`."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `ModelSequence.truncate`."""

    @abstractmethod
    def resync(self) -> None:
        """Discard the tree, and what llama.cpp's cache lacks, after a failed or interrupted call."""


class CachingSequence(HeadSequence):
    """A sequence of a head that has a cache, into which it reads the states that it receives.

    Its entries are saved in the prompt cache as the cells of others are, so that the main model need not
    evaluate a restored prompt again to get the states of its tokens.
    """

    _reads_state_before = True
    """Whether an entry is made with the state of the token before it, instead of its own token's."""

    def __init__(
        self, context: HeadContext, seq_id: int, max_branches: int, max_draft: int = sys.maxsize, **more: Any
    ) -> None:
        super().__init__(context, seq_id, max_branches, max_draft, **more)
        self.received = ReceivedStates()
        """The states that it has received and may still need."""
        self._to_save: dict[int, Saved] = {}  # the states with which to go on after so many tokens

    @property
    @abstractmethod
    def _n_read(self) -> int:
        """Number of the first tokens of the main model's history whose entries are in the cache."""

    @abstractmethod
    def _take(self, tokens: list[int], received: ReceivedStates) -> None:
        """Make these tokens the history, whose entries are in the cache."""

    def keep(self) -> None:
        """See `ModelSequence.keep`: also the state with which to go on after what was received."""
        self._keep(len(self.received.tokens))

    def _keep(self, n: int) -> None:
        if n and self.context.saved.prompts and (states := self._states_after(n, n)) is not None:
            self._to_save[n] = states

    def _keep_blocks(self, start: int) -> None:
        """`keep` for the ends of the blocks in what was received from a position on."""
        block = self.context.saved.block
        self._to_save = {n: states for n, states in self._to_save.items() if n <= start}
        for n in range(start - start % block + block, len(self.received.tokens) + 1, block):
            self._keep(n)

    def _states_after(self, n_entries: int, n: int) -> Saved | None:
        """The states with which to go on after the first `n` tokens, if the cache has that many entries."""
        return self.received.packed(max(0, n_entries - self._reads_state_before), n)

    def save(self, most: int | None = None) -> Progress:
        """Copy what the prompt cache lacks of the history into it: see `SavedParts.save`."""
        self._check_open()
        prompts, n_entries, tokens = self.context.saved.prompts, self._n_read, self.received.tokens
        if not prompts or not n_entries:
            return "all"
        progress = self.context.saved.save(tokens[:n_entries], self._seq_id, most)
        if progress != "all":
            return progress
        for n in sorted({*self._to_save, n_entries, len(tokens)}):
            states = self._to_save.get(n)
            if n > n_entries or states is None:
                states = self._states_after(n_entries, n)
            if states is not None and not prompts.has_state(tokens[:n]):
                prompts.add_state(tokens[:n], states)
        self._to_save.clear()
        return "all"

    def _save_before(self, n_kept: int) -> None:
        """Save the history if less of it is about to be kept."""
        if n_kept < self._n_read and self.context.saved.saves_all:
            self.save()

    def _restore(self, tokens: list[int], n_known: int) -> None:
        """Restore more than the first `n_known` tokens from the prompt cache, if it has more."""
        saved = self.context.saved
        found = saved.find(tokens)
        for state in reversed(found.states):
            if not saved.prompts or state.length <= n_known:
                return
            states = saved.prompts.read(state.entry)
            if states is None:
                continue
            received = ReceivedStates.unpacked(tokens[: state.length], states)
            n = min(state.length, received.first + self._reads_state_before)
            if n > found.n_cells:
                continue
            self.truncate(0)
            if all(
                saved.put_cells(cells, self._seq_id, min(n, cells.start + cells.n))
                for cells in found.cells
                if cells.start < n
            ):
                self._take(tokens[:n], received)
                return
            self.context.remove(self._seq_id, 0)

    @property
    def n_received(self) -> int:  # type: ignore[override]
        """See `HeadSequence.n_received`."""
        return len(self.received.tokens)

    async def _read(self, n_read: int) -> None:
        """Evaluate what was received beyond the first `n_read` tokens, if it is enough for a call."""
        tokens = self.received.tokens
        if len(tokens) - n_read < min(_MAX_UNREAD, self.limits.max_tokens):
            return
        while (start := len(self._cached)) < len(tokens):
            await self.call(tokens[start : start + self.limits.max_tokens], n_logits=0)


def check_parents(tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Check that each of the nodes of a tree has a parent."""
    if len(parents) != len(tokens):
        raise InvalidRequest(f"{len(tokens)} tokens with {len(parents)} parents: give one parent per token")
