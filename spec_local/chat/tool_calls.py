"""Tool calls in the text of an answer: their separation from the rest of it, part by part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from spec_local.chat.call_formats import BARE_OPENINGS, CallFormat
from spec_local.chat.call_reading import SPACE, Begun, Reader, ToolCall, read_bare, read_json
from spec_local.chat.messages import Tool
from spec_local.text import overlap

__all__ = ["Found", "ToolCall", "ToolCallParser"]


class Found(NamedTuple):
    """A part of an answer.

    Attributes:
        text: of the answer, without its calls.
        calls: new calls. They are complete, except with `partial`, where the last one may have the beginning
            of its arguments, and those that the end of the answer has cut.
        arguments: with `partial`, more of the arguments of the call that was given last; they precede the
            text and the new calls.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    arguments: str = ""


class ToolCallParser:
    """Separates the calls in an answer from its text.

    Only text that may belong to a call is held back. White space before a call belongs to it, as does white
    space at the end of an answer that ends with a call. What begins like a call is one as soon as its name
    and the brace of its arguments are there, whatever follows; where arguments are not JSON, as soon as all
    of it is there. Anything else stays text.

    Args:
        form: of the calls; None: all of the answer is text.
        tools: that the model may call.
        partial: give a call as soon as it begins, and its arguments as they come, if they are JSON.
        most: number of calls after which the answer is complete; None: no limit.
        constrained: the answer follows a grammar, so that what begins like a call belongs to one; if the end
            of the answer cuts it before its arguments, it is left out.
        or_schema: of this grammar, an answer may also be JSON of a schema, which may contain the marks of a
            call and begin like a bare one.
    """

    def __init__(
        self,
        form: CallFormat | None = None,
        tools: Sequence[Tool] = (),
        *,
        partial: bool = False,
        most: int | None = None,
        constrained: bool = False,
        or_schema: bool = False,
    ) -> None:
        self._form, self._tools = form, tools
        self._partial, self._most = partial, most
        self._constrained, self._or_schema = constrained, or_schema
        self._held = ""
        self._before: Literal["nothing", "text", "call", "call without its closings"] = "nothing"
        """The text before the part that is held back."""
        self._closings: Sequence[str] = ()
        """Those that may still follow the last call."""
        self._in_list = False
        self._call: ToolCall | None = None
        """A call that has not been given, or with `partial` not all of its arguments."""
        self._arguments: _Arguments | None = None
        self._n_calls = 0

    @property
    def is_full(self) -> bool:
        """True if the answer has as many calls as it may: the rest of it is ignored."""
        return self._most is not None and self._n_calls >= self._most

    def feed(self, text: str) -> Found:
        """The text and the calls that are certain now."""
        return self._found(self._form, text, is_last=False) if self._form else Found(text)

    def finish(self, text: str = "") -> Found:
        """The text and the calls of the last text, and all that was held back."""
        return self._found(self._form, text, is_last=True) if self._form else Found(text)

    def _found(self, form: CallFormat, text: str, *, is_last: bool) -> Found:
        self._held += text
        shown, more, calls = "", "", list[ToolCall]()
        while not self.is_full:
            if self._arguments and self._call:
                part, n, is_complete = self._arguments.feed(self._held)
                self._held = self._held[n:]
                if not self._partial:
                    self._call = replace(self._call, arguments=self._call.arguments + part)
                elif calls:
                    calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part)
                else:
                    more += part
                if not is_complete and not is_last:
                    break
                calls += [] if self._partial else [self._call]
                self._arguments = None
                self._end_calls(form, 1)
                continue
            if not self._skip_closings(is_last):
                break
            start, end, reader = self._opening(form)
            read = reader(self._held, start, end, self._tools) if start < end else None
            is_text = is_last and not (self._constrained and self._begins_call(start, reader))
            if isinstance(read, Begun):
                shown += self._held[:start].rstrip(SPACE)
                self._held, self._call = self._held[read.at :], read.call
                self._arguments, self._in_list = _Arguments(read.depth), self._in_list or read.listed
                calls += [read.call] if self._partial else []
            elif read and read.calls:
                shown += self._held[:start].rstrip(SPACE)
                found = read.calls if self._most is None else read.calls[: self._most - self._n_calls]
                calls += found
                self._held = self._held[read.end :]
                self._end_calls(form, len(found))
            elif start < end and (read or is_text):
                self._in_list = False
                shown += self._release(end)
            else:
                shown += self._release(len(self._held[:start].rstrip(SPACE)))
                if is_last and not is_text:
                    self._held = ""
                break
        if self.is_full:
            self._held = ""
        if is_last:
            shown += "" if self._before == "call" and not self._held.strip(SPACE) else self._held
            self._held = ""
        return Found(shown, calls, more)

    def _begins_call(self, start: int, reader: Reader) -> bool:
        """Whether what begins here can only be a call, under the grammar."""
        if not self._or_schema:
            return True
        return reader is not read_bare and self._before != "text" and not self._held[:start].strip(SPACE)

    def _end_calls(self, form: CallFormat, n: int) -> None:
        self._n_calls += n
        self._before = "call without its closings"
        self._closings = ("]", *form.closings) if self._in_list else form.closings

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        self._before = "text" if text else self._before
        return text

    def _skip_closings(self, is_last: bool) -> bool:
        """Remove the closings of the last call; False: one may be incomplete."""
        while self._before == "call without its closings":
            rest = self._held.lstrip(SPACE)
            closing = next(filter(rest.startswith, self._closings), "")
            if closing:
                self._held = rest[len(closing) :]
                self._closings = self._closings[self._closings.index(closing) + 1 :]
                self._in_list &= closing != "]"
            elif not any(each.startswith(rest) for each in self._closings):
                self._before = "call"
            elif is_last:
                self._before, self._held = "call", ""  # the end of the answer has cut it
            else:
                return False
        return True

    def _opening(self, form: CallFormat) -> tuple[int, int, Reader]:
        """Start and end of the first opening, and the reader of what follows.

        An end that is the start: there is none; from there on, one may begin.
        """
        text = self._held
        first = len(text) - len(text.lstrip(SPACE))
        if self._in_list and text.startswith(",", first):
            return first, first + 1, read_json
        if form.bare and self._before != "text":
            rest = text[first:]
            for each in BARE_OPENINGS:
                if rest.startswith(each):
                    return first, first + len(each), read_bare
                if each.startswith(rest):
                    return first, first, read_bare
        found = [(at, at + len(each)) for each in form.openings if (at := text.find(each)) >= 0]
        end = len(text) - max((overlap(text, each) for each in form.openings), default=0)
        return *min(found, default=(end, end)), form.read


class _Arguments:
    """Reads the arguments of a call part by part, and the JSON around them.

    Control characters in strings, which JSON does not allow, become escapes.

    Args:
        depth: number of brackets around the arguments.
    """

    def __init__(self, depth: int) -> None:
        self._around = self._depth = depth
        self._in_string = self._escaped = self._are_complete = False

    def feed(self, text: str) -> tuple[str, int, bool]:
        """The arguments in the next text, its length up to the end of the call, and whether that is there."""
        found: list[str] = []
        for i, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
                character = _ESCAPES.get(character, character)
            else:
                self._in_string = character == '"'
                self._depth += (character in "[{") - (character in "]}")
            if not self._are_complete:
                found.append(character)
                self._are_complete = self._depth <= self._around and not self._in_string
            if self._depth <= 0:
                return "".join(found), i + 1, True
        return "".join(found), len(text), False


_ESCAPES = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
