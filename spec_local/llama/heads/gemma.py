"""The assistant of a Gemma 4 model: a head in a GGUF file of its own, architecture ``gemma4-assistant``.

Its layers have no keys and values of their own: they attend to those that the main model has cached in its
last two layers, one with a sliding window and one without. Its input is a token, and the main model's state
of the token before it. Neither this token nor the draft tokens enter a cache, and all of them have the same
position. The assistant's llama.cpp context shares the main model's cells, and its graph writes none of them.
"""

from collections.abc import Sequence

import numpy as np

from spec_local.core.calls import Call, Logits
from spec_local.core.language_model import States, common_prefix
from spec_local.core.proposal import check_path
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.batch import Batch
from spec_local.llama.float_rows import FloatRows
from spec_local.llama.gguf_tensors import numbers
from spec_local.llama.heads.base import HeadContext, HeadRow
from spec_local.llama.heads.fit import check_fit
from spec_local.llama.heads.states import State
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.native_context import check_parents
from spec_local.llama.row import LlamaRow

_ROW_TOKENS, _MIN_TOKENS = 8, 32  # tokens per call, all of which have logits: per row, and at least


def hidden_states(head: Model, main: Model) -> HiddenStates:
    """The hidden states of the main model that an assistant reads.

    Raises:
        ModelError: the assistant does not fit the main model.
    """
    check_fit(head, main, "a Gemma 4 assistant", _difference(head, main))
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


def open_assistant_rows(head: Model, mains: Sequence[LlamaRow]) -> Sequence["AssistantRow"]:
    """Create a context for an assistant, with a row for each row of the main model, which becomes empty.

    Args:
        mains: opened with the `hidden_states` of this head.

    Raises:
        ModelError: the assistant does not fit.
        ContextOverflow, BackendError: see `HeadContext`.
    """
    hidden_states(head, mains[0].model)
    context = _AssistantContext(head, mains)
    return [AssistantRow(context, i, main) for i, main in enumerate(mains)]


