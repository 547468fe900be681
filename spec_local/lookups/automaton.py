"""An online suffix automaton: earlier occurrences of a text's suffixes, and the tokens that followed them.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; for speculative decoding:
Hu et al. 2024, "SAM Decoding" (arXiv 2411.10666). A state represents all contexts (runs of tokens) with the
same end positions. Its suffix link leads to the longest shorter context with more end positions, so that
all suffixes of the text lie on one path of links, whose second state is the longest repeated suffix. No
search is needed.
"""

from collections.abc import Sequence
from itertools import islice

_MAX_RANKED = 64
"""Maximum number of followers of a context that are ranked; if there are more, none of them is likely."""


class SuffixAutomaton:
    """The tokens that followed each context of a text.

    Feeding a token takes amortized constant time: at most two states and three transitions are added, and
    counting visits at most `longest` states.

    Args:
        longest: maximum length of a context; of a longer context, only the last tokens count.
    """

    def __init__(self, longest: int = 64) -> None:
        self.longest = longest
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # length of a state's longest context, in tokens
        # Number of its end positions; only valid if its shortest context has up to `longest` tokens.
        self._count = [0]
        self._end = [0]  # the first of these end positions
        self._last = 0  # state of the whole text
        self._counted = 0  # state of the last `longest` tokens

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        follow, link, length, count = self._next, self._link, self._length, self._count
        last, counted, longest = self._last, self._counted, self.longest
        for token in tokens:
            new = len(follow)
            follow.append({})
            link.append(0)
            length.append(length[last] + 1)
            count.append(0)
            self._end.append(length[new])
            state = last
            while state >= 0 and token not in follow[state]:
                follow[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = self._ending_there(state, token)
            last = new
            counted = follow[counted][token]
            while length[link[counted]] >= longest:
                counted = link[counted]
            state = counted
            while state > 0:
                count[state] += 1
                state = link[state]
        self._last, self._counted = last, counted
        self.text += tokens

    def _ending_there(self, state: int, token: int) -> int:
        """The state of a state's longest context plus a token, split off if it has more end positions."""
        follow, link, length = self._next, self._link, self._length
        found = follow[state][token]
        if length[found] == length[state] + 1:
            return found
        split = len(follow)
        follow.append(follow[found].copy())
        length.append(length[state] + 1)
        link.append(link[found])
        self._count.append(self._count[found])
        self._end.append(self._end[found])
        link[found] = split
        while state >= 0 and follow[state].get(token) == found:
            follow[state][token] = split
            state = link[state]
        return split

    def repeated(self) -> tuple[int, int]:
        """State and length of the longest suffix (up to `longest` tokens) that occurred before, or (0, 0)."""
        state = self._link[self._last]
        if state <= 0:
            return 0, 0
        if self._length[state] < self.longest:
            return state, self._length[state]
        return self._counted, self.longest

    def followers(self, state: int, width: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The tokens that followed a context.

        Args:
            state: of the context, which may have been cut to `longest` tokens.
            width: maximum number of followers to return.

        Returns:
            how often any token followed, and for the most frequent ones the token, how often it followed,
            and the state of the context extended by it; among equals, the earliest first. Only the first 64
            different followers are ranked.
        """
        known = self._next[state]
        found = [(token, *self._cut(after)) for token, after in islice(known.items(), _MAX_RANKED)]
        if len(found) == 1:
            return found[0][1], found
        found.sort(key=_frequency, reverse=True)
        return sum(map(_frequency, found)), found[:width]

    def first_continuation(self, state: int, n: int) -> list[int]:
        """Up to n tokens after the first occurrence of a context."""
        end = self._end[state]
        return self.text[end : end + n]

    def _cut(self, state: int) -> tuple[int, int]:
        """Return how often the last `longest` tokens of a context occur in the text, and their state."""
        while self._length[self._link[state]] >= self.longest:
            state = self._link[state]
        return self._count[state], state


def _frequency(follower: tuple[int, int, int]) -> int:
    return follower[1]
