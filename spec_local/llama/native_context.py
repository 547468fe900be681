"""A ``llama_context``: the arrays that its calls read and write, and the cells of its KV cache.

In llama.cpp, a token attends to a cell if both share a sequence id and the cell's position is not later. Each
branch of a tree of draft tokens therefore has an id: it is forked from its parent's without copying data, and
a token with several children belongs to the ids of all of them.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.core.calls import Call
from spec_local.core.span import Cell
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import runtime, thread_count
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject, Pointer


class Batch:
    """A llama_batch that is reused for all calls: NumPy arrays, which llama.cpp reads in place.

    Args:
        lib: the low-level API.
        capacity: maximum number of tokens.
        max_sequences: maximum number of llama.cpp's sequences that a token can belong to.
        width: size of the vector that each entry has beside its token; 0: none.
        has_tokens: whether the entries have tokens; False: only vectors.
        n_axes: positions of each vector, as in `Model.n_axes`; 1 for tokens.

    Attributes:
        native: the structure to pass to llama_decode, after `set_size`.
        vectors: float32 (capacity, width), which the caller sets.
    """

    def __init__(
        self,
        lib: Any,
        capacity: int,
        max_sequences: int = 1,
        *,
        width: int = 0,
        has_tokens: bool = True,
        n_axes: int = 1,
    ) -> None:
        seq_ids = np.zeros((capacity, max_sequences), np.int32)
        self.vectors: NDArray[np.float32] = np.zeros((capacity, width), np.float32)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "token": np.zeros(capacity, np.int32),
            "pos": np.zeros(capacity * n_axes, np.int32),
            "logits": np.zeros(capacity, np.int8),
            "n_seq_id": np.ones(capacity, np.int32),
            "seq_id": seq_ids.ctypes.data + np.arange(capacity, dtype=np.uint64) * seq_ids.strides[0],
        }
        self.native = lib.llama_batch()
        given = {name: array for name, array in arrays.items() if has_tokens or name != "token"}
        if width:
            given["embd"] = self.vectors
        for name, array in given.items():
            setattr(self.native, name, ctypes.cast(array.ctypes.data, dict(self.native._fields_)[name]))
        self._arrays, self._n_axes = arrays, n_axes  # the structure holds only their addresses
        # For the few entries of a call, a memoryview is several times as fast as NumPy.
        self._tokens, self._positions, self._wants_logits, self._n_seq_ids = (
            arrays[name].data for name in ("token", "pos", "logits", "n_seq_id")
        )
        self._seq_ids, self._seq_id_array = seq_ids.data, seq_ids

    def put(self, i: int, token: int, position: int, seq_id: int, wants_logits: bool) -> None:
        """Set entry `i`: a token of one of llama.cpp's sequences, and whether to compute its logits."""
        self.put_all(i, (token,), (position,), (seq_id,), int(wants_logits))

    def put_all(
        self, i: int, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], n_logits: int
    ) -> None:
        """Set the entries from `i` on; compute the logits of the last `n_logits` of these.

        A head reads the placeholder of a cell: see `spec_local.core.span`.
        """
        first_wanted = i + len(tokens) - n_logits
        for token, position, seq_id in zip(tokens, positions, seq_ids, strict=True):
            self._tokens[i] = token.span.placeholder if isinstance(token, Cell) else token
            self._positions[i] = position
            self._wants_logits[i] = i >= first_wanted
            self._n_seq_ids[i] = 1
            self._seq_ids[i, 0] = seq_id
            i += 1

    def add_sequence(self, i: int, seq_id: int) -> None:
        """Add the token of entry `i` to another one of llama.cpp's sequences."""
        self._seq_ids[i, self._n_seq_ids[i]] = seq_id
        self._n_seq_ids[i] += 1

    def seq_ids(self) -> list[int]:
        """The first of llama.cpp's sequences of each token."""
        found: list[int] = self._seq_id_array[: self.native.n_tokens, 0].tolist()
        return found

    def put_vectors(self, vectors: NDArray[np.float32], positions: NDArray[np.int32], seq_id: int) -> None:
        """Set all entries: vectors without logits.

        Args:
            vectors: float32 (n, width). positions: int32 (n, k): the first k axes of each; others are 0.
        """
        n, k = positions.shape
        self.native.n_tokens = n
        self.vectors[:n] = vectors
        self._arrays["pos"][:] = 0
        self._arrays["pos"][: n * k] = positions.T.ravel()
        self._arrays["logits"][:] = 0
        self._seq_id_array[:n, 0] = seq_id

    def follow(self, other: "Batch", vectors: NDArray[np.float32], wanted: Sequence[int]) -> None:
        """Set all entries: those of another batch, with these vectors, and logits of the wanted ones."""
        n = self.native.n_tokens = other.native.n_tokens
        for name in ("pos", "n_seq_id", "seq_id"):
            setattr(self.native, name, getattr(other.native, name))
        self.vectors[:n] = vectors
        self._arrays["logits"][:n] = 0
        self._arrays["logits"][list(wanted)] = 1

    def set_size(self, n: int) -> None:
        """Set the number of entries; of 4 positions, those of a text are the same, and the last one is 0."""
        self.native.n_tokens = n
        if self._n_axes > 1:
            positions = self._arrays["pos"]
            positions[n : 3 * n] = np.tile(positions[:n], 2)
            positions[3 * n : 4 * n] = 0


