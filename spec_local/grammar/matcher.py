"""Grammars and JSON schemas as constraints: llguidance computes which tokens of a vocabulary may follow."""

import functools
import re
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from spec_local.deep_stack import call_with_stack
from spec_local.errors import InvalidRequest
from spec_local.grammar import gbnf, json_schema

_STACK = 256 << 20
"""Bytes: llguidance recurses along chains of rules, 3.3 KB for each of at most 65,000."""
_LIMITS = LLParserLimits(step_max_items=20_000_000, step_lexer_fuel=20_000_000)
"""About a second for a mask. The defaults stop where large sets of characters meet a large vocabulary."""
_FEW = 64
"""Up to this many tokens are quicker to check one by one than with a mask of the whole vocabulary."""
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
# Without this, a text that is forced may be spelled in one way only, and masks depend on the tokenizer.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class Vocabulary(Protocol):
    """What a grammar needs of a model's vocabulary."""

    n_tokens: int

    @property
    def is_end(self) -> Callable[[int], bool]: ...

    def piece(self, token: int) -> bytes: ...

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]: ...


class Grammar:
    """A grammar or a JSON schema for one vocabulary.

    Tokens without text (control tokens) are not allowed, unless the grammar names them (``<...>``).
    End tokens are allowed where the text is complete.
    """

    def __init__(self, vocabulary: Vocabulary, lark: str) -> None:
        tokenizer = _tokenizer(vocabulary)
        self._n_tokens, self._ends = vocabulary.n_tokens, tokenizer.eos_tokens
        self._matcher = call_with_stack(
            _STACK,
            lambda: LLMatcher(
                tokenizer, LLMatcher.grammar_from_lark(_OPTIONS + lark), log_level=0, limits=_LIMITS
            ),
        )
        if self._matcher.is_error():
            raise gbnf.refusal(_reason(self._matcher.get_error()))

    @classmethod
    def from_gbnf(cls, vocabulary: Vocabulary, text: str) -> "Grammar":
        """A grammar in GBNF, with a rule ``root``; at most 1 MiB.

        Raises:
            InvalidRequest: it cannot be used; the message gives the reason.
        """

        def token_id(spelling: str) -> int | None:
            tokens = vocabulary.tokenize(spelling, parse_special=True)
            return tokens[0] if len(tokens) == 1 else None

        return cls(vocabulary, gbnf.to_lark(text, token_id))

    @classmethod
    def from_json_schema(cls, vocabulary: Vocabulary, schema: str) -> "Grammar":
        """The JSON that is valid under a schema, itself given as JSON (see `spec_local.grammar.json_schema`).

        Raises:
            InvalidRequest: the schema cannot be used; the message gives the reason.
        """
        check_json_schema(schema)
        return cls(vocabulary, json_schema.to_lark(schema))

    def start(self) -> "GrammarState":
        """What an answer may begin with."""
        return GrammarState(self._matcher.deep_copy(), self._n_tokens, self._ends)


@functools.lru_cache(maxsize=8)
def check_json_schema(schema: str) -> None:
    """Make sure that a schema can be used, without a model.

    Raises:
        InvalidRequest: it cannot; the message gives the reason.
    """
    lark = json_schema.to_lark(schema)
    error = call_with_stack(
        _STACK, lambda: LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(_OPTIONS + lark))
    )
    if error:
        raise InvalidRequest(
            f"the JSON schema cannot be used ({_reason(error)}): change it, or validate the output yourself"
        )


class GrammarState:
    """A position in a grammar: a `spec_local.core.constraint.State`.

    Every method raises InvalidRequest where the grammar is so ambiguous that it would take seconds.
    """

    def __init__(self, matcher: LLMatcher, n_tokens: int, ends: list[int]) -> None:
        self._matcher, self._n_tokens, self._ends = matcher, n_tokens, ends
        self._allowed: NDArray[np.bool_] | None = None

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        if not ((tokens >= 0) & (tokens < self._n_tokens)).all():
            raise InvalidRequest("a token is outside of the vocabulary: give one of the model's")
        # A matcher that stopped at a complete text validates no token, not even the end tokens in its mask.
        if self._allowed is None and len(tokens) <= _FEW and not self._matcher.is_stopped():
            found = np.array([self._matcher.validate_tokens([token]) for token in tokens.tolist()], bool)
            self._check()
            return found
        return self.allowed()[tokens]

    def allowed(self) -> NDArray[np.bool_]:
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            self._allowed = np.unpackbits(bits, count=self._n_tokens, bitorder="little").view(np.bool_)
            if not self._matcher.is_accepting():  # a set like !<[5]> contains the end tokens
                self._allowed[self._ends] = False
        return self._allowed

    def after(self, token: int) -> "GrammarState | None":
        if token in self._ends or not self.allows(np.array([token]))[0]:
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        following = GrammarState(matcher, self._n_tokens, self._ends)
        following._check()
        return following

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar is too ambiguous ({_reason(self._matcher.get_error())}): simplify it"
            )


class _Tokens:
    """The tokens of a vocabulary as llguidance reads them; it never tokenizes, as nothing is forced."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = [vocabulary.piece(token) for token in range(vocabulary.n_tokens)]
        self.ends = [token for token in range(len(pieces)) if vocabulary.is_end(token)]
        self.eos_token_id = self.ends[0]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.special_token_ids += self.ends
        for token in self.special_token_ids:
            pieces[token] = b"<|%d|>" % token
        self.tokens = pieces

    def __call__(self, text: bytes | str) -> list[int]:
        return []


_tokenizers: "weakref.WeakKeyDictionary[Vocabulary, LLTokenizer]" = weakref.WeakKeyDictionary()


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Made at the first use of a vocabulary, which takes some tenths of a second."""
    if vocabulary not in _tokenizers:
        tokens = _Tokens(vocabulary)
        _tokenizers[vocabulary] = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.ends)
    return _tokenizers[vocabulary]


def _reason(message: str) -> str:
    """The line of an error of llguidance that gives the reason, shortened."""
    found = re.search("^error: (.*)", message, re.MULTILINE)  # of a regular expression
    line = found[1] if found else _POSITION.sub("", message.strip().partition("\n")[0])
    return line if len(line) < 160 else line[:157] + "..."
