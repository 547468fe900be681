"""DRY's sequence breakers as tokens of a vocabulary."""

import re
from collections.abc import Sequence

from spec_local.core.dry import Breakers
from spec_local.llama.vocabulary import Vocabulary
from spec_local.text import bytes_of


def breaker_tokens(vocabulary: Vocabulary, texts: Sequence[str]) -> Breakers:
    """The tokens in which a breaker begins, each with those that must follow to complete it.

    As in llama.cpp. Nothing must follow a token that contains a breaker, and most breakers are one character.
    The first call takes a second for a large vocabulary, whose texts are then known.
    """
    pieces = [vocabulary.piece(token, special=True) for token in range(vocabulary.n_tokens)]
    found: dict[int, set[tuple[int, ...]]] = {}
    for breaker in filter(None, map(bytes_of, texts)):
        beginnings = [breaker[:n] for n in range(1, len(breaker))]
        patterns = [re.escape(breaker), *(re.escape(each) + rb"\Z" for each in beginnings)]
        begins_in = re.compile(b"|".join(patterns)).search
        rest = {each: _tokens(vocabulary, breaker.removeprefix(each)) for each in beginnings}
        for token, piece in enumerate(pieces):
            if begins_in(piece):
                tails = [()] if breaker in piece else [rest[b] for b in beginnings if piece.endswith(b)]
                found.setdefault(token, set()).update(tails)
    return {token: sorted(each) for token, each in found.items()}


def _tokens(vocabulary: Vocabulary, text: bytes) -> tuple[int, ...]:
    return tuple(vocabulary.tokenize(text.decode("utf-8", "surrogateescape")))
