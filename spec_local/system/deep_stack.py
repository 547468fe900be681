"""Call native code that recurses deeply, on a thread with a sufficiently large stack."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from spec_local.errors import BackendError

_Result = TypeVar("_Result")
_stack_size = threading.Lock()
"""Held while the stack size of new threads, a setting of the whole process, is changed."""


def call_with_stack(size: int, function: Callable[[], _Result]) -> _Result:
    """Call a function on a thread with a stack of `size` bytes, and return its result or raise its error.

    A stack overflow would end the process.

    Raises:
        BackendError: there is not enough memory for the stack.
    """
    result: Future[_Result] = Future()
    context = contextvars.copy_context()  # in which the work may be abandoned

    def work() -> None:
        try:
            result.set_result(context.run(function))
        except BaseException as error:
            result.set_exception(error)

    worker = threading.Thread(target=work)
    with _stack_size:
        previous = threading.stack_size(size)
        try:
            worker.start()
        except RuntimeError:
            raise BackendError(
                f"there is not enough memory for a stack of {size >> 20} MiB: give a shorter text"
            ) from None
        finally:
            threading.stack_size(previous)
    worker.join()
    return result.result()
