"""The assistant of a Gemma 4 model: a head in a GGUF file of its own, architecture ``gemma4-assistant``.

Its layers have no keys and values of their own: they attend to those that the main model has cached in its
last two layers, one with a sliding window and one without. Its input is a token, and the main model's state
of the token before it. Neither this token nor the draft tokens enter a cache, and all of them have the same
position. The assistant's llama.cpp context shares the main model's cells, and its graph writes none of them.
"""

from collections.abc import Sequence

import numpy as np

from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import check_path
from spec_local.core.sequence import States, common_prefix
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.gguf_tensors import numbers
from spec_local.llama.heads.base import HeadContext, HeadSequence, check_parents
from spec_local.llama.heads.fit import check_fit
from spec_local.llama.heads.states import State
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, OutputView
from spec_local.llama.sequence import LlamaSequence

_SEQUENCE_TOKENS, _MIN_TOKENS = (
    8,
    32,
)  # tokens per call, all of which have logits: for each sequence, and at least


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that an assistant reads.

    Raises:
        ModelError: the assistant does not fit the main model.
    """
    check_fit(head.path.name, "a Gemma 4 assistant", main, _difference(head, main))
    return HiddenStates()


def _difference(head: Model, main: Model) -> str | None:
    """Return why an assistant does not fit, or None. llama.cpp would abort the process, or draft nonsense."""
    if main.architecture != "gemma4":
        return f"{main.path.name} has the architecture {main.architecture}"
    width, n_vocab = head.number("embedding_length_out"), head.vocabulary.n_tokens
    if width != main.n_embd:
        return f"hidden states of width {width} against {main.n_embd}"
    if n_vocab != main.vocabulary.n_tokens:
        return f"{n_vocab} tokens against {main.vocabulary.n_tokens}"
    if head.number("attention.sliding_window") != main.number("attention.sliding_window"):
        return "its sliding window has a different length"
    ours, theirs = _caches(head), _caches(main)
    for has_window, shape in ours.items():
        if theirs.get(has_window) != shape:
            kind = "with" if has_window else "without"
            return f"its layers {kind} a sliding window need other keys and values"
    return None


def _caches(model: Model) -> dict[bool, tuple[int | None, ...]]:
    """The keys and values that layers with and without a sliding window attend to: heads, and their widths.

    llama.cpp takes those of the main model's last layer but one and of its last layer.
    """
    n, found = model.number("block_count") or 0, {}
    has_window, n_heads = (
        numbers(model.path, f"{model.architecture}.attention.{name}", n) or [0] * n
        for name in ("sliding_window_pattern", "head_count_kv")
    )
    for i in range(n):
        if model.is_head or i == n - (2 if has_window[i] else 1):
            suffix = "_swa" if has_window[i] else ""
            lengths = [model.number(f"attention.{part}_length{suffix}") for part in ("key", "value")]
            found[bool(has_window[i])] = (n_heads[i], *lengths)
    return found


def open_assistant_sequences(head: Model, mains: Sequence[LlamaSequence]) -> Sequence["AssistantSequence"]:
    """Create a context for an assistant, with a sequence for each of the main model, which becomes empty.

    Args:
        mains: opened with the `hidden_states` of this head.

    Raises:
        ModelError: the assistant does not fit.
        ContextOverflow, BackendError: see `HeadContext`.
    """
    hidden_states(head, mains[0].model)
    context = _AssistantContext(head, mains)
    return [AssistantSequence(context, i, main) for i, main in enumerate(mains)]


class _AssistantContext(HeadContext):
    """The llama.cpp context of an assistant: a `Context`, without a cache of its own."""

    def __init__(self, model: Model, mains: Sequence[LlamaSequence]) -> None:
        main, n_parallel = mains[0].context, len(mains)
        for sequence in mains:
            sequence.truncate(0)  # llama.cpp empties the cells when it creates a context that shares them
        self.max_logits = min(main.max_tokens, max(_MIN_TOKENS, _SEQUENCE_TOKENS * n_parallel))
        super().__init__(
            model,
            main,
            n_cells=n_parallel * main.n_ctx,  # replaced by llama.cpp with the main model's number
            kv_bytes=0,
            max_tokens=self.max_logits,
            n_sequences=main.n_sequences,
            n_outputs=max(self.max_logits, main.n_sequences),
            ctx_other=main.handle.address,
        )
        self.width = main.model.n_embd
        # Masked: only tokens with logits have an output, but all have logits.
        self._extensions.llama_set_embeddings_nextn(self.handle, True, True)
        self._batch = Batch(self.lib, self.max_tokens, width=self.width)
        self._logits = OutputView(self.native, self.max_logits, self.n_vocab)
        self._outputs = OutputView(self.native, self.max_logits, self.width)

    def decode(self, calls: Sequence[Call["AssistantSequence"]]) -> Sequence[Logits]:
        """Evaluate tokens of some of the sequences in one call: see `Context.decode`."""
        n_tokens = sum(len(call.tokens) for call in calls)
        if not 1 <= n_tokens <= self.max_tokens:
            raise InvalidRequest(f"{n_tokens} tokens in one call of a head: give 1 to {self.max_tokens}")
        try:
            n = 0
            for call in calls:
                call.sequence.fill_batch(self._batch, n, call)
                n += len(call.tokens)
            self._batch.set_size(n)
            self._evaluate(self._batch)
        except BaseException:  # the call failed, or a signal handler interrupted it
            for call in calls:
                call.sequence.resync()
            raise
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        logits = self._logits.at(self.lib.llama_get_logits(self.handle))
        found: list[Logits] = []
        end = 0
        for call in calls:
            start, end = end, end + len(call.tokens)
            call.sequence.on_evaluated(outputs[start:end])
            found.append(logits[end - call.n_logits : end])
        return found


class AssistantSequence(HeadSequence):
    """One sequence of an assistant. Created by `open_assistant_sequences`.

    Its history is what it has received, followed by draft tokens. A node of a tree needs only the output for
    its parent, so the nodes of one level are evaluated in one call.

    Args:
        context: what the sequences have in common.
        index: number of this sequence.
        main: the main model's sequence.
    """

    context: _AssistantContext
    can_be_limited = False

    def __init__(self, context: _AssistantContext, index: int, main: LlamaSequence) -> None:
        max_branches = main.limits.max_branches
        super().__init__(context, index * max_branches, max_branches)  # the main model's id of the history
        self._main = main
        self._zeros = np.zeros(context.width, np.float32)
        self.n_received = 0
        self._state: State | None = None  # the main model's state of the last one of these
        self._own: dict[int, State] = {}  # the head's output for later tokens of the history, by position
        self._tree: list[tuple[int, int]] = []  # token and parent
        self._outputs: list[State] = []  # for the nodes of the tree
        self._prompt: list[int] = []
        self._prompt_state: State | None = None  # of its last token

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
        """See `ModelSequence.call`. The parents of all nodes must have been evaluated.

        Tokens of the history are evaluated one by one; those in the main model's cache need no call.
        """
        n_logits = len(tokens) if n_logits is None else n_logits
        self._check_positions(positions)
        if parents is not None:
            return await self._part(tokens, parents, n_logits)
        self.commit(())
        parts: list[Logits] = []
        for i, token in enumerate(tokens):
            wanted = i >= len(tokens) - n_logits
            if len(self._cached) < self.n_received and not wanted:
                self._cached.append(token)
                continue
            logits = await self._part([token], [-1], 1)
            self.commit([0])
            if wanted:  # a view, which the next call overwrites
                parts.append(logits if i == len(tokens) - 1 else logits.copy())
        return self._joined(parts)

    def _part(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int
    ) -> Call["AssistantSequence"]:
        """Prepare one llama_decode."""
        self._check_call(tokens, n_logits)
        check_parents(tokens, parents)
        if not self._assumes_states:
            length = self.context.length(self._seq_id)
            if any(not -1 <= parent < len(self._outputs) for parent in parents):
                raise InvalidRequest("a head evaluates tokens without the main model's states one by one")
            if length != self.n_received or self._main.cached != self._cached[:length]:
                raise InvalidRequest("an assistant reads the main model's cache: it must contain the history")
            if not length:
                raise ContextOverflow("an assistant needs a token in the main model's cache")
        return Call(self, tokens, parents, n_logits)

    def fill_batch(self, batch: Batch, start: int, call: Call["AssistantSequence"]) -> None:
        """Add the tokens of a call to the tree and to a batch, which has `start` entries already."""
        position = self.context.length(self._seq_id)
        for i, (token, parent) in enumerate(zip(call.tokens, call.parents, strict=True), start):
            batch.put(i, token, position, self._seq_id, True)
            batch.vectors[i] = self._state_after(parent)
            self._tree.append((token, parent))

    def _state_after(self, node: int) -> State:
        """The state to read with a child of this node; −1: with a token after the history."""
        if self._assumes_states:
            return self._zeros
        if node >= 0:
            return self._outputs[node]
        last = len(self._cached) - 1
        state = self._own.get(last) if last >= self.n_received else self._state
        return self._zeros if state is None else state

    def on_evaluated(self, outputs: States) -> None:
        """Note that the last nodes of the tree have been evaluated, and the head's output."""
        self._outputs.extend(outputs.copy())

    async def read(self) -> None:
        """See `Head.read`: there is nothing to evaluate."""

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `ModelSequence.commit`."""
        self._check_open()
        check_path(path, [parent for _, parent in self._tree])
        for node in path:
            self._own[len(self._cached)] = self._outputs[node]
            self._cached.append(self._tree[node][0])
        self.resync()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `ModelSequence.truncate`."""
        self._check_open()
        self._check_length(length)
        self.resync()
        del self._cached[length:]
        self._own = {position: output for position, output in self._own.items() if position < length}
        if length < self.n_received:
            self.n_received, self._state = length, None

    def resync(self) -> None:
        """Discard the tree."""
        self._tree.clear()
        self._outputs.clear()

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """Make the history all of `tokens`, but the last one only if its state is known.

        See `ModelSequence.reuse`.
        """
        tokens = list(tokens)
        state = next(
            (s for sequence in self.context.sequences if (s := sequence.known_state(tokens)) is not None),
            None,
        )
        n = len(tokens) if state is not None else max(0, len(tokens) - 1)
        self.truncate(0)
        self._cached, self.n_received, self._state = tokens[:n], n, state
        self._prompt, self._prompt_state = tokens, state
        return n

    def known_state(self, tokens: Sequence[int]) -> State | None:
        """The main model's state of the last of these tokens, which are a prompt or all that was received."""
        if self._prompt == tokens:
            return self._prompt_state
        return self._state if self._cached[: self.n_received] == tokens else None

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        if start > self.n_received:
            raise InvalidRequest(f"the states of tokens {self.n_received} to {start - 1} are missing")
        tokens = list(tokens[: self.limits.n_ctx - start])
        end = start + len(tokens)
        known = self._cached[start : self.n_received]
        if not tokens or (end < self.n_received and common_prefix(known, tokens) == len(tokens)):
            return  # known already, and not the last ones
        self.resync()
        self._cached[start:] = tokens
        self._own.clear()
        self.n_received, self._state = end, states[len(tokens) - 1].copy()
        if end == len(self._prompt) and self._cached == self._prompt:
            self._prompt_state = self._state
