"""Marks that stand for images in a text while it is rendered."""

import re
import secrets


class NumberedMarks:
    """Marks of numbered images, which nobody can guess: no other text contains one."""

    def __init__(self) -> None:
        self._begin = f"[image {secrets.token_hex(8)} "

    def of(self, i: int) -> str:
        """The mark of image number `i`."""
        return f"{self._begin}{i}]"

    def split(self, text: str) -> list[str]:
        """The texts between marks, and after each but the last one the number of the image that follows."""
        return re.split(rf"{re.escape(self._begin)}(\d+)\]", text)
