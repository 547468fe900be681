"""A llama.cpp context, whose sequences share each call: weights and KV cache in one llama_decode.

Each sequence has ids of its own in llama.cpp (see `spec_local.llama.native_context`), and all use one pool of
cells: with a cache for each, llama.cpp evaluates those with different numbers of tokens one after another,
and reads the weights each time.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_local.core.calls import Call, Logits
from spec_local.core.sequence import Limits, Rollback, States
from spec_local.core.span import Cell, Span
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, SpecLocalError
from spec_local.llama import runtime
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.memory import check_free_memory, free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_context import Batch, NativeContext, OutputView
from spec_local.llama.saved import SavedParts
from spec_local.llama.ubatch_order import evaluation_order
from spec_local.system import machine

MAX_SEQUENCES = 255
"""Sequence ids: llama.cpp has 256 (LLAMA_MAX_SEQ), of which one is kept empty between calls."""
_CACHE_STEP = 256  # llama.cpp rounds each sequence's cache up to a multiple of this
CACHE_TYPES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # bytes per value


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What a `LlamaContext` is created for.

    n_ctx: maximum number of tokens of a sequence, committed tokens and tree nodes together.
    n_parallel: number of sequences, 1 to 255; the cache has room for all of them at their maximum.
    max_branches: maximum number of leaves of a tree, 1 to 255. llama.cpp has that many sequence ids for them,
        which the sequences divide among themselves.
    max_tokens: maximum number of tokens per call. It is also llama.cpp's physical batch size, so that each
        call reads the weights once. On a CPU, a larger value does not make prefill faster; compute buffers
        grow with it, and Ctrl-C waits for the call to end.
    max_span: maximum number of cells of a picture whose cells attend to all of it. llama.cpp's physical batch
        has room for them; other calls stay within `max_tokens`.
    max_logits: maximum number of tokens with logits per call; llama.cpp reserves memory for them.
    threads: number of threads, for single tokens and batches; None: one per usable core.
    cache_type: type of keys and values, ``f16``, ``q8_0`` or ``q4_0``.
    flash_attention: None lets llama.cpp choose; a quantized cache requires it.
    pad_to: fill up each call with dummy tokens to a multiple of this number, so that logits depend only on
        the tokens before them (see `spec_local.llama.reproducible`). Only for a single sequence. `n_ctx` is
        reduced to leave room for them; `max_tokens` must be a multiple of it, and `max_logits` is the same
        number.
    max_rollback: of a recurrent model, keep the states before so many of a call's last tokens, so that these
        can be rolled back without evaluating others again; fewer if the states would take more than an
        eighth of the free memory, and none where llama.cpp does not support it. Only for a single sequence:
        where several share a call, llama.cpp moves the state of one, but not those kept for it.
    unified: False: a cache for each sequence. It is for many that are evaluated in ascending order and with
        the same number of tokens: attention then does not read the cells of others. Such sequences cannot
        roll back, and share no cells.
    hidden: the hidden states to keep from each call; None: none.
    """

    n_ctx: int = 4096
    n_parallel: int = 1
    max_branches: int = 1
    max_tokens: int = 96
    max_span: int = 0
    max_logits: int = 65
    threads: int | None = None
    cache_type: str = "f16"
    flash_attention: bool | None = None
    pad_to: int | None = None
    max_rollback: int = 8
    unified: bool = True
    hidden: HiddenStates | None = None

    def check(self) -> None:
        """Raise InvalidRequest if a value is out of range."""
        threads = machine.default_threads() if self.threads is None else self.threads
        for name, value, low, high in [
            ("the context length", self.n_ctx, self.pad_to or 1, 1 << 24),
            ("the number of sequences", self.n_parallel, 1, 1 if self.pad_to else MAX_SEQUENCES),
            ("the number of branches", self.max_branches, 1, MAX_SEQUENCES),
            ("the batch size", self.max_tokens, 1, 1 << 16),
            ("the size of a picture", self.max_span, 0, 1 << 16),
            ("the number of logits", self.max_logits, 1, 1 << 16),
            ("the number of threads", threads, 1, 512),
            ("the number of kept states", self.max_rollback, 0, 64),
        ]:
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}: give {low} to {high}")
        if self.cache_type not in CACHE_TYPES:
            raise InvalidRequest(f"cache type {self.cache_type!r} is unknown: give {', '.join(CACHE_TYPES)}")
        if self.cache_type != "f16" and self.flash_attention is False:
            raise InvalidRequest(f"a {self.cache_type} cache requires flash attention: leave it on")


