"""Load models in threads of their own, while this thread imports the rest of the library.

Both take some tenths of a second, one in C++ and one in Python, so that they do not wait for each other.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.setup.probe import check_model_file

_begun: dict[tuple[Path, int, bool], "Future[Model]"] = {}


@contextlib.contextmanager
def preload(
    paths: Sequence[Path], *, gpu_layers: int, load_mtp: bool, log: Callable[[str], None]
) -> Iterator[None]:
    """Check and load models, for what is opened in this block. Whatever fails there, is reported there.

    At the end of the block, models that nobody took are freed.

    Args:
        gpu_layers, load_mtp: see `Model`.
        log: see `check_model_file`; called by other threads.
    """
    runtime.library()
    keys = [(path, gpu_layers, load_mtp) for path in dict.fromkeys(paths)]
    threads = [threading.Thread(target=_load, args=(key, log)) for key in keys]
    _begun.update((key, Future()) for key in keys)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        with runtime.deferred_signals():
            for thread in threads:
                thread.join()
        for key in keys:
            if (left := _begun.pop(key, None)) and not left.exception():
                left.result().close()


def take(path: Path, *, gpu_layers: int, load_mtp: bool) -> Model | None:
    """The model that is being loaded with these arguments; None: none is.

    Raises:
        SpecLocalError: it failed.
    """
    begun = _begun.pop((path, gpu_layers, load_mtp), None)
    if not begun:
        return None
    with runtime.deferred_signals():
        return begun.result()


def _load(key: tuple[Path, int, bool], log: Callable[[str], None]) -> None:
    future, (path, gpu_layers, load_mtp) = _begun[key], key
    try:
        check_model_file(path, gpu_layers=gpu_layers, log=log)
        future.set_result(Model(path, gpu_layers=gpu_layers, load_mtp=load_mtp))
    except BaseException as error:
        future.set_exception(error)
