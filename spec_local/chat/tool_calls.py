"""Tool calls in the text of an answer: their separation from the rest of it, part by part."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from spec_local.chat.call_formats import BARE_OPENINGS, SPACE, CallFormat, Read, ToolCall, read_bare
from spec_local.chat.messages import Tool
from spec_local.core.text import overlap

__all__ = ["Found", "ToolCall", "ToolCallParser"]


class Found(NamedTuple):
    """Text of the answer without its calls, and calls that are complete."""

    text: str
    calls: Sequence[ToolCall]


class ToolCallParser:
    """Separates the calls in an answer from its text.

    Only text that may belong to a call is held back. White space before a call belongs to it, as does white
    space at the end of an answer that ends with a call. A call that is malformed or not complete stays text.

    Args:
        form: of the calls; None: all of the answer is text.
        tools: that the model may call.
    """

    def __init__(self, form: CallFormat | None = None, tools: Sequence[Tool] = ()) -> None:
        self._form, self._tools = form, tools
        self._held = ""
        self._before: Literal["nothing", "text", "call", "call without its closing"] = "nothing"
        """The text before the part that is held back."""

    def feed(self, text: str) -> Found:
        """The text and the calls that are certain now."""
        return self._found(self._form, text, is_last=False) if self._form else Found(text, ())

    def finish(self, text: str = "") -> Found:
        """The text and the calls of the last text, and all that was held back."""
        return self._found(self._form, text, is_last=True) if self._form else Found(text, ())

    def _found(self, form: CallFormat, text: str, *, is_last: bool) -> Found:
        self._held += text
        shown, calls = "", list[ToolCall]()
        while self._skip_closing(form, is_last):
            start, end, is_bare = self._opening(form)
            read: Read | None = None
            if start < end:
                read = (read_bare if is_bare else form.read)(self._held, start, end, self._tools)
            if read and read.calls:
                shown += self._held[:start].rstrip(SPACE)
                calls += read.calls
                self._held, self._before = self._held[read.end :], "call without its closing"
            elif start < end and (read or is_last):
                shown += self._release(end)
            else:
                shown += self._release(len(self._held[:start].rstrip(SPACE)))
                break
        if is_last:
            shown += "" if self._before == "call" and not self._held.strip(SPACE) else self._held
            self._held = ""
        return Found(shown, calls)

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        self._before = "text" if text else self._before
        return text

    def _skip_closing(self, form: CallFormat, is_last: bool) -> bool:
        """Remove the closing of the last call; False: it may be incomplete."""
        if self._before == "call without its closing":
            rest = self._held.lstrip(SPACE)
            closing = next(filter(rest.startswith, form.closings), "")
            if not closing and not is_last and any(each.startswith(rest) for each in form.closings):
                return False
            self._held = rest[len(closing) :] if closing else self._held
            self._before = "call"
        return True

    def _opening(self, form: CallFormat) -> tuple[int, int, bool]:
        """Start and end of the first opening, and whether it is bare JSON.

        An end that is the start: there is none; from there on, one may begin.
        """
        text = self._held
        first = len(text) - len(text.lstrip(SPACE))
        if form.bare and self._before != "text":
            rest = text[first:]
            for each in BARE_OPENINGS:
                if rest.startswith(each):
                    return first, first + len(each), True
                if each.startswith(rest):
                    return first, first, False
        found = [(at, at + len(each), False) for each in form.openings if (at := text.find(each)) >= 0]
        end = len(text) - max((overlap(text, each) for each in form.openings), default=0)
        return min(found, default=(end, end, False))
