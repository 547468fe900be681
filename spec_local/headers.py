"""Models without their weights: what a GGUF file says of itself, in a moment and whatever its size.

What may take llama.cpp down is done in a child process: a program of ours (`answer`) that prints one JSON object. See also
`spec_local.llama.probe`, which tries whole models.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_local.errors import ModelFileError, SpecLocalError
from spec_local.llama.model import Model, check_header
from spec_local.llama.probe import Verdict


def open_header(path: Path) -> Model:
    """The model of a file, without weights; a damaged header takes a child down, and not this process.

    Raises:
        ModelFileError, ModelError: see `Model`.
    """
    check_header(path)
    verdict = in_child("spec_local.headers", str(path))
    if verdict.crash:
        raise ModelFileError(
            f"{path} takes llama.cpp down ({verdict.crash}): download it again, or run specdec doctor if others do so too"
        )
    return Model(path, weights=False)  # what the child was refused is raised here, with its type


def in_child(module: str, *arguments: str) -> Verdict:
    """Run a module that ends in `answer`; it is killed where this process is interrupted, and ends where this one dies."""
    # -P: a module in the working folder that is called like one of ours must not take its place.
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # or a debugger is started to print one
    reading, writing = os.pipe()  # never written to: its end is the end of this process
    try:
        child = subprocess.run(command, stdin=reading, capture_output=True, env=environment, check=False)
    finally:
        os.close(reading)
        os.close(writing)
    with contextlib.suppress(ValueError, IndexError, AttributeError):
        said = json.loads(child.stdout.splitlines()[-1])
        return Verdict(None, said.get("error"), said)
    if child.returncode < 0:
        with contextlib.suppress(ValueError):
            return Verdict(signal.Signals(-child.returncode).name, None, {})
    last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return Verdict(last[0] if last else f"exit code {child.returncode}", None, {})


def answer(work: Callable[[], dict[str, Any]], *, partial: Path | None = None) -> None:
    """Do a child's work, print what came of it, and end the process.

    Args:
        work: gives the facts.
        partial: a file that goes if the parent dies before the work is done.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def leave_with_parent() -> None:
        os.read(0, 1)
        if partial:
            partial.unlink(missing_ok=True)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        said = work()
    except SpecLocalError as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)
    os._exit(0)  # the answer is given; nothing that happens while freeing may change it


def _read(path: Path) -> dict[str, Any]:
    model = Model(path, weights=False)
    for token in range(model.vocabulary.n_tokens):
        model.vocabulary.piece(token)
    return {"size": model.size, "kv": model.kv_bytes(1)}


if __name__ == "__main__":
    answer(lambda: _read(Path(sys.argv[1])))
