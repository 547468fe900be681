"""A draft of another vocabulary, made to look like a model of main's.

Token-level intersection (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", algorithm 4): tokens of both vocabularies that stand for the same bytes are one token, and
the draft guesses these only. Its distribution, so restricted, is a distribution over main's tokens like any other, so
that every acceptance rule stays exact; nothing above this module knows of it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import LanguageModel, Logits
from spec_local.errors import InvalidRequest, VocabularyMismatch

_TURN_STARTS = (b"<|im_start|>", b"<start_of_turn>", b"<|start_header_id|>", b"<|turn>", b"[INST]")


class Spelling(Protocol):
    """What is to be known of a vocabulary: see `spec_local.llama.vocabulary.Vocabulary`."""

    n_tokens: int
    bos: int
    eos: int
    eot: int
    add_bos: bool

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none of control tokens."""

    def text(self, token: int) -> bytes:
        """The name of a token."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text; lone surrogates stand for bytes that are no UTF-8."""


class VocabularyMap:
    """Which of main's tokens the draft can guess, and how it reads all of them.

    Attributes:
        mains, drafts: intp (n,), ids of the shared tokens in both vocabularies, ascending in main's.

    Raises:
        VocabularyMismatch: no token is shared.
    """

    def __init__(self, main: Spelling, draft: Spelling) -> None:
        self._main, self._draft = main, draft
        ours, theirs = _Names(main), _Names(draft)
        self._bytes = [theirs.texts.get(bytes([byte])) for byte in range(256)]
        shared = dict(_by_role(ours, theirs))
        shared |= {
            ours.texts[piece]: theirs.texts[piece] for piece in ours.texts.keys() & theirs.texts.keys()
        }
        if not shared:
            raise VocabularyMismatch(
                "main and draft have no token in common: give another draft, or none (prompt lookup works with every model)"
            )
        self.mains: NDArray[np.intp] = np.array(sorted(shared), np.intp)
        self.drafts: NDArray[np.intp] = np.array([shared[token] for token in sorted(shared)], np.intp)
        self._mains_of = dict(zip(self.drafts.tolist(), self.mains.tolist(), strict=True))
        self._read: dict[int, tuple[int, ...]] = {token: (other,) for token, other in shared.items()}

    @property
    def share(self) -> float:
        """Of main's tokens, those that the draft can guess."""
        return len(self.mains) / self._main.n_tokens

    def read(self, token: int, is_first: bool = False) -> tuple[int, ...]:
        """A token of main's as the draft reads it: one or more of its own.

        Args:
            is_first: it begins the text, where the draft may want a token of its own.
        """
        found = self._read.get(token)
        if found is None:
            # Piece by piece, and not as the draft would spell the whole text: so what was read once stays as it is.
            found = self._read[token] = self._spell(self._main.piece(token) or self._main.text(token)) or (0,)
        if is_first and self._draft.add_bos and found[0] != self._draft.bos:
            return (self._draft.bos, *found)
        return found

    def _spell(self, piece: bytes) -> tuple[int, ...]:
        """A piece of main's in the draft's tokens."""
        try:
            return tuple(self._draft.tokenize(piece.decode()))
        except UnicodeDecodeError:  # a part of a character: a tokenizer may put U+FFFD in its place
            singles = tuple(token for byte in piece if (token := self._bytes[byte]) is not None)
            if len(singles) == len(piece):
                return singles
            return tuple(self._draft.tokenize(piece.decode("utf-8", "surrogateescape")))

    def respell(self, before: Sequence[int], said: Sequence[int]) -> list[int]:
        """What the draft said, in main's tokens.

        Args:
            before: the end of the text, in main's tokens: a word that they begin is spelled as a whole.
            said: the draft's tokens.
        """
        spelled = list(said)
        end = self._mains_of.get(spelled[-1], -1) if spelled and not self._draft.piece(spelled[-1]) else -1
        text = b"".join(map(self._draft.piece, spelled))
        controls = [i for i, token in enumerate(before) if not self._main.piece(token)]
        known = b"".join(map(self._main.piece, before[controls[-1] + 1 if controls else 0 :]))
        tokens = self._after(known, text)
        if tokens is None:
            tokens = self._after(b"", text) or []
        return tokens if end < 0 else [*tokens, end]

    def _after(self, known: bytes, text: bytes) -> list[int] | None:
        """Main's tokens of a text, as they would follow what is known; None: they would begin within it."""
        if not text:
            return []
        tokens = self._main.tokenize((known + text).decode("utf-8", "surrogateescape"))
        left = len(text)
        for i in range(len(tokens) - 1, -1, -1):
            left -= len(self._main.piece(tokens[i]))
            if left <= 0:
                return tokens[i:] if left == 0 else None
        return None


class _Names:
    """A vocabulary the other way round.

    Attributes:
        texts: tokens by their bytes; of equal ones the last: SentencePiece lists single bytes before the characters
            that they are.
        controls: those that stand for no bytes, by their names.
    """

    def __init__(self, vocabulary: Spelling) -> None:
        self.vocabulary = vocabulary
        self.texts = {vocabulary.piece(token): token for token in range(vocabulary.n_tokens)}
        self.texts.pop(b"", None)
        nameless = set(range(vocabulary.n_tokens)) - set(self.texts.values())
        self.controls = {vocabulary.text(t): t for t in nameless if not vocabulary.piece(t)}


