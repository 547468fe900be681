"""What a length policy is asked and told; what goes into an answer is no matter of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Source = Literal["none", "lookup", "draft", "tree"]
"""Who guesses in a step; `tree` is the draft model, asked for a tree."""


class Opinion(Protocol):
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


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is to choose from in one step.

    most: tokens that may be guessed on a path, at least 1.
    copied: tokens that a copy of earlier text could guess; 0: nothing was found.
    match: tokens at the end of the text that stood before those, too.
    unread: tokens that the draft model must read for its first guess; 0: there is no draft model.
    """

    most: int
    copied: int = 0
    match: int = 0
    unread: int = 0


class Policy:
    """Decides along each step who guesses and how far, and hears how it went. This one takes all there is.

    A step goes: `begin`; for a chain of the draft model `reads_on`, a call of the model and `takes` for each
    guess; `keeps`; `drafted`; a call of main; `learn`. Nothing here can change what is said, only how fast, as long as
    `may_cut` is false where guesses are drawn and judged by their probabilities: to drop a guess after looking at what
    follows it would then favour some tokens over others. To stop before a guess is drawn is always allowed.

    Args:
        may_cut: whether any guess may be dropped after it was drawn.
    """

    name = "fixed"

    def __init__(self, may_cut: bool = True) -> None:
        self.may_cut = may_cut

    tree_nodes = 0
    tree_depth = 0
    """Most nodes and levels of a tree, where `begin` says so."""

    @property
    def wants_draft(self) -> bool:
        """Whether the draft model shall read the prompt; asked before the first step."""
        return True

    def begin(self, offer: Offer) -> Source:
        """Who guesses in this step."""
        return "draft" if offer.unread else "lookup" if offer.copied else "none"

    def reads_on(self) -> bool:
        """Whether the draft model shall be called for another guess."""
        return True

    def takes(self, opinion: Opinion) -> bool:
        """Whether a guess is drawn from what the draft model just said."""
        return True

    def keeps(self, n: int) -> int:
        """How many of n guesses main shall look at; n where none may be dropped."""
        return n

    def drafted(self) -> None:
        """All guesses are made; the time that follows is main's."""

    def learn(self, guesses: Sequence[int], copy: Sequence[int], said: Sequence[int], n_tested: int) -> None:
        """Hear how a step went.

        Args:
            guesses: all that were drawn, those that were dropped among them; of a tree the longest path that was said.
            copy: what a copy of earlier text would have guessed.
            said: the tokens of the step.
            n_tested: nodes that main looked at.
        """
