"""Reasoning: the markers that models put around it, and its separation from the answer, part by part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spec_local.text import overlap

_TAIL = 64
"""Tokens of a prompt that may be a marker: more than the characters of the longest."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers that a model writes before its reasoning, and between reasoning and answer.

    The first closing also precedes an answer without reasoning. calls: what tool calls begin with; one also
    ends the reasoning, and is part of the answer. opened, closed: the first opening and the last closing with
    the line breaks that models write around the reasoning. header: what a message begins with, if a grammar
    of calls writes the rest of it.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    opened: str
    closed: str
    calls: tuple[str, ...] = ()
    header: str = ""

    @property
    def before_calls(self) -> "Markers":
        """The markers of reasoning after which a grammar of calls holds."""
        closed = f"<|end|>{self.header}"
        return replace(self, closings=(closed,), closed=closed, calls=()) if self.header else self

    def before_answer(self, prompt: str, reasoning: str, *, is_over: bool) -> tuple[str, str, str]:
        """What stands between a prompt and an answer that is continued, in three parts.

        Args:
            prompt: it may end with a marker, or with the beginning of one.
            reasoning: that of the answer; empty: there is none.
            is_over: whether the reasoning has ended: the answer has text of its own.

        Returns:
            what opens the reasoning, the reasoning, and what closes it.
        """
        end = prompt.rstrip()
        is_open = end.endswith(self.openings)
        if reasoning:
            opened = "" if is_open else self.opened[overlap(end, self.opened) :]
            return opened, reasoning, self.closed if is_over else ""
        if is_open and is_over:
            return "", "", self.closed
        begun = overlap(end, self.closings[0])
        return "", "", self.closings[0][begun:] if begun and is_over else ""


_HEADER = "<|start|>assistant"
_CHANNEL = _HEADER + "<|channel|>{}<|message|>"
_FINAL = _CHANNEL.format("final")
_CALLS = (
    "<|start|>assistant to=functions.",
    *(f"<|start|>assistant<|channel|>{channel} to=functions." for channel in ("commentary", "analysis")),
)
_MARKERS = (
    Markers(("<think>",), ("</think>",), "<think>\n", "\n</think>\n\n"),  # Qwen, DeepSeek and most others
    # gpt-oss. Whether <|end|> has a text depends on the version of llama.cpp.
    Markers(
        (_CHANNEL.format("analysis"), _CHANNEL.format("commentary")),
        (_FINAL, f"<|end|>{_FINAL}"),
        _CHANNEL.format("analysis"),
        f"<|end|>{_FINAL}",
        (*_CALLS, *(f"<|end|>{call}" for call in _CALLS)),
        _HEADER,
    ),
    Markers(("<|channel>thought",), ("<channel|>",), "<|channel>thought\n", "<channel|>"),  # Gemma 4
)


def markers_of(template: str) -> Markers | None:
    """The markers of the models with this chat template; None: they do not reason."""
    return next((markers for markers in _MARKERS if markers.closings[0] in template), None)


def splitter_after(template: str, piece: Callable[[int], bytes], prompt: Sequence[int]) -> "Splitter":
    """A splitter of the text that follows a prompt, which this chat template rendered.

    Args:
        piece: returns the bytes of a token, with the names of control tokens.
        prompt: token ids.
    """
    markers = markers_of(template)
    end = b"".join(map(piece, prompt[-_TAIL:])) if markers else b""
    return Splitter(markers, end.decode("utf-8", "replace"))


class Parts(NamedTuple):
    """Text of the reasoning, and text of the answer, which follows it."""

    reasoning: str
    answer: str


class Splitter:
    """Separates the reasoning at the start of a text from the answer after it.

    Only text that may be the beginning of a marker is held back. Line breaks before and after a marker belong
    to it. Text without a marker at its start is unchanged; markers in the answer are text.

    Args:
        markers: of the model; None: all of the text is the answer.
        prompt: the end of the prompt, which may end with a marker or with the beginning of one.
    """

    def __init__(self, markers: Markers | None = None, prompt: str = "") -> None:
        self._state: Literal["start", "reasoning", "answer"] = "start" if markers else "answer"
        self._closings = markers.closings if markers else ()
        self._ends = (*markers.closings, *markers.calls) if markers else ()
        self._starts = (*markers.openings, markers.closings[0]) if markers else ()
        prompt = prompt.rstrip()
        self._n_prompt = max((overlap(prompt, marker) for marker in self._starts), default=0)
        """Number of characters held back that are the prompt's."""
        self._held = prompt[len(prompt) - self._n_prompt :]
        self._after_marker = False

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, unless a marker follows."""
        return self._state == "reasoning"

    @property
    def is_past_reasoning(self) -> bool:
        """True if all further text is the answer."""
        return self._state == "answer"

    @property
    def is_before_answer(self) -> bool:
        """True if a marker has ended the reasoning, and nothing but line breaks has followed it."""
        return self._state == "answer" and self._after_marker

    @property
    def rests(self) -> list[str]:
        """What completes the markers with which the text so far may end; at the start, whole ones, too."""
        if self._state == "start":
            held = self._held if self._n_prompt else self._held.lstrip()
            return [marker[len(held) :] for marker in self._starts if marker.startswith(held)]
        if not self._held:
            return []
        parts = [(marker[:n], marker[n:]) for marker in self._ends for n in range(1, len(marker))]
        return [rest for begun, rest in parts if self._held.endswith(begun)]

    def skip(self, text: str) -> None:
        """Read the beginning of an answer that is continued: none of it is returned."""
        self.feed(text)
        if self._state == "start":
            self._n_prompt = len(self._held)
        else:
            self._held, self._after_marker = "", False

    def feed(self, text: str) -> Parts:
        """The parts of the text that are certain now."""
        self._held += text
        if self._state == "start":
            self._start()
        reasoning = self._reasoning() if self._state == "reasoning" else ""
        return Parts(reasoning, self._answer() if self._state == "answer" else "")

    def finish(self, text: str = "") -> Parts:
        """The parts of the last text, and all that was held back."""
        parts, rest = self.feed(text), self._held[self._n_prompt :]
        self._held, self._n_prompt = "", 0
        if self._state == "reasoning":
            return parts._replace(reasoning=parts.reasoning + rest)
        return parts._replace(answer=parts.answer + rest)

    def _start(self) -> None:
        text = self._held if self._n_prompt else self._held.lstrip()
        for marker in self._starts:
            if text.startswith(marker):
                self._state = "answer" if marker in self._closings else "reasoning"
                self._held, self._n_prompt, self._after_marker = text[len(marker) :], 0, True
                return
        if any(marker.startswith(text) for marker in self._starts):
            return
        if self._n_prompt:  # only the prompt began a marker
            self._held, self._n_prompt = self._held[self._n_prompt :], 0
            self._start()
        else:
            self._state = "answer"

    def _reasoning(self) -> str:
        self._skip_line_breaks()
        found = [(at, marker) for marker in self._ends if (at := self._held.find(marker)) >= 0]
        if found:
            end, marker = min(found)
            self._state = "answer"
            self._after_marker = marker in self._closings
            rest = end + len(marker) if self._after_marker else end
            text, self._held = self._held[:end].rstrip("\n"), self._held[rest:]
            return text
        end = len(self._held) - max(overlap(self._held, marker) for marker in self._ends)
        end = len(self._held[:end].rstrip("\n"))
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _answer(self) -> str:
        self._skip_line_breaks()
        text, self._held = self._held, ""
        return text

    def _skip_line_breaks(self) -> None:
        if self._after_marker:
            self._held = self._held.lstrip("\n")
            self._after_marker = not self._held
