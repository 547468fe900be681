"""A text that is being said again with changes: where it goes on after words that differ, and what they will differ by.

A search for the end of the history finds a text again some tokens after each change, and is not sure of so short a match. Who
knows where the text was left looks for it there, so that one token that agrees says as much as several elsewhere. And what was
said instead of something, a name for another one, is said instead of it again.
"""

from collections.abc import Sequence

_TAKEN_UP = 8  # tokens of context: with fewer it may be another text
_BACK = 4  # tokens that agree, after which nothing else is looked for
_LOST = 40  # tokens without that, after which the text has ended for us
_SKIPPED = 24  # tokens of the text that may have been left out
_SWAPPED = 8  # tokens: longer passages are not said again
_LONGEST = 32  # tokens of context that a search tells apart


class Followed:
    """One text, from a place in it on, and how what is said relates to it."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._at = 0  # of the token that is expected next, or was when the text was left
        self._run = 0  # tokens that agreed, up to there
        self._said: list[int] = []  # since it was left; none: it is being followed
        self._back = 0, 0  # of these, how many agree with what; and tokens from where it was left to there
        self._in_place: bool | None = None  # whether it went on where it was left; None: it never was left
        self._swaps: dict[tuple[int, ...], list[int]] = {}

    @property
    def is_followed(self) -> bool:
        """Whether the last token was the expected one, and there is another."""
        return not self._said and self._at < len(self._text)

    @property
    def is_changed(self) -> bool:
        """Whether it goes on otherwise than the text that was found, or elsewhere than a search would find it."""
        return bool(self._said or self._in_place is not None or self._swaps)

    @property
    def match(self) -> int:
        """Tokens of unbroken context that would say as much about what follows; 0: nothing is expected.

        Counted in variants of 20 answers of a 1.5B main, temperature 0: after 1, 2, 3 tokens that agreed, what followed them was
        said in 67, 79, 83 % of cases where about as many tokens had been said as left out, and in 35, 58, 78 % elsewhere.
        """
        if not self.ahead(1):
            return 0
        if self._said:
            run, skipped = self._back
            return _worth(run, self._is_in_place(skipped)) if run else 0
        return self._run if self._in_place is None else _worth(self._run, self._in_place)

    def ahead(self, n: int) -> Sequence[int]:
        """Up to n tokens that are expected."""
        start = self._at + self._back[1] if self._said else self._at
        return self._text[start : start + n]

    def found(self, match: int, text: Sequence[int]) -> None:
        """Hear of a place in a text whose context agrees with the history's end; follow it if it says more.

        Args:
            match: tokens that agree.
            text: what followed there.
        """
        if match < _TAKEN_UP or not text:
            return
        goes_on = self._changed(text)
        if self.is_followed and match >= min(self._run, _LONGEST) and goes_on[0] == self._text[self._at]:
            self._text, self._at = goes_on, 0  # the same, as far as can be told, and more of it
        elif match > self.match:
            self._text, self._at, self._run = goes_on, 0, match
            self._said, self._in_place = [], None

    def said(self, token: int) -> None:
        """Hear the next token."""
        if not self._text:
            return
        if self.is_followed and token == self._text[self._at]:
            self._at += 1
            self._run += 1
            return
        self._said.append(token)
        run, skipped = self._back = self._agreeing()
        if run >= _BACK:
            self._learn(run, skipped)
            self._in_place = self._is_in_place(skipped)
            self._at, self._run, self._said = self._at + skipped, run, []
        elif len(self._said) > _LOST:
            self._text, self._said = [], []

    def _is_in_place(self, skipped: int) -> bool:
        """Whether about as many tokens were left out as were said instead."""
        return abs(skipped - len(self._said)) < 2

    def _agreeing(self) -> tuple[int, int]:
        """The most of the last tokens that stand in the text, and the tokens up to their end there; the nearest ones."""
        said, text, n = self._said, self._text, len(self._said)
        best = 0, 0
        for skipped in range(1, min(n + _SKIPPED, len(text) - self._at) + 1):
            end, run = self._at + skipped, 0
            while run < min(n, skipped) and text[end - 1 - run] == said[-1 - run]:
                run += 1
            if run and (run, -abs(skipped - n)) > (best[0], -abs(best[1] - n)):
                best = run, skipped
        return best

    def _learn(self, run: int, skipped: int) -> None:
        """What was said instead of what, after the token before; nothing instead of something teaches nothing."""
        old = self._text[self._at : self._at + skipped - run]
        new = self._said[: len(self._said) - run]
        if self._at and 0 < len(old) <= _SWAPPED and 0 < len(new) <= _SWAPPED:
            before, end = self._text[self._at - 1], self._at + skipped
            self._swaps[before, *old] = [before, *new]
            self._text[end:] = self._changed(self._text[end:])

    def _changed(self, text: Sequence[int]) -> list[int]:
        """A text with all that was said instead of something."""
        starts = {old[0] for old in self._swaps}
        changed: list[int] = []
        at = 0
        while at < len(text):
            olds = self._swaps if text[at] in starts else ()
            old = next((each for each in olds if tuple(text[at : at + len(each)]) == each), None)
            changed += self._swaps[old] if old else text[at : at + 1]
            at += len(old) if old else 1
        return changed


def _worth(run: int, in_place: bool) -> int:
    """Tokens of unbroken context that say as much as a run after a change."""
    return min(3 * run, run + 4) + 3 * in_place
