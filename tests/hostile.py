"""Texts that try to control a terminal, and what may reach it."""

import re
import unicodedata

OVERRIDE, ISOLATE = "\u202e", "\u2067"
CONTROLS = {
    "colour": "\x1b[31mred",
    "clear": "\x1b[2J\x1b[H",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;aGk=\x07",
    "link": "\x1b]8;;http://x.invalid\x1b\\text\x1b]8;;\x1b\\",
    "string": "\x1bP+q544e\x1b\\",
    "C1": "\x9b31mred\x9d0;title\x9c",
    "overwrite": "seen\rgone",
    "backspace": "seen\x08\x08\x08\x08gone",
    "bell": "\x07\x0e\x0f\x7f",
    "override": f"abc{OVERRIDE}def",
}
MARKUP = "[red]x[/red][link=http://x.invalid]y[/link] :smile:"
ALL = MARKUP + "".join(CONTROLS.values())
"""All of them in one text."""
NAME = ALL.replace("/", "|")
"""As a file name."""


def forbidden(text, *, prose=False):
    """Return the characters of a terminal's output that may not be in it.

    prose: whether the text is an answer, in which characters of the world's languages may be invisible.
    """
    found = [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    kept = {"\u200c", "\u200d"}
    return found + [
        c
        for c in text
        if (c in "\u202d\u202e" if prose else unicodedata.category(c) == "Cf" and c not in kept)
    ]


STYLES = re.compile(
    "\x1b\\[(?:[0-9;]*m|\\?25[hl]|\\?2004[hl]|\\?1l|[12]?[AKJ]|[0-9]*[ABCD]|\\?7[hl]|\\?12[hl])|\x1b[78]|[\r\b]"
)
"""Escape sequences of rich and of prompt_toolkit: styles, the cursor, erasing a line."""
