"""Prompt lookup: find an earlier occurrence of the last tokens, and propose the tokens that followed it.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). Prompt lookup uses the last occurrence;
`suffixes` uses all of them.
"""

from array import array
from collections.abc import Sequence

from spec_local.core.calls import Logits
from spec_local.core.proposal import EMPTY, Limit, Proposal
from spec_local.lookups.base import ONCE

_BYTES = array("i").itemsize
_MAX_MATCH = 48  # longer matches are not better predictors


class PromptLookup:
    """Proposes the tokens after the last earlier occurrence of the longest suffix n-gram; always a chain.

    Args:
        longest: maximum length of the n-gram.
        shortest: minimum length; short n-grams are found more often and predict worse.
    """

    name = "lookup"
    needs_logits = False

    def __init__(self, longest: int = 8, shortest: int = 3) -> None:
        self._longest, self._shortest = longest, shortest
        self._history: Sequence[int] = ()
        self._text = array("i")

    @classmethod
    def create(cls, calibrated: bool) -> "PromptLookup":
        """Create a lookup for one answer.

        calibrated: the policy learns acceptance rates, so that unreliable candidates are useful, too.
        """
        return cls(shortest=2 if calibrated else 3)

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        self._read(history)
        text = self._text.tobytes()  # bytes.rfind is fast
        start = match = 0
        # Start with the shortest suffix: if it does not occur, no longer one does.
        for n in range(self._shortest, min(self._longest, len(history) - 1) + 1):
            at = _find_last(text, text[-n * _BYTES :])
            if at < 0:
                break
            start, match = at // _BYTES + n, n
        if not match:
            return EMPTY
        if match == self._longest:
            while match < min(start, _MAX_MATCH) and self._text[start - match - 1] == self._text[-match - 1]:
                match += 1
        else:
            # If an earlier occurrence continued differently, the match is not a reliable predictor.
            at = _find_last(text[: (start - 1) * _BYTES], text[-match * _BYTES :])
            if at >= 0 and self._text[at // _BYTES + match] != self._text[start]:
                match = 1 if match < 5 else 2
        tokens = self._text[start : start + min(limit.depth, limit.nodes)].tolist()
        return Proposal.chain(tokens, source=self.name, confidence=ONCE[match : match + len(tokens)])

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def _read(self, history: Sequence[int]) -> None:
        """Update the array to the history, which has usually only grown."""
        known = len(self._text)
        # The decoding loop's own list only grows; any other list is compared.
        if history is not self._history or len(history) < known:
            if list(history[:known]) != self._text.tolist():
                self._text, known = array("i"), 0
            self._history = history
        self._text.extend(history[known:])


def _find_last(text: bytes, pattern: bytes) -> int:
    """Byte offset of the last whole-token occurrence of pattern before the end of text; −1 if none."""
    end = len(text) - 1  # exclude the pattern itself
    while (at := text.rfind(pattern, 0, end)) >= 0 and at % _BYTES:
        end = at + len(pattern) - 1
    return at
