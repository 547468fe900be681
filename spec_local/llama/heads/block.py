"""Heads that draft a block of tokens in one call.

The cache has an entry for each token of the history whose state the main model has computed. A block is
evaluated after them: the last token of the history (the anchor), and mask tokens in place of those to draft.
Its entries are removed again right after the call.

One call returns the logits for all draft tokens of a block. They do not depend on which tokens are drafted,
or only by a `Lattice`, which the call returns instead. So a tree takes no more calls than a chain (Ringel and
Romano 2026, arXiv 2604.12989).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import ROOT, check_path
from spec_local.core.sequence import States, common_prefix
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES, MAX_SEQUENCES, LlamaContext
from spec_local.llama.heads.base import CachingSequence, HeadContext, check_parents
from spec_local.llama.heads.lattice import Lattice, SparseRows
from spec_local.llama.heads.states import ReceivedStates, State
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, OutputView

_MIN_ENCODED = 32  # states that are encoded in a call, so that a prompt takes few calls


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The format of the blocks that a head drafts.

    Attributes:
        size: maximum number of tokens in a block, the anchor included.
        n_skipped: number of first tokens of a block whose logits belong to no draft token: 1 if the output of
            a mask token predicts the token at its own position, 0 if each output predicts the next token.
        mask: the mask token.
        is_causal: whether the tokens of a block attend only to those before them.
        n_candidates: number of candidates for each draft token in the block's lattice; 0: it has none.
    """

    size: int
    n_skipped: int
    mask: int
    is_causal: bool
    n_candidates: int = 0

    @property
    def n_drafted(self) -> int:
        """Maximum number of draft tokens in a block."""
        return self.size - self.n_skipped


