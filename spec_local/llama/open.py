"""Open a llama.cpp context, and get its sequences: of the kind that suits the model."""

from collections.abc import Sequence
from typing import Any

from spec_local.llama.context import ContextOptions, LlamaContext
from spec_local.llama.model import Model
from spec_local.llama.recurrent import RecurrentSequence
from spec_local.llama.sequence import LlamaSequence


def open_sequence(model: Model, **options: Any) -> LlamaSequence:
    """Create a llama.cpp context with one sequence; see `open_sequences`."""
    return open_sequences(model, 1, **options)[0]


def open_sequences(model: Model, n_parallel: int, **options: Any) -> Sequence[LlamaSequence]:
    """Create a llama.cpp context and return its sequences; for the errors, see `LlamaContext`.

    options: fields of `ContextOptions`.
    """
    context = LlamaContext(model, ContextOptions(n_parallel=n_parallel, **options))
    kind = RecurrentSequence if model.is_recurrent else LlamaSequence
    return [kind(context, i) for i in range(n_parallel)]
