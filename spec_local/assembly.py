"""Who guesses in an answer, and who decides how far: what settings, models and measured costs come to."""

from collections.abc import Callable
from dataclasses import replace

from spec_local.core.language_model import LanguageModel
from spec_local.core.sampling import Sampler
from spec_local.datastore.datastore import Datastore
from spec_local.datastore.lookup import DatastoreLookup
from spec_local.errors import InvalidRequest
from spec_local.llama.context import Context
from spec_local.lookups import Lookup, PromptLookup, Recycling, SuffixLookup
from spec_local.policies import Adaptive, Confidence, Entropy, Experience, Policy
from spec_local.policies.adaptive import could_gain
from spec_local.policies.cost_model import CostModel
from spec_local.proposers import (
    Beam,
    BestFirst,
    Chain,
    CombinedProposer,
    DraftModel,
    Drawn,
    Proposer,
    Shape,
    StringLevelDraft,
)
from spec_local.proposers.vocabulary_map import VocabularyMap
from spec_local.settings import (
    CHAIN_VERIFIERS,
    MAX_DRAFT,
    MAX_STAGED,
    GenerationSettings,
    ProposerName,
)
from spec_local.verifiers import VERIFIERS

Costs = tuple[CostModel, CostModel | None]

_RECYCLED = {1: 1.28, 2: 1.48, 3: 1.6, 4: 1.65}
"""Tokens of a step with so many recycled guesses: a 1.5B main's answers to 8 of the built-in prompts (docs/benchmarks.md)."""


