"""The fences around code in a Markdown text, for its views and for /copy."""

import re
from typing import Literal

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)$")


class Fences:
    """Follows the fences of a text, line by line.

    Args:
        begun: the text before the first line, whose last line may be incomplete: the first one is its rest.
    """

    def __init__(self, begun: str = "") -> None:
        self.language = ""
        """Language of the code, as the last opening fence names it."""
        self._open = self._begun = ""
        *lines, last = begun.split("\n")
        for line in lines:
            self.read(line)
        self._begun = last

    @property
    def in_code(self) -> bool:
        """True if the next line is code, or the fence that ends it."""
        return bool(self._open)

    def read(self, line: str) -> Literal["fence", "code", "prose"]:
        """Read the next line, and return what it is."""
        fence = _FENCE.match(self._begun + line)
        self._begun = ""
        if not self._open:
            if not fence:
                return "prose"
            self._open, self.language = fence[1], fence[2].strip()
        elif fence and not fence[2].strip() and fence[1].startswith(self._open):
            self._open = ""
        else:
            return "code"
        return "fence"


def code_blocks(text: str) -> list[str]:
    """Return the code between the fences of a Markdown text; the last fence may be missing."""
    blocks: list[list[str]] = []
    fences = Fences()
    for line in text.split("\n"):
        kind = fences.read(line)
        if kind == "code":
            blocks[-1].append(line)
        elif fences.in_code:  # as of this line
            blocks.append([])
    return ["\n".join(block) for block in blocks]
