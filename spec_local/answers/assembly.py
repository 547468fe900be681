"""Assemble the proposer of an answer from settings, models and measured costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from spec_local.core.proposal import MAX_DRAFT, MAX_STAGED
from spec_local.core.sampling import Sampler
from spec_local.core.sequence import ModelSequence
from spec_local.datastore.datastore import Datastore
from spec_local.datastore.lookup import DatastoreLookup
from spec_local.errors import InvalidRequest
from spec_local.installed import InstalledLookup
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.lookups import LOOKUPS
from spec_local.lookups.base import Lookup
from spec_local.lookups.forced import ForcedTokens
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.policies import POLICIES
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.base import Policy, PolicyOptions
from spec_local.policies.choice import best_chain, could_gain
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import AnswerKind, Experience, PairExperience, PastAnswers
from spec_local.policies.loss_budget import LossBudget
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.base import Proposer
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel, Shape, Window
from spec_local.proposers.shapes import Beam, BestFirst, Coupled, Drawn
from spec_local.settings import CHAIN_VERIFIERS, GenerationSettings
from spec_local.verifiers import VERIFIERS


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The caches for one answer, and what is learned from one to the next.

    main, draft: sequences of both models. drafter: the draft model; it reads and drafts tokens of the main
    model's vocabulary. recycling: knows the main sequence's history. experience: by kind of answer. window:
    the part of the history that the draft model has read.
    """

    main: LlamaSequence
    draft: LlamaSequence | HeadSequence | None
    drafter: ModelSequence | None
    recycling: Recycling
    experience: dict[AnswerKind, Experience] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    @property
    def head(self) -> HeadSequence | None:
        """The draft, if it is a head."""
        return self.draft if isinstance(self.draft, HeadSequence) else None

    def clear(self) -> None:
        """Free all cells."""
        for sequence in (self.main, self.draft):
            if sequence and sequence.cached:
                sequence.truncate(0)