class OutputView:
    """A view of an output buffer, such as that of the logits. llama.cpp may move it from call to call.

    Args:
        owner: the context that the buffer belongs to; it is freed later than the view.
        n, width: number of vectors in the buffer, and their width.
    """

    def __init__(self, owner: NativeObject, n: int, width: int) -> None:
        self._owner, self._shape = owner, (n, width)
        self._view: NDArray[np.float32] = np.empty((0, width), np.float32)
        self._address = 0

    def at(self, pointer: Any) -> NDArray[np.float32]:
        """Return the vectors at a pointer to float, float32 (n, width)."""
        address = ctypes.addressof(pointer.contents)
        if address != self._address:
            n, width = self._shape
            floats = (ctypes.c_float * (n * width)).from_address(address)
            floats.owner = self._owner  # type: ignore[attr-defined]  # keeps the memory alive
            flat: NDArray[np.float32] = np.frombuffer(memoryview(floats), np.float32)
            self._view, self._address = flat.reshape(n, width), address
        return self._view


class NativeContext:
    """A ``llama_context`` and its KV cache.

    Args:
        model: kept open as long as the context.
        params: llama.cpp's parameters of the context, without those that follow from the other arguments.
        threads, cache_type, flash_attention: see `spec_local.llama.context.ContextOptions`.
        what: which context it is, for an error.
        advice: what to do if llama.cpp cannot create it.
        fixed_threads: use all threads even if other programs use their cores.
        parents: pointers to other objects that are freed later.

    Attributes:
        lib: llama.cpp's low-level API.
        native: owner of the ``llama_context``.
        sequences: weak references to them.
        is_limited: whether calls may compute a part of the output matrix: see `NativeSequence.limit`.

    Raises:
        BackendError: llama.cpp could not create the context.
    """

    n_ctx: int
    max_tokens: int
    max_logits: int

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        threads: int,
        cache_type: str,
        flash_attention: bool | None,
        what: str,
        advice: str,
        fixed_threads: bool = False,
        parents: Sequence[Pointer] = (),
    ) -> None:
        self.model, self.n_vocab = model, model.vocabulary.n_tokens
        self.threads, self.cache_type, self.flash_attention = threads, cache_type, flash_attention
        self.sequences: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_limited = False
        self.lib = lib = runtime.library()
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = True  # otherwise a rollback reports success, but the tokens are gone
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        elif cache_type != "f16":
            params.flash_attn_type = 1
        runtime.clear_log()
        with runtime.deferred_signals():
            handle: int = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise BackendError(
                f"llama.cpp could not create a context {what} ({runtime.failure_reason()}): {advice}"
            )
        self.native = NativeObject(lib.llama_free, handle, "context", model.handle, *parents)
        self._thread_count = None if fixed_threads or model.is_on_gpu else thread_count.adaptive(threads)
        self._memory: int = lib.llama_get_memory(self.handle)

    def close(self) -> None:
        """Free the memory; logits that were returned must not be used any more."""
        self.native.close()

    def _decode(self, batch: Batch) -> int:
        """Call llama_decode, with as many threads as the processor has cores for; returns its code."""
        if runtime.log.lines or runtime.log.n_dropping:
            runtime.clear_log()
        if not self._thread_count:
            return int(self.lib.llama_decode(self.native.pointer, batch.native))
        with self._thread_count.call() as n:
            self.lib.llama_set_n_threads(self.native.pointer, n, n)
            return int(self.lib.llama_decode(self.native.pointer, batch.native))

    def _decode_limited(self, calls: Sequence[Call[Any]], batch: Batch) -> int:
        """`_decode`, computing the output matrix only for tokens that the sequences of these calls may draft.

        Those that the sequences read now are among them.
        """
        tiles: list[NDArray[np.int32] | None] = []
        for call in calls:
            vocabulary: DraftVocabulary | None = call.sequence.draft_vocabulary
            if vocabulary:
                call.sequence.may_draft(call.tokens)
            if call.n_logits:
                tiles.append(vocabulary.tiles if vocabulary else None)
        chosen = [each for each in tiles if each is not None]
        native = kernels.installed()
        if not native or not chosen or len(chosen) < len(tiles):
            return self._decode(batch)
        native.choose_rows(self.n_vocab, chosen[0] if len(chosen) == 1 else np.unique(np.concatenate(chosen)))
        try:
            return self._decode(batch)
        finally:
            native.choose_rows(0, None)

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self.native.pointer

    @property
    def memory(self) -> Pointer:
        """llama.cpp's pointer to the KV cache."""
        return self.native.inner(self._memory)

    # The pointer to the context keeps the cache, of which llama.cpp gets the address, during a call.

    def copy(self, source: int, seq_id: int, start: int, end: int) -> None:
        """Add the cells of a sequence at positions from `start` to `end` − 1 to another one; −1: all."""
        _kept = self.native.pointer
        self.lib.llama_memory_seq_cp(self._memory, source, seq_id, start, end)

    def remove(self, seq_id: int, start: int) -> bool:
        """Remove a sequence's cells from a position on; returns whether llama.cpp did so."""
        _kept = self.native.pointer
        return bool(self.lib.llama_memory_seq_rm(self._memory, seq_id, start, -1))

    def length(self, seq_id: int) -> int:
        """The position after the last one of a sequence in the cache."""
        _kept = self.native.pointer
        return int(self.lib.llama_memory_seq_pos_max(self._memory, seq_id)) + 1