class ProposerFactory:
    """What guesses in the answers of one session, and remembers from one to the next.

    Args:
        main, draft: contexts.
        guesser: the draft, speaking main's vocabulary.
        translation: where the draft has another one.
        costs: of main and draft; measured when first asked for. staging: of the draft's calls that give an opinion after
            each token.
    """

    def __init__(
        self,
        main: Context,
        draft: Context | None,
        guesser: LanguageModel | None,
        translation: VocabularyMap | None,
        costs: Callable[[], Costs],
        staging: Callable[[], CostModel | None],
    ) -> None:
        self.datastore: Datastore | None = None
        self._main, self._draft, self._guesser, self._translation = main, draft, guesser, translation
        self._costs, self._staging = costs, staging
        self._experience: dict[tuple[bool, str, bool], Experience] = {}
        self._recycling = Recycling()

    def names(self, settings: GenerationSettings) -> list[ProposerName]:
        """Who may guess: what the settings say, and what ``auto`` means with these models."""
        if settings.policy == "off" or settings.draft_max == 0 or settings.proposer == "none":
            return []
        if settings.proposer != "auto":
            return [settings.proposer]
        if not self._main.model.can_roll_back:
            return []
        if settings.policy != "adaptive":
            return ["draft" if self._draft else "suffix"]
        return ["draft", "suffix"] if self._draft else ["suffix"]

    def lookups(self, settings: GenerationSettings) -> list[Lookup]:
        """Those among them that ask no model; the store of texts is asked beside any of them.

        ``auto`` has them recycle main's logits, too, where main's calls grow little with their tokens.
        """
        # A policy that counts what becomes of guesses can use those that seldom stand, too.
        shortest = 2 if settings.policy == "adaptive" else 3
        kinds: dict[ProposerName, Callable[[], Lookup]] = {
            "lookup": lambda: PromptLookup(shortest=shortest),
            "suffix": SuffixLookup,
            "recycling": lambda: self._recycling,
        }
        found = [kinds[name]() for name in self.names(settings) if name in kinds]
        if self.datastore and found:
            found.insert(1, DatastoreLookup(self.datastore))
        if found and settings.proposer == "auto" and settings.policy == "adaptive" and self._recycling_pays():
            found.append(self._recycling)
        return found

    def proposer(
        self, settings: GenerationSettings, sampler: Sampler, clock: Callable[[], float]
    ) -> Proposer | None:
        """What guesses in one answer; None: nothing.

        Raises:
            InvalidRequest, ModelError: the settings want what these models cannot do.
        """
        names = self.names(settings)
        if not names:
            return None
        self._main.model.check_can_roll_back()
        if "draft" in names and not self._draft:
            raise InvalidRequest("the draft proposer needs a draft model: give --draft FILE")
        if settings.shape in ("tree", "beam") and self._branches < 2 <= settings.tree_nodes:
            raise InvalidRequest("the session was opened for chains: open it with branches=64")
        policy = self._policy(settings, clock)
        draft = self._drafter(settings, sampler, policy) if "draft" in names else None
        may_branch = self._may_branch(settings)
        return CombinedProposer(
            policy,
            draft,
            self.lookups(settings),
            self._shape(replace(settings, shape="tree"), policy) if may_branch else None,
            branches=1 if settings.shape == "chain" else MAX_DRAFT,
            nodes=MAX_DRAFT if may_branch else settings.tree_nodes,
        )

    def _drafter(self, settings: GenerationSettings, sampler: Sampler, policy: Policy) -> DraftModel:
        assert self._draft is not None
        assert self._guesser is not None
        ahead = PromptLookup(shortest=2) if policy.may_stage else None
        if self._translation and settings.cross_vocab == "slem":
            return StringLevelDraft(
                self._draft,
                # A constraint is of main's tokens, too: exact_match judges by it.
                Sampler(replace(settings.sampling, logit_bias={})),
                Chain("greedy", policy),  # tokens of two vocabularies cannot be coupled
                self._translation,
                is_end=self._draft.model.vocabulary.is_end,
                ahead=ahead,
            )
        vocabulary = self._main.model.vocabulary
        return DraftModel(
            self._guesser,
            sampler,
            self._shape(settings, policy),
            n_vocab=vocabulary.n_tokens,
            is_end=vocabulary.is_end,
            ahead=ahead,
        )

    def _policy(self, settings: GenerationSettings, clock: Callable[[], float]) -> Policy:
        greedy = settings.sampling.temperature == 0
        # A chain that is judged by its probabilities must be as long as it was drawn.
        may_cut = greedy or settings.greedy_draft or settings.rule not in CHAIN_VERIFIERS
        n_staged = settings.staged or 0
        match settings.policy:
            case "adaptive":
                kind = greedy, settings.shape, settings.constrained
                learned = self._experience.setdefault(kind, Experience())
                tree = settings.tree_nodes if self._may_branch(settings) else 0
                return Adaptive(
                    *self._costs(),
                    learned,
                    may_cut=may_cut,
                    tree=tree,
                    most=settings.max_tokens,
                    staging=self._staging_pays(settings),
                    n_staged=MAX_STAGED if settings.staged is None else settings.staged,
                    clock=clock,
                )
            case "confidence":
                return Confidence(settings.draft_p_min, may_cut, n_staged)
            case "entropy":
                return Entropy(may_cut=may_cut, n_staged=n_staged)
        return Policy(may_cut, n_staged)

    @property
    def _branches(self) -> int:
        """Most guesses side by side that both models can read."""
        return min(context.max_branches for context in (self._main, self._draft) if context)

    def _may_branch(self, settings: GenerationSettings) -> bool:
        """Whether a policy may ask for trees beside chains."""
        chains_only = settings.verifier in CHAIN_VERIFIERS or settings.greedy_draft
        return settings.shape == "auto" and not chains_only and self._branches > 1

    def _shape(self, settings: GenerationSettings, policy: Policy) -> Shape:
        if settings.shape == "beam":
            return Beam(settings.beam_width, settings.tree_nodes)
        drawing = VERIFIERS[settings.rule].drawing
        if settings.shape == "tree":
            if drawing == "chosen":
                main, draft = self._costs() if settings.policy == "adaptive" else (None, None)
                return BestFirst(settings.tree_nodes, costs=(main, draft) if main and draft else None)
            return Drawn(drawing, settings.tree_nodes)
        if settings.greedy_draft:
            return Chain("greedy", policy)
        return Chain("drawn" if drawing == "one" else "coupled", policy)

    def _staging_pays(self, settings: GenerationSettings) -> CostModel | None:
        """What staging costs, where it could gain if the draft always guessed what it read along."""
        main, draft = self._costs()
        if settings.staged == 0 or not draft or not could_gain(main, draft):
            return None
        costs = self._staging()
        if costs and any(n * draft.seconds(1) > costs.seconds(1 + n) - costs.seconds(1) for n in (1, 3)):
            return costs
        return None

    def _recycling_pays(self) -> bool:
        """Whether main's calls grow so little with their tokens that guesses of this kind could gain."""
        main = self._costs()[0]
        plain = main.seconds(1)
        return any(tokens * plain > 1.05 * main.seconds(n + 1) for n, tokens in _RECYCLED.items())
