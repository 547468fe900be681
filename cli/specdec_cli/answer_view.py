"""How an answer appears on standard output as it comes: as it is, with its guesses marked, or as Markdown.

All of them only ever append: nothing that stands on the screen is written again, so that a terminal may be resized,
scrolled and copied from at any time.
"""

import codecs
import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from spec_local.core.text import printable
from specdec_cli import render

if TYPE_CHECKING:
    from rich.text import Text as Styled

    from spec_local.core.proposal import Proposal
    from spec_local.session import Text


class AnswerView(Protocol):
    """Shows the parts of one answer."""

    def show(self, event: "Text") -> None:
        """The text that has become certain with a step."""

    def end(self, text: str) -> None:
        """The last part of the text."""


class Plain:
    """The bytes that the model says, and nothing else."""

    def show(self, event: "Text") -> None:
        render.say(event.text)

    def end(self, text: str) -> None:
        render.say(text)


_ACCEPTED, _REJECTED, _OFF = "\x1b[32m", "\x1b[2;9;31m", "\x1b[0m"


class Drafts:
    """A picture of speculation: which tokens had been guessed, and the guesses that main did not follow.

    Args:
        piece: a token's bytes.
        colour: False marks with characters instead.
    """

    def __init__(self, piece: Callable[[int], bytes], colour: bool) -> None:
        self._piece, self._colour = piece, colour
        marks = ("green", "struck out") if colour else ("«…»", "~…~")
        self.legend = (
            f"{marks[0]}: guessed, and right · {marks[1]}: guessed, and wrong · the rest: main's own"
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        # What the tokens so far spell: characters with whether they were guessed, and marks between them. The text
        # that a session gives may lag behind (a stop string may be coming).
        self._coming: deque[tuple[str, bool | None]] = deque()

    def show(self, event: "Text") -> None:
        for i, token in enumerate(event.tokens):
            if i == event.n_accepted:
                self._mark(event.proposal, event.tokens[:i])
            accepted = i < event.n_accepted
            self._coming.extend((char, accepted) for char in self._decoder.decode(self._piece(token)))
        if len(event.tokens) == event.n_accepted:
            self._mark(event.proposal, event.tokens)
        self._release(event.text)

    def end(self, text: str) -> None:
        self._coming.extend((char, False) for char in self._decoder.decode(b"", final=True))
        self._release(text)

    def _mark(self, proposal: "Proposal", accepted: Sequence[int]) -> None:
        """What was guessed after these tokens, and not said: each way that the guesses went on."""
        children, path = proposal.children(), proposal.follow(accepted)
        ways = []
        for child in children.get(path[-1] if path else -1, ()):
            way = [child]
            while way[-1] in children:
                way.append(children[way[-1]][0])
            pieces = b"".join(self._piece(proposal.tokens[node]) for node in way)
            ways.append(_on_one_line(pieces.decode("utf-8", "replace")))
        if any(ways):
            self._coming.append(("|".join(ways), None))

    def _release(self, text: str) -> None:
        parts, left = [], len(text)
        while self._coming and (left or self._coming[0][1] is None):
            part, accepted = self._coming.popleft()
            left -= accepted is not None
            parts.append((part, accepted))
        for accepted, group in itertools.groupby(parts, key=lambda part: part[1]):
            render.say(self._styled("".join(part for part, _ in group), accepted))

    def _styled(self, part: str, accepted: bool | None) -> str:
        if accepted is None:
            return f"{_REJECTED}{part}{_OFF}" if self._colour else f"~{part}~"
        if not accepted:
            return part
        return f"{_ACCEPTED}{part}{_OFF}" if self._colour else f"«{part}»"


def _on_one_line(text: str) -> str:
    """A rejected guess does not move the cursor."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else " " for char in text)


class Markdown:
    """Renders each block of Markdown when it is complete, and each line of code when it is."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout, soft_wrap=False, highlight=False)
        self._held = ""  # of a line
        self._block: list[str] = []
        self._fence = self._language = ""
        self._begun = False

    def show(self, event: "Text") -> None:
        self._feed(event.text)

    def end(self, text: str) -> None:
        self._feed(text)
        if self._held:
            self._line(self._held)
        self._held = ""
        self._finish_block()

    def _feed(self, text: str) -> None:
        *lines, self._held = (self._held + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        fence = _FENCE.match(line)
        if self._fence:
            if fence and not fence[2].strip() and fence[1].startswith(self._fence):
                self._fence = ""
            else:
                self._code(line)
        elif fence:
            self._finish_block()
            self._space()
            self._fence, self._language = fence[1], fence[2].strip()
        elif not line.strip():
            if self._block and _ITEM.match(self._block[0]):  # more of the item may come
                self._block.append("")
            else:
                self._finish_block()
        else:
            if self._block and not self._block[-1] and not line.startswith((" ", "\t")):
                self._finish_block()
            self._block.append(line)

    def _code(self, line: str) -> None:
        from rich.syntax import Syntax

        code = Syntax("", self._language or "text", theme="ansi_dark").highlight(printable(line))
        code.rstrip()
        code.pad_left(2)
        self._console.print(code, soft_wrap=True)  # or it could not be copied

    def _finish_block(self) -> None:
        from rich.markdown import Markdown as Rendered
        from rich.text import Text as Styled

        if self._block:
            self._space()
            rendered = self._console.render_lines(Rendered(printable("\n".join(self._block))), pad=False)
            lines = [Styled.assemble(*((s.text, s.style or "") for s in line)) for line in rendered]
            for line in lines:
                line.rstrip()  # or a narrower window would break the padding into lines
            for line in _trimmed(lines):
                self._console.print(line, soft_wrap=True)
        self._block = []

    def _space(self) -> None:
        """An empty line between blocks."""
        if self._begun:
            self._console.print()
        self._begun = True


def _trimmed(lines: "list[Styled]") -> "list[Styled]":
    """Without the empty lines at both ends."""
    full = [i for i, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])( |$)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")


def view(piece: Callable[[int], bytes], *, show_drafts: bool = False, markdown: bool = False) -> AnswerView:
    """How to show an answer. Off a terminal it is always plain: programs want the text."""
    if sys.stdout.isatty():
        if show_drafts:
            return Drafts(piece, colour=render.coloured(sys.stdout))
        if markdown:
            return Markdown()
    return Plain()
