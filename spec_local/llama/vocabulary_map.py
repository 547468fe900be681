"""A draft model with a different vocabulary behind the interface of a model with the main model's vocabulary.

Token-level intersection (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", algorithm 4): tokens of the two vocabularies with the same bytes
are shared, and only these are drafted. The restricted distribution is an ordinary distribution over main
model tokens, so that every verifier stays lossless and no other module depends on the difference.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits
from spec_local.core.sequence import Limits, ModelSequence, common_prefix
from spec_local.errors import InvalidRequest, VocabularyMismatch
from spec_local.llama.rollback import RollsBack

_TURN_STARTS = (b"<|im_start|>", b"<start_of_turn>", b"<|start_header_id|>", b"<|turn>", b"[INST]")


class MappedVocabulary(Protocol):
    """The part of `spec_local.llama.vocabulary.Vocabulary` that is needed here."""

    n_tokens: int
    bos: int
    eos: int
    eot: int

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for control tokens."""

    def text(self, token: int) -> bytes:
        """The name of a token."""


class MappedDraftVocabulary(MappedVocabulary, Protocol):
    """The part of a draft model's vocabulary that conversion needs."""

    add_bos: bool

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text; lone surrogates encode bytes that are not UTF-8."""


class VocabularyMap:
    """The shared tokens of two vocabularies, and conversions of all others.

    Attributes:
        main_ids, draft_ids: intp (n,), ids of the shared tokens in both vocabularies; `main_ids` ascend.
        is_new: whether they were compared now.

    Args:
        shared: integers (2, n), `main_ids` and `draft_ids` of these vocabularies; None: compare them.

    Raises:
        VocabularyMismatch: no token is shared.
        ValueError: `shared` is impossible.
    """

    def __init__(
        self, main: MappedVocabulary, draft: MappedDraftVocabulary, shared: NDArray[np.integer] | None = None
    ) -> None:
        self._main, self._draft = main, draft
        self.is_new = shared is None
        ids = _shared(main, draft) if shared is None else shared.astype(np.intp)
        self.main_ids, self.draft_ids = ids
        sizes = np.array([[main.n_tokens], [draft.n_tokens]])
        if not ids.size or (ids < 0).any() or (ids >= sizes).any() or (np.diff(self.main_ids) < 1).any():
            raise ValueError("these are not tokens that the vocabularies share")
        self._to_draft: dict[int, tuple[int, ...]] = {
            token: (other,) for token, other in zip(*ids.tolist(), strict=True)
        }

    @property
    def share(self) -> float:
        """The share of the main model's tokens that are shared, 0 to 1."""
        return len(self.main_ids) / self._main.n_tokens

    def to_draft(self, token: int, is_first: bool = False) -> tuple[int, ...]:
        """Convert a main model token to one or more draft model tokens.

        Args:
            is_first: whether it is the first token of the context, before which the draft model may need BOS.
        """
        found = self._to_draft.get(token)
        if found is None:
            # Token by token instead of the whole text, so that tokens that were read never change.
            piece = self._main.piece(token) or self._main.text(token)
            found = self._to_draft[token] = self._tokenize(piece) or (0,)
        if is_first and self._draft.add_bos and found[0] != self._draft.bos:
            return (self._draft.bos, *found)
        return found

    def _tokenize(self, piece: bytes) -> tuple[int, ...]:
        """Draft model tokens of a main model token."""
        try:
            return tuple(self._draft.tokenize(piece.decode()))
        except UnicodeDecodeError:  # part of a character, which a tokenizer may replace by U+FFFD
            known = self._bytes
            singles = tuple(known[byte] for byte in piece if byte in known)
            if len(singles) == len(piece):
                return singles
            return tuple(self._draft.tokenize(piece.decode("utf-8", "surrogateescape")))

    @functools.cached_property
    def _bytes(self) -> dict[int, int]:
        """Draft model tokens of single bytes."""
        by_bytes = _TokenIndex(self._draft).by_bytes
        return {piece[0]: token for piece, token in by_bytes.items() if len(piece) == 1}


