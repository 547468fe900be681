"""Train a draft model for any main model, by distillation from text that the main model generates."""

from spec_local.errors import SpecLocalError
from spec_local.system import extras


def check_torch() -> None:
    """Check that PyTorch is installed, without importing it.

    Raises:
        SpecLocalError: it is not installed.
    """
    if why := extras.without_torch():
        raise SpecLocalError(why)
