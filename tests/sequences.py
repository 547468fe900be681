"""The sequences of a context, as llama.cpp knows them."""


def sequence_ends(row):
    """The last position of each sequence of a row's context; -1: it is empty."""
    context = row.context
    sequences = range(context.lib.llama_n_seq_max(context.handle))
    return [context.lib.llama_memory_seq_pos_max(context.memory, sequence) for sequence in sequences]
