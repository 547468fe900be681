"""A llama.cpp context: the KV cache of one text, and one call to grow it by a tree of tokens.

In llama.cpp a token sees a cell of the cache when both share a sequence id and the cell does not come later. So a
branch of the tree is a sequence: it is forked from its parent's without copying data, and a token whose children
go different ways carries the ids of all of them. The text itself is always sequence 0.

llama.cpp answers a wrong call with an assertion that kills the process, so that every argument is checked
here first. Positions are never passed in: they follow from the tree.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import machine
from spec_local.core.language_model import Logits
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.llama import runtime
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
CACHE_TYPES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # name of --cache-type: bytes a value


@dataclass(frozen=True, slots=True)
class _Node:
    """A token of the tree: its position, and one sequence that holds it and all its ancestors."""

    token: int
    parent: int
    position: int
    sequence: int


class Context:
    """The KV cache of one text over one model, with room for a tree of guesses on top: a `LanguageModel`.

    Args:
        model: stays alive as long as the context.
        n_ctx: tokens that the text and the tree together can hold.
        max_branches: 1 to 256: most leaves of a tree.
        max_tokens: most tokens a call; also the physical batch, so that one call is one pass over the weights.
            Prefill is no faster with more (on a CPU), the compute buffers grow with it, and Ctrl-C waits for it.
        max_logits: most rows of logits a call; llama.cpp reserves memory for them.
        threads: for single tokens and for batches alike; None: one per physical core.
        cache_type: ``f16``, ``q8_0`` or ``q4_0`` keys and values.
        flash_attention: None leaves it to llama.cpp; a quantized cache needs it.

    Raises:
        InvalidRequest: an argument is out of range.
        ContextOverflow: the cache would not fit into free memory.
        BackendError: llama.cpp could not make the context.
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
    ) -> None:
        threads = machine.default_threads() if threads is None else threads
        for name, value, low, high in [
            ("the context length", n_ctx, 1, 1 << 24),
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
            raise InvalidRequest(f"a {cache_type} cache needs flash attention: leave it on")
        need = model.kv_bytes(n_ctx, CACHE_TYPES[cache_type])
        need += 2 * n_ctx * min(max_tokens, n_ctx)  # the attention mask, in f16
        check_free_memory(need, f"for a context of {n_ctx} tokens")
        self.model = model
        self.threads, self.cache_type, self.flash_attention = threads, cache_type, flash_attention
        self.n_vocab = model.vocabulary.n_tokens
        self.n_ctx = n_ctx
        self.max_tokens = max_tokens = min(max_tokens, n_ctx)
        self.max_logits = min(max_logits, max_tokens)
        self._lib = lib = runtime.library()
        # With a sliding window, llama.cpp takes a cell that has left the window of its ONLY sequence for free, and a
        # tree leaves the holes that make it look there. The text belongs to one sequence more, so that it never is.
        max_branches = max_branches if model.can_roll_back else 1
        self._has_guard = model.has_window and model.can_roll_back
        self.max_branches = max_branches = min(max_branches, MAX_SEQUENCES - self._has_guard)
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = max_tokens
        # llama.cpp reserves a compute buffer of n_outputs_max rows, and asserts on it; a row a sequence is
        # the least that it takes.
        params.n_outputs_max = max(self.max_logits, max_branches + self._has_guard)
        params.n_seq_max = max_branches + self._has_guard
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True  # with a cut window, rolling back reports success and loses tokens
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        elif cache_type != "f16":
            params.flash_attn_type = 1
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        runtime.clear_log()
        with runtime.deferred_signals():
            self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise BackendError(
                f"llama.cpp could not make a context of {n_ctx} tokens "
                f"({runtime.failure_reason()}): give a smaller --ctx or another --cache-type"
            )
        self._owner = _Owner()
        # The model must outlive the context, and weakref.finalize runs newest first at exit.
        self.close = weakref.finalize(self._owner, free_context, lib, self.handle, model)
        self._memory = lib.llama_get_memory(self.handle)
        self._cached: list[int] = []
        self._tree: list[_Node] = []
        self._ends = {0: -1}  # the node that each sequence in use ends with; -1: the text
        self._make_batch(max_tokens)
        self._logits: Logits = np.empty((0, self.n_vocab), np.float32)
        self._logits_address = 0

    def _make_batch(self, capacity: int) -> None:
        """One batch for all calls: numpy arrays that llama.cpp reads in place."""
        sequences = np.zeros((capacity, self.max_branches), np.int32)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "token": np.zeros(capacity, np.int32),
            "pos": np.zeros(capacity, np.int32),
            "logits": np.zeros(capacity, np.int8),
            "n_seq_id": np.ones(capacity, np.int32),
            "seq_id": sequences.ctypes.data + np.arange(capacity, dtype=np.uint64) * sequences.strides[0],
        }
        batch = self._batch = self._lib.llama_batch()
        for name, array in arrays.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, dict(batch._fields_)[name]))
        self._arrays = arrays  # nobody else would keep them
        # A call has few tokens, and for few entries a memoryview is several times quicker than numpy.
        self._ids, self._positions, self._wanted, self._n_sequences = (
            arrays[name].data for name in ("token", "pos", "logits", "n_seq_id")
        )
        self._sequences = sequences.data

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the text, in order. Do not change them."""
        return self._cached

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to the text: see `LanguageModel.evaluate`."""
        if self._tree:
            self.commit(())
        logits = self.decode_tree(tokens, range(-1, len(tokens) - 1), n_logits)
        self.commit(range(len(tokens)))
        return logits

    def decode_tree(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """Add nodes to the tree in ONE llama_decode: see `LanguageModel.decode_tree`."""
        n_logits = len(tokens) if n_logits is None else n_logits
        self._check(tokens, parents, n_logits)
        code = -1
        try:
            self._fill_batch(tokens, parents, n_logits)
            runtime.clear_log()
            code = self._lib.llama_decode(self.handle, self._batch)
        finally:
            if code:  # failed, or interrupted by a Python signal handler
                self._resync()
        if code == 1:
            raise ContextOverflow(
                f"the KV cache has no room for {len(tokens)} more tokens: "
                "start a new conversation or give a larger --ctx"
            )
        if code:
            raise BackendError(
                f"llama.cpp could not evaluate {len(tokens)} tokens "
                f"(code {code}, {runtime.failure_reason()}): try again, and run specdec doctor if it stays so"
            )
        return self._read_logits(n_logits)

    def _check(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        self._check_open()
        n = len(tokens)
        if not 1 <= n <= self.max_tokens:
            raise InvalidRequest(f"{n} tokens in one call: give 1 to {self.max_tokens}")
        if not 0 <= n_logits <= min(n, self.max_logits):
            raise InvalidRequest(
                f"{n_logits} rows of logits of {n} tokens: ask for 0 to {min(n, self.max_logits)}"
            )
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise InvalidRequest(f"a token is outside of the vocabulary: give 0 to {self.n_vocab - 1}")
        if len(self._cached) + len(self._tree) + n > self.n_ctx:
            raise ContextOverflow(
                f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger --ctx"
            )
        if len(parents) != n:
            raise InvalidRequest(f"{n} tokens have {len(parents)} parents: give one for each")
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
            raise InvalidRequest(f"a tree of {n_branches} branches: give at most {self.max_branches}")

    def _fill_batch(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        """Give every token its position and sequences; fork those that branch off from what is evaluated."""
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
            self._ids[i] = token
            self._positions[i] = position
            self._wanted[i] = i >= first_wanted
            self._n_sequences[i] = 1
            self._sequences[i, 0] = sequence
        self._batch.n_tokens = len(tokens)

    def _fork(self, node: int, n_before: int) -> int:
        """A new sequence that ends with `node`: through the batch where that is not evaluated yet, else by a copy."""
        sequence = len(self._ends)
        while node >= n_before:
            i = node - n_before
            self._sequences[i, self._n_sequences[i]] = sequence
            self._n_sequences[i] += 1
            node = self._tree[node].parent
        source, length = 0, len(self._cached)
        if node >= 0:
            source, length = self._tree[node].sequence, self._tree[node].position + 1
        if length:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, length)
        return sequence

    def commit(self, path: Sequence[int]) -> None:
        """Let a path of the tree become text and forget the rest: see `LanguageModel.keep`."""
        self._check_open()
        node = -1
        for child in path:
            if not 0 <= child < len(self._tree) or self._tree[child].parent != node:
                raise InvalidRequest(f"node {child} is no child of node {node}: give a path from the root")
            node = child
        source, start = self._tree[node].sequence if path else 0, len(self._cached)
        if source:
            try:
                self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)
                self._lib.llama_memory_seq_cp(self._memory, source, 0, start, start + len(path))
            except BaseException:  # a Python signal handler
                self._resync()
                raise
            self._ends[0] = node
        kept = [self._tree[child].token for child in path]
        self._cut(start + len(path), kept)

    def truncate(self, length: int) -> None:
        """Roll the text back to its first `length` tokens, and forget the tree.

        Raises:
            ModelError: a recurrent or hybrid model cannot forget its last tokens (forgetting all works).
        """
        self._check_open()
        if not 0 <= length <= len(self._cached):
            raise InvalidRequest(f"cannot trim {len(self._cached)} cached tokens to {length}")
        self._cut(length)

    def state_size(self) -> int:
        """Bytes of `state`."""
        with self._text_alone():
            return int(self._lib.llama_state_get_size(self.handle))

    def state(self) -> NDArray[np.uint8]:
        """A copy of what has been evaluated of the text; the tree is forgotten.

        Returns:
            uint8 (n,), as llama.cpp writes it. Not the sequence's own state: that leaves out what has left a sliding
            window, and rolling back would miss it.

        Raises:
            ContextOverflow: there is no memory for it.
            BackendError: llama.cpp could not write it.
        """
        with self._text_alone():
            n = int(self._lib.llama_state_get_size(self.handle))
            check_free_memory(n, "to save the state")
            state = np.empty(n, np.uint8)
            runtime.clear_log()
            if self._lib.llama_state_get_data(self.handle, _bytes(state), n) != n:
                raise BackendError(
                    f"llama.cpp could not save its state ({runtime.failure_reason()}): go on without it"
                )
        return state

    def restore(self, tokens: Sequence[int], state: NDArray[np.uint8]) -> None:
        """Hold a text as a context of the same model and settings has evaluated it.

        Args:
            tokens: the text.
            state: uint8 (n,), what `state` gave then, and nothing else: llama.cpp trusts it.

        Raises:
            ContextOverflow: the text is longer than the context; nothing has changed.
            BackendError: llama.cpp refused it; no text is left.
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
                    f"llama.cpp refused a saved state ({runtime.failure_reason()}): go on without it"
                )
            self._guard(0, end)
            self._cached.extend(tokens)
            done = True
        finally:
            if not done:
                self._lib.llama_memory_clear(self._memory, True)

    @contextlib.contextmanager
    def _text_alone(self) -> Iterator[None]:
        """Nothing is cached but the text, in sequence 0, so that the number of branches does not matter."""
        self.truncate(len(self._cached))
        try:
            self._guard(0, 0)
            yield
        finally:
            self._guard(0, len(self._cached))

    def _cut(self, length: int, kept: Sequence[int] = ()) -> None:
        """Leave `length` tokens in sequence 0, the last of which are new to the text, and nothing elsewhere."""
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
        """Let the text, from `start` to its `end`, belong to the guard's sequence too, and nothing after it."""
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
            raise BackendError("llama.cpp returned no logits: this model cannot write text")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            view = (ctypes.c_float * (self.max_logits * self.n_vocab)).from_address(address)
            view.owner = self._owner  # type: ignore[attr-defined]  # who holds the logits holds their memory
            flat: Logits = np.frombuffer(memoryview(view), np.float32)
            self._logits, self._logits_address = flat.reshape(-1, self.n_vocab), address
        return self._logits[:n]

    def _check_open(self) -> None:
        if not (self.close.alive and self.model.close.alive):
            raise InvalidRequest("the context or its model is closed: open it again")

    def _resync(self) -> None:
        """After a call that failed or was interrupted: forget the tree, and believe the cache, not the plan."""
        self._tree.clear()
        self._ends = {0: -1}
        for sequence in range(1, self.max_branches):
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        length = int(self._lib.llama_memory_seq_pos_max(self._memory, 0)) + 1
        if length != len(self._cached) and not self.model.can_roll_back:
            self._cached.clear()  # the one running state may have been left half-way: nothing of it can be trusted
        del self._cached[length:]
        self._lib.llama_memory_seq_rm(self._memory, 0, len(self._cached), -1)
        self._guard(0, len(self._cached))


def _bytes(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


class _Owner:
    """Lives as long as the context or anybody's view of its logits; the context is freed after it."""


def free_context(lib: Any, handle: int, model: Model) -> None:
    """Free a llama.cpp context of this model, unless the model has gone before."""
    if model.close.alive:  # llama.cpp reads the model while it frees; losing memory is better than a crash
        lib.llama_free(handle)
