"""The layers of an EAGLE-3 head after its first one, as a second model in the same file.

llama.cpp's graph of the architecture ``eagle3`` has one layer. The layers after it are those of a Llama
model, whose inputs are the outputs of the first layer. They follow in the same file, as a GGUF of the
architecture ``llama`` that begins after the tensors of the first one, and whose vocabulary consists of the
tokens that the head can draft.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.gguf_tensors import array, end_of_tensors
from spec_local.llama.model import Model
from spec_local.system.files import opened


class LaterModel(Model):
    """The layers of a head after its first one, and its output matrix.

    Args:
        head: the first layer's model, in the same file.
        weights: see `Model`.

    Attributes:
        rows: the token of each row of the output matrix, int32 (n,); None: each row is that of its number.

    Raises:
        ModelFileError: the file ends before it.
        ModelError: it does not continue the first layer.
    """

    def __init__(self, head: Model, *, weights: bool = True) -> None:
        self._start = end_of_tensors(head.path)
        with opened(head.path) as file:
            file.seek(self._start)
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{head.path} ends after its first layer: download or convert it again")
        super().__init__(
            head.path, offload=head.offload, n_offloaded=0 if head.uses_cpu else -1, weights=weights
        )
        self.rows = array(head.path, f"{head.architecture}.draft_tokens")
        if why := self._difference(head):
            self.native.close()
            raise ModelError(f"{head.path.name} is damaged ({why}): convert it again")

    @property
    def is_head(self) -> bool:
        """True: it has no tokenizer."""
        return True

    def _read(self, params: Any) -> int:
        with _file_at(self.path, self._start) as file:
            return int(self._lib.llama_model_load_from_file_ptr(file, params) or 0)

    def _difference(self, head: Model) -> str | None:
        """Return why it does not continue the first layer; llama.cpp would abort the process."""
        n_vocab, n_rows = head.vocabulary.n_tokens, self.vocabulary.n_tokens
        if self.architecture != "llama" or self.n_embd != head.n_embd:
            return f"{self.architecture} of width {self.n_embd} after a layer of width {head.n_embd}"
        if self.n_layers != head.n_later:
            return f"{self.n_layers} layers instead of {head.n_later} after the first one"
        if self.number("attention.key_length") != self.number("attention.value_length"):
            return "keys and values of different widths"
        if self.rows is None:
            return None if n_rows == n_vocab else f"{n_rows} tokens against {n_vocab}"
        is_within = self.rows.dtype == np.int32 and self.rows.min() >= 0 and self.rows.max() < n_vocab
        if not is_within or not len(np.unique(self.rows)) == len(self.rows) == n_rows:
            return "it does not list different tokens of the vocabulary"
        return None


@contextlib.contextmanager
def _file_at(path: Path, start: int) -> Iterator[ctypes.c_void_p]:
    """A ``FILE *`` at a position, for a ``with`` block."""
    if sys.platform == "win32":
        libc = ctypes.CDLL("ucrtbase")
        functions = libc._wfopen, libc._fseeki64, libc.fclose
        name: Any = ctypes.c_wchar_p(str(path))
        mode: Any = ctypes.c_wchar_p("rb")
    else:
        libc = ctypes.CDLL(None)
        functions = libc.fopen, libc.fseeko, libc.fclose
        name, mode = ctypes.c_char_p(os.fsencode(path)), ctypes.c_char_p(b"rb")
    fopen, fseek, fclose = functions
    fopen.restype, fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    fseek.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    file = fopen(name, mode)
    if not file:
        raise ModelFileError(f"{path} cannot be read: check its permissions")
    try:
        fseek(file, start, os.SEEK_SET)
        yield ctypes.c_void_p(file)
    finally:
        fclose(file)
