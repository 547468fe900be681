"""Suffix lookup: propose the tokens after the longest repeated suffix, found by a suffix automaton.

Hu et al. 2024, "SAM Decoding" (arXiv 2411.10666): the longer the match, the longer the proposal. Oliaro et
al. 2024, "SuffixDecoding" (arXiv 2411.04975): several continuations are ranked by frequency and proposed as
a tree.
"""

from collections.abc import Sequence

from spec_local.core.calls import Logits
from spec_local.core.proposal import EMPTY, Limit, Proposal
from spec_local.core.sequence import common_prefix
from spec_local.lookups.automaton import SuffixAutomaton
from spec_local.lookups.base import ONCE, match_confidence
from spec_local.lookups.best_first import best_first

_LONGEST = 64  # tokens of context; longer matches are not better predictors
_WIDTH = 4  # maximum number of children of a node
_MIN_PROBABILITY = 0.02  # minimum probability that a node of a tree is accepted


class SuffixLookup:
    """Proposes the tokens after the longest repeated suffix: a chain if one branch is allowed, else a tree.

    Args:
        shortest: minimum length of the suffix; short ones are found more often and predict worse.
    """

    name = "suffix"
    needs_logits = False

    def __init__(self, shortest: int = 2) -> None:
        self._shortest = shortest
        self._automaton = SuffixAutomaton(_LONGEST)
        self._history: Sequence[int] = ()

    @classmethod
    def create(cls, calibrated: bool) -> "SuffixLookup":
        """Create a lookup for one answer."""
        return cls()

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        self._read(history)
        state, match = self._automaton.repeated()
        if match < self._shortest:
            return EMPTY
        return self._chain(state, match, limit) if limit.branches == 1 else self._tree(state, match, limit)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def _read(self, history: Sequence[int]) -> None:
        """Feed new tokens to the automaton; start a new automaton for a different history."""
        known = self._automaton.text
        # The decoding loop's own list only grows; any other list is compared.
        if history is not self._history or len(history) < len(known):
            if common_prefix(known, history) < len(known):
                self._automaton = SuffixAutomaton(_LONGEST)
            self._history = history
        self._automaton.feed(history[len(self._automaton.text) :])

    def _chain(self, state: int, match: int, limit: Limit) -> Proposal:
        """A chain of the most frequent follower at each step."""
        tokens: list[int] = []
        confidence: list[float] = []
        n_max, seen = min(limit.depth, limit.nodes), 0
        while len(tokens) < n_max and seen != 1:
            seen, followers = self._automaton.followers(state, 1)
            if not followers:  # end of the text
                break
            token, n, state = followers[0]
            tokens.append(token)
            confidence.append(match_confidence(match + len(confidence), seen, n / seen))
        tokens += self._automaton.first_continuation(state, n_max - len(tokens)) if seen == 1 else ()
        reach = min(match + len(confidence), _LONGEST)
        confidence += ONCE[reach : reach + len(tokens) - len(confidence)]
        return Proposal.chain(tokens, source=self.name, confidence=confidence)

    def _tree(self, state: int, match: int, limit: Limit) -> Proposal:
        """A tree of the most probable nodes."""

        def followers(state: int, match: int) -> list[tuple[int, float, int]]:
            seen, found = self._automaton.followers(state, _WIDTH)
            return [(token, match_confidence(match, seen, n / seen), after) for token, n, after in found]

        def follow(child: tuple[int, float, int], depth: int) -> list[tuple[int, float, int]]:
            return followers(child[2], match + depth)

        return best_first(followers(state, match), follow, limit, _MIN_PROBABILITY, self.name)
