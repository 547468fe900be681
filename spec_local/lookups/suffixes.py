"""Guesses by a suffix automaton: what followed the end of the text before, the likeliest first.

Hu et al. 2024, "SAM Decoding" (arXiv 2411.10666): the longer the match, the farther goes the guess. Oliaro et al. 2024,
"SuffixDecoding" (arXiv 2411.04975): where a context went on in several ways, frequency decides, and a tree holds them.
"""

from collections.abc import Sequence

from spec_local.core.language_model import Logits, common_prefix
from spec_local.core.proposal import ROOT, Limit
from spec_local.lookups.automaton import SuffixAutomaton
from spec_local.lookups.base import ONCE, Candidates, match_confidence
from spec_local.lookups.growth import likeliest

_LONGEST = 64  # tokens of context: a longer match foretells no more
_WIDTH = 4  # most children of a node
_WORTH = 0.02  # chance of being reached, below which nothing is guessed


class SuffixLookup:
    """What followed the longest end of the text that stood before; a chain where one branch is allowed, else a tree.

    Args:
        shortest: fewest tokens of that end; a shorter match guesses more often and is wrong more often.
    """

    name = "suffix"
    listens = False

    def __init__(self, shortest: int = 2) -> None:
        self._shortest = shortest
        self._automaton = SuffixAutomaton(_LONGEST)
        self._history: Sequence[int] = ()

    def find(self, history: Sequence[int], limit: Limit) -> Candidates:
        self._read(history)
        state, match = self._automaton.repeated()
        if match < self._shortest:
            return Candidates()
        return self._chain(state, match, limit) if limit.branches == 1 else self._tree(state, match, limit)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def _read(self, history: Sequence[int]) -> None:
        """Feed what is new; another text than before starts anew."""
        known = self._automaton.text
        # The loop's own list only grows; any other is compared.
        if history is not self._history or len(history) < len(known):
            if common_prefix(known, history) < len(known):
                self._automaton = SuffixAutomaton(_LONGEST)
            self._history = history
        self._automaton.feed(history[len(self._automaton.text) :])

    def _chain(self, state: int, match: int, limit: Limit) -> Candidates:
        """The most frequent follower, again and again."""
        tokens: list[int] = []
        confidence: list[float] = []
        most, seen = min(limit.depth, limit.nodes), 0
        while len(tokens) < most and seen != 1:
            seen, followers = self._automaton.followers(state, 1)
            if not followers:  # the end of the text
                break
            token, n, state = followers[0]
            tokens.append(token)
            confidence.append(match_confidence(match + len(confidence), seen, n / seen))
        # What stood once only went on in one way.
        tokens += self._automaton.since(state, most - len(tokens)) if seen == 1 else ()
        reach = min(match + len(confidence), _LONGEST)
        confidence += ONCE[reach : reach + len(tokens) - len(confidence)]
        return Candidates(tokens, range(ROOT, len(tokens) - 1), confidence, self.name)

    def _tree(self, state: int, match: int, limit: Limit) -> Candidates:
        """The likeliest nodes, wherever they are."""

        def followers(state: int, match: int) -> list[tuple[int, float, int]]:
            seen, found = self._automaton.followers(state, _WIDTH)
            return [(token, match_confidence(match, seen, n / seen), after) for token, n, after in found]

        def follow(child: tuple[int, float, int], depth: int) -> list[tuple[int, float, int]]:
            return followers(child[2], match + depth)

        return likeliest(followers(state, match), follow, limit, _WORTH, self.name)
