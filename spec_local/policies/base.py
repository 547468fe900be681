"""The interface of a draft-length policy, and the policies that look at no costs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from spec_local.core.proposal import EMPTY, Limit, Proposal
from spec_local.policies.cost_model import CostModel
from spec_local.policies.sharing import SharedCosts

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


WINDOWS = (32, 128, 512, 2048)
"""Lengths, in tokens, of the end of a history that a draft model may read in place of all of it."""


@dataclass(frozen=True, slots=True)
class DraftReading:
    """A part of the history for the draft model to read and draft from: all of it, or its end.

    Attributes:
        n_unread: tokens of it that the draft model must read before it can draft, at least 1.
        window: number of tokens of the end; None: the whole history.
    """

    n_unread: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The choices of a policy in one step.

    Attributes:
        limit: the largest proposal allowed, and the load of the call that verifies it.
        candidates: what each lookup found, at least one token each.
        readings: parts of the history that the draft model may draft from, the longest one last; only the
            one that it has read, if little is unread. Empty: there is no draft model, or no room in its
            context.
    """

    limit: Limit
    candidates: Sequence[Proposal] = ()
    readings: Sequence[DraftReading] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The source of one step's draft, with its limit or its tokens.

    Attributes:
        limit: of what the draft model drafts; None: that of the offer.
        proposal: of ``lookup``: the part of the candidates to verify.
        reading: the part of the history that the draft model drafts from; None: the one that it has read.
    """

    source: Source = "none"
    limit: Limit | None = None
    proposal: Proposal = EMPTY
    reading: DraftReading | None = None

    @property
    def by_draft_model(self) -> bool:
        """True if the draft model drafts."""
        return self.source in ("draft", "tree")


NOTHING = Decision()
"""A plain step."""

Costs = tuple[SharedCosts, CostModel | None]


def _unknown_costs() -> Costs:
    raise ValueError("this policy needs measured costs")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What a policy knows of the answer for which it is created.

    Attributes:
        may_truncate: whether draft tokens may be dropped after they were drawn: see `Policy`.
        p_min: minimum confidence of a draft token.
        costs: returns seconds a call of the main and the draft model (None: there is no draft model), which
            are kept up to date; it measures them when first called.
        experience: what earlier answers of the session taught; grows.
        tree_nodes: maximum nodes of a tree; 0: chains only.
        max_draft: maximum number of tokens that the draft model drafts in a row; None: any.
        max_tokens: of the answer, if known.
        clock: seconds.
    """

    may_truncate: bool = True
    p_min: float = 0.75
    costs: Callable[[], Costs] = _unknown_costs
    experience: "Experience | None" = None
    tree_nodes: int = 0
    max_draft: int | None = None
    max_tokens: int | None = None
    clock: Callable[[], float] = time.perf_counter


_DEFAULTS = PolicyOptions()


class Policy:
    """Decides in each step what drafts and how many tokens. This one always drafts as many as allowed.

    A step calls `choose`, then `wants_call` and `wants_token` for each token of a chain of the draft model,
    then `trim`, and after verification `observe`. A policy changes speed, never output, provided that
    `may_truncate` is false where tokens are drawn from q and verified against it: dropping a drawn token
    after looking at later ones would bias the output. Stopping before a draw is always allowed.

    A subclass takes `PolicyOptions`, too.
    """

    draft_max = 4
    """Default maximum of draft tokens a step."""
    main_costs: SharedCosts | None = None
    """What the policy knows of the main model's costs; None: nothing."""

    def __init__(self, options: PolicyOptions = _DEFAULTS) -> None:
        self.may_truncate = options.may_truncate

    def reads(self, readings: Sequence[DraftReading]) -> DraftReading | None:
        """Choose what the draft model reads of the prompt before the first step; None: nothing yet.

        readings: as in `Offer`.
        """
        return readings[-1] if readings else None

    def choose(self, offer: Offer) -> Decision:
        """Choose what drafts in this step."""
        if offer.readings:
            return Decision("draft", reading=offer.readings[-1])
        return Decision("lookup", proposal=offer.candidates[0]) if offer.candidates else NOTHING

    def wants_call(self) -> bool:
        """Return whether to call the draft model for the next token of a chain."""
        return True

    def wants_token(self, output: DraftOutput) -> bool:
        """Return whether to draw the next token of a chain from this output of the draft model."""
        return True

    def trim(self, proposal: Proposal) -> Proposal:
        """Return the part of the step's proposal to verify; called once a step, when drafting is over."""
        return proposal

    def observe(self, drafted: Sequence[int], output: Sequence[int], n_verified: int) -> None:
        """Learn from a step.

        Args:
            drafted: tokens that the draft model drafted along the output's path, trimmed ones included.
            output: tokens that the step generated.
            n_verified: draft tokens that the main model read.
        """


class Confidence(Policy):
    """Stops before a draft token of too little confidence, as llama.cpp's ``--draft-p-min`` does."""

    draft_max = 16

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._p_min = options.p_min

    def wants_token(self, output: DraftOutput) -> bool:
        return output.confidence >= self._p_min


ALWAYS = Policy()
"""Drafts as many tokens as the limit allows."""
