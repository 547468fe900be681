"""llama.cpp's grammars as constraints: a text in GBNF decides which tokens of a vocabulary may follow.

llama.cpp answers a token that a grammar does not allow with an exception that nobody can catch: so a token is asked about
before it is taken. Some grammars it answers with a crash, or never: see `spec_local.llama.grammar_probe`.
"""

import contextlib
import ctypes
import re
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary

_MAX_BYTES = 1 << 20
_PATIENCE = 2.0
"""Seconds of processor time that a question may take. Of an ambiguous grammar each token may take twice the time of the one before."""
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_TERMINALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_NOT_ASCII = re.compile(r"[^\x00-\x7F]|\\[uU]|\\x[89a-fA-F]")
AMBIGUOUS = (
    "the grammar takes llama.cpp too long: see that it cannot read one text in ever more ways, or simplify it"
)


class Grammar:
    """A GBNF grammar, for one model's vocabulary.

    Tokens that stand for no text (control tokens) may not follow, unless the grammar names tokens (``<...>``). An end token
    may follow where the text is complete.

    Args:
        text: GBNF, with a rule ``root``; at most 1 MiB. One that nobody has tried may end the process: see `check_grammar`.

    Raises:
        InvalidRequest: it is no grammar; the message says why.
    """

    def __init__(self, model: Model, text: str) -> None:
        raw = encoded(text)
        self._lib = lib = runtime.library()
        self._model = model  # whose vocabulary llama.cpp keeps a bare pointer to
        runtime.clear_log()
        self._handle = lib.llama_sampler_init_grammar(lib.llama_model_get_vocab(model.handle), raw, b"root")
        if not self._handle:
            raise InvalidRequest(refusal(runtime.failure_reason()))
        weakref.finalize(self, lib.llama_sampler_free, self._handle)
        # Of a part of a character llama.cpp says no wherever it might become one that is excluded.
        cuts = not any(_NOT_ASCII.search(t) for t in _TERMINALS.findall(text) if t.startswith("[^"))
        self._words = _Words.of(model.vocabulary, cuts)
        self._names_tokens = any(sign in _TERMINALS.sub("", text) for sign in "<!")

    def check_open(self) -> None:
        """llama.cpp reads the model's vocabulary at each question."""
        self._model.check_open()

    def start(self) -> "GrammarState":
        """What an answer may begin with."""
        self.check_open()
        return GrammarState(self, self._lib.llama_sampler_clone(self._handle))


class GrammarState:
    """Where in a grammar a text has got to: a `spec_local.core.constraint.State`.

    Raises, whatever it is asked: InvalidRequest, where the grammar is so ambiguous that it takes seconds.
    """

    def __init__(self, grammar: Grammar, handle: Any) -> None:
        self._grammar, self._handle = grammar, handle
        self._allowed: NDArray[np.bool_] | None = None
        weakref.finalize(self, grammar._lib.llama_sampler_free, handle)

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        self._grammar.check_open()
        words, lib = self._grammar._words, self._grammar._lib
        known = (tokens >= 0) & (tokens < len(words.has_text))  # another one would end the process
        if not known.all():
            raise InvalidRequest("a token is outside of the vocabulary: give one of the model's")
        data = np.zeros(len(tokens), _TOKEN_DATA)
        data["id"] = tokens
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(lib.llama_token_data))
        array = lib.llama_token_data_array(pointer, len(tokens), -1, False)
        with _hurried():
            lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        possible: NDArray[np.bool_] = data["logit"] == 0
        if not self._grammar._names_tokens:
            possible &= words.has_text[tokens]
        return possible

    def allowed(self) -> NDArray[np.bool_]:
        if self._allowed is None:
            words = self._grammar._words
            if self._grammar._names_tokens:  # what may follow is no matter of text alone
                self._allowed = self.allows(np.arange(len(words.has_text)))
            else:
                self._allowed = words.search(self.allows)
        return self._allowed

    def after(self, token: int) -> "GrammarState | None":
        vocabulary, lib = self._grammar._model.vocabulary, self._grammar._lib
        if vocabulary.is_end(token) or not self.allows(np.array([token]))[0]:
            return None
        handle = lib.llama_sampler_clone(self._handle)  # the model is open, or `allows` had said so
        following = GrammarState(self._grammar, handle)
        with _hurried():
            lib.llama_sampler_accept(handle, token)
        return following