def _by_role(main: _Names, draft: _Names) -> Iterable[tuple[int, int]]:
    """Control tokens: those of one name, and those that begin and end a text or a turn."""
    ours, theirs = main.vocabulary, draft.vocabulary
    starts = [next((v.controls[n] for n in _TURN_STARTS if n in v.controls), -1) for v in (main, draft)]
    end_of_turn = theirs.eot if theirs.eot >= 0 else theirs.eos
    roles = [(ours.eos, theirs.eos), (ours.bos, theirs.bos), (ours.eot, end_of_turn)]
    yield from ((a, b) for a, b in [(starts[0], starts[1]), *roles] if a >= 0 and b >= 0)
    yield from ((main.controls[n], draft.controls[n]) for n in main.controls.keys() & draft.controls.keys())


class IntersectionModel:
    """A `LanguageModel` of main's vocabulary, which a draft of another one computes.

    Args:
        model: the draft; others may roll its text back, but not add to it.
        translation: between the vocabularies of main and of this draft.
        n_vocab: columns of main's logits.
    """

    def __init__(self, model: LanguageModel, translation: VocabularyMap, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._model, self._translation = model, translation
        self._text: list[int] = []
        self._ends: list[int] = []  # of each token of the text: how many tokens the draft has read with it
        self._nodes: list[
            tuple[int, list[int]]
        ] = []  # of the tree: the token, and the draft's nodes that it is
        self._logits: Logits = np.full((model.max_logits, n_vocab), -np.inf, np.float32)

    @property
    def n_ctx(self) -> int:
        """As if the draft read every token to come as one: `evaluate` raises where it has no room."""
        used = self._ends[-1] if self.cached else 0
        return self._model.n_ctx - used + len(self._text)

    @property
    def max_tokens(self) -> int:
        return self._model.max_tokens

    @property
    def max_logits(self) -> int:
        return self._model.max_logits

    @property
    def max_branches(self) -> int:
        return self._model.max_branches

    @property
    def cached(self) -> Sequence[int]:
        n_read = len(self._model.cached)
        while self._ends and self._ends[-1] > n_read:
            self._ends.pop()
            self._text.pop()
        return self._text

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        known = len(self.cached)
        self._model.truncate(self._ends[-1] if known else 0)
        n_read = len(self._model.cached)
        spelled: list[int] = []
        ends: list[int] = []
        for i, token in enumerate(tokens):
            spelled += self._translation.read(token, known + i == 0)
            ends.append(n_read + len(spelled))
        self._nodes = []
        wanted = [end - n_read - 1 for end in ends[len(ends) - n_logits :]]
        size = self.max_tokens if n_logits < 2 else min(self.max_tokens, self.max_logits)
        for start in range(0, len(spelled), size):
            chunk = spelled[start : start + size]
            rows = [(row, i - start) for row, i in enumerate(wanted) if start <= i < start + len(chunk)]
            first = rows[0][1] if rows else len(chunk)
            logits = self._model.evaluate(chunk, len(chunk) - first)
            for row, i in rows:
                self._translate(logits[i - first], row)
        self._text += tokens
        self._ends += ends
        return self._logits[:n_logits]

    def decode_tree(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        n_logits = len(tokens) if n_logits is None else n_logits
        n_before = sum(len(nodes) for _, nodes in self._nodes)
        spelled: list[int] = []
        above: list[int] = []
        grown = list(self._nodes)
        for token, parent in zip(tokens, parents, strict=True):
            if not -1 <= parent < len(grown):
                raise InvalidRequest(f"node {len(grown)} has parent {parent}: give -1 to {len(grown) - 1}")
            own = self._translation.read(token)
            nodes = [n_before + len(spelled) + i for i in range(len(own))]
            above += [grown[parent][1][-1] if parent >= 0 else -1, *nodes[:-1]]
            spelled += own
            grown.append((token, nodes))
        logits = self._model.decode_tree(spelled, above)
        for row, (_, nodes) in enumerate(grown[len(grown) - n_logits :]):
            self._translate(logits[nodes[-1] - n_before], row)
        self._nodes = grown
        return self._logits[:n_logits]

    def recall(self, text: Sequence[int]) -> None:
        """Know of a text, in main's tokens, as far as the model holds it already."""
        held, end = self._model.cached, 0
        self._text, self._ends, self._nodes = [], [], []
        for token in text:
            spelled = self._translation.read(token, not self._text)
            if tuple(held[end : end + len(spelled)]) != spelled:
                break
            end += len(spelled)
            self._text.append(token)
            self._ends.append(end)

    def commit(self, path: Sequence[int]) -> None:
        end = self._ends[-1] if self.cached else 0
        self._model.commit([node for step in path for node in self._nodes[step][1]])
        for step in path:
            token, nodes = self._nodes[step]
            end += len(nodes)
            self._text.append(token)
            self._ends.append(end)
        self._nodes = []

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.cached):
            raise InvalidRequest(f"cannot trim {len(self._text)} tokens to {length}")
        self._model.truncate(self._ends[length - 1] if length else 0)
        del self._text[length:], self._ends[length:]
        self._nodes = []

    def _translate(self, logits: NDArray[np.float32], row: int) -> None:
        self._logits[row, self._translation.mains] = logits[self._translation.drafts]
