"""The interface of a draft-length policy: what it is asked in each step, and what it observes."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

from spec_local.core.proposal import Limit, Proposal
from spec_local.lookups.base import Candidates
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import RowCosts

if TYPE_CHECKING:
    from spec_local.policies.experience import Experience

Source = Literal["none", "lookup", "draft", "tree"]
"""The source of a step's draft: nothing, a lookup, or the draft model (a chain or a tree)."""


class DraftOutput(Protocol):
    """The draft model's distribution q at one position, before a token is drawn from it."""

    @property
    def confidence(self) -> float:
        """Σ q², the chance that two draws agree; at temperature 0 the top probability of temperature 1."""

    @property
    def n_read(self) -> int:
        """Tokens in the call that gave this output, staged ones included; 0: an earlier call gave it, too.

        Of a draft model that drafts blocks, the number of draft tokens in the block.
        """


@dataclass(frozen=True, slots=True)
class Offer:
    """The choices of a policy in one step.

    Attributes:
        limit: the largest proposal allowed.
        candidates: what each lookup found, at least one token each.
        n_unread: tokens that the draft model must read before it can draft; 0: there is no draft model, or
            no room left in its context.
    """

    limit: Limit
    candidates: Sequence[Candidates] = ()
    n_unread: int = 0

    @classmethod
    def none(cls) -> "Offer":
        """Nothing to choose from."""
        return cls(Limit(1, 1, 1))

    @property
    def max_path(self) -> int:
        """Maximum number of tokens on one path."""
        return min(self.limit.depth, self.limit.nodes)


Costs = tuple[CostModel | RowCosts, CostModel | RowCosts | None]


def _unknown_costs() -> Costs:
    raise ValueError("this policy needs measured costs")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The arguments for creating policies; each takes what it needs.

    Attributes:
        may_truncate: see `Policy`.
        n_staged: maximum number of staged tokens a call; None: the policy's default.
        p_min: minimum confidence of a draft token.
        costs: measures seconds a call of the main and the draft model (None: there is no draft model) when
            first called.
        staging: the same of draft calls that return logits for every token; None: staging does not pay.
        levels: the same, for the levels of a tree; None: there are no trees, or no draft model.
        experience: what earlier answers of the session taught; grows.
        tree_nodes: maximum nodes of a tree; 0: chains only.
        max_draft: maximum number of tokens that the draft model drafts in a row; None: any.
        max_tokens: of the answer, if known.
        clock: seconds.
    """

    may_truncate: bool = True
    n_staged: int | None = None
    p_min: float = 0.75
    costs: Callable[[], Costs] = _unknown_costs
    staging: Callable[[], CostModel | None] = lambda: None
    levels: Callable[[], CostModel | None] = lambda: None
    experience: "Experience | None" = None
    tree_nodes: int = 0
    max_draft: int | None = None
    max_tokens: int | None = None
    clock: Callable[[], float] = time.perf_counter


class Policy:
    """Decides in each step what drafts and how many tokens. This one always drafts as many as allowed.

    A step calls `choose`; for a chain of the draft model `should_continue` before each call and
    `should_draft` after it, then `truncate`; `on_drafted` before the main model's call; `observe` after
    verification. A policy changes speed, never output, provided that `may_truncate` is false where tokens
    are drawn from q and verified against it: dropping a drawn token after looking at later ones would bias
    the output. Stopping before a draw is always allowed.

    Args:
        may_truncate: whether draft tokens may be dropped after they were drawn.
        n_staged: maximum number of lookup tokens that the draft model reads ahead in one call.
    """

    draft_max = 4
    """Default maximum of draft tokens a step."""

    n_skippable = 0
    """Number of coming steps that may pass without `choose` and `observe` while no candidates `could_pay`."""
    chain_depth = sys.maxsize
    """Limit of the chain when `choose` returns ``draft``."""
    tree_nodes = 0
    tree_depth = 0
    """Limits of the tree when `choose` returns ``tree``."""
    lookup_proposal = Proposal()
    """The candidates to propose when `choose` returns ``lookup``."""

    def __init__(self, may_truncate: bool = True, n_staged: int = 0) -> None:
        self.may_truncate = may_truncate
        self._max_staged = n_staged

    @classmethod
    def create(cls, options: PolicyOptions) -> Self:
        """Create the policy for one answer."""
        return cls(options.may_truncate, options.n_staged or 0)

    def reads_prompt(self, n_unread: int) -> bool:
        """Return whether the draft model should read this many tokens of the prompt before the first step."""
        return True

    def choose(self, offer: Offer) -> Source:
        """Choose what drafts in this step."""
        if offer.n_unread:
            return "draft"
        if not offer.candidates:
            return "none"
        first = offer.candidates[0]
        self.lookup_proposal = Proposal(first.tokens, first.parents, source=first.source)
        return "lookup"

    def should_continue(self) -> bool:
        """Return whether to call the draft model for another token."""
        return True

    def should_draft(self, output: DraftOutput) -> bool:
        """Return whether to draw a draft token from this output."""
        return True

    def truncate(self, n: int) -> int:
        """Return how many of n draft tokens to verify; n where none may be dropped."""
        return n

    def values(self, proposal: Proposal) -> Sequence[float]:
        """Estimated probability that each node of this step's proposal is accepted; empty: unknown."""
        return ()

    def on_drafted(self) -> None:
        """Note that drafting is over; the time that follows is the main model's."""

    def observe(self, drafted: Sequence[int], output: Sequence[int], n_verified: int) -> None:
        """Learn from a step.

        Args:
            drafted: tokens that the draft model drafted along the output's path, truncated ones included.
            output: tokens that the step generated.
            n_verified: draft tokens that the main model read.
        """

    def could_pay(self, candidates: Candidates) -> bool:
        """Return whether verifying these candidates may be worth the main model's time."""
        return True

    def observe_skipped(self, steps: Sequence[tuple[Sequence[Candidates], int]]) -> None:
        """Learn from skipped plain steps: what lookups found in each, and the token generated."""

    @property
    def may_stage(self) -> bool:
        """True if the draft model may read lookup tokens ahead."""
        return self._max_staged > 0

    def n_staged(self, confidence: Sequence[float], n_unread: int) -> int:
        """Return how many lookup tokens the draft model's next call should read ahead.

        Args:
            confidence: of each the probability that the draft model drafts it, given those before.
            n_unread: tokens of the call without them.
        """
        return min(self._max_staged, len(confidence))

    def observe_staged(self, confidence: Sequence[float], n_accepted: int) -> None:
        """Learn that the draft model drafted the first `n_accepted` staged tokens, and not the next one.

        Staged tokens beyond these are left out: they were not reached.
        """