class BlockContext(HeadContext):
    """The llama.cpp context of a head that drafts blocks: a `Context`.

    The tokens of a sequence's call are those whose states enter the cache, in order. If it has logits, its
    last token is instead the anchor of a block of that many tokens.

    Args:
        model, main: see `HeadContext`.
        n_parallel: number of sequences.
        block: how the head drafts.

    Attributes:
        n_outputs: maximum number of tokens with logits in a call of llama.cpp's.
        n_calls: number of calls so far. Each overwrites the logits of the one before.
        sparse: the logits of all sequences' drafts, if blocks have lattices.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    encodes = False
    """True if the main model's states are encoded before the head reads them."""

    def __init__(self, model: Model, main: LlamaContext, n_parallel: int, block: BlockFormat) -> None:
        self.block, self.n_calls = block, 0
        self.max_logits = n_parallel * block.size
        self.n_outputs = max(self.max_logits, _MIN_ENCODED if self.encodes else 0)
        n_cells = n_parallel * (main.n_ctx + block.size)
        width = model.n_embd * (1 if self.encodes else len(model.target_layers))
        self.zeros = np.zeros(width, np.float32)
        lib = runtime.library()
        super().__init__(
            model,
            main,
            n_cells=n_cells,
            kv_bytes=model.kv_bytes(n_cells, CACHE_TYPES[main.cache_type])
            + self.max_logits * model.vocabulary.n_tokens * np.dtype(np.float32).itemsize,
            max_tokens=max(main.max_tokens, self.max_logits),  # all blocks must be in one physical batch
            n_sequences=n_parallel + 1,
            n_outputs=self.n_outputs,
            ctx_other=main.handle.address,
        )
        lib.llama_set_causal_attn(self.handle, block.is_causal)
        self._states = Batch(lib, self.max_tokens, width=width, has_tokens=self.encodes, n_axes=model.n_axes)
        self._blocks = Batch(lib, self.max_logits)
        self._logits = OutputView(self.native, self.max_logits, self.n_vocab)
        self._lattices = OutputView(self.native, self.max_logits, model.n_embd)
        self.sparse = SparseRows(self.n_vocab)
        if block.n_candidates:  # llama.cpp returns lattices in place of the outputs of all tokens
            self._extensions.llama_set_embeddings_nextn(self.handle, True, False)

    def decode(self, calls: Sequence[Call["BlockSequence"]]) -> Sequence[Logits]:
        """Add states to the cache, and draft blocks, for some of the sequences: see `Context.decode`."""
        # All blocks of a call have the same size, as llama.cpp requires for DSpark.
        size = max(call.n_logits for call in calls)
        drafting = [call for call in calls if call.n_logits]
        if size * len(drafting) > self.max_logits:
            raise InvalidRequest(f"{len(drafting)} blocks of {size} tokens in one call of a head")
        self.n_calls += 1
        done = False
        try:
            anchors = [call.sequence.n_stored + len(call.tokens) - 1 for call in drafting]
            self._draft(calls, drafting, anchors, size)
            done = True
        finally:
            for call in calls:
                self.remove(call.sequence.seq_id, call.sequence.n_stored)
                if not done:
                    call.sequence.resync()
        return self._results(calls, size)

    def _draft(
        self,
        calls: Sequence[Call["BlockSequence"]],
        drafting: Sequence[Call["BlockSequence"]],
        anchors: Sequence[int],
        size: int,
    ) -> None:
        """Add the sequences' states to the cache, and evaluate blocks of `size` tokens after them.

        Args:
            drafting: those of the calls that draft. anchors: the positions of their blocks.
        """
        self._store_states(calls)
        if drafting:
            self._decode_blocks(drafting, anchors, size)

    @staticmethod
    def _missing(calls: Sequence[Call["BlockSequence"]]) -> list[tuple["BlockSequence", int, int]]:
        """The sequence, the position and the token of each entry to add to the cache."""
        return [
            (call.sequence, call.sequence.n_stored + i, token)
            for call in calls
            for i, token in enumerate(call.tokens[: len(call.tokens) - (call.n_logits > 0)])
        ]

    def _store_states(self, calls: Sequence[Call["BlockSequence"]]) -> None:
        """Add the sequences' states to the cache, in as few calls as possible."""
        missing = [(sequence, position) for sequence, position, _ in self._missing(calls)]
        for start in range(0, len(missing), self.max_tokens):
            part = missing[start : start + self.max_tokens]
            for i, (sequence, position) in enumerate(part):
                self._states.put(i, 0, position, sequence.seq_id, False)
                self._states.vectors[i] = sequence.state(position)
            self._states.set_size(len(part))
            self._evaluate(self._states)
            for sequence, position in dict(part).items():  # the last position of each sequence
                sequence.on_stored(position + 1)

    def _decode_blocks(
        self, calls: Sequence[Call["BlockSequence"]], anchors: Sequence[int], size: int
    ) -> None:
        """Evaluate the sequences' blocks in one call."""
        for i, (call, anchor) in enumerate(zip(calls, anchors, strict=True)):
            for j in range(size):
                token = self.block.mask if j else call.tokens[-1]
                # Logits for all tokens: llama.cpp computes all, and would return the first outputs otherwise.
                # Beside a lattice, they are not copied.
                wants_logits = not self.block.n_candidates
                self._blocks.put(i * size + j, token, anchor + j, call.sequence.seq_id, wants_logits)
        self._blocks.set_size(len(calls) * size)
        self._evaluate(self._blocks)

    def _results(self, calls: Sequence[Call["BlockSequence"]], size: int) -> Sequence[Logits]:
        """The logits of each call's block, or the rows of its lattice."""
        rows: Logits = np.empty((0, self.n_vocab), np.float32)
        if size and self.block.n_candidates:
            rows = self._lattices.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        elif size:
            rows = self._block_logits()
        found: list[Logits] = []
        n = 0
        for call in calls:
            found.append(rows[n : n + call.n_logits])
            n += size if call.n_logits else 0
        return found

    def _block_logits(self) -> Logits:
        """The logits of the blocks of the last call."""
        return self._logits.at(self.lib.llama_get_logits(self.handle))


@dataclass(frozen=True, slots=True)
class _Block:
    """The result of a call, after the first `anchor` tokens and 0, 1, … draft tokens.

    number: that of the call. rows: logits (n, V), which the next call overwrites, or a copy of a lattice.
    """

    anchor: int
    number: int
    rows: Logits | Lattice


@dataclass(frozen=True, slots=True)
class _Node:
    token: int
    parent: int
    depth: int