class _AssistantContext(HeadContext):
    """The llama.cpp context of an assistant: a `Context`, without a cache of its own."""

    def __init__(self, model: Model, mains: Sequence[LlamaRow]) -> None:
        main, n_rows = mains[0].context, len(mains)
        for row in mains:
            row.truncate(0)  # llama.cpp empties the cells when it creates a context that shares them
        self.max_logits = min(main.max_tokens, max(_MIN_TOKENS, _ROW_TOKENS * n_rows))
        super().__init__(
            model,
            main,
            n_cells=n_rows * main.n_ctx,  # replaced by llama.cpp with the main model's number
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
        self._logits = FloatRows(self.native, self.max_logits, self.n_vocab)
        self._outputs = FloatRows(self.native, self.max_logits, self.width)

    def decode(self, calls: Sequence[Call["AssistantRow"]]) -> Sequence[Logits]:
        """Evaluate tokens of some of the rows in one call: see `Context.decode`."""
        n_tokens = sum(len(call.tokens) for call in calls)
        if not 1 <= n_tokens <= self.max_tokens:
            raise InvalidRequest(f"{n_tokens} tokens in one call of a head: give 1 to {self.max_tokens}")
        try:
            n = 0
            for call in calls:
                call.row.fill_batch(self._batch, n, call)
                n += len(call.tokens)
            self._batch.set_size(n)
            self._evaluate(self._batch)
        except BaseException:  # the call failed, or a signal handler interrupted it
            for call in calls:
                call.row.resync()
            raise
        outputs = self._outputs.at(self._extensions.llama_get_embeddings_nextn(self.handle))
        logits = self._logits.at(self.lib.llama_get_logits(self.handle))
        found: list[Logits] = []
        end = 0
        for call in calls:
            start, end = end, end + len(call.tokens)
            call.row.on_evaluated(outputs[start:end])
            found.append(logits[end - call.n_logits : end])
        return found


class AssistantRow(HeadRow):
    """One row of an assistant. Created by `open_assistant_rows`.

    Its history is what it has received, followed by draft tokens. A node of a tree needs only the output for
    its parent, so the nodes of one level are evaluated in one call.

    Args:
        context: what the rows have in common.
        index: number of this row.
        main: the main model's row.
    """

    context: _AssistantContext
    can_be_limited = False

    def __init__(self, context: _AssistantContext, index: int, main: LlamaRow) -> None:
        super().__init__(context, index * main.max_branches)  # the main model's sequence of the history
        self.max_logits, self.max_branches = context.max_logits, main.max_branches
        self._main = main
        self._zeros = np.zeros(context.width, np.float32)
        self._n_received = 0  # the first tokens of the history
        self._state: State | None = None  # the main model's state of the last one of these
        self._own: dict[int, State] = {}  # the head's output for later tokens of the history, by position
        self._tree: list[tuple[int, int]] = []  # token and parent
        self._outputs: list[State] = []  # for the nodes of the tree
        self._prompt: list[int] = []
        self._prompt_state: State | None = None  # of its last token

    @property
    def n_received(self) -> int:
        """See `Head.n_received`."""
        return self._n_received

    # Evaluating

    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call["AssistantRow"]:
        """Prepare a call: see `Row.call`. The parents of all tokens must have been evaluated."""
        self._check_call(tokens, n_logits)
        check_parents(tokens, parents)
        if not self._assumes_states:
            length = self.context.length(self._sequence)
            if any(not -1 <= parent < len(self._outputs) for parent in parents):
                raise InvalidRequest("a head evaluates tokens without the main model's states one by one")
            if length != self._n_received or self._main.cached != self._cached[:length]:
                raise InvalidRequest("an assistant reads the main model's cache: it must contain the history")
            if not length:
                raise ContextOverflow("an assistant needs a token in the main model's cache")
        return Call(self, tokens, parents, n_logits)

    def fill_batch(self, batch: Batch, start: int, call: Call["AssistantRow"]) -> None:
        """Add the tokens of a call to the tree and to a batch, which has `start` entries already."""
        position = self.context.length(self._sequence)
        for i, (token, parent) in enumerate(zip(call.tokens, call.parents, strict=True), start):
            batch.put(i, token, position, self._sequence, True)
            batch.vectors[i] = self._state_after(parent)
            self._tree.append((token, parent))

    def _state_after(self, node: int) -> State:
        """The state to read with a child of this node; −1: with a token after the history."""
        if self._assumes_states:
            return self._zeros
        if node >= 0:
            return self._outputs[node]
        last = len(self._cached) - 1
        state = self._own.get(last) if last >= self._n_received else self._state
        return self._zeros if state is None else state

    def on_evaluated(self, outputs: States) -> None:
        """Note that the last nodes of the tree have been evaluated, and the head's output."""
        self._outputs.extend(outputs.copy())

    async def evaluate_async(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to the history, one by one: see `LanguageModel.evaluate`.

        Tokens that are in the main model's cache need no call.
        """
        self.commit(())
        parts: list[Logits] = []
        for i, token in enumerate(tokens):
            wanted = i >= len(tokens) - n_logits
            if len(self._cached) < self._n_received and not wanted:
                self._cached.append(token)
                continue
            logits = await self.call([token], [-1], 1)
            self.commit([0])
            if wanted:  # a view, which the next call overwrites
                parts.append(logits if i == len(tokens) - 1 else logits.copy())
        return self._joined(parts)

    async def read(self) -> None:
        """See `Head.read`: there is nothing to evaluate."""

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `LanguageModel.commit`."""
        self._check_open()
        check_path(path, [parent for _, parent in self._tree])
        for node in path:
            self._own[len(self._cached)] = self._outputs[node]
            self._cached.append(self._tree[node][0])
        self.resync()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `LanguageModel.truncate`."""
        self._check_open()
        self._check_length(length)
        self.resync()
        del self._cached[length:]
        self._own = {position: output for position, output in self._own.items() if position < length}
        if length < self._n_received:
            self._n_received, self._state = length, None

    def resync(self) -> None:
        """Discard the tree."""
        self._tree.clear()
        self._outputs.clear()

    def reuse(self, tokens: Sequence[int]) -> None:
        """Make the history all of `tokens`, but the last one only if its state is known.

        See `LanguageModel.reuse`.
        """
        tokens = list(tokens)
        state = next((s for row in self.context.rows if (s := row.known_state(tokens)) is not None), None)
        n = len(tokens) if state is not None else max(0, len(tokens) - 1)
        self.truncate(0)
        self._cached, self._n_received, self._state = tokens[:n], n, state
        self._prompt, self._prompt_state = tokens, state

    def known_state(self, tokens: Sequence[int]) -> State | None:
        """The main model's state of the last of these tokens, which are a prompt or all that was received."""
        if self._prompt == tokens:
            return self._prompt_state
        return self._state if self._cached[: self._n_received] == tokens else None

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        if start > self._n_received:
            raise InvalidRequest(f"the states of tokens {self._n_received} to {start - 1} are missing")
        tokens = list(tokens[: self.n_ctx - start])
        end = start + len(tokens)
        known = self._cached[start : self._n_received]
        if not tokens or (end < self._n_received and common_prefix(known, tokens) == len(tokens)):
            return  # known already, and not the last ones
        self.resync()
        self._cached[start:] = tokens
        self._own.clear()
        self._n_received, self._state = end, states[len(tokens) - 1].copy()
        if end == len(self._prompt) and self._cached == self._prompt:
            self._prompt_state = self._state
