"""Grammars and JSON schemas as constraints: llguidance computes which tokens may follow."""

import functools
import json
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from spec_local.core.constraint import State
from spec_local.errors import InvalidRequest
from spec_local.grammar import forced_text, gbnf, json_schema, lark
from spec_local.grammar.forced_text import ForcedText
from spec_local.grammar.json_text import JsonPieces, JsonState, JsonText
from spec_local.grammar.lark import RuleSet
from spec_local.system.deep_stack import call_with_stack

_STACK = 256 << 20
"""Stack size in bytes: llguidance recurses along chains of up to 65,000 rules, with 3.3 KB for each."""
_LIMITS = LLParserLimits(step_max_items=20_000_000, step_lexer_fuel=20_000_000, initial_lexer_fuel=5_000_000)
"""Limits of about a second per mask. The defaults are too low for large character sets and vocabularies."""
_FORCING_LIMITS = LLParserLimits(step_max_items=5_000, initial_lexer_fuel=5_000_000)
"""The same for forced text, of up to 2 ms: a grammar may force a text without an end."""
_FEW = 64
"""Up to this number of tokens, checking them one by one is faster than a mask of the whole vocabulary."""
_MAX_TOKEN_BYTES, _MAX_VOCABULARY_BYTES = 1 << 10, 1 << 22
"""Size of a token and sum of all sizes; above, llguidance's prefix tree fails an assertion."""
_NOTHING = "NoExtensionBias"
"""llguidance's error where no token may follow."""
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
# Without this, text that is forced could be tokenized in one way only, and masks would depend on the
# tokenizer.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class GrammarVocabulary(forced_text.TextVocabulary, Protocol):
    """The part of a model's vocabulary that a grammar uses."""

    n_tokens: int

    @property
    def is_end(self) -> Callable[[int], bool]: ...

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]: ...


class Grammar:
    """A grammar or a JSON schema for one vocabulary.

    Tokens without text (control tokens) or of more than 1024 bytes are allowed only where the grammar names
    them (``<...>``). End tokens are allowed where the text is complete.
    """

    def __init__(self, vocabulary: GrammarVocabulary, text: str) -> None:
        self._tables = _tables_of(vocabulary)
        self._forced = ForcedText(
            vocabulary, self._tables.byte_tokens, self._tables.ends, self._tables.usual_layout
        )
        self._json: tuple[JsonPieces, bool] | None = None  # and whether the schema limits names
        self._json_start = JsonText()
        self._matcher, self._forcing = (
            call_with_stack(
                _STACK,
                functools.partial(
                    LLMatcher,
                    self._tables.tokenizer,
                    LLMatcher.grammar_from_lark(_OPTIONS + text),
                    log_level=0,
                    limits=limits,
                ),
            )
            for limits in (_LIMITS, _FORCING_LIMITS)
        )
        if self._matcher.is_error():
            raise gbnf.refusal(_reason(self._matcher.get_error()))

    @classmethod
    def from_gbnf(cls, vocabulary: GrammarVocabulary, text: str) -> "Grammar":
        """Create a grammar from GBNF with a rule ``root``, at most 1 MiB.

        Raises:
            InvalidRequest: it cannot be used; the message gives the reason.
        """
        return cls(vocabulary, gbnf.to_lark(text, functools.partial(_token_id, vocabulary)))

    @classmethod
    def from_json_schema(cls, vocabulary: GrammarVocabulary, schema: str) -> "Grammar":
        """Create a grammar for the JSON that is valid under a schema (see `spec_local.grammar.json_schema`).

        Raises:
            InvalidRequest: the schema cannot be used; the message gives the reason.
        """
        check_json_schema(schema)
        text = json_schema.to_lark(schema)
        grammar = cls(vocabulary, text)
        grammar._json = _tables_of(vocabulary).json, "patternProperties" in text
        return grammar

    @classmethod
    def from_rules(cls, vocabulary: GrammarVocabulary, rules: RuleSet) -> "Grammar":
        """Create a grammar from rules for texts with control tokens and JSON.

        Raises:
            InvalidRequest: it cannot be used; the message gives the reason.
        """
        tokens = [_token_id(vocabulary, name) for name in rules.control]
        # Control tokens have no text; a token with text is one of several ways to write it.
        tokens = [None if token is None or vocabulary.piece(token) else token for token in tokens]
        try:
            grammar = cls(vocabulary, rules.rules + lark.control_rules(rules.control, tokens))
        except InvalidRequest as error:
            raise InvalidRequest(
                f"tools and response format cannot be used together ({error}): give fewer or simpler schemas"
            ) from None
        if rules.has_json:
            grammar._json = _tables_of(vocabulary).json, "patternProperties" in rules.rules
            grammar._json_start = JsonText(is_json=False)
        return grammar

    def start(self) -> State:
        """The state before the first token of an answer."""
        forcing = self._forcing.deep_copy()
        state = GrammarState(self._matcher.deep_copy(), self._tables, self._forced, forcing)
        if self._json is None:
            return state
        pieces, limited_names = self._json
        return JsonState(state, self._json_start, pieces, limited_names=limited_names)