def _shared(main: MappedVocabulary, draft: MappedVocabulary) -> NDArray[np.intp]:
    """Ids of the shared tokens in both vocabularies: (2, n), those of the main model ascending."""
    ours, theirs = _TokenIndex(main), _TokenIndex(draft)
    shared = dict(_same_role(ours, theirs))
    shared |= {
        ours.by_bytes[piece]: theirs.by_bytes[piece]
        for piece in ours.by_bytes.keys() & theirs.by_bytes.keys()
    }
    if not shared:
        raise VocabularyMismatch(
            "the main and the draft model have no token in common: use another draft model, or none "
            "(prompt lookup works with every model)"
        )
    return np.array(sorted(shared.items()), np.intp).T


class _TokenIndex:
    """Token ids of a vocabulary by content.

    Attributes:
        by_bytes: ordinary tokens; of several with the same bytes the last, since SentencePiece lists single
            bytes before the characters that they are.
        controls: tokens without bytes, by name.
    """

    def __init__(self, vocabulary: MappedVocabulary) -> None:
        self.vocabulary = vocabulary
        self.by_bytes = {vocabulary.piece(token): token for token in range(vocabulary.n_tokens)}
        self.by_bytes.pop(b"", None)
        others = set(range(vocabulary.n_tokens)) - set(self.by_bytes.values())
        self.controls = {vocabulary.text(t): t for t in others if not vocabulary.piece(t)}


def _same_role(main: _TokenIndex, draft: _TokenIndex) -> Iterable[tuple[int, int]]:
    """Control tokens with the same name, and those that begin and end a text or a turn."""
    ours, theirs = main.vocabulary, draft.vocabulary
    starts = [next((v.controls[n] for n in _TURN_STARTS if n in v.controls), -1) for v in (main, draft)]
    end_of_turn = theirs.eot if theirs.eot >= 0 else theirs.eos
    roles = [(ours.eos, theirs.eos), (ours.bos, theirs.bos), (ours.eot, end_of_turn)]
    yield from ((a, b) for a, b in [(starts[0], starts[1]), *roles] if a >= 0 and b >= 0)
    yield from ((main.controls[n], draft.controls[n]) for n in main.controls.keys() & draft.controls.keys())


