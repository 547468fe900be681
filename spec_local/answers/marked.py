"""Marks the text of an answer that was drafted, and where tokens were rejected.

The text lags behind the tokens: the beginning of a character or of a stop string is held back.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from spec_local.answers.text import Text
from spec_local.core.proposal import ROOT, Proposal

Kind = Literal["main", "accepted", "corrected"]


@dataclass(frozen=True, slots=True)
class MarkedSpan:
    """A part of the text.

    Attributes:
        text: empty where draft tokens were rejected because the main model ended the answer.
        kind: ``main``: the main model's; ``accepted``: accepted draft tokens; ``corrected``: the main
            model's, where it rejected others.
        rejected: the texts of the rejected branches.
    """

    text: str
    kind: Kind = "main"
    rejected: Sequence[str] = ()


class MarkedText:
    """Divides the text of an answer into spans. A character belongs to the token that completes it.

    `feed` and `finish` return the spans of the session's text; joined, their texts are this text. To show
    only parts of the text, use `add` and `take`.

    Args:
        piece: returns the bytes of a token.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._pending: deque[MarkedSpan] = deque()  # of the tokens so far
        self._rejected: tuple[str, ...] = ()  # where the next character will be

    def feed(self, event: Text) -> list[MarkedSpan]:
        """The spans of the text of a step."""
        self.add(event)
        return self.take(event.text)

    def finish(self, text: str = "") -> list[MarkedSpan]:
        """The spans of the rest of the text."""
        self._append(self._decoder.decode(b"", final=True), "main")
        return self.take(text)

    def add(self, event: Text) -> None:
        """Add the tokens of a step."""
        n = event.n_accepted
        if not event.tokens:  # the answer has ended: no token completes the character
            self._append(self._decoder.decode(b"", final=True), "main")
        self._add(event.tokens[:n], "accepted")
        self._rejected += tuple(self._rejected_branches(event.proposal, event.tokens[:n]))
        self._add(event.tokens[n:], "main")
        if n == len(event.tokens):  # the main model ended the answer
            self._append("", "main")

    def take(self, text: str) -> list[MarkedSpan]:
        """The spans of the next text that is shown; text before it, such as a marker, is skipped."""
        start = "".join(span.text for span in self._pending).find(text)
        if start < 0:
            return [MarkedSpan(text)]
        if start:
            self._cut(start)
        return self._cut(len(text))

    def _add(self, tokens: Sequence[int], kind: Kind) -> None:
        for piece in map(self._piece, tokens):
            text = self._decoder.decode(piece)
            if text or not piece:  # otherwise the character is incomplete
                self._append(text, kind)

    def _append(self, text: str, kind: Kind) -> None:
        if text or self._rejected:
            self._pending.append(MarkedSpan(text, "corrected" if self._rejected else kind, self._rejected))
            self._rejected = ()

    def _cut(self, n: int) -> list[MarkedSpan]:
        """Remove the first n characters, and the rejections after them."""
        spans: list[MarkedSpan] = []
        while self._pending and (n or not self._pending[0].text):
            span = self._pending.popleft()
            if len(span.text) > n:
                self._pending.appendleft(MarkedSpan(span.text[n:], span.kind))
                span = replace(span, text=span.text[:n])
            n -= len(span.text)
            if spans and span.kind == spans[-1].kind and not span.rejected:
                spans[-1] = replace(spans[-1], text=spans[-1].text + span.text)
            else:
                spans.append(span)
        return spans

    def _rejected_branches(self, proposal: Proposal, accepted: Sequence[int]) -> Iterator[str]:
        """Yield the text of each branch of a proposal after the accepted tokens."""
        children, path = proposal.children(), proposal.follow(accepted)
        for child in children.get(path[-1] if path else ROOT, ()):
            branch = [child]
            while branch[-1] in children:
                branch.append(children[branch[-1]][0])
            text = b"".join(self._piece(proposal.tokens[node]) for node in branch).decode("utf-8", "replace")
            if text:
                yield text
