"""Drafting text with a different vocabulary, tokenized again with the main model's.

String-level exact match (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", algorithm 2): the draft model may draft any of its tokens. The
text is verified with exact match, which needs no probabilities.
"""

from collections.abc import Callable, Sequence

from spec_local.core.language_model import LanguageModel, common_prefix
from spec_local.core.proposal import Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Sampler
from spec_local.lookups.base import Lookup
from spec_local.proposers.base import Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Chain, Shape
from spec_local.proposers.vocabulary_map import VocabularyMap

_CONTEXT = 8
"""Tokens of the history that are tokenized again with the draft: it may begin within a word."""


class StringLevelDraft(DraftModel):
    """Chains of a draft model with a different vocabulary.

    Args:
        model: the draft model, in its own vocabulary; its cache belongs to this proposer.
        sampler: the main model's, without logit biases and constraints, which are of the main model's tokens.
        chain: the shape, in draft model tokens.
        vocabulary_map: between the vocabularies of the two models.
        is_end: whether a draft model token ends the draft.
        lookup: see `DraftModel`; it searches draft model tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        chain: Chain,
        vocabulary_map: VocabularyMap,
        *,
        is_end: Callable[[int], bool] = lambda token: False,
        lookup: Lookup | None = None,
    ) -> None:
        super().__init__(model, sampler, chain, n_vocab=model.n_vocab, is_end=is_end, lookup=lookup)
        self._map = vocabulary_map
        self._history: list[int] = []  # main model tokens
        self._tokens: list[int] = []  # the same history in draft model tokens
        self._ends: list[int] = []  # len(_tokens) after each main model token
        self._drafted: Sequence[int] = ()

    def drafted(self, output: Sequence[int]) -> Sequence[int]:
        return self._drafted

    async def propose(
        self, history: Sequence[int], limit: Limit, rng: Rng, shape: Shape | None = None
    ) -> Proposal:
        proposal = await super().propose(history, limit, rng, shape)
        kept = proposal.tokens
        drafted = self._tree.tokens if self._tree else ()

        def retokenized(tokens: Sequence[int]) -> list[int]:
            return self._map.to_main(history[-_CONTEXT:], tokens)[: limit.depth]

        self._drafted = retokenized(drafted)
        proposed = self._drafted if len(kept) == len(drafted) else retokenized(kept)
        return Proposal.chain(proposed, source="draft")

    def _readable(self, history: Sequence[int]) -> Sequence[int]:
        n = common_prefix(self._history, history)
        if n < len(self._history):
            del self._history[n:], self._ends[n:]
            del self._tokens[self._ends[-1] if n else 0 :]
        for token in history[n:]:
            self._tokens += self._map.to_draft(token, not self._history)
            self._history.append(token)
            self._ends.append(len(self._tokens))
        return self._tokens
