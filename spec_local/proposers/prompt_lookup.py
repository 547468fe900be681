"""Prompt lookup: find the end of the text earlier in the text, and guess what followed there.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). It costs microseconds, and pays where
an answer repeats its prompt: editing code, summarising, quoting.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spec_local.dice import Dice
from spec_local.proposal import Proposal
from spec_local.proposers.base import Lap, Limit

_BYTES = array("i").itemsize
_LONG = 48  # a longer match foretells no more


@dataclass(frozen=True, slots=True)
class Copy:
    """What followed earlier, and how many tokens before it are the end of the text, too; fewer if that is ambiguous."""

    tokens: Sequence[int]
    match: int


class PromptLookup:
    """Copies what followed the last earlier occurrence of the longest suffix n-gram.

    Args:
        longest: most tokens of the suffix that is looked for.
        shortest: fewest; a shorter match guesses more often and is wrong more often.
    """

    def __init__(self, longest: int = 8, shortest: int = 3) -> None:
        self._longest, self._shortest = longest, shortest
        self._history: Sequence[int] = ()
        self._text = array("i")

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        return iter(())

    def propose(self, history: Sequence[int], limit: Limit, dice: Dice, lap: Lap) -> Proposal:
        proposal = Proposal.chain(self.find(history, min(limit.depth, limit.nodes)).tokens, source="lookup")
        lap("lookup")
        return proposal

    def commit(self, history: Sequence[int]) -> None:
        pass

    def find(self, history: Sequence[int], most: int) -> Copy:
        """Up to so many tokens that followed the longest earlier match of the history's end; none if there is none."""
        self._read(history)
        text = self._text.tobytes()  # bytes.rfind looks at C speed
        start = match = 0
        # The shortest suffix is looked for first: where it does not occur, no longer one does.
        for n in range(self._shortest, min(self._longest, len(history) - 1) + 1):
            at = _find_last(text, text[-n * _BYTES :])
            if at < 0:
                break
            start, match = at // _BYTES + n, n
        if match == self._longest:
            while match < min(start, _LONG) and self._text[start - match - 1] == self._text[-match - 1]:
                match += 1
        elif match:
            # Where an occurrence before that went on otherwise, the match foretells little (docs/benchmarks.md).
            at = _find_last(text[: (start - 1) * _BYTES], text[-match * _BYTES :])
            if at >= 0 and self._text[at // _BYTES + match] != self._text[start]:
                match = 1 if match < 5 else 2
        return Copy(self._text[start : start + most].tolist() if match else (), match)

    def _read(self, history: Sequence[int]) -> None:
        """Bring the array to the history, which usually has only grown."""
        known = len(self._text)
        # The loop's own list only grows; any other is compared.
        if history is not self._history or len(history) < known:
            if list(history[:known]) != self._text.tolist():
                self._text, known = array("i"), 0
            self._history = history
        self._text.extend(history[known:])


def _find_last(text: bytes, pattern: bytes) -> int:
    """Byte offset of the last whole-token occurrence of pattern before the end of text; −1 if none."""
    end = len(text) - 1  # so that the pattern does not find itself
    while (at := text.rfind(pattern, 0, end)) >= 0 and at % _BYTES:
        end = at + len(pattern) - 1
    return at
