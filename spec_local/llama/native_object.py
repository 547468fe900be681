"""Objects that llama.cpp allocates: models and contexts.

Any thread may close one, or drop the last reference to it, while another thread's call is using it. The
memory is then freed when that call returns: the arguments of a ctypes call keep the `Pointer` alive.
"""

import os
import time
import weakref
from collections.abc import Callable
from typing import NoReturn

from spec_local.errors import InvalidRequest

_EXIT_TIMEOUT = 10.0  # seconds to wait for a daemon thread's call when the process exits; a call takes less
_POLL = 0.005  # seconds


_process = {"forked": False}


def watch_forks() -> None:
    """Make `check_process` and every `NativeObject` raise errors in processes forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_on_fork)


def _on_fork() -> None:
    _process["forked"] = True
    for each in list(_open):
        each.close()


def is_forked() -> bool:
    """Return whether this process was forked after llama.cpp was loaded.

    llama.cpp's threads do not exist in such a process: a call would wait for them forever.
    """
    return _process["forked"]


def check_process() -> None:
    """Raise InvalidRequest if this process was forked after llama.cpp was loaded."""
    if _process["forked"]:
        raise InvalidRequest(
            "llama.cpp cannot be used in a process that was forked after it was loaded: "
            'start the process with multiprocessing.get_context("spawn")'
        )


class Pointer:
    """An address, as an argument of ctypes functions, and what must not be freed while it is in use."""

    __slots__ = ("__weakref__", "_as_parameter_", "_kept")

    def __init__(self, address: int, *kept: "Pointer") -> None:
        self._as_parameter_, self._kept = address, kept

    @property
    def address(self) -> int:
        """The address, for a field of a structure; it is valid as long as this object exists."""
        return self._as_parameter_


class NativeObject:
    """Owner of an object that llama.cpp allocated. It is freed by `close`, or with the last reference.

    Args:
        free: called with `address`, after the last call that uses the object has returned.
        name: ``model`` or ``context``, for errors.
        parents: freed later than this object.
    """

    pointer: Pointer
    """The object's pointer. Pass it on, and do not keep it: it would delay `close`.

    While a function holds it, parts of the object can be used by their addresses. If the object is closed, or
    this process was forked, reading it raises InvalidRequest.
    """

    def __init__(self, free: Callable[[int], None], address: int, name: str, *parents: Pointer) -> None:
        self._name = name
        self.pointer = Pointer(address, *parents)  # an attribute: most steps read it dozens of times
        _open.add(self)
        # At exit, finalizers run newest first, so that a context is freed before its model.
        references = weakref.ref(self), weakref.ref(self.pointer)
        weakref.finalize(self.pointer, _free, free, address, *references)

    def __getattr__(self, name: str) -> NoReturn:
        if name != "pointer":
            raise AttributeError(name)
        check_process()
        raise InvalidRequest(f"the {self._name} is closed: open it again")

    @property
    def is_open(self) -> bool:
        return "pointer" in self.__dict__

    def inner(self, address: int) -> Pointer:
        """A pointer to a part of the object; see `pointer`."""
        return Pointer(address, self.pointer)

    def close(self) -> None:
        """Free the object as soon as no call uses it; later uses raise InvalidRequest."""
        self.__dict__.pop("pointer", None)


_open: weakref.WeakSet[NativeObject] = weakref.WeakSet()


def _free(
    free: Callable[[int], None],
    address: int,
    owner: "weakref.ref[NativeObject]",
    pointer: "weakref.ref[Pointer]",
) -> None:
    """Free an object that is no longer used; also called at exit, when a daemon thread may be using it."""
    if is_forked():
        return  # freeing could wait for threads that do not exist here
    if still_open := owner():
        still_open.close()
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while pointer() is not None:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL)
    free(address)
