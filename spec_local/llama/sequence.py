"""One sequence of a llama.cpp context: its history in the KV cache, extended by a tree of draft tokens.

The history always has the first of the sequence's ids (see `spec_local.llama.native_context.Tree`). Sequences
of recurrent and hybrid models roll back in another way: `spec_local.llama.recurrent`.

llama.cpp aborts the process when it is called with wrong arguments, so all of them are checked here first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from spec_local.core.calls import Call, run
from spec_local.core.proposal import check_path
from spec_local.core.sequence import Limits, States, common_prefix
from spec_local.core.span import Cell, Span, text_of, whole
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError
from spec_local.llama.context import LlamaContext
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.native_context import Batch, NativeContext, Tree
from spec_local.llama.native_object import Pointer
from spec_local.llama.positions import Positions
from spec_local.llama.rollback import RollsBack
from spec_local.llama.saved import Progress
from spec_local.prompt_cache.entry import Match

_MOST_POSITIONS = 1 << 31
_MIN_RESTORED = 16  # tokens: fewer are read as fast


class NativeSequence:
    """What sequences of ordinary models and of heads have in common.

    Args:
        context: what evaluates it, and others.
        seq_id: llama.cpp's id of its history.
        limits: see `ModelSequence.limits`.
    """

    context: NativeContext
    cached: Sequence[int]
    can_be_limited = True
    """True if its calls can compute a part of the output matrix: see `limit`."""
    draft_vocabulary: DraftVocabulary | None = None
    """The tokens for which its calls compute the output matrix; None: all. The main model's have none."""

    def __init__(self, context: NativeContext, seq_id: int, limits: Limits) -> None:
        self.context, self.model, self.limits = context, context.model, limits
        self.n_ctx, self.threads, self.cache_type = limits.n_ctx, context.threads, context.cache_type
        self._trained = limits.draft_tokens  # those that the model has at all
        self._seq_id = seq_id
        context.sequences.add(self)

    def close(self) -> None:
        """Free the memory of all sequences; logits that were returned must not be used any more."""
        self.context.close()

    def limit(self, vocabulary: DraftVocabulary | None) -> None:
        """Compute the output matrix only for these tokens (None: all) in calls from now on.

        Without specdec's kernels, calls compute all of it, and only drafts are limited.
        """
        self.draft_vocabulary = vocabulary
        self.context.is_limited |= vocabulary is not None
        self.may_draft(())

    def may_draft(self, tokens: Sequence[int]) -> None:
        """Note that tokens occur in the text, which may then be drafted, too: see `Limits.draft_tokens`."""
        drafted = self._trained
        if self.draft_vocabulary:
            self.draft_vocabulary.read(text_of(tokens))
            drafted = self.draft_vocabulary.tokens
        if drafted is not self.limits.draft_tokens:
            self.limits = replace(self.limits, draft_tokens=drafted)

    def _forget_text(self, length: int) -> None:
        """Draft no tokens of earlier texts if a history is cut to `length` tokens, less than half of it."""
        if self.draft_vocabulary and 2 * length < len(self.cached):
            self.draft_vocabulary.restart()
            self.may_draft(self.cached[:length])

    @property
    def is_open(self) -> bool:
        return self.context.native.is_open

    @property
    def handle(self) -> Pointer:
        """llama.cpp's pointer to the context; see `NativeObject.pointer`."""
        return self.context.native.pointer

    def _check_open(self) -> None:
        """Raise InvalidRequest if the context or the model is closed."""
        _ = self.context.native.pointer, self.model.native.pointer

    def _check_length(self, length: int) -> None:
        """Check that the history can be truncated to a length."""
        if not 0 <= length <= len(self.cached):
            raise InvalidRequest(f"cannot truncate {len(self.cached)} tokens to {length}")

    # The errors of a call: it makes the checks itself, as often as tokens are generated.

    def _unknown_token(self) -> InvalidRequest:
        return InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.limits.n_vocab - 1}")

    def _full(self) -> ContextOverflow:
        return ContextOverflow(
            f"the context of {self.limits.n_ctx} tokens is full: "
            "start a new conversation or give a larger `n_ctx`"
        )


