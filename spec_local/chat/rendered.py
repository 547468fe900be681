"""Rendered conversations: text in which the template's own words are told from the content of messages.

Only the former become control tokens. Otherwise, a message or a file that contains ``<|im_end|>`` could end
its own turn and forge the next one.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_local.errors import ModelError
from spec_local.images.media import Media
from spec_local.llama.vocabulary import Vocabulary
from spec_local.text import bytes_of

_IMAGE = 2


class _Tokenizer(Protocol):
    """The first text of a part: at the start of a prompt, it adds the beginning-of-sequence token."""

    def __call__(self, text: str, *, parse_special: bool) -> list[int]: ...


IMAGE_MARKER = b"<__media__>"
"""What stands for an image where the text is shown, as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, or a part of it.

    text: UTF-8; other bytes are possible. is_content: one byte for each byte of the text: 1 if it is from a
    message, 0 if the template wrote it, 2 for a byte that stands for an image.
    images: and sounds, in their order.
    """

    text: bytes
    is_content: bytes
    images: tuple[Media, ...] = ()

    @classmethod
    def of(cls, text: str, content: Iterable[tuple[int, int]]) -> "Rendered":
        """Create it from a text and the parts of it that are content: pairs of the first and the next index.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        written, mask, end = [], [], 0
        for start, next_ in [*content, (len(text), len(text))]:
            for part, flag in ((text[end:start], b"\0"), (text[start:next_], b"\1")):
                written.append(bytes_of(part))
                mask.append(flag * len(written[-1]))
            end = next_
        return cls(b"".join(written), b"".join(mask))

    def __add__(self, other: "Rendered") -> "Rendered":
        images = self.images + other.images
        return Rendered(self.text + other.text, self.is_content + other.is_content, images)

    def __getitem__(self, part: slice) -> "Rendered":
        is_content, images = self.is_content[part], self.images
        if images:
            first = self.is_content[: part.indices(len(self))[0]].count(_IMAGE)
            images = images[first : first + is_content.count(_IMAGE)]
        return Rendered(self.text[part], is_content, images)

    def __len__(self) -> int:
        return len(self.text)

    def __str__(self) -> str:
        shown = self
        for i in reversed(
            [i for i, kind in enumerate(self.is_content) if kind == _IMAGE] if self.images else ()
        ):
            shown = Rendered(shown.text[:i] + IMAGE_MARKER + shown.text[i + 1 :], b"")
        return shown.text.decode("utf-8", "surrogateescape")

    def with_images(self, marks: Sequence[bytes], images: Sequence[Media]) -> "Rendered":
        """The text with images in place of these marks.

        Args:
            marks: of each image, in their order; each occurs once.

        Raises:
            ModelError: the text lacks one of them.
        """
        parts, end = [], 0
        for mark in marks:
            start = self.text.find(mark, end)
            if start < 0:
                raise ModelError(
                    "the model's chat template leaves out an image: send none, or only in questions"
                )
            parts += [self[end:start], Rendered(b"\xff", bytes([_IMAGE]))]
            end = start + len(mark)
        parts.append(self[end:])
        return Rendered(
            b"".join(part.text for part in parts), b"".join(part.is_content for part in parts), tuple(images)
        )

    def without_prefix(self, prefix: str) -> "Rendered":
        """The rest after this prefix if the template wrote it, or else all."""
        n = len(prefix.encode())
        return self[n:] if self[:n] == Rendered(prefix.encode(), bytes(n)) else self

    def tokens(
        self,
        vocabulary: Vocabulary,
        *,
        is_start: bool = True,
        image_tokens: Callable[[Media], Sequence[int]] | None = None,
    ) -> list[int]:
        """The tokens, with the template's control tokens only.

        Args:
            is_start: whether this part is the start of the prompt; otherwise it continues one.
            image_tokens: tokens and cells of an image; None: there is none.

        Raises:
            InvalidRequest: the text is too long, or an image cannot be read.
        """
        first = vocabulary.continuation
        if is_start:
            first = functools.partial(vocabulary.tokenize, add_special=True)
        if not self.images or not image_tokens:
            return self._text_tokens(vocabulary, first)
        found, end = list[int](), 0
        for image in self.images:
            start = self.is_content.index(_IMAGE, end)
            found += self[end:start]._text_tokens(vocabulary, first)
            found += image_tokens(image)
            end, first = (
                start + 1,
                vocabulary.tokenize,
            )  # libmtmd tokenizes the text after an image for itself
        return found + self[end:]._text_tokens(vocabulary, first)

    def _text_tokens(self, vocabulary: Vocabulary, first: _Tokenizer) -> list[int]:
        """`tokens` of a text without images."""
        names: set[bytes] = set()
        forged: list[tuple[int, int]] = []
        while True:
            tokens = self._tokenize(vocabulary, forged, first)
            names |= {vocabulary.text(token) for token in set(tokens) if vocabulary.is_control(token)}
            found = self._forged(names)
            if found == forged:
                return tokens
            forged = found  # names that overlap with these may come to light next

    def _tokenize(
        self, vocabulary: Vocabulary, forged: Iterable[tuple[int, int]], first: _Tokenizer
    ) -> list[int]:
        """Tokenize these parts without control tokens, and all other text as usual; `first` begins."""
        tokens, end = list[int](), 0
        for start, next_ in [*forged, (len(self), len(self))]:
            for part, is_forged in ((self[end:start], False), (self[start:next_], True)):
                if not end and not is_forged:
                    tokens += first(str(part), parse_special=True)
                elif part.text:
                    tokens += vocabulary.continuation(str(part), parse_special=not is_forged)
            end = next_
        return tokens

    def _forged(self, names: Iterable[bytes]) -> list[tuple[int, int]]:
        """The content that contains a name or a part of one, with the rest of the name.

        All of the content is taken, so that it is tokenized as text usually is. Parts that touch are joined.
        """
        found: list[tuple[int, int]] = []
        for name in filter(None, names):
            start = self.text.find(name)
            while start >= 0:
                end, next_ = start + len(name), start + 1
                if 1 in self.is_content[start:end]:
                    first = self.is_content.rfind(0, 0, self.is_content.index(1, start)) + 1
                    last = self.is_content.find(0, self.is_content.rindex(1, 0, end))
                    last = len(self) if last < 0 else last
                    found.append((min(start, first), max(end, last)))
                    next_ = max(next_, last - len(name) + 1)  # the first that this part does not contain
                start = self.text.find(name, next_)
        joined: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if joined and start <= joined[-1][1]:
                start, end = joined[-1][0], max(end, joined.pop()[1])
            joined.append((start, end))
        return joined
