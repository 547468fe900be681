"""Several layers for multi-token prediction (NextN), each of which drafts one token.

The first layer drafts the first token, as a single one does. Layer i drafts token i: it also evaluates the
draft tokens before its own, each together with the output of the layer that drafted it.

Every layer has a context of its own. llama.cpp's own loop (common/speculative.cpp) uses one for all layers:
for each layer, it removes tokens and evaluates them again. This preserves the other layers' entries only if
all tokens get their old cells, which is not certain where sequences share a cache. The price is memory: each
context also has caches for the layers that it does not use.

A later layer evaluates what the main model has evaluated when it is next used, in the same call as the draft
tokens.
"""

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits
from spec_local.core.sequence import States
from spec_local.errors import InvalidRequest
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.heads.one_token import OneTokenContext, OneTokenSequence
from spec_local.llama.heads.states import State


class ChainedSequence(OneTokenSequence):
    """One sequence of the first layer, with the sequences of the later ones.

    Args:
        layers: what the sequences of each layer have in common.
        index: number of this sequence.
    """

    def __init__(self, layers: Sequence[OneTokenContext], index: int) -> None:
        super().__init__(layers[0], index, max_draft=len(layers))  # one token for each layer
        self._later = [_LaterSequence(layer, index, self) for layer in layers[1:]]
        self._drafted: list[int] = []  # draft tokens that later layers have evaluated
        self._draft_outputs: list[State] = []  # their outputs

    def limit(self, vocabulary: DraftVocabulary | None) -> None:
        """See `NativeSequence.limit`."""
        super().limit(vocabulary)
        for sequence in self._later:
            sequence.limit(vocabulary)

    def close(self) -> None:
        """See `OneTokenSequence.close`."""
        for sequence in self._later:
            sequence.close()
        super().close()

    @property
    def cached(self) -> Sequence[int]:  # type: ignore[override]
        """See `OneTokenSequence.cached`; includes the draft tokens."""
        return [*self._cached, *self._drafted] if self._drafted else self._cached

    @property
    def n_received(self) -> int:  # type: ignore[override]
        """See `HeadSequence.n_received`; a layer may lack states that others have."""
        return min(super().n_received, *(sequence.n_received for sequence in self._later))

    def output(self, position: int) -> State | None:
        """The output for a draft token, or for a token of the history; None: it is not known."""
        n = position - len(self._cached)
        if n < 0:
            return self._own.get(position)
        return self._draft_outputs[n] if n < len(self._draft_outputs) else None

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

        Raises:
            InvalidRequest: there are more draft tokens than layers.
        """
        if parents is not None:
            return await super().call(tokens, parents, n_logits, positions=positions)
        n_logits = len(tokens) if n_logits is None else n_logits
        # The first layer evaluates all tokens of the history; later layers evaluate draft tokens.
        n = len(self.received.tokens) + 1 - len(self.cached)
        n = len(tokens) if self._assumes_states else max(0, min(len(tokens), n))
        parts: list[Logits] = []
        if n:
            wanted = max(0, n_logits - (len(tokens) - n))
            logits = await super().call(tokens[:n], None, wanted, positions=positions)
            parts.append(logits if n == len(tokens) else logits.copy())
        for i, token in enumerate(tokens[n:], n + 1):
            logits = await self._evaluate_draft(token)
            if i > len(tokens) - n_logits:
                parts.append(logits if i == len(tokens) else logits.copy())
        return self._joined(parts)

    async def _evaluate_draft(self, token: int) -> Logits:
        """Evaluate one more draft token with the next layer."""
        n = len(self._drafted)
        if n == len(self._later):
            raise InvalidRequest(
                f"{self.model.path.name} has {self.limits.max_draft} layers for multi-token prediction, "
                "which draft one token each: draft fewer tokens"
            )
        layer = self._later[n]
        logits = await layer.predict([*self.cached, token])
        self._drafted.append(token)
        self._draft_outputs.append(layer.last_output)
        return logits

    def _drop(self, n_kept: int = 0) -> None:
        """Drop all but the first draft tokens."""
        del self._drafted[n_kept:], self._draft_outputs[n_kept:]

    def truncate(self, length: int) -> None:
        """See `OneTokenSequence.truncate`."""
        n_kept = length - len(self._cached)
        if 0 <= n_kept <= len(self._drafted):
            self._check_open()
            self._drop(n_kept)
            return
        self._drop()
        super().truncate(length)
        for sequence in self._later:
            sequence.truncate(min(length, len(sequence.cached)))

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """See `OneTokenSequence.reuse`."""
        self._drop()
        super().reuse(tokens, text)
        for sequence in self._later:
            sequence.reuse(tokens, text)
        return self.n_received

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """See `Head.receive`."""
        self._drop()
        super().receive(start, tokens, states)
        for sequence in self._later:
            sequence.receive(start, tokens, states)

    async def read(self) -> None:
        """See `Head.read`."""
        await super().read()
        for sequence in self._later:
            await sequence.read()


class _LaterSequence(OneTokenSequence):
    """One sequence of a layer after the first one.

    Args:
        context, index: see `OneTokenSequence`.
        chain: the sequence that keeps the outputs of the layers before this one.

    Attributes:
        last_output: for the last token of the last call.
    """

    def __init__(self, context: OneTokenContext, index: int, chain: ChainedSequence) -> None:
        super().__init__(context, index)
        self._chain = weakref.proxy(chain)
        self.last_output = context.zeros

    async def predict(self, tokens: Sequence[int]) -> Logits:
        """Evaluate the history and draft tokens, of which it has evaluated a part; returns its logits.

        Draft tokens of an earlier step are removed first.
        """
        self.truncate(self._n_true)
        most = self.limits.max_tokens
        while len(tokens) - len(self._cached) > most:
            start = len(self._cached)
            await self.call(tokens[start : start + most], n_logits=0)
        return await self.call(tokens[len(self._cached) :], n_logits=1)

    def _known(self, token: int, position: int) -> State | None:
        state = super()._known(token, position)
        return self._chain.output(position) if state is None else state

    def on_evaluated(self, outputs: NDArray[np.float32]) -> None:
        """See `OneTokenSequence.on_evaluated`; only that for the last token, the draft token, is used."""
        self.last_output = outputs[-1].copy()
