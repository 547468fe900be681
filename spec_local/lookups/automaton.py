"""A suffix automaton that grows with a text: where its end stood before, and what followed there.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; for speculative decoding: Hu et al. 2024,
"SAM Decoding" (arXiv 2411.10666). A state stands for all contexts (runs of tokens) that ended at the same places so far.
A state's link leads to the longest shorter context that ended at more places, so that the text's whole end
is a path of links, and its longest repeated part the second state on it: nothing is searched.
"""

from collections.abc import Sequence
from itertools import islice

_LOOKED_AT = 64
"""Most followers of a context that are ranked: where more are known, none is likely."""


class SuffixAutomaton:
    """What followed each context of a text.

    A token is fed in constant time, amortised: the automaton itself grows so (at most two states and three transitions
    a token), and counting visits at most `longest` states.

    Args:
        longest: most tokens of a context that count; longer ones are cut to their last tokens.
    """

    def __init__(self, longest: int = 64) -> None:
        self.longest = longest
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # tokens of a state's longest context
        self._count = [
            0
        ]  # places where its contexts ended; right where its shortest one has up to `longest` tokens
        self._end = [0]  # tokens up to the first of these places
        self._last = 0  # the whole text
        self._counted = 0  # the text's end, cut to `longest` tokens

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
        """The state of a state's longest context and the token; split off where that ended at more places than longer ones."""
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
        """The longest end of the text that stood before, too, up to `longest` tokens: its state and its tokens; (0, 0): none."""
        state = self._link[self._last]
        if state <= 0:
            return 0, 0
        if self._length[state] < self.longest:
            return state, self._length[state]
        return self._counted, self.longest

    def followers(self, state: int, width: int) -> tuple[int, list[tuple[int, int, int]]]:
        """What followed a context.

        Args:
            state: of the context, which may have been cut to `longest` tokens.
            width: most followers wanted.

        Returns:
            how often anything followed, and of the most frequent ones: token, how often it followed, and the state of
            the context with it. Of equally frequent ones the first that was seen comes first. Beyond 64 different ones later
            ones are not looked at.
        """
        known = self._next[state]
        found = [(token, *self._cut(after)) for token, after in islice(known.items(), _LOOKED_AT)]
        if len(found) == 1:
            return found[0][1], found
        found.sort(key=_frequency, reverse=True)
        return sum(map(_frequency, found)), found[:width]

    def since(self, state: int, n: int) -> list[int]:
        """Up to n tokens that followed a context where it stood first."""
        end = self._end[state]
        return self.text[end : end + n]

    def _cut(self, state: int) -> tuple[int, int]:
        """How often a context, cut to its last `longest` tokens, stands in the text, and the state of that."""
        while self._length[self._link[state]] >= self.longest:
            state = self._link[state]
        return self._count[state], state


def _frequency(follower: tuple[int, int, int]) -> int:
    return follower[1]