class _Words:
    """The tokens of a vocabulary, each under the longest one that it begins with: where that may not follow, it may not.

    So a question about all tokens becomes one about some hundreds, wherever few are allowed.

    Args:
        cuts: tokens that end in the midst of a character may have others under them.

    Attributes:
        ends: intp (n,), tokens that end an answer.
        has_text: bool (V,), whether a token stands for text, or for an end.
    """

    def __init__(self, vocabulary: Vocabulary, cuts: bool) -> None:
        every = range(vocabulary.n_tokens)
        pieces = [vocabulary.piece(token) for token in every]
        self.ends = np.array([token for token in every if vocabulary.is_end(token)], np.intp)
        self.has_text = np.array([bool(piece) for piece in pieces])
        self._above = np.zeros(len(pieces), np.intp)
        levels: list[list[int]] = [[]]
        above: list[int] = []
        spoken = (token for token in every if pieces[token] and not vocabulary.is_end(token))
        for token in sorted(spoken, key=pieces.__getitem__):
            while above and not pieces[token].startswith(pieces[above[-1]]):
                above.pop()
            if above:
                self._above[token] = above[-1]
            if len(above) == len(levels):
                levels.append([])
            levels[len(above)].append(token)
            if cuts or _is_whole(pieces[token]):
                above.append(token)
        self.has_text[self.ends] = True
        self._levels = [np.sort(level) for level in levels]  # as they lie in memory

    @classmethod
    def of(cls, vocabulary: Vocabulary, cuts: bool) -> "_Words":
        """Made at a vocabulary's first use, which takes some tenths of a second."""
        known = _words.setdefault(vocabulary, {})
        if cuts not in known:
            known[cuts] = cls(vocabulary, cuts)
        return known[cuts]

    def search(self, allows: Callable[[NDArray[np.intp]], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """bool (V,), whether a token is allowed, where no more are asked about than need be."""
        found = np.zeros(len(self.has_text), bool)
        found[self.ends] = allows(self.ends)
        for depth, level in enumerate(self._levels):
            asked = level[found[self._above[level]]] if depth else level
            if not len(asked):
                break
            found[asked] = allows(asked)
        return found


_words: "weakref.WeakKeyDictionary[Vocabulary, dict[bool, _Words]]" = weakref.WeakKeyDictionary()


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def _hurried() -> Iterator[None]:
    started = time.thread_time()  # a machine that does something else is no fault of the grammar's
    yield
    if time.thread_time() - started > _PATIENCE:
        raise InvalidRequest(AMBIGUOUS)


def encoded(text: str) -> bytes:
    """A grammar as llama.cpp reads it.

    Raises:
        InvalidRequest: it cannot be one.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the grammar is not UTF-8: convert it first, for instance with iconv") from None
    if not text.strip():  # llama.cpp would take it for no grammar at all
        raise InvalidRequest("the grammar is empty: give rules, the first of them root ::= ...")
    if b"\0" in raw:
        raise InvalidRequest("the grammar holds a NUL byte: give a text in GBNF")
    if len(raw) > _MAX_BYTES:
        raise InvalidRequest(f"the grammar has {len(raw)} bytes: give at most {_MAX_BYTES}")
    return raw


def refusal(why: str) -> str:
    """What to tell of a grammar that llama.cpp refuses, from its own words."""
    why = " ".join(why.split())
    return f"the grammar cannot be used ({why if len(why) < 120 else why[:117] + '...'}): see llama.cpp's grammars/README.md"