class IntersectionModel(RollsBack):
    """A `ModelSequence` with the main model's vocabulary, computed by a draft model with a different one.

    Args:
        model: the draft model; others may truncate its cache, but not extend it.
        vocabulary_map: between the vocabularies of the main model and this draft model.
        n_vocab: columns of the main model's logits; −inf for tokens that are not shared.
    """

    def __init__(self, model: ModelSequence, vocabulary_map: VocabularyMap, n_vocab: int) -> None:
        self._model, self._map, self._n_vocab = model, vocabulary_map, n_vocab
        self._history: list[int] = []
        self._ends: list[int] = []  # for each token of the history: draft model tokens up to its end
        self._nodes: list[
            tuple[int, list[int]]
        ] = []  # of the tree: the token, and its nodes in the draft model
        self._logits: Logits = np.full((model.limits.max_logits, n_vocab), -np.inf, np.float32)
        # Of the shared tokens, those that have logits in the draft model's last call, in both vocabularies,
        # and its `Limits.draft_tokens` that they follow from.
        self._ours, self._theirs = vocabulary_map.main_ids, vocabulary_map.draft_ids
        self._drafted: NDArray[np.intp] | None = None

    @property
    def limits(self) -> Limits:
        """Those of the draft model; n_ctx: if all further tokens are one draft model token each."""
        self._refresh()
        limits, used = self._model.limits, self._ends[-1] if self.cached else 0
        return replace(
            limits,
            n_vocab=self._n_vocab,
            n_ctx=limits.n_ctx - used + len(self._history),
            draft_tokens=None if self._drafted is None else self._ours,
        )

    def checkpoint(self) -> bool:
        return self._model.checkpoint()

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        n = common_prefix(self.cached, tokens)
        self.truncate(n)
        if text:
            self._model.reuse(self._model.cached, self._converted(text))
        return n

    def _converted(self, tokens: Sequence[int]) -> list[int]:
        return [other for token in tokens for other in self._map.to_draft(token)]

    @property
    def cached(self) -> Sequence[int]:
        n_cached = len(self._model.cached)
        while self._ends and self._ends[-1] > n_cached:
            self._ends.pop()
            self._history.pop()
        return self._history

    async def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Logits:
        if positions is not None:
            raise InvalidRequest("positions are those of the draft model's own tokens: give none")
        n_logits = len(tokens) if n_logits is None else n_logits
        if parents is None:
            await self._append(tokens, n_logits)
        else:
            await self._grow(tokens, parents, n_logits)
        return self._logits[:n_logits]

    async def _append(self, tokens: Sequence[int], n_logits: int) -> None:
        limits, n_history = self._model.limits, len(self.cached)
        self._model.truncate(self._ends[-1] if n_history else 0)
        n_cached = len(self._model.cached)
        converted: list[int] = []
        ends: list[int] = []
        for i, token in enumerate(tokens):
            converted += self._map.to_draft(token, n_history + i == 0)
            ends.append(n_cached + len(converted))
        self._nodes = []
        wanted = [end - n_cached - 1 for end in ends[len(ends) - n_logits :]]
        size = limits.max_tokens if n_logits < 2 else min(limits.max_tokens, limits.max_logits)
        for start in range(0, len(converted), size):
            chunk = converted[start : start + size]
            here = [(k, i - start) for k, i in enumerate(wanted) if start <= i < start + len(chunk)]
            first = here[0][1] if here else len(chunk)
            logits = await self._model.call(chunk, n_logits=len(chunk) - first)
            for k, i in here:
                self._set_logits(k, logits[i - first])
        self._history += tokens
        self._ends += ends

    async def _grow(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        n_before = sum(len(nodes) for _, nodes in self._nodes)
        converted: list[int] = []
        above: list[int] = []
        tree = list(self._nodes)
        for token, parent in zip(tokens, parents, strict=True):
            if not -1 <= parent < len(tree):
                raise InvalidRequest(f"node {len(tree)} has parent {parent}: give -1 to {len(tree) - 1}")
            own = self._map.to_draft(token)
            nodes = [n_before + len(converted) + i for i in range(len(own))]
            above += [tree[parent][1][-1] if parent >= 0 else -1, *nodes[:-1]]
            converted += own
            tree.append((token, nodes))
        logits = await self._model.call(converted, above)
        for k, (_, nodes) in enumerate(tree[len(tree) - n_logits :]):
            self._set_logits(k, logits[nodes[-1] - n_before])
        self._nodes = tree

    def commit(self, path: Sequence[int]) -> None:
        end = self._ends[-1] if self.cached else 0
        self._model.commit([node for step in path for node in self._nodes[step][1]])
        for step in path:
            token, nodes = self._nodes[step]
            end += len(nodes)
            self._history.append(token)
            self._ends.append(end)
        self._nodes = []
        self._follow()

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.cached):
            raise InvalidRequest(f"cannot truncate {len(self._history)} tokens to {length}")
        self._model.truncate(self._ends[length - 1] if length else 0)
        del self._history[length:], self._ends[length:]
        self._nodes = []
        self._follow()

    def _follow(self) -> None:
        """Shorten the history to what the draft model has kept, which must end with one of its tokens."""
        while self._model.limits.rollback != "any" and len(self._model.cached) > (
            end := self._ends[-1] if self.cached else 0
        ):
            self._model.truncate(end)

    def _refresh(self) -> None:
        """Follow a change of the tokens that have logits."""
        drafted = self._model.limits.draft_tokens
        if drafted is not self._drafted:
            has_logit = np.zeros(self._model.limits.n_vocab, bool)
            has_logit[slice(None) if drafted is None else drafted] = True
            kept = has_logit[self._map.draft_ids]
            self._ours, self._theirs = self._map.main_ids[kept], self._map.draft_ids[kept]
            self._drafted = drafted

    def _set_logits(self, k: int, logits: NDArray[np.float32]) -> None:
        self._refresh()
        if self._drafted is not None:  # one result may come from calls with different tokens
            self._logits[k] = -np.inf
        self._logits[k, self._ours] = logits[self._theirs]
