"""What a length policy is asked and told; what goes into an answer is no matter of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from spec_local.core.proposal import Limit, Proposal
from spec_local.lookups.base import Candidates

Source = Literal["none", "lookup", "draft", "tree"]
"""Who guesses in a step: `lookup` is `Policy.copy`, `tree` the draft model, asked for a tree."""


class DraftOutput(Protocol):
    """The draft's distribution at a place, before a guess is drawn from it."""

    @property
    def confidence(self) -> float:
        """How sure the draft is, 0 to 1.

        The chance that two draws agree, Σ q²; at temperature 0, where q is certain, the largest probability of
        temperature 1.
        """

    @property
    def entropy(self) -> float:
        """−Σ q ln q, in nats; at temperature 0 that of temperature 1."""

    @property
    def n_read(self) -> int:
        """Tokens that the draft has read for it, those read along among them; 0: it had, with an earlier opinion."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is to choose from in one step.

    limit: of what may be guessed.
    copies: what lookups have found, at least one token each.
    unread: tokens that the draft model must read for its first guess; 0: there is no draft model.
    """

    limit: Limit
    copies: Sequence[Candidates] = ()
    unread: int = 0

    @property
    def most(self) -> int:
        """Tokens of a path, at most."""
        return min(self.limit.depth, self.limit.nodes)


class Policy:
    """Decides along each step who guesses and how far, and hears how it went. This one takes all there is.

    A step goes: `begin`; for a chain of the draft model `reads_on`, a call of the model and `takes` for each
    guess; `keeps`; `drafted`; a call of main; `learn`. Nothing here can change what is said, only how fast, as long as
    `may_cut` is false where guesses are drawn and judged by their probabilities: to drop a guess after looking at what
    follows it would then favour some tokens over others. To stop before a guess is drawn is always allowed.

    Args:
        may_cut: whether any guess may be dropped after it was drawn.
        n_staged: most copied tokens that the draft reads along with one that it has to.
    """

    name = "fixed"

    def __init__(self, may_cut: bool = True, n_staged: int = 0) -> None:
        self.may_cut = may_cut
        self._n_staged = n_staged

    rests = 0
    """So many steps may follow without guesses, `begin` and `learn`, as long as it `hopes` for nothing from what lookups find."""
    tree_nodes = 0
    tree_depth = 0
    """Most nodes and levels of a tree, where `begin` says so."""
    copy = Proposal()
    """What is guessed without a model, where `begin` says so."""

    def wants_draft(self, unread: int) -> bool:
        """Whether the draft model shall read so many tokens of the prompt at once; asked before the first step."""
        return True

    def begin(self, offer: Offer) -> Source:
        """Who guesses in this step."""
        if offer.unread or not offer.copies:
            return "draft" if offer.unread else "none"
        first = offer.copies[0]
        self.copy = Proposal(first.tokens, first.parents, source=first.source)
        return "lookup"

    def reads_on(self) -> bool:
        """Whether the draft model shall be called for another guess."""
        return True

    @property
    def may_stage(self) -> bool:
        """Whether the draft may be given copied tokens to read along."""
        return self._n_staged > 0

    def stages(self, confidence: Sequence[float], unread: int) -> int:
        """How many copied tokens the draft shall read along, so that it need not be called if it guesses them.

        Args:
            confidence: of each of them the chance that the draft guesses it, if it does those before.
            unread: tokens that the call has without them.
        """
        return min(self._n_staged, len(confidence))

    def staged(self, confidence: Sequence[float], n_stood: int) -> None:
        """Hear what became of tokens that were read along: the first `n_stood` were guessed, and the next, if any, was not.

        Those after it, and those that the draft did not come to, are not told of.
        """

    def takes(self, opinion: DraftOutput) -> bool:
        """Whether a guess is drawn from what the draft model just said."""
        return True

    def keeps(self, n: int) -> int:
        """How many of n guesses main shall look at; n where none may be dropped."""
        return n

    def drafted(self) -> None:
        """All guesses are made; the time that follows is main's."""

    def learn(self, guesses: Sequence[int], said: Sequence[int], n_tested: int) -> None:
        """Hear how a step went.

        Args:
            guesses: all that the draft drew, those that were dropped among them; of a tree the longest path that was said.
            said: the tokens of the step.
            n_tested: nodes that main looked at.
        """

    def hopes(self, copies: Candidates) -> bool:
        """Whether a copy may be worth main's time."""
        return True

    def rested(self, steps: Sequence[tuple[Sequence[Candidates], int]]) -> None:
        """Hear of steps without guesses that were passed over: what lookups had found in each, and what main said."""
