"""Stable beginnings of prompts: what programs change in their system messages from request to request.

The cache has a prompt only up to the first token that differs, and system messages come first.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_SYSTEM = ("system", "developer")
_HEADERS = re.compile(r"(?:\s*^x-anthropic-billing-header\b[^\n]*(?:\n|\Z))+", re.IGNORECASE | re.MULTILINE)
"""Lines at the beginning of a text. Claude Code writes another value into this one in every request."""
_TIME = re.compile(
    r"(?:(?<=\dT)|(?<![\w:.,+−-]))"  # no offset such as +02:00, no end of a range, no part of an address
    r"(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d)(?P<fraction>[.,]\d{1,9})?)?"
    r"(?:(?P<space>\s?)(?P<half>[ap]\.?m\b\.?))?(?![\d:])",
    re.IGNORECASE,
)
_DAY_S = 86400
_KEPT = 32
"""Texts with a clock: some programs, each with some kinds of agents."""
_KEPT_S = 3600.0
"""How old the time that a model sees may be. A conversation is read again as often as this, which takes
seconds; a day, or an answer to "how long ago", is rarely wrong by an hour."""
_SLACK_S = 120.0
"""By how much a clock may seem to go wrong: it may show minutes only, and requests wait for a model."""


@dataclass(frozen=True, slots=True)
class _Clock:
    """System texts with times, and when they were used first."""

    texts: Sequence[str]
    times: Sequence[float]
    used: float


class StablePrompts:
    """Messages whose beginning is that of earlier ones, where only what means nothing differs.

    Args:
        now: seconds, of a clock that is never set.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clocks: OrderedDict[tuple[str, ...], _Clock] = OrderedDict()
        self._lock = threading.Lock()  # prompts are prepared in several threads

    def stable(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages without known headers, and with the time of day of an earlier request.

        The texts of the system messages at the start are those of an earlier request if they differ from it
        in times of day only, and each of these times is later by as much as has passed since.
        """
        made = [shown for message in messages if (shown := _without_headers(message)) is not None]
        system = list(takewhile(_is_of_text, made))
        texts = self._with_earlier_time([message["content"] or "" for message in system])
        changed = [{**message, "content": text} for message, text in zip(system, texts, strict=True)]
        return [*changed, *made[len(system) :]]

    def _with_earlier_time(self, texts: Sequence[str]) -> Sequence[str]:
        found = [match for text in texts for match in _TIME.finditer(text)]
        if not found or any("\0" in text for text in texts):
            return texts
        key, now = tuple(_TIME.sub(_form, text) for text in texts), self._now()
        times = [_seconds(match) for match in found]
        with self._lock:
            clock = self._clocks.pop(key, None)
            if not clock or now - clock.used > _KEPT_S or not _is_later(clock, times, now - clock.used):
                clock = _Clock(texts, times, now)
            self._clocks[key] = clock
            if len(self._clocks) > _KEPT:
                self._clocks.popitem(last=False)
        return clock.texts


def _is_of_text(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the system's, without images, whose places would no longer be right."""
    return message.get("role") in _SYSTEM and not message.get("images")


def _without_headers(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A message without headers; None: it has nothing else."""
    content = message.get("content")
    if not _is_of_text(message) or not content or not (found := _HEADERS.match(content)):
        return message
    rest = content[found.end() :]
    return {**message, "content": rest} if rest.strip() else None


def _form(time: re.Match[str]) -> str:
    """What stands for a time of day where texts are compared: its parts, without their values."""
    fraction, half = time["fraction"] or "", time["half"] or ""
    seconds = "s" if time["second"] else ""
    letters = re.sub("[ap]", "x", half.lower()) if half.islower() else re.sub("[AaPp]", "X", half)
    return f"\0{seconds}{len(fraction)}{time['space'] or ''}{letters}\0"


def _seconds(time: re.Match[str]) -> float:
    """Seconds of a time since midnight."""
    hour = int(time["hour"])
    if half := time["half"]:
        hour = hour % 12 + 12 * (half[0] in "pP")
    fraction = float(f"0.{time['fraction'][1:]}") if time["fraction"] else 0.0
    return 60.0 * (60 * hour + int(time["minute"])) + int(time["second"] or 0) + fraction


def _is_later(clock: _Clock, times: Sequence[float], passed: float) -> bool:
    """Return whether each time is the earlier one, or later by the seconds that have passed.

    Others, such as those of an appointment, are what the text is about.
    """
    later = [(new - old) % _DAY_S for old, new in zip(clock.times, times, strict=True)]
    return all(not s or min(abs(s - passed), _DAY_S - abs(s - passed)) <= _SLACK_S for s in later)