class BlockSequence(CachingSequence):
    """One sequence of a head that drafts blocks: a `Head`.

    Args:
        context: what the sequences have in common.
        index: number of this sequence.
    """

    context: BlockContext
    can_be_limited = False
    _reads_state_before = False

    def __init__(self, context: BlockContext, index: int) -> None:
        super().__init__(
            context,
            index,
            MAX_SEQUENCES,  # a node takes no cell of the cache
            context.block.n_drafted,
            max_logits=context.max_tokens,
            drafts_blocks=True,
        )
        self.n_stored = 0
        """Number of tokens, from the first one of the history, whose states are in the cache."""
        self._tree: list[_Node] = []
        self._block: _Block | None = None

    @property
    def seq_id(self) -> int:
        """Its sequence id in the cache."""
        return self._seq_id

    @property
    def _lag(self) -> int:
        """By how many positions the state of an entry is behind its token."""
        return int(self._reads_state_before)

    def state(self, position: int) -> State:
        """The main model's state of a token."""
        state = self.received.get(position)
        return self.context.zeros if state is None else state

    def on_stored(self, n: int) -> None:
        """Note that the states of the first `n` tokens are in the cache."""
        self.n_stored = n
        self.received.forget(n - self._lag)

    # Evaluating

    async def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Logits:
        """See `ModelSequence.call`.

        With logits, the states of all tokens of the history but the last `Limits.max_draft` must be known.

        Args:
            n_draft: limits the length of the block, since shorter ones take less time.
        """
        n_logits = len(tokens) if n_logits is None else n_logits
        most = self.limits.max_draft
        n_draft = most if n_draft is None else max(1, min(n_draft, most))
        self._check_positions(positions)
        self._check_call(tokens, n_logits)
        if parents is not None:
            return await self._draft(tokens, parents, n_logits, n_draft)
        self.commit(())
        end = len(self._cached) + len(tokens)
        if end > self.limits.n_ctx:
            raise self._full()
        logits: Logits = np.empty((0, self.limits.n_vocab), np.float32)
        if n_logits:
            lengths = range(end - n_logits + 1, end + 1)
            logits = await self._logits_after(tokens, lengths, tokens[-n_logits:], n_draft)
        elif (n := self._n_known(tokens) - self.n_stored) > 0:
            await self._call(tokens, n, 0)
        self._cached += tokens
        return logits

    async def _draft(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int, n_draft: int
    ) -> Logits:
        """Add nodes to the tree."""
        check_parents(tokens, parents)
        nodes = list(self._tree)
        for token, parent in zip(tokens, parents, strict=True):
            if not ROOT <= parent < len(nodes):
                raise InvalidRequest(f"node {len(nodes)} has parent {parent}: give −1 or an earlier node")
            nodes.append(_Node(token, parent, 1 if parent == ROOT else nodes[parent].depth + 1))
        lengths = [len(self._cached) + node.depth for node in nodes]
        if max(lengths) > self.limits.n_ctx:
            raise self._full()
        logits: Logits = np.empty((0, self.limits.n_vocab), np.float32)
        if n_logits:
            is_chain = all(node.depth == i + 1 for i, node in enumerate(nodes))
            chain = [node.token for node in nodes] if is_chain else ()
            logits = await self._logits_after(chain, lengths[-n_logits:], tokens[-n_logits:], n_draft)
        self._tree = nodes
        return logits

    async def _logits_after(
        self, new: Sequence[int], lengths: Sequence[int], last: Sequence[int], n_draft: int
    ) -> Logits:
        """The logits after the first `lengths` tokens of the history and a chain of new ones.

        They are those of one block. Its anchor is the first token whose state is not known, or the last one.

        Args:
            last: the last token of each length.
        """
        anchor = min(max(lengths), self._n_known(new) + 1)
        places, most = [length - anchor for length in lengths], self.limits.max_draft
        if self._assumes_states:
            places, n_draft = [min(place, most - 1) for place in places], 1
        if anchor > len(self._cached) + len(new):
            raise InvalidRequest("this head evaluates a tree after the last token of the history only")
        if min(places) < 0 or max(places) >= most:
            raise InvalidRequest(f"this head drafts up to {most} tokens after the main model's")
        block = self._block
        if not block or block.anchor != anchor or not self._is_kept(block) or len(block.rows) <= max(places):
            block = self._block = await self._new_block(new, anchor, max(n_draft, max(places) + 1))
        if isinstance(block.rows, Lattice):
            return self._scores(block.rows, places, last)
        first = places[0]
        if places == list(range(first, first + len(places))):
            return block.rows[first : first + len(places)]
        return block.rows[places]

    def _is_kept(self, block: _Block) -> bool:
        return isinstance(block.rows, Lattice) or block.number == self.context.n_calls

    async def _new_block(self, new: Sequence[int], anchor: int, n_draft: int) -> _Block:
        """Evaluate a block of n_draft draft tokens."""
        if anchor == self.n_stored:  # its entry is kept, but not its logits
            self.n_stored -= 1
            self.context.remove(self._seq_id, self.n_stored)
        n_skipped, k = self.context.block.n_skipped, self.context.block.n_candidates
        rows = (await self._call(new, anchor - self.n_stored, n_draft + n_skipped))[n_skipped:]
        return _Block(anchor, self.context.n_calls, Lattice(rows, k) if k else rows)

    def _scores(self, lattice: Lattice, places: Sequence[int], last: Sequence[int]) -> Logits:
        """The scores of candidates as logits of all tokens, after noting which tokens are candidates."""
        tokens = lattice.candidates(places)
        is_level = min(places) == max(places)  # of a tree, or one token of a chain
        self.limits = replace(self.limits, draft_tokens=tokens[0] if is_level else np.unique(tokens))
        return self.context.sparse.fill(tokens, lattice.scores(places, last))

    def _call(self, new: Sequence[int], n: int, size: int) -> Call["BlockSequence"]:
        """A call for the next n tokens whose states are not in the cache, and for a block of this size."""
        return Call(self, [*self._cached[self.n_stored :], *new][:n], range(ROOT, n - 1), size)

    def _n_known(self, new: Sequence[int]) -> int:
        """Number of the first tokens of the history and a chain of new ones whose states are known."""
        start, tokens = len(self._cached), self.received.tokens
        if self._assumes_states:
            return start
        if start >= len(tokens):
            return len(tokens)
        return start + common_prefix(tokens[start : start + len(new)], list(new))

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `ModelSequence.commit`."""
        self._check_open()
        check_path(path, [node.parent for node in self._tree])
        nodes = [self._tree[node] for node in path]
        self._cut(len(self._cached))
        self._cached += [node.token for node in nodes]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `ModelSequence.truncate`."""
        self._check_open()
        self._check_length(length)
        if length < self.n_stored:
            self.received.truncate(self._n_usable(self.received.tokens, length))
        self._cut(length)

    def _cut(self, length: int) -> None:
        """Reduce the history to `length` tokens, and the cache to those of them whose states are known."""
        self._tree = []
        del self._cached[length:]
        if self._block and self._block.anchor > length:
            self._block = None
        n = min(self.n_stored, length, len(self.received.tokens) + self._lag)
        if n < self.n_stored:
            self.n_stored = n
            self.context.remove(self._seq_id, n)

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """Make the history a prefix of `tokens`, as long as `n_received` can be: see `ModelSequence.reuse`.

        Entries of another sequence are shared, not copied.
        """
        tokens = list(tokens)
        self._save_before(self.known(tokens)[1])
        best = max(self.context.sequences, key=lambda sequence: (sequence.known(tokens), sequence is self))
        n_received, n_stored = best.known(tokens)
        if best is not self:
            self.truncate(0)
            self.n_stored = n_stored
            if n_stored > self._lag:
                self.context.copy(best.seq_id, self._seq_id, self._lag, n_stored)
            self._cached, self.received = tokens[:n_stored], best.received.copy()
        self.received.truncate(n_received)
        self._cut(n_stored)
        self._restore(tokens, n_received)
        self.may_draft(text)
        return self.n_received

    @property
    def _n_read(self) -> int:
        return min(self.n_stored, len(self.received.tokens))

    def _take(self, tokens: list[int], received: ReceivedStates) -> None:
        self._cached, self.n_stored, self.received = tokens, len(tokens), received
        self.may_draft(tokens)

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return what `reuse` of this sequence would give: `n_received`, and the number of entries."""
        n = common_prefix(self.received.tokens, tokens)
        if self._lag:
            n_stored = common_prefix(self._cached[: self.n_stored], tokens)
            return self._n_usable(tokens, n_stored), n_stored
        return n, min(self.n_stored, n)

    def _n_usable(self, tokens: Sequence[int], n_stored: int) -> int:
        """Number of the first of these tokens whose states are known, or not needed after these entries."""
        return self.received.n_usable(n_stored, tokens) if self._lag else n_stored

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        tokens = list(tokens[: self.limits.n_ctx - start])
        n = self.received.receive(start, tokens, states, are_raw=self.context.encodes)
        if n is None:
            return
        self._keep_blocks(n)
        # The entry of the first token that was not known may be there: it has the state before it.
        n += self._lag and self._cached[n : n + 1] == self.received.tokens[n : n + 1]
        if n < self.n_stored:
            self._cut(n)
        # The token after those in the cache was the anchor of a block: it stays if it is the same.
        end = self.n_stored
        self._cut(end + (self._cached[end : end + 1] == self.received.tokens[end : end + 1]))

    def resync(self) -> None:
        """Discard the tree after a failed or interrupted call; tokens whose states are cached are kept."""
        self._tree = []
        self.n_stored = min(self.n_stored, self.context.length(self._seq_id)) if self._lag else self.n_stored
        stored = self.received.tokens[: self.n_stored]
        if len(stored) > len(self._cached):
            self._cached = stored

    async def read(self) -> None:
        """Add the states that were received to the cache: see `Head.read`."""
        await self._read(self.n_stored)
