"""Making a draft for any main: what main writes is kept, and a small model learns to write the same."""

import importlib.util

from spec_local.errors import SpecLocalError


def require() -> None:
    """Say that PyTorch is missing before anything has been done for it.

    Raises:
        SpecLocalError: it is.
    """
    if not importlib.util.find_spec("torch"):
        raise SpecLocalError("training a draft needs PyTorch: run pip install 'spec-local[train]'")