class ProposerFactory:
    """Creates the proposer of each answer in a session, and keeps what was learned from earlier answers.

    Args:
        slots: one for each answer that can be generated at the same time.
        costs: returns the seconds per call of the main and the draft model; measured in a slot when first
            called.
        recall: returns what earlier runs learned.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        costs: Callable[[Slot], tuple[CostModel, CostModel | None]],
        recall: Callable[[], PairExperience] = PairExperience,
    ) -> None:
        self.datastore: Datastore | None = None
        self._main, self._draft = slots[0].main, slots[0].draft
        self._slots = slots
        self._costs = costs
        self._shared: tuple[SharedCosts, CostModel | None] | None = None
        self.planner = SharedCalls(lambda: self._shared[0] if self._shared else None)
        """Divides calls among requests."""
        self._recall = recall
        self._budget = LossBudget()

    def names(self, settings: GenerationSettings) -> list[str]:
        """Names of the proposers in use; resolves ``auto``."""
        if settings.policy == "off" or settings.draft_max == 0 or settings.proposer == "none":
            return []
        if settings.proposer != "auto":
            return [settings.proposer]
        if self._main.limits.rollback == "none":
            return []
        if settings.policy != "adaptive":
            return ["draft" if self._draft else "suffix"]
        return ["draft", "suffix"] if self._draft else ["suffix"]

    def _shared_costs(self, slot: Slot) -> tuple[SharedCosts, CostModel | None]:
        main, draft = self._costs(slot)
        if not self._shared:
            if draft and slot.head:
                draft.drafts_blocks = slot.head.limits.drafts_blocks
            self._shared = SharedCosts(main, slot.main.limits.max_rollback), draft
        return self._shared

    def lookups(self, settings: GenerationSettings, slot: Slot | None = None) -> list[Lookup]:
        """Lookups in use; the datastore is added to any other lookup.

        Without a draft model, ``auto`` adds recycling if the main model's calls take little longer with more
        tokens.
        """
        calibrated = settings.policy == "adaptive"
        slot = slot or self._slots[0]
        recycling = slot.recycling
        found: list[Lookup] = [
            self._lookup(name, calibrated, recycling) for name in self.names(settings) if name != "draft"
        ]
        if self.datastore and found:
            found.insert(1, DatastoreLookup(self.datastore))
        may_recycle = settings.proposer == "auto" and calibrated and not self._draft
        if found and may_recycle and self._recycling_pays(settings, slot):
            found.append(recycling)
        return found

    def proposer(
        self,
        settings: GenerationSettings,
        sampler: Sampler,
        clock: Callable[[], float],
        slot: Slot,
    ) -> Proposer | None:
        """The proposer of one answer in a slot; None: plain decoding.

        Raises:
            InvalidRequest, ModelError: the settings are not possible with these models.
        """
        names = self.names(settings)
        if not names:
            return None
        if "draft" in names and not self._draft:
            raise InvalidRequest("the draft proposer needs a draft model: give `draft=FILE`")
        if settings.shape in ("tree", "beam") and self._branches < 2 <= settings.tree_nodes:
            if slot.head and slot.head.limits.max_branches < 2 <= self._main.limits.max_branches:
                raise InvalidRequest("this head drafts chains only: use the shape chain")
            if any(sequence.model.is_recurrent for sequence in (self._main, self._draft) if sequence):
                raise InvalidRequest("a recurrent model cannot evaluate a tree: use the shape chain")
            raise InvalidRequest("the session was opened for chains: open it with branches=64")
        policy = self._policy(settings, clock, slot)
        if "draft" in names and settings.policy == "adaptive" and slot.head and not self._could_gain(slot):
            names.remove("draft")  # the policy would never ask the head, which reads the main model's states
        forced = [ForcedTokens(sampler.constraint)] if sampler.constraint else []
        draft = self._draft_model(settings, sampler, slot, forced) if "draft" in names else None
        may_branch = self._may_branch(settings)
        return CombinedProposer(
            policy,
            draft,
            [*forced, *self.lookups(settings, slot)],
            self._shape(replace(settings, shape="tree"), slot) if may_branch else None,
            constraint=sampler.constraint,
            branches=1 if settings.shape == "chain" else MAX_DRAFT,
            nodes=MAX_DRAFT if may_branch else settings.tree_nodes,
        )

    def _could_gain(self, slot: Slot) -> bool:
        """Return whether the adaptive policy may ask the head."""
        main, draft = self._shared_costs(slot)
        return not draft or not slot.head or could_gain(main.at(), draft, slot.head.limits.max_draft)

    def _lookup(self, name: str, calibrated: bool, recycling: Recycling) -> Lookup:
        if name == recycling.name:
            return recycling
        if name not in LOOKUPS:
            return InstalledLookup(name, calibrated)
        created: Lookup = LOOKUPS[name].create(calibrated)
        return created

    def _draft_model(
        self, settings: GenerationSettings, sampler: Sampler, slot: Slot, staged: Sequence[Lookup]
    ) -> DraftModel:
        """staged: finds tokens to stage before prompt lookup does."""
        assert slot.drafter is not None
        lookups = [*staged, PromptLookup.create(calibrated=True)] if settings.staged else staged
        vocabulary = self._main.model.vocabulary
        return DraftModel(
            slot.drafter,
            sampler,
            self._shape(settings, slot),
            n_vocab=vocabulary.n_tokens,
            is_end=vocabulary.is_end,
            lookups=() if slot.head else lookups,  # a head evaluates staged tokens one by one
            n_staged=settings.staged or (MAX_STAGED if staged else 0),
            window=slot.window,
        )

    def _policy(self, settings: GenerationSettings, clock: Callable[[], float], slot: Slot) -> Policy:
        greedy = settings.sampling.is_greedy
        policy: type[Policy] = POLICIES[settings.policy]
        return policy(
            PolicyOptions(
                # A chain that is verified against q must not be truncated after it was drawn.
                may_truncate=greedy or settings.rule == "exact-match",
                p_min=settings.draft_p_min,
                costs=lambda: self._shared_costs(slot),
                experience=self._known(settings, slot),
                tree_nodes=settings.tree_nodes if self._may_branch(settings) else 0,
                max_draft=slot.head.limits.max_draft if slot.head else None,
                max_tokens=settings.max_tokens,
                clock=clock,
            )
        )

    def _known(self, settings: GenerationSettings, slot: Slot) -> Experience:
        """Return the experience of earlier answers of the same kind, in all slots."""
        kind = self._kind(settings)
        answers = self._learned.answers.setdefault(kind, PastAnswers())
        known = Experience(self._acceptance(settings), answers, self._budget.of_another_answer())
        return slot.experience.setdefault(kind, known)

    @cached_property
    def _learned(self) -> PairExperience:
        return self._recall()

    def learned(self) -> PairExperience | None:
        """What the answers so far, and earlier runs, have taught; None: no answer needed it."""
        for slot in self._slots:
            for known in slot.experience.values():
                known.end()
        return self.__dict__.get("_learned")

    def _acceptance(self, settings: GenerationSettings) -> AcceptanceModel:
        return self._learned.acceptance.setdefault(self._kind(settings), AcceptanceModel())

    @staticmethod
    def _kind(settings: GenerationSettings) -> AnswerKind:
        return settings.sampling.is_greedy, settings.shape, settings.constrained

    @property
    def _branches(self) -> int:
        """Maximum number of branches that both contexts support."""
        return min(sequence.limits.max_branches for sequence in (self._main, self._draft) if sequence)

    def _may_branch(self, settings: GenerationSettings) -> bool:
        """Return whether the policy may choose trees instead of chains."""
        chains_only = settings.verifier in CHAIN_VERIFIERS
        return settings.shape == "auto" and not chains_only and self._branches > 1

    def _shape(self, settings: GenerationSettings, slot: Slot) -> Shape:
        if settings.shape == "beam":
            return Beam(settings.beam_width, settings.tree_nodes)
        exact_match = settings.rule == "exact-match"
        if settings.shape == "tree":
            if settings.sampling.is_greedy:
                costs = self._tree_costs(slot) if settings.policy == "adaptive" else None
                return BestFirst(settings.tree_nodes, costs=costs)
            if exact_match:
                return Coupled(settings.tree_nodes)
            return Drawn(VERIFIERS[settings.rule].drawing, settings.tree_nodes)
        return Chain("coupled" if exact_match else "drawn")

    def _tree_costs(self, slot: Slot) -> tuple[SharedCosts, CostModel] | None:
        """Seconds of the main and the draft model's calls, to choose the nodes of a tree."""
        main, draft = self._shared_costs(slot)
        return (main, draft) if draft else None

    def _recycling_pays(self, settings: GenerationSettings, slot: Slot) -> bool:
        """Return whether recycling pays at the measured costs and the acceptance rate learned so far."""
        main, _ = self._costs(slot)
        rate = self._acceptance(settings).recycled.mean
        return best_chain(rate, main, None, MAX_DRAFT).rate > 1.05 / main.seconds(1)
