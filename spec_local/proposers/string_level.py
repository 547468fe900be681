"""A draft of another vocabulary guesses text, which is spelled again in main's tokens.

String-level exact match (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", algorithm 2): the draft may say any of its tokens, and what it said is judged by
exact_match, which needs no probabilities.
"""

from collections.abc import Callable, Sequence

from spec_local.core.language_model import LanguageModel, common_prefix
from spec_local.core.proposal import Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Sampler
from spec_local.lookups.base import Lookup
from spec_local.proposers.base import Lap, Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Chain
from spec_local.proposers.vocabulary_map import VocabularyMap

_LOOK_BEHIND = 8
"""Tokens of main's history that are spelled again with the guess: a border may be inside of a word."""


class StringLevelDraft(DraftModel):
    """Chains of a draft of another vocabulary.

    Args:
        model: in its own vocabulary; its cache is this proposer's own.
        sampler: like main's, without what it says of single tokens.
        chain: what grows, in the draft's tokens.
        translation: how the draft reads main's tokens, and main the draft's text.
        is_end: nothing is guessed after such a token of the draft's.
        ahead: see `DraftModel`; it is asked about the draft's tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        chain: Chain,
        translation: VocabularyMap,
        *,
        is_end: Callable[[int], bool] = lambda token: False,
        ahead: Lookup | None = None,
    ) -> None:
        super().__init__(model, sampler, chain, n_vocab=model.n_vocab, is_end=is_end, ahead=ahead)
        self._translation = translation
        self._history: list[int] = []  # main's tokens as far as they were spelled
        self._spelled: list[int] = []  # the same in the draft's
        self._ends: list[int] = []  # of each of them, where it ends there
        self._guesses: Sequence[int] = ()

    @property
    def guesses(self) -> Sequence[int]:
        return self._guesses

    def propose(self, history: Sequence[int], limit: Limit, rng: Rng, lap: Lap) -> Proposal:
        own = super().propose(history, limit, rng, lap)
        said = self._reader.tokens if self._reader else ()
        self._guesses = self._translation.respell(history[-_LOOK_BEHIND:], said)[: limit.depth]
        guesses = self._guesses
        if len(own.tokens) < len(said):
            guesses = self._translation.respell(history[-_LOOK_BEHIND:], own.tokens)[: limit.depth]
        lap("draft sampling")
        return Proposal.chain(guesses, source="draft")

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        known = common_prefix(self._history, history)
        if known < len(self._history):
            del self._history[known:], self._ends[known:]
            del self._spelled[self._ends[-1] if known else 0 :]
        for token in history[known:]:
            self._spelled += self._translation.read(token, not self._history)
            self._history.append(token)
            self._ends.append(len(self._spelled))
        return self._spelled
