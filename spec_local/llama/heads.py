"""Heads that llama.cpp evaluates: drafters that read the main model's hidden states.

Entry i of a head's cache is a pair: token i, and the state of token i − 1. This is how llama.cpp drafts with
heads (common/speculative.cpp), except that the accepted tokens of a step are evaluated in the same call as
the first draft token of the next one.
"""

from collections.abc import Sequence

import numpy as np

from spec_local.core.language_model import (
    Call,
    Calls,
    Logits,
    States,
    common_prefix,
)
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama.batch import Batch
from spec_local.llama.llama_head import LlamaHead
from spec_local.llama.received_states import ReceivedStates, State
from spec_local.llama.shared_head import SharedHead

_MAX_UNREAD = 32  # tokens whose states are kept until they are evaluated in one call
_MAX_REREAD = 8  # tokens evaluated in the call of the first draft token, if the head returns all logits


class HeadRow(LlamaHead):
    """One row of a head: a `Row` and a `Head`. Created by `spec_local.llama.eagle` or `spec_local.llama.mtp`.

    Args:
        shared, index: see `LlamaHead`.
    """

    shared: SharedHead
    max_branches = 1

    def __init__(self, shared: SharedHead, index: int) -> None:
        super().__init__(shared, index)
        self.max_logits = shared.max_logits
        self._tree: list[int] = []  # a chain
        self._n_true = 0  # the first entries of the cache, evaluated with the main model's states
        self._received = ReceivedStates()
        self._own: dict[int, State] = {}  # the head's output, which takes the place of a token's state

    @property
    def received(self) -> ReceivedStates:
        """The states that it has received and may need yet."""
        return self._received

    @property
    def n_received(self) -> int:
        """See `Head.n_received`."""
        return len(self._received.tokens)

    # Evaluating

    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call:
        """Prepare a call: see `Row.call`. The states before all tokens but the first must be known."""
        _ = self.handle
        n, start = len(tokens), len(self._cached) + len(self._tree)
        if not 1 <= n <= self.max_tokens or not 0 <= n_logits <= min(n, self.max_logits):
            raise InvalidRequest(f"{n} tokens and {n_logits} rows of logits in one call of a head")
        if self.shared.returns_all and n_logits not in (0, n):
            raise InvalidRequest("this head returns logits for all tokens of a call, or for none")
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.n_vocab - 1}")
        if start + n > self.n_ctx:
            raise ContextOverflow(
                f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger --ctx"
            )
        self._check_chain(tokens, parents)
        if not all(self._has_state(start + i - 1) for i in range(1, n)):
            raise InvalidRequest("a head evaluates tokens without the main model's states one by one")
        return Call(self, tokens, parents, n_logits)

    def _check_chain(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        first = len(self._tree) - 1
        if list(parents) != list(range(first, first + len(tokens))):
            raise InvalidRequest("a head evaluates chains only: give each token's parent as the one before")

    def fill_batch(self, batch: Batch, start: int, call: Call, n_logits: int) -> None:
        """Add the tokens of a call to the tree and to a batch.

        Args:
            start: number of entries that the batch already has.
            n_logits: number of the last tokens whose logits are computed.
        """
        first_wanted = len(call.tokens) - n_logits
        for i, token in enumerate(call.tokens):
            position = len(self._cached) + len(self._tree)
            self._tree.append(token)
            batch.put(start + i, token, position, self._sequence, i >= first_wanted)
            batch.vectors[start + i] = self._state(position - 1)

    def _has_state(self, position: int) -> bool:
        return self._assumes_states or position in self._received

    def _state(self, position: int) -> State:
        """The main model's state of a token, or what takes its place."""
        state = self._received.get(position)
        return self._own.get(position, self.shared.zeros) if state is None else state

    def on_evaluated(self, output: State) -> None:
        """Note that the last token of the tree has been evaluated, and the head's output."""
        self._own[len(self._cached) + len(self._tree) - 1] = output.copy()

    def evaluate_calls(self, tokens: Sequence[int], n_logits: int) -> Calls[Logits]:
        """Append tokens to the history: see `LanguageModel.evaluate`.

        Tokens whose states are known are evaluated in one call, others one by one.
        """
        self.commit(())
        logits = yield from self._extend(tokens, n_logits)
        self.commit(range(len(tokens)))
        return logits

    def decode_tree_calls(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Calls[Logits]:
        """Add tokens to the chain: see `LanguageModel.decode_tree`."""
        self._check_chain(tokens, parents)
        return (yield from self._extend(tokens, len(tokens) if n_logits is None else n_logits))

    def _extend(self, tokens: Sequence[int], n_logits: int) -> Calls[Logits]:
        parts: list[Logits] = []
        done = 0
        while done < len(tokens):
            start = len(self._cached) + len(self._tree)
            if not start and self.shared.skips_first and n_logits < len(tokens):
                self._tree.append(tokens[0])  # there is no state before it, and hence no pair
                done = 1
                continue
            n, wanted = self._next_part(start, len(tokens) - done, n_logits)
            first = len(self._tree) - 1
            n_rows = n if wanted and self.shared.returns_all else wanted
            logits = yield self.call(tokens[done : done + n], range(first, first + n), n_rows)
            done += n
            if wanted:  # a view, which the next call overwrites
                found = logits[n_rows - wanted :]
                parts.append(found if done == len(tokens) else found.copy())
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.n_vocab), np.float32)

    def _next_part(self, start: int, n_left: int, n_logits: int) -> tuple[int, int]:
        """How many of the next `n_left` tokens to evaluate in one call, and how many logits to keep."""
        n = 1
        while n < min(n_left, self.max_tokens) and self._has_state(start + n - 1):
            n += 1
        wanted = min(n, max(0, n_logits - (n_left - n)))
        n_rows = n if self.shared.returns_all else wanted
        if not wanted or n_rows <= (_MAX_REREAD if wanted < n_rows else self.max_logits):
            return n, wanted
        return (n - wanted, 0) if wanted < n else (self.max_logits, self.max_logits)

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit the first nodes of the chain and discard the others: see `LanguageModel.commit`."""
        _ = self.handle
        if list(path) != list(range(len(path))) or len(path) > len(self._tree):
            raise InvalidRequest("a path of a chain has its first nodes, in order")
        kept, dropped = self._tree[: len(path)], self._tree[len(path) :]
        for token in kept:
            position = len(self._cached)
            if position == self._n_true and self._is_true(position, token):
                self._n_true += 1
            self._cached.append(token)
        self._tree.clear()
        if dropped:
            self._cut(len(self._cached))
        start = self._n_true - 2  # one more than the next pair needs: the last one may be dropped
        self._received.forget(start)
        self._own = {position: output for position, output in self._own.items() if position >= start}

    def _is_true(self, position: int, token: int) -> bool:
        """Whether the pair at a position is that of the main model's history."""
        tokens = self._received.tokens
        is_next = position == len(tokens)  # its own state is not known, nor needed
        has_state = position == 0 or position - 1 in self._received
        return has_state and (is_next or tokens[position : position + 1] == [token])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the chain: see `LanguageModel.truncate`."""
        _ = self.handle
        if not 0 <= length <= len(self._cached):
            raise InvalidRequest(f"cannot truncate {len(self._cached)} tokens to {length}")
        if length < len(self._cached) or self._tree:
            self._cut(length)
        self._follow(length)

    def _follow(self, length: int) -> None:
        """Note that the cache has been reduced to `length` tokens."""
        if length < self._n_true:
            self._n_true = length
            self._received.truncate(self._received.n_usable(length, self._received.tokens))

    def _cut(self, length: int) -> None:
        """Reduce the cache to `length` tokens, and drop the chain."""
        self._tree.clear()
        del self._cached[length:]
        self._own = {position: output for position, output in self._own.items() if position < length}
        if not self.shared.remove(self._sequence, length):
            raise BackendError("llama.cpp could not discard the last tokens: please report it")

    def reuse(self, tokens: Sequence[int]) -> None:
        """Make the history a prefix of `tokens`, as long as `n_received` can be: see `LanguageModel.reuse`.

        Entries of another row are shared, not copied.
        """
        tokens = list(tokens)
        best = max(self.shared.rows, key=lambda row: (row.known(tokens), row is self))
        n_received, n_pairs = best.known(tokens)
        if best is not self:
            self._cut(0)
            self.shared.copy(best._sequence, self._sequence, n_pairs)
            self._cached, self._received = tokens[:n_pairs], best._received.copy()
        else:
            self._cut(n_pairs)
        self._n_true = n_pairs
        self._received.truncate(n_received)
        self._received.keep(len(tokens) - 1)  # for another answer to the same prompt

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """What `reuse` of this row would give: `n_received`, and the length of the history."""
        n_pairs = common_prefix(self._cached[: self._n_true], tokens)
        return self._received.n_usable(n_pairs, tokens), n_pairs

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        received = self._received
        if start > len(received.tokens):
            raise InvalidRequest(f"the states of tokens {len(received.tokens)} to {start - 1} are missing")
        tokens = list(tokens[: self.n_ctx - start])
        n_known = common_prefix(received.tokens[start:], tokens)
        if n_known == len(tokens):  # a recurrent model has evaluated them again
            return
        n = start + n_known
        is_cached = self._cached[n : n + 1] == tokens[n_known : n_known + 1]
        self._n_true = min(self._n_true, n + is_cached)
        received.truncate(n)
        received.append(tokens[n_known:], states[n_known : len(tokens)], are_raw=self.shared.encodes)
        self._cut(self._n_true)  # the rest was evaluated with the head's own output

    def read_calls(self) -> Calls[None]:
        """Evaluate the tokens that were received: see `Head.read_calls`."""
        tokens = self._received.tokens
        if len(tokens) - len(self._cached) < min(_MAX_UNREAD, self.max_tokens):
            return
        while (start := len(self._cached)) < len(tokens):
            yield from self.evaluate_calls(tokens[start : start + self.max_tokens], 0)

    def resync(self) -> None:
        """Discard the chain after a failed or interrupted call; llama.cpp's cache has the length."""
        length = min(len(self._cached), self.shared.length(self._sequence))
        self._cut(length)
        self._follow(length)
