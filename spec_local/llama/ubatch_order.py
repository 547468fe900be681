"""The order in which llama.cpp evaluates the tokens of a batch that it splits into parts (ubatches).

For recurrent layers, and where sequences have a cache each, every one of a part must have the same number of
tokens (``split_equal`` in llama-batch.cpp). llama.cpp puts the logits back into the order of the batch, but a
callback receives the outputs of layers part by part.
"""

from collections.abc import Sequence


def evaluation_order(sequences: Sequence[int], *, adjacent: bool) -> list[int]:
    """Return the indices of a batch's tokens in the order of their evaluation.

    Args:
        sequences: the only sequence of each token; the tokens of a sequence are consecutive.
        adjacent: whether a part contains only sequences with consecutive ids, as llama.cpp does where they do
            not share a cache.
    """
    waiting: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        waiting.setdefault(sequence, []).append(i)
    order: list[int] = []
    while waiting:
        part: list[int] = []
        for sequence in waiting:
            if not part or not adjacent or sequence == part[-1] + 1:
                part.append(sequence)
        n = min(len(waiting[sequence]) for sequence in part)
        for sequence in part:
            order += waiting[sequence][:n]
            del waiting[sequence][:n]
            if not waiting[sequence]:
                del waiting[sequence]
    return order