def _token_id(vocabulary: GrammarVocabulary, name: str) -> int | None:
    tokens = vocabulary.tokenize(name, parse_special=True)
    return tokens[0] if len(tokens) == 1 else None


@functools.lru_cache(maxsize=8)
def check_json_schema(schema: str) -> None:
    """Check that a JSON schema can be used, without a model.

    Raises:
        InvalidRequest: it cannot; the message gives the reason.
    """
    text = json_schema.to_lark(schema)
    error = call_with_stack(
        _STACK, lambda: LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(_OPTIONS + text))
    )
    if error:
        raise InvalidRequest(
            f"the JSON schema cannot be used ({_reason(error)}): change it, or validate the output yourself"
        )


@functools.lru_cache(maxsize=256)
def is_pattern(pattern: str) -> bool:
    """Return whether a regular expression for strings is supported: look-around, for example, is not."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not call_with_stack(_STACK, lambda: LLMatcher.validate_grammar(grammar))


class GrammarState:
    """A position in a grammar: a `spec_local.core.constraint.State`.

    All methods raise InvalidRequest if the grammar is so ambiguous that they would take seconds.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tables: "_Tables",
        forced: ForcedText,
        forcing: LLMatcher,
        text: bytes = b"",
    ) -> None:
        self._matcher, self._tables, self._forced, self._text = matcher, tables, forced, text
        self._forcing = forcing  # the same position, with other limits
        self._n_tokens, self._ends = len(tables.pieces), tables.ends
        self._allowed: NDArray[np.bool_] | None = None

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        if not ((tokens >= 0) & (tokens < self._n_tokens)).all():
            raise InvalidRequest("a token is outside the vocabulary: give a token of the model")
        # A matcher that stopped at a complete text rejects all tokens, even the end tokens in its mask.
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
            if not self._matcher.is_accepting():  # sets such as !<[5]> contain the end tokens
                self._allowed[self._ends] = False
        return self._allowed

    def n_allowed(self, tokens: Sequence[int]) -> int:
        matcher = self._matcher.deep_copy()  # candidates that are too ambiguous are no error of the answer
        n = matcher.validate_tokens(list(tokens))
        # A matcher that stopped at a complete text rejects even end tokens.
        return len(tokens) if matcher.is_stopped() or matcher.is_error() else n

    def after(self, token: int) -> "GrammarState | None":
        if token in self._ends or not self.allows(np.array([token]))[0]:
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        forcing = self._forcing.deep_copy()
        forcing.consume_token(token)
        text = self._text + self._tables.pieces[token]
        following = GrammarState(matcher, self._tables, self._forced, forcing, text)
        following._check()
        return following

    def forced(self, n: int) -> Sequence[tuple[int, float]]:
        if self._forcing.is_error():
            return ()
        return self._forced.tokens(self._forcing.deep_copy(), self._text, n)

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        reason = _reason(self._matcher.get_error())
        if reason == _NOTHING:
            raise InvalidRequest(
                "the grammar lets no text follow: a rule refers only to itself, or a set is empty; correct it"
            )
        raise InvalidRequest(f"the grammar is too ambiguous ({reason}): simplify it")


class _Tokens:
    """The tokens of a vocabulary, as llguidance expects them. It tokenizes no text: see `_OPTIONS`."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        pieces = [vocabulary.piece(token) for token in range(vocabulary.n_tokens)]
        self.ends = [token for token in range(len(pieces)) if vocabulary.is_end(token)]
        if not self.ends:
            raise InvalidRequest(
                "the model has no token that ends an answer, which a grammar needs: use another model"
            )
        self.eos_token_id = self.ends[0]
        unusable = [token for token, piece in enumerate(pieces) if not 0 < len(piece) <= _MAX_TOKEN_BYTES]
        self.special_token_ids = unusable + self.ends
        for token in self.special_token_ids:
            pieces[token] = b"<|%d|>" % token
        if sum(map(len, pieces)) >= _MAX_VOCABULARY_BYTES:
            raise InvalidRequest("the model's vocabulary is too large for a grammar: use another model")
        self.tokens = pieces

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class _Tables:
    """The tokenizer data that grammars need; creating it, on first use, takes some tenths of a second."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        tokens = _Tokens(vocabulary)
        self.tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.ends)
        self.pieces, self.ends = tokens.tokens, tokens.ends
        self.usual_layout = forced_text.UsualLayout()
        self.byte_tokens = {piece[0]: token for token, piece in enumerate(self.pieces) if len(piece) == 1}

    @functools.cached_property
    def json(self) -> JsonPieces:
        return JsonPieces(self.pieces)


_tables: "weakref.WeakKeyDictionary[GrammarVocabulary, _Tables]" = weakref.WeakKeyDictionary()


def _tables_of(vocabulary: GrammarVocabulary) -> _Tables:
    if vocabulary not in _tables:
        _tables[vocabulary] = _Tables(vocabulary)
    return _tables[vocabulary]


def _reason(message: str) -> str:
    """The line of an llguidance error that gives the reason, shortened."""
    found = re.search("^error: (.*)", message, re.MULTILINE)  # of a regular expression
    line = found[1] if found else _POSITION.sub("", message.strip().partition("\n")[0])
    line = gbnf.escaped(line)
    return line if len(line) < 160 else line[:157] + "..."