class Tree:
    """The tree of draft tokens of one sequence, and llama.cpp's ids of its branches.

    Args:
        context: the cells of its cache belong to the ids.
        first: id of the history. Those of the branches follow.
        limit: maximum number of branches, the first one included.
        guard: id that contains only the history, for models with a sliding window; None: there is no window.
            Without it, llama.cpp would reuse cells that have left the window, even for draft tokens that are
            then rejected.

    Attributes:
        tokens, parents, positions: of each node, in the order in which they were added.
        seq_ids: of each node one that contains it and all its ancestors.
    """

    def __init__(self, context: NativeContext, first: int, limit: int, guard: int | None = None) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self._context, self._first, self._limit, self._guard = context, first, limit, guard
        self._ends = {first: -1}  # the last node of each id in use; -1: no node

    def __len__(self) -> int:
        return len(self.tokens)

    def count(self, n: int, parents: Sequence[int]) -> int:
        """Number of branches after n nodes with these parents have been added.

        Raises:
            InvalidRequest: a parent is missing, or does not exist.
        """
        if len(parents) != n:
            raise InvalidRequest(f"{n} tokens with {len(parents)} parents: give one parent per token")
        ends, n_branches = set(self._ends.values()), len(self._ends)
        for node, parent in enumerate(parents, len(self.tokens)):
            if not -1 <= parent < node:
                raise InvalidRequest(f"node {node} has parent {parent}: give -1 to {node - 1}")
            if parent in ends:
                ends.remove(parent)
            else:
                n_branches += 1
            ends.add(node)
        return n_branches

    def add(self, batch: Batch, start: int, call: Call[Any], n_logits: int, position: int) -> None:
        """Add a call's nodes to the tree and to a batch, and fork ids where they branch off.

        Args:
            start: number of entries that the batch already has.
            n_logits: number of the last nodes whose logits are computed.
            position: the one after the history.
        """
        n_before = node = len(self.tokens)
        forked: list[tuple[int, int]] = []  # nodes that belong to another id, too
        for i, parent in enumerate(call.parents):
            at, seq_id = position, self._first
            if parent >= 0:
                at, seq_id = self.positions[parent] + 1, self.seq_ids[parent]
            if self._ends[seq_id] != parent:
                seq_id = self._fork(parent, n_before, position, forked)
            self._ends[seq_id] = node
            self.parents.append(parent)
            self.positions.append(call.positions[i] if call.positions else at)
            self.seq_ids.append(seq_id)
            node += 1
        self.tokens.extend(call.tokens)
        batch.put_all(start, call.tokens, self.positions[n_before:], self.seq_ids[n_before:], n_logits)
        for node, seq_id in forked:
            batch.add_sequence(start + node - n_before, seq_id)

    def add_chain(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Add a chain after the history to the empty tree; the caller fills the batch."""
        self.tokens.extend(tokens)
        self.parents.extend(range(-1, len(tokens) - 1))
        self.positions.extend(positions)
        self.seq_ids.extend([self._first] * len(tokens))
        self._ends[self._first] = len(tokens) - 1

    def add_unevaluated(self, token: int) -> None:
        """Add the first token of an empty history without an entry in a batch: it gets no cell."""
        self._ends[self._first] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(-1)
        self.positions.append(0)
        self.seq_ids.append(self._first)

    def _fork(self, node: int, n_before: int, position: int, forked: list[tuple[int, int]]) -> int:
        """Create an id that ends with `node`; nodes from `n_before` on are not evaluated yet."""
        seq_id = self._first + len(self._ends)
        while node >= n_before:
            forked.append((node, seq_id))
            node = self.parents[node]
        source, end = self._first, position
        if node >= 0:
            source, end = self.seq_ids[node], self.positions[node] + 1
        if end:
            self._context.copy(source, seq_id, 0, end)
        return seq_id

    def take(self, path: Sequence[int], position: int) -> None:
        """Put the cells of a path of another id into the first one, in place of other nodes."""
        self._context.remove(self._first, position)
        self._context.copy(self.seq_ids[path[-1]], self._first, position, self.positions[path[-1]] + 1)
        self._ends[self._first] = path[-1]

    def cut(self, position: int) -> None:
        """Free all cells but those of the first id before a position.

        Raises:
            BackendError: llama.cpp could not do so.
        """
        if not self._context.remove(self._first, position):
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        if len(self._ends) > 1:
            self._free(len(self._ends))
        if self._guard is not None:
            self.guard(position, position)

    def resync(self, position: int) -> None:
        """Free what may have been left by an interruption, from a position on, and forget all nodes."""
        self._free(self._limit)
        self._context.remove(self._first, position)
        self.guard(0, position)
        self.clear()

    def _free(self, n: int) -> None:
        """Free the cells of the first n ids but the first one."""
        for seq_id in range(self._first + 1, self._first + n):
            self._context.remove(seq_id, 0)

    def guard(self, start: int, end: int) -> None:
        """Extend the guard from the positions before `start` to those before `end`."""
        if self._guard is None:
            return
        self._context.remove(self._guard, start)
        if start < end:
            self._context.copy(self._first, self._guard, start, end)

    def clear(self) -> None:
        """Forget all nodes; the cells must have been freed."""
        for each in (self.tokens, self.parents, self.positions, self.seq_ids):
            each.clear()
        self._ends = {self._first: -1}
