"""A model's tokenizer: text to token ids and back."""

import ctypes
import functools
import hashlib
import itertools
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama.native_object import NativeObject, Pointer
from spec_local.llama.runtime import suppressed_tokens
from spec_local.system.cancellation import check_wanted
from spec_local.system.deep_stack import call_with_stack
from spec_local.text import bytes_of

# llama.cpp counts bytes in int32, and its tokenizer needs many times the size of the text.
_MAX_TEXT_BYTES = 1 << 24
# Some of llama.cpp's pre-tokenizers are recursive regular expressions. A long run of one kind of
# character overflows a stack of normal size, which crashes the process. They need up to 400 bytes
# of stack per character (measured with the tokenizer of deepseek-llm: 512 MiB suffice for 1.5
# million characters).
_LONG_TEXT_BYTES, _MIN_STACK, _STACK_PER_BYTE = 4096, 64 << 20, 512
_RARELY_LONGER = 8  # bytes of a token on average: those of usual texts have 3 to 5
_PART_BYTES, _SEAM = 1 << 15, 16
_USUALLY_LONGEST = 32  # bytes of a token: most vocabularies have longer ones, of white space
_PieceBuffer = ctypes.c_char * 64  # enough for nearly all tokens
_MARKER = re.compile(rb"<\|[^<>|\s]{1,64}\|>")  # what the names of tokens that mark turns look like
_SPACE = "▁".encode()  # what a tokenizer of SentencePiece takes for a space
_ALL_BYTES = bytes(range(256)).decode("utf-8", "surrogateescape")


