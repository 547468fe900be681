"""Open a llama.cpp context, and get its rows: of the kind that suits the model."""

from collections.abc import Sequence
from typing import Any

from spec_local.llama.context import LlamaContext
from spec_local.llama.model import Model
from spec_local.llama.recurrent import RecurrentRow
from spec_local.llama.row import LlamaRow


def open_row(model: Model, **options: Any) -> LlamaRow:
    """Create a llama.cpp context with one row; see `LlamaContext` for the options and errors."""
    return open_rows(model, 1, **options)[0]


def open_rows(model: Model, n_rows: int, **options: Any) -> Sequence[LlamaRow]:
    """Create a llama.cpp context and return its rows; see `LlamaContext` for the options and errors."""
    context = LlamaContext(model, n_rows=n_rows, **options)
    kind = RecurrentRow if model.is_recurrent else LlamaRow
    return [kind(context, i) for i in range(n_rows)]
