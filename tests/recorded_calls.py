"""Record the calls of a llama.cpp context."""

from typing import NamedTuple


class Recorded(NamedTuple):
    """A call: its number of rows (running answers), of tokens, and of rows of logits."""

    n_parallel: int
    n_tokens: int
    n_logits: int


def record_calls(context):
    """Return a list to which each call of a context, for any of its rows, is appended.

    It replaces the list of an earlier recording.
    """
    calls, shared = [], context.context
    original = getattr(shared.decode, "original", shared.decode)

    def decode(parts):
        calls.append(
            Recorded(
                len(parts), sum(len(part.tokens) for part in parts), sum(part.n_logits for part in parts)
            )
        )
        return original(parts)

    decode.original = original
    shared.decode = decode
    return calls
