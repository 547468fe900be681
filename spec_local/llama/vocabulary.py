"""Text to token ids and back, as a model's own tokenizer has it."""

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from spec_local.core.text import bytes_of
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama.runtime import Weights

# llama.cpp counts bytes in int32, and its tokenizer takes many times the text in memory.
_MAX_TEXT_BYTES = 1 << 24
# Some of llama.cpp's pre-tokenizers are recursive regular expressions: a long run of one kind of
# character overflows an ordinary stack, and that kills the process. They take up to 400 bytes of stack
# for a character (measured with the tokenizer of deepseek-llm, where 512 MiB end at 1.5 million).
_LONG_TEXT_BYTES, _SMALLEST_STACK, _STACK_PER_BYTE = 4096, 64 << 20, 512


class Vocabulary:
    """A view of one model's vocabulary, for which the model stays in memory, until it is closed."""

    def __init__(self, lib: Any, handle: int, weights: Weights) -> None:
        self._lib, self._pointer, self._weights = lib, handle, weights
        self._buffer = ctypes.create_string_buffer(256)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.n_tokens: int = lib.llama_vocab_n_tokens(handle)
        self.type: int = lib.llama_vocab_type(handle)
        self.bos: int = lib.llama_vocab_bos(handle)
        self.eos: int = lib.llama_vocab_eos(handle)
        self.eot: int = lib.llama_vocab_eot(handle)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(handle)
        self.add_eos: bool = lib.llama_vocab_get_add_eos(handle)

    @property
    def _handle(self) -> int:
        self._weights.check_open()
        return self._pointer

    @functools.cached_property
    def is_end(self) -> Callable[[int], bool]:
        """Whether a token ends the answer (end of sequence, of turn, of message)."""
        # Not of `self`: in a circle, the weights would wait for the garbage collector.
        ask, handle, weights = self._lib.llama_vocab_is_eog, self._pointer, self._weights

        @functools.cache
        def is_end(token: int) -> bool:
            weights.check_open()
            return bool(ask(handle, token))

        return is_end

    @functools.cached_property
    def fill_in(self) -> tuple[int, int, int] | None:
        """Tokens that mark what is before a gap, what is after it, and where its filling begins; None: there are none."""
        kinds = ("pre", "suf", "mid")
        pre, suf, mid = (getattr(self._lib, f"llama_vocab_fim_{kind}")(self._handle) for kind in kinds)
        return (pre, suf, mid) if min(pre, suf, mid) >= 0 else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names what the ordinary tokens are, by every 61st of them: the same for all sizes, quantizations and finetunes of a
        family, whatever special tokens and padding they have besides."""
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

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: lone surrogates stand for the raw bytes of a text that is not UTF-8.
            add_special: put the beginning-of-sequence token in front where the model wants one.
            parse_special: read ``<|im_end|>`` and its like as the tokens they name.

        Raises:
            InvalidRequest: the text is longer than 16 MiB, or holds surrogates that stand for no byte.
        """
        raw = bytes_of(text)
        if len(raw) > _MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"a text of {len(raw)} bytes is too long to tokenize: give at most {_MAX_TEXT_BYTES}"
            )
        if len(raw) < _LONG_TEXT_BYTES:
            return self._tokenize(raw, add_special, parse_special)
        result: Future[list[int]] = Future()  # carries an exception out of the thread, too

        def work() -> None:
            try:
                result.set_result(self._tokenize(raw, add_special, parse_special))
            except BaseException as error:
                result.set_exception(error)

        previous = threading.stack_size(max(_SMALLEST_STACK, len(raw) * _STACK_PER_BYTE))
        try:
            worker = threading.Thread(target=work)
            worker.start()
        except RuntimeError:
            raise BackendError(
                f"there is no memory to tokenize {len(raw)} bytes: give a shorter text"
            ) from None
        finally:
            threading.stack_size(previous)
        worker.join()
        return result.result()

    def _tokenize(self, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
        # Mostly at most a token a byte, and the special ones; a byte that is not UTF-8 may become the three
        # of U+FFFD, and then the answer -n is what it takes.
        n = -(len(raw) + 8)
        for _ in range(2):
            tokens = (ctypes.c_int32 * -n)()
            n = self._lib.llama_tokenize(
                self._handle, raw, len(raw), tokens, len(tokens), add_special, parse_special
            )
            if n >= 0:
                return tokens[:n]
        raise BackendError("the tokenizer failed on this text: please report it with the model's name")

    def continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows another one, special tokens among them: see `tokenize`.

        Some tokenizers put a space before every text, also where it is none of its own.
        """
        tokens, own = self.tokenize(text, parse_special=True), _indent(bytes_of(text))
        if _indent(self._spelled(tokens)) <= own:
            return tokens
        for start in (b"\n", b".", b"a"):  # one of them will not melt into the text
            whole = self.tokenize(start.decode() + text, parse_special=True)
            n = next((n for n in range(1, 5) if self._spelled(whole[:n]).lstrip(b" ") == start), None)
            if n is not None:
                return whole[n:]
        return tokens

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        """With special tokens by name."""
        return b"".join(self.piece(token, special=True) for token in tokens)

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; often only a part of a UTF-8 character.

        Args:
            token: an id of this vocabulary.
            special: give control tokens their name; otherwise they are empty.
        """
        known = self._pieces.get((token, special))
        if known is not None:
            return known
        self._check(token)
        n = self._lib.llama_token_to_piece(self._handle, token, self._buffer, len(self._buffer), 0, special)
        if n < 0:  # the buffer is too small, and -n is what it takes
            self._buffer = ctypes.create_string_buffer(-n)
            n = self._lib.llama_token_to_piece(self._handle, token, self._buffer, -n, 0, special)
        piece = self._pieces[token, special] = self._buffer.raw[:n]
        return piece

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become lone surrogates."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "surrogateescape")

    def text(self, token: int) -> bytes:
        """The token as the GGUF file spells it (for comparing vocabularies)."""
        self._check(token)
        return self._lib.llama_vocab_get_text(self._handle, token) or b""

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise InvalidRequest(f"token {token} is outside of the vocabulary: give 0 to {self.n_tokens - 1}")


def _indent(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))
