"""Failures of llama_decode."""

from spec_local.errors import BackendError, ContextOverflow


class Broken:
    """llama.cpp with a replaced llama_decode.

    decode: receives llama.cpp and the arguments of llama_decode.
    """

    def __init__(self, lib, decode):
        self._lib, self._decode = lib, decode

    def llama_decode(self, handle, batch):
        return self._decode(self._lib, handle, batch)

    def __getattr__(self, name):
        return getattr(self._lib, name)


def interrupted_after(lib, handle, batch):
    assert lib.llama_decode(handle, batch) == 0
    raise KeyboardInterrupt


def interrupted_before(lib, handle, batch):
    raise KeyboardInterrupt


def aborted_after(lib, handle, batch):
    assert lib.llama_decode(handle, batch) == 0
    return 2


def aborted_half_way(lib, handle, batch):
    n = batch.n_tokens
    batch.n_tokens = max(1, n // 2)
    assert lib.llama_decode(handle, batch) == 0
    batch.n_tokens = n
    return 2


FAILURES = {  # and the errors that are raised
    "aborted before": (lambda lib, handle, batch: 2, BackendError),
    "aborted half-way": (aborted_half_way, BackendError),
    "aborted after": (aborted_after, BackendError),
    "bad batch": (lambda lib, handle, batch: -1, BackendError),
    "fatal": (lambda lib, handle, batch: -3, BackendError),
    "no slot": (lambda lib, handle, batch: 1, ContextOverflow),
    "interrupted before": (interrupted_before, KeyboardInterrupt),
    "interrupted after": (interrupted_after, KeyboardInterrupt),
}
