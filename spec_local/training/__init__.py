"""Train a draft model for any main model, by distillation from text that the main model generates."""

import importlib.util

from spec_local.errors import SpecLocalError


def check_torch() -> None:
    """Check that PyTorch is installed, without importing it.

    Raises:
        SpecLocalError: it is not installed.
    """
    if not importlib.util.find_spec("torch"):
        raise SpecLocalError("training a draft model needs PyTorch: run pip install 'spec-local[train]'")
