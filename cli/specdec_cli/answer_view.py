"""Views of an answer on standard output: plain, with draft tokens marked, or as Markdown.

Views only append and never rewrite the screen, so that the terminal can be resized, scrolled and copied from.
"""

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.text import Text as Styled

from spec_local.answers.marked import MarkedSpan, MarkedText
from spec_local.answers.running import OnRead
from spec_local.answers.text import NumberedEvent, Text
from specdec_cli import render, terminal, waiting
from specdec_cli.code_fences import Fences
from specdec_cli.wrapping import Unwrapped, Wrapped

_Event = TypeVar("_Event")


def reading(
    generate: Callable[[OnRead], Iterator[_Event]], *, in_one_piece: bool = False
) -> Iterator[_Event]:
    """Yield the events of an answer, and show meanwhile how far its prompt has been read.

    in_one_piece: whether the answer is shown when it is complete; until then, the number of its tokens is.
    """
    n_tokens = 0

    def on_read(n_read: int, n_prompt: int, n_drafter: int) -> None:
        who = f"the draft model is reading: {n_drafter:,}" if n_drafter else f"reading {n_read:,}"
        apart = "  " if render.line_is_open() else ""
        waiting.say(f"{apart}{who} of {n_prompt:,} tokens")

    with waiting.line("preparing the answer …"):
        for event in generate(on_read):
            of_answer = event.event if isinstance(event, NumberedEvent) else event
            if isinstance(of_answer, Text):
                n_tokens += len(of_answer.tokens)
                waiting.say(f"generating: {n_tokens:,} tokens" if in_one_piece else "")
            yield event


class AnswerView(ABC):
    """Shows one answer, part by part."""

    @abstractmethod
    def show(self, event: Text) -> None:
        """Show the text of a step."""

    @abstractmethod
    def end(self, text: str) -> None:
        """Show the rest of the text."""

    def notes(self) -> list[str]:
        """Return lines to show after the answer."""
        return []


class PlainView(AnswerView):
    """Shows the text of the answer; `write` may break lines between words."""

    def __init__(self, write: Wrapped | Unwrapped | None = None) -> None:
        self._write = write or Unwrapped(render.answer)

    def show(self, event: Text) -> None:
        self._write(event.text)

    def end(self, text: str) -> None:
        self._write(text)
        self._write.flush()


# Names and escape sequences of the styles of tokens.
_COLOURS = {"accepted": ("green", "\x1b[32m"), "corrected": ("yellow", "\x1b[33m")}
_NO_COLOURS = {"accepted": ("underlined", "\x1b[4m"), "corrected": ("bold", "\x1b[1m")}
_MAX_LISTED = 8  # rejected drafts after an answer


class DraftsView(AnswerView):
    """Marks accepted draft tokens, and what the main model generated instead of a rejected one.

    The rejected tokens are listed after the answer, so that what is copied from the terminal is the answer.

    Args:
        piece: returns a token's bytes.
        marks: as `_COLOURS`. None: only list the rejected tokens.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        marks: Mapping[str, tuple[str, str]] | None = _COLOURS,
        write: Wrapped | Unwrapped | None = None,
    ) -> None:
        self._text = MarkedText(piece)
        self._write = write or Unwrapped(render.answer)
        self._styles = {kind: escape for kind, (_, escape) in (marks or {}).items()}
        self._rejected: list[str] = []
        self.legend = "rejected draft tokens are listed after the answer"
        if marks:
            (accepted, _), (corrected, _) = marks.values()
            self.legend = (
                f"{accepted}: accepted draft tokens · {corrected}: the main model's, where one was rejected"
            )

    def show(self, event: Text) -> None:
        self._show(self._text.feed(event))

    def end(self, text: str) -> None:
        self._show(self._text.finish(text))
        self._write.flush()

    def notes(self) -> list[str]:
        if not self._rejected:
            return []
        more = len(self._rejected) - _MAX_LISTED
        listed = " · ".join(self._rejected[:_MAX_LISTED])
        return [f"rejected: {listed}" + (f" · and {more} more" if more > 0 else "")]

    def _show(self, spans: Sequence[MarkedSpan]) -> None:
        for span in spans:
            if span.text:
                self._write(span.text, self._styles.get(span.kind, ""))
            if span.rejected:
                branches = ", ".join(map(_quoted, span.rejected))
                self._rejected.append(f"{branches} → {_quoted(span.text) if span.text else 'the end'}")


def _quoted(text: str) -> str:
    """Quote a rejected draft, and replace the characters in it that would move the cursor."""
    line = "".join("⏎" if char == "\n" else char if char.isprintable() else " " for char in text)
    return f"“{line}”"


class MarkdownView(AnswerView):
    """Renders each block of Markdown, and each line of code, when it is complete.

    Until then, its last line is shown as a line of `waiting`.

    Args:
        begun: the text before, of an answer that is continued; it is not shown.
    """

    def __init__(self, begun: str = "") -> None:
        self._console = render.console(sys.stdout)
        self._prose = terminal.Prose()
        self._held = ""  # text of an incomplete line
        self._block: list[str] = []
        self._fences = Fences(begun)
        self._started = False

    def show(self, event: Text) -> None:
        with waiting.hidden():
            self._feed(event.text)
        begun = self._held or "".join(self._block[-1:])
        waiting.say(begun.expandtabs()[1 - terminal.width() :])

    def end(self, text: str) -> None:
        waiting.say("")
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
        kind = self._fences.read(line)
        if kind == "code":
            self._code(line)
        elif kind == "fence":
            if self._fences.in_code:
                self._finish_block()
                self._space()
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

        code = Syntax("", self._fences.language or "text", theme="ansi_dark").highlight(line)
        code.rstrip()
        self._console.print(code, soft_wrap=True)  # hard breaks would be copied

    def _finish_block(self) -> None:
        from rich.markdown import Markdown as Rendered

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


def _trimmed(lines: list[Styled]) -> list[Styled]:
    """Return the lines without empty lines at both ends."""
    full = [i for i, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])( |$)")


def end_of(begun: str, *, markdown: bool = False) -> str:
    """Return the end of an answer that is continued, to be shown before the rest: a word may be cut there.

    Its last line, as much as fits on the terminal; in Markdown, its last block.
    """
    if markdown and not Fences(begun).in_code:
        return begun.rpartition("\n\n")[2]
    line = begun.rpartition("\n")[2]
    room = terminal.width()
    return line if len(line) <= room else line[-room:].partition(" ")[2] or line[-room:]


def view(
    piece: Callable[[int], bytes],
    *,
    show_drafts: bool = False,
    markdown: bool = False,
    wrap: bool = False,
    begun: str = "",
) -> AnswerView:
    """Return the view for an answer; always plain if standard output is not a terminal.

    wrap: break lines between words. begun: the text before, of an answer that is continued.
    """
    if not sys.stdout.isatty():
        return PlainView()
    if markdown and not show_drafts:
        return MarkdownView(begun)
    write = Wrapped(render.answer, begun=begun) if wrap else Unwrapped(render.answer)
    if not show_drafts:
        return PlainView(write)
    styled = _COLOURS if render.coloured(sys.stdout) else _NO_COLOURS
    return DraftsView(piece, None if os.environ.get("TERM") == "dumb" else styled, write)
