"""A llama.cpp context: the KV cache of one token sequence, extended by a tree of draft tokens per call.

In llama.cpp, a token attends to a cache cell if both share a sequence id and the cell's position is not
later. Each branch of the tree is therefore a sequence: it is forked from its parent's sequence without
copying data, and a token with several children belongs to the sequences of all of them. The committed tokens
are always in sequence 0.

llama.cpp aborts the process when it is called with wrong arguments, so all of them are checked here first.
Positions are not passed in: they follow from the tree.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import machine
from spec_local.core.language_model import Logits
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject, Pointer

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
CACHE_TYPES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # bytes per value


@dataclass(frozen=True, slots=True)
class _Node:
    """A token of the tree; `sequence` is one that contains it and all its ancestors."""

    token: int
    parent: int
    position: int
    sequence: int


class Context:
    """The KV cache of one token sequence and a tree of draft tokens after it: a `LanguageModel`.

    Only one thread may use it at a time, which `spec_local.session.Session` ensures.

    Args:
        model: kept open as long as the context.
        n_ctx: maximum number of committed tokens and tree nodes together.
        max_branches: maximum number of leaves of a tree, 1 to 256.
        max_tokens: maximum number of tokens per call. It is also llama.cpp's physical batch size, so that
            each call reads the weights once. On a CPU, a larger value does not make prefill faster; compute
            buffers grow with it, and Ctrl-C waits for the call to end.
        max_logits: maximum number of rows of logits per call; llama.cpp reserves memory for them.
        threads: number of threads, for single tokens and batches; None: one per physical core.
        cache_type: type of keys and values, ``f16``, ``q8_0`` or ``q4_0``.
        flash_attention: None lets llama.cpp choose; a quantized cache requires it.
        pad_to: fill up each call with dummy tokens to a multiple of this number, so that logits depend only
            on the tokens before them (see `spec_local.llama.reproducible`). `n_ctx` is reduced to leave room
            for them; `max_tokens` must be a multiple of it, and `max_logits` is the same number.

    Raises:
        InvalidRequest: an argument is out of range.
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 4096,
        max_branches: int = 1,
        max_tokens: int = 96,
        max_logits: int = 65,
        threads: int | None = None,
        cache_type: str = "f16",
        flash_attention: bool | None = None,
        pad_to: int | None = None,
    ) -> None:
        threads = machine.default_threads() if threads is None else threads
        for name, value, low, high in [
            ("the context length", n_ctx, pad_to or 1, 1 << 24),
            ("the number of branches", max_branches, 1, MAX_SEQUENCES),
            ("the batch size", max_tokens, 1, 1 << 16),
            ("the number of logit rows", max_logits, 1, 1 << 16),
            ("the number of threads", threads, 1, 512),
        ]:
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}: give {low} to {high}")
        if cache_type not in CACHE_TYPES:
            raise InvalidRequest(f"cache type {cache_type!r} is unknown: give {', '.join(CACHE_TYPES)}")
        if cache_type != "f16" and flash_attention is False:
            raise InvalidRequest(f"a {cache_type} cache requires flash attention: leave it on")
        need = model.kv_bytes(n_ctx, CACHE_TYPES[cache_type])
        need += 2 * n_ctx * min(max_tokens, n_ctx)  # the attention mask, in f16
        check_free_memory(need, f"for a context of {n_ctx} tokens")
        self.model = model
        self.threads, self.cache_type, self.flash_attention = threads, cache_type, flash_attention
        self.pad_to = pad_to
        self.n_vocab = model.vocabulary.n_tokens
        self.n_ctx = n_ctx - (pad_to or 1) + 1
        self.max_tokens = max_tokens = min(max_tokens, n_ctx - n_ctx % (pad_to or 1))
        self.max_logits = max_tokens if pad_to else min(max_logits, max_tokens)
        self._lib = lib = runtime.library()
        # With a sliding window, llama.cpp reuses a cell that has left the window of its only
        # sequence, and the holes that a tree leaves make it search there. A second sequence, the
        # guard, keeps the committed tokens.
        max_branches = max_branches if model.can_roll_back else 1
        self._has_guard = model.has_window and model.can_roll_back
        n_extra = self._has_guard + bool(pad_to)
        self.max_branches = max_branches = min(max_branches, MAX_SEQUENCES - n_extra)
        self._padding = max_branches + self._has_guard  # the sequence of the dummy tokens
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = max_tokens
        # llama.cpp reserves a buffer of n_outputs_max rows, asserts that it suffices, and requires
        # at least one row per sequence.
        params.n_outputs_max = max(self.max_logits, max_branches + n_extra)
        params.n_seq_max = max_branches + n_extra
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True  # otherwise a rollback reports success, but the tokens are gone
        if pad_to:
            params.op_offload = False  # a GPU would compute large calls of a model in main memory
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        elif cache_type != "f16":
            params.flash_attn_type = 1
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        runtime.clear_log()
        with runtime.deferred_signals():
            handle: int = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise BackendError(
                f"llama.cpp could not create a context of {n_ctx} tokens "
                f"({runtime.failure_reason()}): give a smaller --ctx or another --cache-type"
            )
        self._native = NativeObject(lib.llama_free, handle, "context", model.handle)
        self._memory_address: int = lib.llama_get_memory(self.handle)
        self._cached: list[int] = []
        self._tree: list[_Node] = []
        self._ends = {0: -1}  # the last node of each sequence in use; -1: no node
        self._batch = Batch(lib, max_tokens, max_branches)
        self._logits: Logits = np.empty((0, self.n_vocab), np.float32)
        self._logits_address = 0

    def close(self) -> None:
        """Free the memory; logits that were returned must not be used any more."""
        self._native.close()

    @property
    def is_open(self) -> bool:
        return self._native.is_open

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self._native.pointer

    @property
    def _memory(self) -> Pointer:
        return self._native.inner(self._memory_address)

    @property
    def cached(self) -> Sequence[int]:
        """The committed tokens. Do not change them."""
        return self._cached

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Evaluate and commit tokens: see `LanguageModel.evaluate`."""
        if self._tree:
            self.commit(())
        logits = self.decode_tree(tokens, range(-1, len(tokens) - 1), n_logits)
        self.commit(range(len(tokens)))
        return logits

    def decode_tree(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """Add nodes to the tree in one llama_decode call: see `LanguageModel.decode_tree`."""
        n_logits = len(tokens) if n_logits is None else n_logits
        self._check(tokens, parents, n_logits)
        # The kernel of the output matrix, too, depends on the number of rows: padded calls compute all.
        n_rows = len(tokens) if self.pad_to and n_logits else n_logits
        code = -1
        try:
            self._fill_batch(tokens, parents, n_rows)
            runtime.clear_log()
            code = self._lib.llama_decode(self.handle, self._batch.native)
            if self.pad_to:
                self._lib.llama_memory_seq_rm(self._memory, self._padding, -1, -1)
        finally:
            if code:  # failed, or interrupted by a signal handler
                self._resync()
        if code == 1:
            raise ContextOverflow(
                f"the KV cache has no room for {len(tokens)} more tokens: "
                "start a new conversation or give a larger --ctx"
            )
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {len(tokens)} tokens "
                f"(code {code}, {runtime.failure_reason()}): try again, and run specdec doctor if it persists"
            )
        return self._read_logits(n_rows)[n_rows - n_logits :]

    def _check(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        self._check_open()
        n = len(tokens)
        if not 1 <= n <= self.max_tokens:
            raise InvalidRequest(f"{n} tokens in one call: give 1 to {self.max_tokens}")
        if not 0 <= n_logits <= min(n, self.max_logits):
            raise InvalidRequest(
                f"{n_logits} rows of logits for {n} tokens: give 0 to {min(n, self.max_logits)}"
            )
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.n_vocab - 1}")
        if len(self._cached) + len(self._tree) + n > self.n_ctx:
            raise ContextOverflow(
                f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger --ctx"
            )
        if len(parents) != n:
            raise InvalidRequest(f"{n} tokens with {len(parents)} parents: give one parent per token")
        ends, n_branches = set(self._ends.values()), len(self._ends)
        for node, parent in enumerate(parents, len(self._tree)):
            if not -1 <= parent < node:
                raise InvalidRequest(f"node {node} has parent {parent}: give -1 to {node - 1}")
            if parent in ends:
                ends.remove(parent)
            else:
                n_branches += 1
            ends.add(node)
        if n_branches > self.max_branches:
            if not self.model.can_roll_back:
                raise ModelError("a recurrent model cannot evaluate a tree: draft chains (--shape chain)")
            raise InvalidRequest(f"a tree with {n_branches} branches: give at most {self.max_branches}")

    def _fill_batch(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        """Fill the batch with new nodes, and fork sequences where they branch off."""
        tree, ends, n_before = self._tree, self._ends, len(self._tree)
        first_wanted = len(tokens) - n_logits
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent < 0:
                position, sequence = len(self._cached), 0
            else:
                position, sequence = tree[parent].position + 1, tree[parent].sequence
            if ends[sequence] != parent:
                sequence = self._fork(parent, n_before)
            ends[sequence] = n_before + i
            tree.append(_Node(token, parent, position, sequence))
            self._batch.put(i, token, position, sequence, i >= first_wanted)
        n = len(tokens)
        if self.pad_to:
            # The dummy tokens are a sequence of their own, and come last so that the cells of the others are
            # consecutive. Any token will do.
            for i in range(-n % self.pad_to):
                self._batch.put(n + i, tokens[0], i, self._padding, n_logits > 0)
            n += -n % self.pad_to
        self._batch.native.n_tokens = n

    def _fork(self, node: int, n_before: int) -> int:
        """Create a sequence that ends with `node`; nodes from `n_before` on are not evaluated yet."""
        sequence = len(self._ends)
        while node >= n_before:
            self._batch.add_sequence(node - n_before, sequence)
            node = self._tree[node].parent
        source, length = 0, len(self._cached)
        if node >= 0:
            source, length = self._tree[node].sequence, self._tree[node].position + 1
        if length:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, length)
        return sequence

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the rest: see `LanguageModel.commit`."""
        self._check_open()
        node = -1
        for child in path:
            if not 0 <= child < len(self._tree) or self._tree[child].parent != node:
                raise InvalidRequest(f"node {child} is not a child of node {node}: give a path from the root")
            node = child
        if self.pad_to and (n_first := _n_first(path)) < len(path):
            # Later tokens would fill the cells of rejected nodes between those of the path, and attention
            # adds up in the order of the cells. The nodes after the first gap are evaluated again.
            tokens = [self._tree[child].token for child in path[n_first:]]
            self.commit(path[:n_first])
            self.evaluate(tokens, 0)
            return
        source, start = self._tree[node].sequence if path else 0, len(self._cached)
        if source:
            try:
                self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)
                self._lib.llama_memory_seq_cp(self._memory, source, 0, start, start + len(path))
            except BaseException:  # from a signal handler
                self._resync()
                raise
            self._ends[0] = node
        kept = [self._tree[child].token for child in path]
        self._cut(start + len(path), kept)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens, and discard the tree.

        Raises:
            ModelError: the model is recurrent or hybrid, and `length` is neither 0 nor the current length.
        """
        self._check_open()
        if not 0 <= length <= len(self._cached):
            raise InvalidRequest(f"cannot truncate {len(self._cached)} tokens to {length}")
        self._cut(length)

    def state_size(self) -> int:
        """Return the size of `state` in bytes."""
        with self._only_committed():
            return int(self._lib.llama_state_get_size(self.handle))

    def state(self) -> NDArray[np.uint8]:
        """Return a copy of the cached state of the committed tokens; the tree is discarded.

        Returns:
            uint8 (n,), in llama.cpp's format. It is the state of the whole context: the state of a single
            sequence lacks the tokens outside a sliding window, to which the cache may be rolled back.

        Raises:
            ContextOverflow: there is no memory for the copy.
            BackendError: llama.cpp could not write the state.
        """
        with self._only_committed():
            n = int(self._lib.llama_state_get_size(self.handle))
            check_free_memory(n, "to save the state")
            state = np.empty(n, np.uint8)
            runtime.clear_log()
            if self._lib.llama_state_get_data(self.handle, _bytes(state), n) != n:
                raise BackendError(
                    f"llama.cpp could not save its state ({runtime.failure_reason()}): continue without it"
                )
        return state

    def restore(self, tokens: Sequence[int], state: NDArray[np.uint8]) -> None:
        """Replace the cache with a state saved from a context with the same model and settings.

        Args:
            tokens: the tokens that were committed when the state was saved.
            state: uint8 (n,), the unmodified result of `state`. llama.cpp does not validate it.

        Raises:
            ContextOverflow: there are more tokens than `n_ctx`; nothing has changed.
            BackendError: llama.cpp rejected the state; the context is empty.
        """
        self._check_open()
        if len(tokens) > self.n_ctx:
            raise ContextOverflow(f"{len(tokens)} tokens do not fit into a context of {self.n_ctx}")
        self._tree.clear()
        self._ends = {0: -1}
        self._cached.clear()
        done = False
        try:
            runtime.clear_log()
            n = self._lib.llama_state_set_data(self.handle, _bytes(state), len(state))
            end = self._lib.llama_memory_seq_pos_max(self._memory, 0) + 1
            if n != len(state) or end != len(tokens):
                raise BackendError(
                    f"llama.cpp rejected a saved state ({runtime.failure_reason()}): continue without it"
                )
            self._guard(0, end)
            self._cached.extend(tokens)
            done = True
        finally:
            if not done:
                self._lib.llama_memory_clear(self._memory, True)

    @contextlib.contextmanager
    def _only_committed(self) -> Iterator[None]:
        """Keep only sequence 0 in the cache within the block: its state does not depend on `max_branches`."""
        self.truncate(len(self._cached))
        try:
            self._guard(0, 0)
            yield
        finally:
            self._guard(0, len(self._cached))

    def _cut(self, length: int, kept: Sequence[int] = ()) -> None:
        """Reduce the cache to `length` tokens in sequence 0, the last of which, `kept`, are new."""
        self._cached.extend(kept)
        last = self._ends[0]
        removed, done = True, False
        try:
            if length < (len(self._cached) if last < 0 else self._tree[last].position + 1):
                removed = self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)
            for sequence in range(1, len(self._ends)):
                self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._guard(length - len(kept), length)
            done = removed
        finally:
            if not done:
                self._resync()
        if not removed:
            self.model.check_can_roll_back()
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        del self._cached[length:]
        self._tree.clear()
        self._ends = {0: -1}

    def _guard(self, start: int, end: int) -> None:
        """Extend the guard sequence, which contains the tokens before `start`, to those before `end`."""
        if not self._has_guard:
            return
        self._lib.llama_memory_seq_rm(self._memory, self.max_branches, start, -1)
        if start < end:
            self._lib.llama_memory_seq_cp(self._memory, 0, self.max_branches, start, end)

    def _read_logits(self, n: int) -> Logits:
        if not n:
            return np.empty((0, self.n_vocab), np.float32)
        pointer = self._lib.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp returned no logits: use a model that generates text")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            view = (ctypes.c_float * (self.max_logits * self.n_vocab)).from_address(address)
            view.owner = self._native  # type: ignore[attr-defined]  # keeps the memory of the logits alive
            flat: Logits = np.frombuffer(memoryview(view), np.float32)
            self._logits, self._logits_address = flat.reshape(-1, self.n_vocab), address
        return self._logits[:n]

    def _check_open(self) -> None:
        _ = self.handle, self.model.handle

    def _resync(self) -> None:
        """Discard the tree after a failed or interrupted call, and take the length from llama.cpp's cache."""
        self._tree.clear()
        self._ends = {0: -1}
        for sequence in [*range(1, self.max_branches), *([self._padding] if self.pad_to else [])]:
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        length = int(self._lib.llama_memory_seq_pos_max(self._memory, 0)) + 1
        if length != len(self._cached) and not self.model.can_roll_back:
            self._cached.clear()  # the recurrent state may be only partly updated
        del self._cached[length:]
        self._lib.llama_memory_seq_rm(self._memory, 0, len(self._cached), -1)
        self._guard(0, len(self._cached))


def _n_first(path: Sequence[int]) -> int:
    """Return how many nodes of a path are the first ones of the tree, in order."""
    return next((i for i, node in enumerate(path) if node != i), len(path))


def _bytes(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
