"""Prompt lookup: find the end of the text earlier in the text, and guess what followed there.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). It costs microseconds, and pays where
an answer repeats its prompt: editing code, summarising, quoting.
"""

from array import array
from collections.abc import Iterator, Sequence

from spec_local.dice import Dice
from spec_local.proposal import Proposal
from spec_local.proposers.base import Lap, Limit

_BYTES = array("i").itemsize


class PromptLookup:
    """Copies what followed the last earlier occurrence of the longest suffix n-gram.

    Args:
        longest: most tokens of the suffix that is looked for.
        shortest: fewest; a shorter match guesses more often and is wrong more often.
    """

    def __init__(self, longest: int = 8, shortest: int = 3) -> None:
        self._longest, self._shortest = longest, shortest

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        return iter(())

    def propose(self, history: Sequence[int], limit: Limit, dice: Dice, lap: Lap) -> Proposal:
        found = self._continuation(history)
        n = min(limit.depth, limit.nodes)
        proposal = Proposal.chain(history[found : found + n]) if found else Proposal()
        lap("lookup")
        return proposal

    def commit(self, history: Sequence[int]) -> None:
        pass

    def _continuation(self, history: Sequence[int]) -> int:
        """Index of the token that followed the longest earlier match of the history's end; 0 if none."""
        text = array("i", history).tobytes()  # bytes.rfind looks at C speed
        best = 0
        # The shortest suffix is looked for first: where it does not occur, no longer one does.
        for n in range(self._shortest, min(self._longest, len(history) - 1) + 1):
            at = _find_last(text, text[-n * _BYTES :])
            if at < 0:
                break
            best = at // _BYTES + n
        return best


def _find_last(text: bytes, pattern: bytes) -> int:
    """Byte offset of the last whole-token occurrence of pattern before the end of text; −1 if none."""
    end = len(text) - 1  # so that the pattern does not find itself
    while (at := text.rfind(pattern, 0, end)) >= 0 and at % _BYTES:
        end = at + len(pattern) - 1
    return at
