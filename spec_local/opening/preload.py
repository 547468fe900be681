"""Load models in threads of their own, while this thread imports the rest of the library.

Both take some tenths of a second, one in C++ and one in Python, so that they do not wait for each other.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from spec_local.llama import runtime
from spec_local.llama.devices import Offload
from spec_local.llama.model import Model
from spec_local.llama.setup.probe import check_model_files

_Arguments = tuple[Path, Offload, bool]  # of a model that is being loaded
_begun: dict[_Arguments, "Future[Model]"] = {}


@contextlib.contextmanager
def preload(
    paths: Sequence[Path], *, offload: Offload, load_mtp: bool, log: Callable[[str], None]
) -> Iterator[None]:
    """Check models, and load them for what is opened in this block, which gets the errors of loading.

    At the end of the block, models that nobody took are freed.

    Args:
        offload, load_mtp: see `Model`.
        log: see `check_model_files`.

    Raises:
        ModelFileError, BackendCrash: see `check_model_files`.
    """
    keys = [(path, offload, load_mtp) for path in dict.fromkeys(paths)]
    check_model_files(*(path for path, *_ in keys), offload=offload, log=log)
    runtime.library()
    with ThreadPoolExecutor(len(keys)) as pool:
        begun = {key: pool.submit(Model, key[0], offload=offload, load_mtp=load_mtp) for key in keys}
        _begun.update(begun)
        try:
            yield
        finally:
            with runtime.deferred_signals():
                wait(begun.values())
            for key in keys:
                if (left := _begun.pop(key, None)) and not left.exception():
                    left.result().close()


def take(path: Path, *, offload: Offload, load_mtp: bool) -> Model | None:
    """The model that is being loaded with these arguments; None: none is.

    Raises:
        SpecLocalError: it failed.
    """
    begun = _begun.pop((path, offload, load_mtp), None)
    if not begun:
        return None
    with runtime.deferred_signals():
        return begun.result()