class LlamaContext(NativeContext):
    """A llama.cpp context with a number of sequences: a `Context`.

    Only one thread may use it at a time, which `spec_local.session.Session` ensures.

    Args:
        model: kept open as long as the context.

    Attributes:
        limits: of its sequences.
        keeps_states: whether it keeps hidden states.
        spare: id of a sequence that is empty between calls.
        saved: copies of parts of the cache, in a prompt cache.

    Raises:
        InvalidRequest: an option is out of range.
        ContextOverflow: the cache does not fit into free memory.
        BackendError: llama.cpp could not create the context.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        options.check()
        if options.hidden:
            options.hidden.check(model)
        unified, pad_to, n_parallel = options.unified, options.pad_to, options.n_parallel
        step = 1 if unified else _CACHE_STEP
        n_ctx = -(-options.n_ctx // step) * step
        n_cells = n_parallel * n_ctx
        self.max_tokens = max_tokens = min(options.max_tokens, n_cells - n_cells % (pad_to or 1))
        if unified and n_parallel > 1 and n_ctx <= (model.n_ctx_original or n_cells) < n_cells:
            raise InvalidRequest(
                f"{n_parallel} sequences of {n_ctx} tokens exceed the {model.n_ctx_original} tokens beyond "
                "which this model rotates positions differently: give fewer sequences or a smaller `n_ctx`"
            )
        self._number_sequences(model, options)
        max_rollback = self._reserve_memory(model, options, n_ctx)
        self._unified, self.pad_to = unified, pad_to
        self.n_ctx = n_ctx - (pad_to or 1) + 1
        self.max_logits = max_tokens if pad_to else min(options.max_logits, max_tokens)
        params = runtime.library().llama_context_default_params()
        params.n_ctx = n_cells
        self._max_span = max(max_tokens, min(options.max_span, n_cells))
        params.n_batch = params.n_ubatch = self._max_span
        # llama.cpp reserves a buffer for n_outputs_max outputs, asserts that it suffices, and requires
        # at least one per sequence.
        params.n_outputs_max = max(self.max_logits, self.n_sequences)
        params.n_seq_max = self.n_sequences
        params.n_rs_seq = max_rollback
        params.kv_unified = unified
        if pad_to:
            params.op_offload = False  # a GPU would compute large calls of a model in main memory
        self._capture = options.hidden.capture(model, self._max_span) if options.hidden else None
        if self._capture:
            self._capture.prepare(params)
        super().__init__(
            model,
            params,
            threads=machine.default_threads() if options.threads is None else options.threads,
            cache_type=options.cache_type,
            flash_attention=options.flash_attention,
            what=f"of {n_cells} tokens",
            advice="give a smaller `n_ctx` or another `cache_type`",
            fixed_threads=bool(pad_to),  # llama.cpp divides a long context's keys by the number of threads
        )
        self.keeps_states = self._capture is not None
        if self._capture:
            self._capture.attach(self.native)
        rollback, max_rollback = self._ways_back(unified)
        self.limits = Limits(
            self.n_vocab, self.n_ctx, max_tokens, self.max_logits, self.max_branches, rollback, max_rollback
        )
        self.saved = SavedParts(self, self.spare, has_states=model.is_recurrent)
        self._batch = Batch(self.lib, max_tokens, self.max_branches)
        self._logits = OutputView(self.native, self.max_logits, self.n_vocab)
        self._no_logits: Logits = np.empty((0, self.n_vocab), np.float32)

    def _number_sequences(self, model: Model, options: ContextOptions) -> None:
        """Assign llama.cpp's ids: those of the branches, of the guards or checkpoints, and the spare one."""
        n_parallel, unified = options.n_parallel, options.unified
        # With a sliding window, llama.cpp reuses a cell that has left the window of its only
        # sequence, and the holes that a tree leaves make it search there. A second sequence, the
        # guard, keeps the committed tokens.
        self.has_guard = unified and model.has_window and not model.is_recurrent
        n_others = self.has_guard + (unified and model.is_recurrent)
        if n_parallel * (1 + n_others) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"the number of sequences is {n_parallel}: give 1 to {MAX_SEQUENCES // (1 + n_others)}"
            )
        max_branches = 1 if model.is_recurrent or not unified else options.max_branches
        self.max_branches = min(max_branches, MAX_SEQUENCES // n_parallel - n_others)
        self.first_other = n_parallel * self.max_branches
        self.spare = self.first_other + n_parallel * n_others
        self.n_sequences = self.spare + bool(unified or options.pad_to)

    def _reserve_memory(self, model: Model, options: ContextOptions, n_ctx: int) -> int:
        """Check that the cache fits into free memory; returns how many states of a sequence it keeps."""
        n_parallel, n_cells = options.n_parallel, options.n_parallel * n_ctx
        state_bytes, max_rollback = self.n_sequences * model.state_bytes, 0
        if options.unified and model.is_recurrent and n_parallel == 1:
            # llama.cpp asserts that a physical batch is larger than what it keeps together of a sequence.
            most = min(options.max_rollback, self.max_tokens - 2, _kept_states(state_bytes))
            max_rollback = max(0, most)
        self.kv_bytes = model.kv_bytes(n_cells, CACHE_TYPES[options.cache_type])
        self.kv_bytes += state_bytes * (1 + max_rollback)
        need = self.kv_bytes + 2 * n_cells * min(self.max_tokens, n_cells)  # the attention mask, in f16
        if model.has_own_memory:  # llama.cpp reports that a GPU's is too small
            pass
        elif n_parallel == 1:
            check_free_memory(need, f"for a context of {n_ctx} tokens")
        else:
            purpose = f"for {n_parallel} answers at the same time, in contexts of {n_ctx} tokens"
            check_free_memory(need, purpose, "let fewer run at the same time, or give a smaller `n_ctx`")
        return max_rollback

    def _ways_back(self, unified: bool) -> tuple[Rollback, int]:
        """Return `Limits.rollback` and `Limits.max_rollback` of the sequences."""
        if not unified:
            return "none", 0
        if not self.model.is_recurrent:
            return "any", self.n_ctx
        n = int(self.lib.llama_n_rs_seq(self.handle))  # 0 for most architectures, whatever was asked for
        return ("bounded", n) if n else ("fork", 0)

    def decode(self, calls: Sequence[Call[Any]]) -> Sequence[Logits]:
        """Evaluate nodes of some of the sequences in one llama_decode call: see `Context.decode`."""
        if calls and calls[0].tokens[0] < 0:
            return [self._decode_span(calls)]
        n_tokens = n_logits = 0
        for call in calls:
            n_tokens += len(call.tokens)
            n_logits += call.n_logits
        if not 1 <= n_tokens <= self.max_tokens:
            raise InvalidRequest(f"{n_tokens} tokens in one call: give 1 to {self.max_tokens}")
        if n_logits > self.max_logits:
            raise InvalidRequest(f"{n_logits} logits in one call: give at most {self.max_logits}")
        code, done = -1, False
        try:
            self._fill_batch(calls)
            if self._capture:
                self._capture.begin()
            code = self._decode_limited(calls, self._batch) if self.is_limited else self._decode(self._batch)
            if self._capture and not code:
                self._capture.finish(self._batch.native.n_tokens, self._order(calls))
            if self.pad_to:
                self.remove(self.spare, 0)
            done = not code
        finally:
            if not done:  # failed, or interrupted by a signal handler
                if self.pad_to:
                    self.remove(self.spare, 0)
                for call in calls:
                    call.sequence.resync(unchanged=code == 1)
        if code:
            raise self._failure(code, n_tokens)
        return self._split_logits(calls, n_logits)

    @staticmethod
    def _failure(code: int, n_tokens: int) -> SpecLocalError:
        """The error of a call for which llama_decode returned a code."""
        if code == 1:
            return ContextOverflow(
                f"the KV cache has no room for {n_tokens} more tokens: "
                "start a new conversation or give a larger `n_ctx`"
            )
        return BackendError(
            f"llama.cpp could not evaluate {n_tokens} tokens "
            f"(code {code}, {runtime.failure_reason()}): try again, and run specdec doctor if it persists"
        )

    def check_span(self, span: Span) -> None:
        """Check that a span can be evaluated.

        Raises:
            InvalidRequest: the model's vectors have other positions, or the span is too large for a call.
        """
        if not span.is_causal and len(span) > self._max_span:
            raise InvalidRequest(
                f"an image of {len(span)} tokens is read in one call, of at most {self._max_span} tokens here"
            )
        if span.offsets.shape[1] > self.model.n_axes or not self._unified:
            raise InvalidRequest("these contexts cannot read images")

    def _decode_span(self, calls: Sequence[Call[Any]]) -> Logits:
        """Evaluate a span, in several of llama.cpp's calls if it is large."""
        if len(calls) > 1:
            raise InvalidRequest("a span is evaluated in a call of its own")
        sequence, first = calls[0].sequence, calls[0].tokens[0]
        assert isinstance(first, Cell)
        vectors = first.span.vectors()
        states, n, code, done = list[States](), 0, -1, False
        try:
            span, position, seq_id = sequence.begin_span(calls[0])
            if not span.is_causal:
                self.lib.llama_set_causal_attn(self.native.pointer, False)
            most = self.max_tokens if span.is_causal else self._max_span
            for start in range(0, len(span), most):
                part = slice(start, start + most)
                n = len(span.cells[part])
                self._vectors.put_vectors(vectors[part], position + span.offsets[part], seq_id)
                if self._capture:
                    self._capture.begin()
                if code := self._decode(self._vectors):
                    break
                if self._capture:
                    self._capture.finish(n, None)
                    states.append(self._capture.at(range(n)))
            else:
                sequence.on_span(n, np.concatenate(states) if states else None)
                done = True
        finally:
            self.lib.llama_set_causal_attn(self.native.pointer, True)
            if not done:  # failed, or interrupted by a signal handler
                sequence.resync()
        if code:
            raise self._failure(code, len(calls[0].tokens))
        return self._no_logits

    @functools.cached_property
    def _vectors(self) -> Batch:
        """The batch of spans."""
        model = self.model
        return Batch(
            self.lib, self._max_span, width=model.n_embd_input, has_tokens=False, n_axes=model.n_axes
        )

    def _order(self, calls: Sequence[Call[Any]]) -> Sequence[int] | None:
        """The order in which llama.cpp evaluated the tokens of the batch; None: that of the batch."""
        if len(calls) == 1 or (self._unified and not self.model.is_recurrent):
            return None
        adjacent = not self._unified or not self.model.is_hybrid
        return evaluation_order(self._batch.seq_ids(), adjacent=adjacent)

    def states(self, indices: Sequence[int]) -> States:
        """A copy of the hidden states of the last call's tokens at these indices of its batch.

        Raises:
            InvalidRequest: the context keeps none.
            BackendError: llama.cpp returned none.
        """
        if not self._capture:
            raise InvalidRequest("this context keeps no hidden states: open it with hidden=HiddenStates(…)")
        return self._capture.at(indices)

    def _fill_batch(self, calls: Sequence[Call[Any]]) -> None:
        n = 0
        for call in calls:
            # The kernel of the output matrix, too, depends on how much is computed: padded calls compute all.
            n_logits = len(call.tokens) if self.pad_to and call.n_logits else call.n_logits
            call.sequence.fill_batch(self._batch, n, call, n_logits)
            n += len(call.tokens)
        if self.pad_to:
            # The dummy tokens are in the spare sequence, and come last so that the cells of the others are
            # consecutive. Any token will do.
            for i in range(-n % self.pad_to):
                self._batch.put(n + i, calls[0].tokens[0], i, self.spare, calls[0].n_logits > 0)
            n += -n % self.pad_to
        self._batch.set_size(n)

    def _split_logits(self, calls: Sequence[Call[Any]], n_logits: int) -> Sequence[Logits]:
        """The logits of each call, which llama.cpp stores in the order of the batch."""
        logits, end = self._no_logits, 0
        if n_logits:
            pointer = self.lib.llama_get_logits(self.native.pointer)
            if not pointer:
                raise BackendError("llama.cpp returned no logits: use a model that generates text")
            logits = self._logits.at(pointer)
        found: list[Logits] = []
        for call in calls:
            if self.model.is_recurrent:
                call.sequence.on_evaluated(len(call.tokens))
            end += len(call.tokens) if self.pad_to and call.n_logits else call.n_logits
            found.append(logits[end - call.n_logits : end])
        return found


def _kept_states(one: int) -> int:
    """Return the number of states of `one` bytes that fit into an eighth of the free memory."""
    return free_memory() // (8 * one) if one else 0
