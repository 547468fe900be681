"""libmtmd (temporary)."""

from typing import Any

from spec_local.llama import runtime


def library() -> Any:
    """Return it."""
    runtime.library()
    return runtime._bindings("mtmd_cpp")
