"""Heads that draft one token per call: EAGLE-3, and layers for multi-token prediction (MTP).

Entry i of a head's cache is a pair: token i, and the state of token i − 1. This is how llama.cpp drafts with
heads (common/speculative.cpp), except that the accepted tokens of a step are evaluated in the same call as
the first draft token of the next one.

In place of a draft token's state, the head reads its own output for that token, so a tree takes a call for
each of its levels. Every branch has its own sequence: see `spec_local.llama.native_context`.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import check_path
from spec_local.core.sequence import States, common_prefix
from spec_local.errors import InvalidRequest
from spec_local.llama.context import MAX_SEQUENCES, LlamaContext
from spec_local.llama.heads.base import CachingSequence, HeadContext
from spec_local.llama.heads.states import ReceivedStates, State
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, OutputView, Tree

_SEQUENCE_OUTPUTS, _MIN_OUTPUTS = 8, 32  # logits per call: for each sequence, and at least


class OneTokenContext(HeadContext):
    """The llama.cpp context of a head that drafts one token per call: a `Context`.

    Args:
        model, main, kv_bytes, params: see `HeadContext`.
        n_parallel: number of sequences.
        max_branches: maximum number of leaves of a tree; fewer if the sequences together would have more of
            them than llama.cpp has ids, or than a call has tokens.

    Attributes:
        zeros: takes the place of an unknown state.

    Raises:
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    encodes = False
    """True if the main model's states are encoded before the head reads them."""
    skips_first = False
    """True if there is no pair for the first token."""
    returns_all = False
    """True if a call has logits for all tokens of a sequence or for none."""
    has_all_outputs = True
    """True if llama.cpp computes the head's output for all tokens. Otherwise it does so only for those with
    logits, and the head drafts chains only."""

    def __init__(
        self,
        model: Model,
        main: LlamaContext,
        n_parallel: int,
        kv_bytes: int,
        max_branches: int,
        **params: Any,
    ) -> None:
        self.has_guard = model.has_window
        # llama.cpp reserves logits for each id, and has at most one per token of a call.
        most = min(MAX_SEQUENCES, main.max_tokens - 1)
        n_ids = most // n_parallel  # per sequence
        if n_ids < 1 + self.has_guard:
            raise InvalidRequest(
                f"{model.path.name} cannot draft for {n_parallel} answers at the same time, but for "
                f"{most // (1 + self.has_guard)}: let fewer run, give a larger `n_ctx`, or `draft=none`"
            )
        if not self.has_all_outputs:
            max_branches = 1  # else all leaves of a tree would need logits
        self.max_branches = max(1, min(max_branches, n_ids - self.has_guard))
        self.first_guard = n_parallel * self.max_branches
        n_outputs = n_parallel * max(_SEQUENCE_OUTPUTS, self.max_branches)
        self.max_logits = min(main.max_tokens, max(_MIN_OUTPUTS, n_outputs))
        self.encoder_sequence = n_parallel * (self.max_branches + self.has_guard)  # is empty between calls
        n_sequences = self.encoder_sequence + 1
        self.zeros = np.zeros(model.n_state, np.float32)
        # If outputs come only with logits, both are computed for the last token of each sequence.
        n_outputs = (
            self.max_logits if self.has_all_outputs else min(main.max_tokens, self.max_logits + n_parallel)
        )
        super().__init__(
            model,
            main,
            n_cells=n_parallel * main.n_ctx,
            kv_bytes=kv_bytes,
            max_tokens=main.max_tokens,
            n_sequences=n_sequences,
            n_outputs=max(n_outputs, n_sequences),
            **params,
        )
        # Masked, llama.cpp copies one output per token with logits, otherwise one per token. If the graph
        # computes fewer, it returns those of other tokens, or aborts.
        self._extensions.llama_set_embeddings_nextn(self.handle, True, not self.has_all_outputs)
        self._batch = Batch(self.lib, self.max_tokens, self.max_branches, width=model.n_state)
        self._logits = OutputView(self.native, n_outputs, self.n_vocab)
        self._outputs = OutputView(self.native, self.max_tokens, model.n_state)

    def remove(self, seq_id: int, start: int) -> bool:
        """Remove the entries of a sequence from a position on; returns whether llama.cpp did so."""
        if self.skips_first and start == 1:
            start = 0  # the first token has no pair: its entry, if any, is a placeholder
        return super().remove(seq_id, start)

    def decode(self, calls: Sequence[Call["OneTokenSequence"]]) -> Sequence[Logits]:
        """Evaluate tokens of some of the sequences in one call: see `Context.decode`."""
        n_tokens = sum(len(call.tokens) for call in calls)
        n_logits = sum(call.n_logits for call in calls)
        if not 1 <= n_tokens <= self.max_tokens or n_logits > self.max_logits:
            raise InvalidRequest(f"{n_tokens} tokens and {n_logits} logits in one call of a head")
        # If logits are computed for all tokens, llama.cpp returns the first outputs of the batch.
        ordered = sorted(calls, key=lambda call: not call.n_logits)
        try:
            self._encode(calls)
            self._fill_batch(ordered)
            self._evaluate(self._batch, ordered)
            found = self._results(ordered)
        except BaseException:  # the call failed, or a signal handler interrupted it
            for call in calls:
                call.sequence.resync()
            raise
        return [found[id(call)] for call in calls]

    def read_again(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the head reads in place of unknown states, given its outputs."""
        return outputs

    def _encode(self, calls: Sequence[Call["OneTokenSequence"]]) -> None:
        """Encode the states that the sequences have received."""

    def _fill_batch(self, calls: Sequence[Call["OneTokenSequence"]]) -> None:
        n = 0
        for call in calls:
            n_logits = self._n_computed(call)
            call.sequence.fill_batch(self._batch, n, call, n_logits)
            n += len(call.tokens)
        self._batch.set_size(n)

    def _n_computed(self, call: Call[Any]) -> int:
        """Number of the last tokens of a call whose logits are computed."""
        return call.n_logits if self.has_all_outputs else max(1, call.n_logits)

    def _results(self, calls: Sequence[Call["OneTokenSequence"]]) -> dict[int, Logits]:
        """The logits of each call, in the order of the batch; hands their outputs to the sequences."""
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        logits: Logits = np.empty((0, self.n_vocab), np.float32)
        if any(call.n_logits for call in calls):
            logits = self._logits.at(self.lib.llama_get_logits(self.handle))
        found: dict[int, Logits] = {}
        n_tokens = n_logits = 0
        for call in calls:
            n_tokens += len(call.tokens)
            n_computed = self._n_computed(call)
            n_logits += n_computed
            end, n = (n_tokens, len(call.tokens)) if self.has_all_outputs else (n_logits, n_computed)
            call.sequence.on_evaluated(self.read_again(outputs[end - n : end]))
            found[id(call)] = logits[n_logits - call.n_logits : n_logits]
        return found


_MAX_REREAD = 8  # tokens evaluated in the call of the first draft token, if the head returns all logits


class OneTokenSequence(CachingSequence):
    """One sequence of a head: a `Head`. Created by `heads.eagle` or `heads.mtp`.

    Args:
        context: what the sequences have in common.
        index: number of this sequence.
    """

    context: OneTokenContext

    def __init__(self, context: OneTokenContext, index: int, max_draft: int = sys.maxsize) -> None:
        super().__init__(context, index * context.max_branches, context.max_branches, max_draft)
        guard = context.first_guard + index if context.has_guard else None
        self._tree = Tree(context, self._seq_id, context.max_branches, guard)
        self._n_true = 0  # the first entries of the cache, evaluated with the main model's states
        # The head's outputs, which take the place of unknown states: of tokens of the history by position, of
        # the tree by node.
        self._own: dict[int, State] = {}
        self._outputs: dict[int, State] = {}

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

        Tokens whose states are known are evaluated in one call, others of the history one by one, and those
        of the tree in a call for each of its levels.
        """
        n_logits = len(tokens) if n_logits is None else n_logits
        self._check_positions(positions)
        if parents is not None:
            self._check_tree(tokens, parents)
            return await self._extend(tokens, parents, n_logits)
        self.commit(())
        logits = await self._extend(tokens, range(-1, len(tokens) - 1), n_logits)
        self.commit(range(len(tokens)))
        return logits

    def _part(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call["OneTokenSequence"]:
        """Prepare one llama_decode: a token with a child in the same call must have a known state."""
        self._check_call(tokens, n_logits)
        if len(self._cached) + len(self._tree) + len(tokens) > self.limits.n_ctx:
            raise self._full()
        return Call(self, tokens, parents, n_logits)

    def _check_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        n_branches = self._tree.count(len(tokens), parents)
        if n_branches > self.limits.max_branches:
            raise InvalidRequest(
                f"a tree with {n_branches} branches: give at most {self.limits.max_branches}"
            )

    def _n_ready(self, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """Count the nodes, from the first one, that can be evaluated in one call."""
        n_before = len(self._tree)
        positions: list[int] = []
        for parent in parents:
            position = len(self._cached)
            if parent >= n_before:  # it is in the same call
                token, before = tokens[parent - n_before], positions[parent - n_before]
                if not self._assumes_states and self._known(token, before) is None:
                    break
                position = before + 1
            elif parent >= 0:
                position = self._tree.positions[parent] + 1
            positions.append(position)
        return len(positions)

    def fill_batch(self, batch: Batch, start: int, call: Call[Any], n_logits: int) -> None:
        """Add the tokens of a call to the tree and to a batch.

        Args:
            start: number of entries that the batch already has.
            n_logits: number of the last tokens whose logits are computed.
        """
        self._tree.add(batch, start, call, n_logits, len(self._cached))
        for i, parent in enumerate(call.parents, start):
            batch.vectors[i] = self._state(parent)

    def _known(self, token: int, position: int) -> State | None:
        """The main model's state of a token, if it is known."""
        return self.received.of(token, position)

    def _state(self, node: int) -> State:
        """The state of a node's token, or the output in its place; −1: of the last token of the history."""
        if node >= 0:
            tree = self._tree
            state, own = self._known(tree.tokens[node], tree.positions[node]), self._outputs.get(node)
        elif self._cached:
            position = len(self._cached) - 1
            state, own = self._known(self._cached[-1], position), self._own.get(position)
        else:
            state = own = None
        if state is None:
            state = own
        return self.context.zeros if state is None else state

    def on_evaluated(self, outputs: NDArray[np.float32]) -> None:
        """Note that the last nodes of the tree have been evaluated.

        Args:
            outputs: the head's, float32 (number of these nodes, width); overwritten by the next call.
        """
        first = len(self._tree) - len(outputs)
        inner = set(self._tree.parents[first:])  # their states were known
        for node, output in enumerate(outputs, first):
            if node not in inner:
                self._outputs[node] = output.copy()

    async def _extend(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Logits:
        parts: list[Logits] = []
        done = 0
        if self.context.skips_first and not self._cached and not self._tree and n_logits < len(tokens):
            self._tree.add_unevaluated(tokens[0])  # no state precedes it, so there is no pair
            done = 1
        while done < len(tokens):
            n, wanted = self._next_part(tokens[done:], parents[done:], n_logits)
            n_parallel = n if wanted and self.context.returns_all else wanted
            logits = await self._part(tokens[done : done + n], parents[done : done + n], n_parallel)
            done += n
            if wanted:
                found = logits[n_parallel - wanted :]
                parts.append(found if done == len(tokens) else self._kept(found))
        return self._joined(parts)

    def _kept(self, logits: Logits) -> Logits:
        """A copy of a view that the next call overwrites; that call may compute logits of more tokens."""
        drafted = self.limits.draft_tokens
        if drafted is None:
            return logits.copy()
        kept = np.full_like(logits, -np.inf)
        kept[:, drafted] = logits[:, drafted]
        return kept

    def _next_part(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> tuple[int, int]:
        """Return the number of next nodes to evaluate in one call, and of logits to keep."""
        n = min(self.limits.max_tokens, self._n_ready(tokens, parents))
        wanted = min(n, max(0, n_logits - (len(tokens) - n)))
        n_parallel = n if self.context.returns_all else wanted
        if not wanted or n_parallel <= (_MAX_REREAD if wanted < n_parallel else self.limits.max_logits):
            return n, wanted
        return (n - wanted, 0) if wanted < n else (self.limits.max_logits, self.limits.max_logits)

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `ModelSequence.commit`."""
        self._check_open()
        check_path(path, self._tree.parents)
        nodes, outputs, n_before = self._tree.tokens, self._outputs, len(self._cached)
        try:
            if path and self._tree.seq_ids[path[-1]] != self._seq_id:
                self._tree.take(path, n_before)
            for node in path:
                position, token = len(self._cached), nodes[node]
                if position == self._n_true and self._is_true(position, token):
                    self._n_true += 1
                if node in outputs:
                    self._own[position] = outputs[node]
                self._cached.append(token)
            if len(path) < len(nodes):
                self._cut(len(self._cached))
            self._tree.guard(n_before, len(self._cached))
        except BaseException:  # from a signal handler
            self.resync()
            raise
        self._forget(len(self._cached))
        start = self._n_true - 2  # one more than the next pair needs: the last one may be dropped
        self.received.forget(start)
        self._own = {position: output for position, output in self._own.items() if position >= start}

    def _is_true(self, position: int, token: int) -> bool:
        """Return whether the pair at a position is that of the main model's history."""
        tokens = self.received.tokens
        is_next = position == len(tokens)  # its own state is not known, nor needed
        has_state = position == 0 or position - 1 in self.received
        return has_state and (is_next or tokens[position : position + 1] == [token])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `ModelSequence.truncate`."""
        self._check_open()
        self._check_length(length)
        self._forget_text(length)
        if length < len(self._cached) or self._tree:
            self._cut(length)
        self._follow(length)

    def _follow(self, length: int) -> None:
        """Note that the cache has been reduced to `length` tokens."""
        if length < self._n_true:
            self._n_true = length
            self.received.truncate(self.received.n_usable(length, self.received.tokens))

    def _cut(self, length: int) -> None:
        """Reduce the cache to `length` tokens, and drop the tree."""
        try:
            self._tree.cut(length)
        except BaseException:  # llama.cpp failed, or a signal handler interrupts it
            self.resync()
            raise
        self._forget(length)

    def _forget(self, length: int) -> None:
        """Forget the tree, and the tokens from a position on."""
        self._tree.clear()
        self._outputs.clear()
        del self._cached[length:]
        self._own = {position: output for position, output in self._own.items() if position < length}

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """Make the history a prefix of `tokens`, as long as `n_received` can be: see `ModelSequence.reuse`.

        Entries of another sequence are shared, not copied.
        """
        tokens = list(tokens)
        self._save_before(self.known(tokens)[1])
        best = max(self.context.sequences, key=lambda sequence: (sequence.known(tokens), sequence is self))
        n_received, n_pairs = best.known(tokens)
        if best is not self:
            self._cut(0)
            # The first token has no pair: its entry, if there is one, is only a placeholder.
            if (start := int(self.context.skips_first)) < n_pairs:
                self.context.copy(best._seq_id, self._seq_id, start, n_pairs)
            self._tree.guard(0, n_pairs)
            self._cached, self.received = tokens[:n_pairs], best.received.copy()
        else:
            self._cut(n_pairs)
        self._n_true = n_pairs
        self.received.truncate(n_received)
        self._restore(tokens, n_received)
        self.received.keep(len(tokens) - 1)  # for another answer to the same prompt
        self.may_draft(text)
        return self.n_received

    @property
    def _n_read(self) -> int:
        return min(self._n_true, len(self.received.tokens))

    def _take(self, tokens: list[int], received: ReceivedStates) -> None:
        self._tree.guard(0, len(tokens))
        self._cached, self._n_true, self.received = tokens, len(tokens), received
        self.may_draft(tokens)

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return what `reuse` of this sequence would give: `n_received`, and the length of the history."""
        n_pairs = common_prefix(self._cached[: self._n_true], tokens)
        return self.received.n_usable(n_pairs, tokens), n_pairs

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        tokens = list(tokens[: self.limits.n_ctx - start])
        n = self.received.receive(start, tokens, states, are_raw=self.context.encodes)
        if n is None:
            return
        self._keep_blocks(n)
        is_cached = self._cached[n : n + 1] == tokens[n - start : n - start + 1]
        self._n_true = min(self._n_true, n + is_cached)
        self._cut(self._n_true)  # the rest was evaluated with the head's own output

    async def read(self) -> None:
        """Evaluate the tokens that were received: see `Head.read`."""
        await self._read(len(self._cached))

    def resync(self) -> None:
        """Discard the tree, and what llama.cpp's cache lacks, after a failed or interrupted call."""
        length = min(len(self._cached), self.context.length(self._seq_id))
        self._tree.resync(length)
        self._forget(length)
        self._follow(length)