class LlamaSequence(NativeSequence, RollsBack):
    """One sequence of a llama.cpp context: a `MainSequence`. Created by `spec_local.llama.open`.

    Args:
        context: what the sequences have in common; most attributes are documented there.
        index: number of this sequence.

    Attributes:
        cached: see `ModelSequence.cached`.
    """

    context: LlamaContext
    cached: list[int]

    def __init__(self, context: LlamaContext, index: int) -> None:
        super().__init__(context, index * context.max_branches, context.limits)
        self.flash_attention, self.pad_to = context.flash_attention, context.pad_to
        guard = context.first_other + index if context.has_guard else None
        self._tree = Tree(context, self._seq_id, context.max_branches, guard)
        self.cached = []
        self._positions: Positions | None = None  # of the history; None: each is its token's number
        self._span_states: States | None = None  # of the last call, if it was a span's
        self._first_entry = self._first_node = 0  # of the last call, in its batch and in the tree

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Call["LlamaSequence"]:
        """See `ModelSequence.call`."""
        appends, n = parents is None, len(tokens)
        if parents is None:
            if self._tree.tokens:
                self.commit(())
            parents = range(-1, n - 1)
        n_logits = n if n_logits is None else n_logits
        _ = self.context.native.pointer, self.model.native.pointer  # both are open
        limits = self.limits
        if tokens and min(tokens) < 0:
            return self._span_call(tokens, parents, n_logits)
        if not 1 <= n <= limits.max_tokens:
            raise InvalidRequest(f"{n} tokens in one call: give 1 to {limits.max_tokens}")
        if not 0 <= n_logits <= min(n, limits.max_logits):
            raise InvalidRequest(f"{n_logits} logits for {n} tokens: give 0 to {min(n, limits.max_logits)}")
        if max(tokens) >= limits.n_vocab:
            raise self._unknown_token()
        if len(self.cached) + len(self._tree.tokens) + n > limits.n_ctx:
            raise self._full()
        n_branches = self._tree.count(n, parents)
        if n_branches > limits.max_branches:
            if self.model.is_recurrent:
                raise ModelError("a recurrent model cannot evaluate a tree: draft chains (`shape=chain`)")
            raise InvalidRequest(f"a tree with {n_branches} branches: give at most {limits.max_branches}")
        if positions is not None:
            self._check_positions(parents, positions)
        return Call(self, tokens, parents, n_logits, positions, appends)

    def _span_call(
        self, cells: Sequence[int], parents: Sequence[int], n_logits: int
    ) -> Call["LlamaSequence"]:
        """The call of a span, which is the whole call, and follows the history."""
        span = cells[0].span if isinstance(cells[0], Cell) else None
        if any(token < 0 and not isinstance(token, Cell) for token in cells):
            raise self._unknown_token()
        if (
            not span
            or list(cells) != span.cells
            or self._tree.tokens
            or [*parents] != [*range(-1, len(span) - 1)]
        ):
            raise InvalidRequest("a span is evaluated whole, alone, and after the history")
        if n_logits:
            raise InvalidRequest("a span has no logits: add text after it")
        if len(self.cached) + len(span) > self.limits.n_ctx:
            raise self._full()
        self.context.check_span(span)
        start = self._at(len(self.cached))
        return Call(self, cells, parents, 0, (start + span.offsets[:, 0]).tolist(), True)

    def begin_span(self, call: Call[Any]) -> tuple[Span, int, int]:
        """Note that a span is about to be evaluated: it, its position, and llama.cpp's id of this history."""
        self._tree.add_chain(call.tokens, call.positions or ())
        self._first_node = 0
        span: Span = call.tokens[0].span  # type: ignore[attr-defined]
        return span, self._at(len(self.cached)), self._seq_id

    def on_span(self, n_last: int, states: States | None) -> None:
        """Note that a span was evaluated.

        Args:
            n_last: cells of the last one of llama.cpp's calls for it.
            states: the hidden states of its cells, if the context keeps them.
        """
        self._span_states = states

    def _check_positions(self, parents: Sequence[int], positions: Sequence[int]) -> None:
        """Check positions: llama.cpp lets a history begin anywhere, and has no gaps after that."""
        if self.pad_to:
            raise InvalidRequest("padded calls number the tokens themselves: give no positions")
        known = [*self._tree.positions, *positions]
        for parent, position in zip(parents, positions, strict=True):
            after = known[parent] + 1 if parent >= 0 else self._at(len(self.cached))
            is_first = parent < 0 and not self.cached
            if not 0 <= position < _MOST_POSITIONS or (position != after and not is_first):
                raise InvalidRequest(f"a token is at position {position}: give {after}, after its parent")

    def fill_batch(self, batch: Batch, start: int, call: Call[Any], n_logits: int) -> None:
        """Add the nodes of a call to the tree and to a batch, which has `start` entries already.

        Args:
            n_logits: number of the last nodes whose logits are computed.
        """
        self._first_entry, self._first_node, self._span_states = start, len(self._tree.tokens), None
        n = len(self.cached)
        self._tree.add(batch, start, call, n_logits, self._at(n) if self._positions else n)

    def states(self, nodes: Sequence[int]) -> States:
        """Hidden states of tokens of the last call, as in `LlamaContext.states`.

        Args:
            nodes: numbers of the tokens, from the first one of this sequence's part of the call.
        """
        if self._span_states is not None:
            return self._span_states[list(nodes)]
        return self.context.states([self._first_entry + node for node in nodes])

    def commit(self, path: Sequence[int]) -> States | None:
        """Commit a path of the tree and discard the rest: see `ModelSequence.commit`."""
        tree = self._tree
        _ = self.context.native.pointer  # it is open
        if not path and not tree.tokens:
            return None
        check_path(path, tree.parents)
        states = None
        if self.context.keeps_states and path and path[0] >= self._first_node:
            states = self.states([node - self._first_node for node in path])
        if (self.pad_to or 1) > 1 and (n_first := _n_first(path)) < len(path):
            # Later tokens would fill the cells of rejected nodes between those of the path, and llama.cpp's
            # attention adds up in the order of the cells (specdec's does not depend on it, and needs no
            # padding). The nodes after the first gap are evaluated again.
            tokens = [tree.tokens[node] for node in path[n_first:]]
            self._commit(path[:n_first])
            run(self.call(tokens, n_logits=0))
        else:
            self._commit(path)
        return states

    def _commit(self, path: Sequence[int]) -> None:
        """`commit` of a path that has been checked."""
        tree, n_before = self._tree, len(self.cached)
        start = self._at(n_before) if self._positions else n_before
        try:
            if path and tree.seq_ids[path[-1]] != self._seq_id:
                tree.take(path, start)
            if path and not self.cached and (first := tree.positions[path[0]]):
                self._positions = Positions(first)
            self.cached += map(tree.tokens.__getitem__, path)
            if path and tree.tokens[path[-1]] < 0:
                self._add_spans(tree.tokens, n_before)
            if len(path) < len(tree.tokens):
                self._cut(len(self.cached))
            if self.context.has_guard:
                tree.guard(start, self._at(len(self.cached)))
        except BaseException:  # from a signal handler
            self.resync()
            raise
        tree.clear()

    def _at(self, n: int) -> int:
        """The position of entry number `n` of the history, or the one after it."""
        return self._positions.at(n) if self._positions else n

    def _n_before(self, position: int) -> int:
        """The number of entries of the history whose cells are before a position."""
        return self._positions.n_before(position) if self._positions else position

    def _add_spans(self, entries: Sequence[int], n_before: int) -> None:
        """Note that entries, perhaps with spans, follow the first `n_before` ones."""
        if entries and min(entries) < 0:
            self._positions = self._positions or Positions(0)
            self._positions.add(entries, n_before)

    def _drop(self, length: int) -> None:
        """Drop the tree, and the history from a token on, whose cells are gone."""
        del self.cached[length:]
        if self._positions:
            self._positions.cut(length)
        self._tree.clear()

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens, and discard the tree: see `ModelSequence.truncate`."""
        _ = self.context.native.pointer  # it is open
        n = len(self.cached)
        if length != n:
            self._check_length(length)
            length = whole(self.cached, length)
            self._forget_text(length)
        if length != n or self._tree.tokens:
            self._keep(length)

    def _keep(self, length: int) -> None:
        """Reduce the history to `length` tokens, and discard the tree."""
        self._cut(length)

    def checkpoint(self) -> bool:
        """See `ModelSequence.checkpoint`: no checkpoints are needed, or possible."""
        self._check_open()
        return self.limits.rollback == "any"

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """Make the history a prefix of `tokens`, the longest that is known: see `ModelSequence.reuse`.

        Cells of another sequence are shared, not copied.
        """
        self._check_open()
        self._reuse(tokens)
        self.may_draft(text)
        return len(self.cached)

    def _reuse(self, tokens: Sequence[int]) -> None:
        own = self._n_shared(tokens)
        if self.limits.rollback == "none":
            self.truncate(own if own == len(self.cached) else 0)
            return
        if own < len(self.cached) and self.context.saved.saves_all:
            self.save()
        found = self.context.saved.find(tokens)
        self._take_cells(tokens, found, len(tokens))

    def _n_shared(self, tokens: Sequence[int]) -> int:
        """Number of the first of these tokens with which the history begins, each at its usual position."""
        return (
            0
            if self._positions and self._positions.start
            else whole(tokens, common_prefix(self.cached, tokens))
        )

    def _take_cells(self, tokens: Sequence[int], found: Match, most: int, least: int = _MIN_RESTORED) -> None:
        """Make the history the longest known prefix of `tokens`, of up to `most` of them.

        Args:
            found: what the prompt cache has of them.
            least: fewer tokens are not restored.
        """
        best: LlamaSequence = max(self._all(), key=lambda each: (each._n_shared(tokens), each is self))
        n = min(most, best._n_shared(tokens))
        use_saved = min(most, found.n_cells) - n >= least
        if use_saved:
            n = whole(tokens, n - n % self.context.saved.block)
        if best is self:
            self._shorten(n)
        else:
            self._copy(best._seq_id, tokens[:n])
        if use_saved:
            self._restore_cells(tokens, found, most)

    def _restore_cells(self, tokens: Sequence[int], found: Match, most: int) -> None:
        """Append cells of the prompt cache to the history, as far as there are any, up to `most` tokens."""
        for cells in found.cells:
            start, end = whole(tokens, cells.start), whole(tokens, min(most, cells.start + cells.n))
            if start < len(self.cached) or end <= start:
                continue
            if start > len(self.cached):
                return
            done = False
            try:
                self._add_spans(tokens[start:end], start)
                if not self.context.saved.put_cells(
                    cells, self._seq_id, end, lambda n: self._at(whole(tokens, n))
                ):
                    return  # the file has gone: the rest is evaluated
                self._tree.guard(self._at(start), self._at(end))
                self.cached += tokens[start:end]
                self.may_draft(tokens[start:end])
                done = True
            finally:
                if not done:  # or interrupted by a signal handler
                    self.resync()

    def save(self, most: int | None = None) -> Progress:
        """Copy what the prompt cache lacks of the history into it: see `SavedParts.save`."""
        self._check_open()
        if not self.cached or self._tree.tokens or (self._positions and self._positions.start):
            return "all"
        return self.context.saved.save(self.cached, self._seq_id, most, self._at)

    def _shorten(self, length: int) -> None:
        """Keep the cells of the first `length` tokens, and discard the tree."""
        self.truncate(length)

    def _all(self) -> Sequence[Self]:
        """All sequences of the context."""
        return [each for each in self.context.sequences if isinstance(each, type(self))]

    def _copy(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Replace the history with the first tokens of another sequence's; their cells are shared."""
        self.truncate(0)
        try:
            self._add_spans(tokens, 0)
            end = self._at(len(tokens))
            self.context.copy(seq_id, self._seq_id, 0, end)
            self._tree.guard(0, end)
            self.cached += tokens
        finally:
            if len(self.cached) < len(tokens):  # interrupted by a signal handler
                self.resync()

    def _cut(self, length: int) -> None:
        """Reduce the cache to `length` tokens, and discard the tree."""
        self._check_rollback(length)
        try:
            self._tree.cut(self._at(length) if self._positions else length)
        except BaseException:  # llama.cpp failed, or a signal handler interrupts it
            self.resync()
            raise
        self._drop(length)

    def _check_rollback(self, length: int) -> None:
        """Check that the sequence can go back to its first `length` tokens.

        If it cannot, llama.cpp may still say so, having overwritten their cells.
        """
        if length and self.limits.rollback == "none":
            raise ModelError("sequences with a cache each cannot roll back: clear the sequence")

    def resync(self, *, unchanged: bool = False) -> None:
        """Discard the tree after a failed or interrupted call, and take the length from llama.cpp's cache.

        Args:
            unchanged: whether llama.cpp has not begun to evaluate the call.
        """
        self._drop(self._n_before(self.context.length(self._seq_id)))
        self._tree.resync(self._at(len(self.cached)))


def _n_first(path: Sequence[int]) -> int:
    """Return how many nodes of a path are the first ones of the tree, in order."""
    return next((i for i, node in enumerate(path) if node != i), len(path))