class Vocabulary:
    """The vocabulary of a model. It keeps the weights in memory until the model is closed.

    Any number of threads may use it at the same time.
    """

    def __init__(self, lib: Any, handle: int, weights: NativeObject) -> None:
        self._lib, self._address, self._weights = lib, handle, weights
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.n_tokens: int = lib.llama_vocab_n_tokens(handle)
        self.type: int = lib.llama_vocab_type(handle)
        self.bos: int = lib.llama_vocab_bos(handle)
        self.eos: int = lib.llama_vocab_eos(handle)
        self.eot: int = lib.llama_vocab_eot(handle)
        self.mask: int = lib.llama_vocab_mask(handle)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(handle)
        self.add_eos: bool = lib.llama_vocab_get_add_eos(handle)

    @property
    def _handle(self) -> Pointer:
        return self._weights.inner(self._address)

    @functools.cached_property
    def is_end(self) -> Callable[[int], bool]:
        """True if a token ends the answer (end of sequence, of turn, of message)."""
        # Without `self`: a reference cycle would keep the weights until the garbage collector runs.
        is_eog, address, weights = self._lib.llama_vocab_is_eog, self._address, self._weights

        @functools.cache
        def is_end(token: int) -> bool:
            return bool(is_eog(weights.inner(address), token))

        return is_end

    def control(self, name: str) -> list[int]:
        """The control token with this name; an empty list if there is none."""
        tokens = self.tokenize(name, parse_special=True)
        return tokens if len(tokens) == 1 and self.is_control(tokens[0]) else []

    def is_control(self, token: int) -> bool:
        """Return whether `tokenize` returns a token for its name with `parse_special` only."""
        hidden = self._lib.LLAMA_TOKEN_ATTR_CONTROL | self._lib.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(self._lib.llama_vocab_get_attr(self._handle, token) & hidden) or self._is_marker(token)

    def _is_marker(self, token: int) -> bool:
        """Return whether a token that llama.cpp finds in any text marks turns, as gpt-oss's ``<|start|>``."""
        user_defined = self._lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        is_found = self._lib.llama_vocab_get_attr(self._handle, token) & user_defined
        return bool(is_found and _MARKER.fullmatch(self.text(token)))

    @property
    def can_tokenize(self) -> bool:
        """True if llama.cpp's tokenizer ends on every text.

        That of RWKV starts again, without end, after the beginning of a token that is not itself a token.
        """
        if self.type != self._lib.LLAMA_VOCAB_TYPE_RWKV:
            return True
        pieces = {self.piece(token, special=True) for token in range(self.n_tokens)}
        return all(piece[:1] in pieces for piece in pieces if piece)

    def exercise(self) -> None:
        """Read all tokens and tokenize all bytes: llama.cpp crashes on texts that need a damaged one."""
        tokens = (ctypes.c_int32 * self.n_tokens)(*range(self.n_tokens))
        buffer = ctypes.create_string_buffer(1)  # llama.cpp reads the tokens that do not fit, too
        self._lib.llama_detokenize(self._handle, tokens, self.n_tokens, buffer, len(buffer), False, False)
        for text in ("A line of text,\n  12 + 34 = 46.\tNaïve 東京 🙂", _ALL_BYTES):
            self.tokenize(text, add_special=True, parse_special=True)

    @functools.cached_property
    def fill_in(self) -> tuple[int, int, int] | None:
        """The fill-in-the-middle tokens (prefix, suffix, middle), or None."""
        kinds = ("pre", "suf", "mid")
        pre, suf, mid = (getattr(self._lib, f"llama_vocab_fim_{kind}")(self._handle) for kind in kinds)
        return (pre, suf, mid) if min(pre, suf, mid) >= 0 else None

    @property
    def repository(self) -> int | None:
        """The token before the name of a repository whose files follow, for gaps in code; None: none."""
        return _or_none(self._lib.llama_vocab_fim_rep(self._handle))

    @property
    def file_separator(self) -> int | None:
        """The token before each of these files; None: none."""
        return _or_none(self._lib.llama_vocab_fim_sep(self._handle))

    @functools.cached_property
    def suppressed(self) -> Sequence[int]:
        """Tokens that the file forbids in answers; llama.cpp's samplers never choose them."""
        n, function = ctypes.c_int32(), suppressed_tokens()
        tokens = function(self._handle, ctypes.byref(n)) if function else None
        return [token for token in tokens[: n.value] if 0 <= token < self.n_tokens] if tokens else []

    @functools.cached_property
    def ends(self) -> Sequence[int]:
        """All tokens that end an answer."""
        return [token for token in range(self.n_tokens) if self.is_end(token)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every 61st token, except special ones: 32 hexadecimal digits.

        It is the same for all sizes, quantizations and fine-tunes of a model family.
        """
        lib = self._lib
        special = (
            lib.LLAMA_TOKEN_ATTR_UNKNOWN
            | lib.LLAMA_TOKEN_ATTR_UNUSED
            | lib.LLAMA_TOKEN_ATTR_CONTROL
            | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        )
        digest = hashlib.sha256()
        for token in range(0, self.n_tokens, 61):
            if not lib.llama_vocab_get_attr(self._handle, token) & special:
                digest.update(b"%d %b\n" % (token, self.text(token)))
        return digest.hexdigest()[:32]

    def check_length(self, text: bytes, n_ctx: int | None) -> None:
        """Raise ContextOverflow for a text that certainly has more tokens than a context; None: no context.

        To tokenize a text takes up to 5 s for each MB, in which nothing can interrupt it. Of a text that is
        much too long, only a part is tokenized here.
        """
        if n_ctx is None or len(text) <= max(n_ctx * _RARELY_LONGER, _LONG_TEXT_BYTES):
            return
        longest, left_out = self._coverage
        if not longest:
            return
        n = 0
        if len(text) > n_ctx * _USUALLY_LONGEST:
            n = len(text.replace(_SPACE, b" ").translate(None, left_out)) // longest
        n_parts = 0  # tokens of parts: the whole text may have fewer, where two parts meet
        for start in range(0, len(text), _PART_BYTES):
            if n > n_ctx or n_parts > 2 * n_ctx:
                n = max(n, n_parts // 2)
                raise ContextOverflow(
                    f"the prompt has more than {n} tokens but the context has {n_ctx}: shorten it, or use a "
                    "longer context",
                    n,
                    n_ctx,
                    is_exact=False,
                )
            part = text[start : start + _PART_BYTES].decode("utf-8", "surrogateescape")
            n_parts += max(0, len(self.tokenize(part, parse_special=True)) - _SEAM)

    @functools.cached_property
    def _coverage(self) -> tuple[int | None, bytes]:
        """How many bytes of a text one token has at most (None: unknown), and which bytes may be in no token.

        It takes a second for a large vocabulary. Other tokenizers than these make one token of any unknown
        word, or leave out white space anywhere.
        """
        lib, handle = self._lib, self._handle
        if self.type not in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE, lib.LLAMA_VOCAB_TYPE_RWKV):
            return None, b""
        longest, strips, known = 0, 0, set[int]()
        for token in range(self.n_tokens):
            piece = self._piece(token, True) or self.text(token)
            longest = max(longest, len(piece))
            if len(piece) == 1:
                known.add(piece[0])
            strips |= lib.llama_vocab_get_attr(handle, token)
        if strips & (lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP):  # white space beside it
            known.difference_update(string.whitespace.encode())
        is_whole = known.issuperset("\ufffd".encode())  # in place of what is not UTF-8
        return longest if is_whole else None, bytes(byte for byte in range(256) if byte not in known)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: bytes that are not UTF-8 are written as lone surrogates.
            add_special: add the beginning-of-sequence token if the model uses one; never an end token.
            parse_special: tokenize the names of control tokens, such as ``<|im_end|>``, as these tokens.

        Raises:
            InvalidRequest: the text is longer than 16 MiB, or contains surrogates that stand for no byte.
            BackendError: there is not enough memory, or the tokenizer failed.
        """
        raw = bytes_of(text)
        if len(raw) > _MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"a text of {len(raw)} bytes is too long to tokenize: give at most {_MAX_TEXT_BYTES}"
            )
        if len(raw) < _LONG_TEXT_BYTES:
            return self._tokenize(raw, add_special, parse_special)
        stack = max(_MIN_STACK, len(raw) * _STACK_PER_BYTE)
        return call_with_stack(stack, lambda: self._tokenize(raw, add_special, parse_special))

    def _tokenize(self, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special or not (cuts := self._cuts(raw)):
            return self._tokens(raw, add_special, parse_special)
        first, *rest = (raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(raw)]))
        tokens = self._tokens(first, add_special, parse_special=False)
        for part in rest:
            tokens += self.continuation(part.decode("utf-8", "surrogateescape"), parse_special=False)
        return tokens

    def _cuts(self, raw: bytes) -> list[int]:
        """Places within the names of markers: of a text that is divided there, they become no tokens."""
        names = {match[0] for match in _MARKER.finditer(raw)}
        markers = {name for name in names if any(map(self._is_marker, self._tokens(name, False, True)))}
        return [match.start() + 1 for match in _MARKER.finditer(raw) if match[0] in markers]

    def _tokens(self, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
        # Usually at most one token per byte, plus special ones. A byte that is not UTF-8 can become the three
        # of U+FFFD; llama.cpp then returns -n, where n is the number of tokens needed.
        n = -(len(raw) + 8)
        for _ in range(2):
            check_wanted()
            tokens = (ctypes.c_int32 * -n)()
            n = self._lib.llama_tokenize(
                self._handle, raw, len(raw), tokens, len(tokens), add_special, parse_special
            )
            if n >= 0:
                # Some files ask for the end token, too: the model would go on after the end of a text.
                has_end = add_special and self.add_eos and tokens[n - 1 : n] == [self.eos]
                return tokens[: n - has_end]
        raise BackendError("the tokenizer failed on this text: please report it with the model's name")

    def continuation(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text that continues another one: see `tokenize`.

        Some tokenizers add a space before every text, which must not be part of a continuation.
        """
        tokens, own = self.tokenize(text, parse_special=parse_special), _indent(bytes_of(text))
        if _indent(self._spelled(tokens)) <= own:
            return tokens
        for start in (b"\n", b".", b"a"):  # at least one of them is not merged with the text
            whole = self.tokenize(start.decode() + text, parse_special=parse_special)
            n = next((n for n in range(1, 5) if self._spelled(whole[:n]).lstrip(b" ") == start), None)
            if n is not None:
                return whole[n:]
        return tokens

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens, including the names of special tokens."""
        return b"".join(self.piece(token, special=True) for token in tokens)

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token, which may be part of a UTF-8 character.

        Args:
            token: an id of this vocabulary.
            special: return the names of control tokens; otherwise they are empty.
        """
        known = self._pieces.get((token, special))
        if known is not None:
            return known
        piece = self._pieces[token, special] = self._piece(token, special)
        return piece

    def _piece(self, token: int, special: bool) -> bytes:
        self._check(token)
        handle, buffer = self._handle, _PieceBuffer()  # a new one for each call: threads must not share it
        n = self._lib.llama_token_to_piece(handle, token, buffer, len(buffer), 0, special)
        if n < 0:  # the buffer is too small: -n bytes are needed
            buffer = (ctypes.c_char * -n)()
            n = self._lib.llama_token_to_piece(handle, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become lone surrogates."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "surrogateescape")

    def text(self, token: int) -> bytes:
        """Return a token as it is spelled in the GGUF file, to compare vocabularies."""
        self._check(token)
        return self._lib.llama_vocab_get_text(self._handle, token) or b""

    def texts(self, n: int) -> list[bytes]:
        """As `text`, of the first n tokens; much faster than one after the other."""
        get, handle = self._lib.llama_vocab_get_text, self._handle
        return [get(handle, token) or b"" for token in range(min(n, self.n_tokens))]

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise InvalidRequest(f"token {token} is outside the vocabulary: give 0 to {self.n_tokens - 1}")


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None


def _indent(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))
