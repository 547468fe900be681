"""Views of an answer on standard output: plain, with draft tokens marked, or as Markdown.

Views only append and never rewrite the screen, so that the terminal can be resized, scrolled and copied from.
"""

import codecs
import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from specdec_cli import render, terminal

if TYPE_CHECKING:
    from rich.text import Text as Styled

    from spec_local.core.proposal import Proposal
    from spec_local.session import Text


class AnswerView(Protocol):
    """Shows one answer, part by part."""

    def show(self, event: "Text") -> None:
        """Show the text of a step."""

    def end(self, text: str) -> None:
        """Show the rest of the text."""


class Plain:
    """Writes the text of the answer as it is."""

    def show(self, event: "Text") -> None:
        render.answer(event.text)

    def end(self, text: str) -> None:
        render.answer(text)


_ACCEPTED, _REJECTED = "\x1b[32m", "\x1b[2;9;31m"


class Drafts:
    """Marks accepted draft tokens, and inserts the rejected ones.

    Args:
        piece: returns a token's bytes.
        colour: mark with colours; otherwise with characters.
    """

    def __init__(self, piece: Callable[[int], bytes], colour: bool) -> None:
        self._piece, self._colour = piece, colour
        accepted, rejected = ("green", "struck out") if colour else ("«…»", "~…~")
        self.legend = f"{accepted}: accepted draft tokens · {rejected}: rejected ones · the rest: main model"
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        # Characters of the tokens so far, with whether each was drafted, and rejected drafts (None) between.
        # The session's text lags behind them while it may be the beginning of a stop string.
        self._pending: deque[tuple[str, bool | None]] = deque()

    def show(self, event: "Text") -> None:
        for i, token in enumerate(event.tokens):
            if i == event.n_accepted:
                self._mark(event.proposal, event.tokens[:i])
            accepted = i < event.n_accepted
            self._pending.extend((char, accepted) for char in self._decoder.decode(self._piece(token)))
        if len(event.tokens) == event.n_accepted:
            self._mark(event.proposal, event.tokens)
        self._release(event.text)

    def end(self, text: str) -> None:
        self._pending.extend((char, False) for char in self._decoder.decode(b"", final=True))
        self._release(text)

    def _mark(self, proposal: "Proposal", accepted: Sequence[int]) -> None:
        """Append each rejected branch of a proposal after the accepted tokens."""
        children, path = proposal.children(), proposal.follow(accepted)
        branches = []
        for child in children.get(path[-1] if path else -1, ()):
            branch = [child]
            while branch[-1] in children:
                branch.append(children[branch[-1]][0])
            pieces = b"".join(self._piece(proposal.tokens[node]) for node in branch)
            branches.append(_on_one_line(pieces.decode("utf-8", "replace")))
        if any(branches):
            self._pending.append(("|".join(branches), None))

    def _release(self, text: str) -> None:
        """Write the pending characters of this text."""
        parts, left = [], len(text)
        while self._pending and (left or self._pending[0][1] is None):
            part, accepted = self._pending.popleft()
            left -= accepted is not None
            parts.append((part, accepted))
        for accepted, group in itertools.groupby(parts, key=lambda part: part[1]):
            part = "".join(part for part, _ in group)
            if accepted is False:
                render.answer(part)
            elif self._colour:
                render.answer(part, _ACCEPTED if accepted else _REJECTED)
            else:
                render.answer(f"«{part}»" if accepted else f"~{part}~")


def _on_one_line(text: str) -> str:
    """Replace characters of a rejected draft that would move the cursor."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else " " for char in text)


class Markdown:
    """Renders each block of Markdown, and each line of code, when it is complete."""

    def __init__(self) -> None:
        self._console = render.console(sys.stdout)
        self._prose = terminal.Prose()
        self._held = ""  # text of an incomplete line
        self._block: list[str] = []
        self._fence = self._language = ""
        self._started = False

    def show(self, event: "Text") -> None:
        self._feed(event.text)

    def end(self, text: str) -> None:
        self._feed(text)
        if self._held:
            self._line(self._held)
        self._held = ""
        self._finish_block()

    def _feed(self, text: str) -> None:
        *lines, self._held = (self._held + self._prose(text)).split("\n")
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
            if self._block and _ITEM.match(self._block[0]):  # the item may continue
                self._block.append("")
            else:
                self._finish_block()
        else:
            if self._block and not self._block[-1] and not line.startswith((" ", "\t")):
                self._finish_block()
            self._block.append(line)

    def _code(self, line: str) -> None:
        from rich.syntax import Syntax

        code = Syntax("", self._language or "text", theme="ansi_dark").highlight(line)
        code.rstrip()
        code.pad_left(2)
        self._console.print(code, soft_wrap=True)  # hard breaks would be copied

    def _finish_block(self) -> None:
        from rich.markdown import Markdown as Rendered
        from rich.text import Text as Styled

        if self._block:
            self._space()
            # Links are shown with their addresses: a terminal would hide where they lead.
            text = Rendered("\n".join(self._block), hyperlinks=False)
            rendered = self._console.render_lines(text, pad=False)
            visible = terminal.Prose()  # again: entities such as &#8238; have become characters
            lines = [Styled.assemble(*((visible(s.text), s.style or "") for s in line)) for line in rendered]
            for line in lines:
                line.rstrip()  # padding would wrap in a narrower window
            for line in _trimmed(lines):
                self._console.print(line, soft_wrap=True)
        self._block = []

    def _space(self) -> None:
        """Write an empty line between blocks."""
        if self._started:
            self._console.print()
        self._started = True


def _trimmed(lines: "list[Styled]") -> "list[Styled]":
    """Return the lines without empty lines at both ends."""
    full = [i for i, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])( |$)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")


def view(piece: Callable[[int], bytes], *, show_drafts: bool = False, markdown: bool = False) -> AnswerView:
    """Return the view for an answer; always plain if standard output is not a terminal."""
    if sys.stdout.isatty():
        if show_drafts:
            return Drafts(piece, colour=render.coloured(sys.stdout))
        if markdown:
            return Markdown()
    return Plain()
