"""Test llama.cpp builds and model files in a child process before they are used in this process.

Two things crash llama.cpp without an error that could be caught: a damaged model file, and a build with
instructions that this machine lacks (a virtual machine may report instructions that it does not support).
Both are tested with ``python -m spec_local.llama.setup.probe``. A file that passes is not tested again until
the file, the build or the processor changes.
"""

import contextlib
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.errors import BackendCrash, BackendError, ContextOverflow, ModelFileError
from spec_local.llama import mtmd, runtime
from spec_local.llama.devices import OFFLOADED, Offload, gpus
from spec_local.llama.gguf_header import read_metadata
from spec_local.llama.gguf_tensors import parts
from spec_local.llama.memory import shortage
from spec_local.llama.model_file import check_gguf, check_header
from spec_local.system.child_process import DEADLINE_S, ChildResult, child_main, run_children
from spec_local.system.files import write_atomically
from spec_local.system.folders import user_folder

if TYPE_CHECKING:
    from spec_local.llama.model import Model

_SLOWEST_DISK = 1e7
"""Bytes per second, as of a network folder over Wi-Fi. A model that does not fit in the memory is read again
for every token, and is unusable from such a disk anyway."""
_CONTEXT = 64  # tokens of the test's context
_WITHOUT_KERNELS, _MAIN = "--without-kernels", "--main="  # arguments of the child process


def probe_build() -> ChildResult:
    """Test the installed build of llama.cpp on tiny models with common quantizations.

    Of the facts of a build that works, `pictures` is why it cannot read pictures, empty if it can.
    """
    return _run_children([()])[0]


def probe_files(
    paths: Sequence[Path],
    offload: Offload = OFFLOADED,
    *,
    without_kernels: bool = False,
    main: Path | None = None,
    seconds: float | None = None,
) -> list[ChildResult]:
    """Test model files at the same time: load each, evaluate a few tokens and read its vocabulary.

    Args:
        main: the main model of a head, which cannot be evaluated without it.
        seconds: time after which the child processes are killed; by default, `deadline`.
    """
    options = [_WITHOUT_KERNELS] * without_kernels + [f"{_MAIN}{main}"] * (main is not None)
    calls = [(str(path), str(offload), *options) for path in paths]
    return _run_children(calls, deadline=seconds or deadline(paths))


def deadline(paths: Sequence[Path]) -> float:
    """Seconds for testing some files, on the slowest disk."""
    return DEADLINE_S + sum(map(_size, paths)) / _SLOWEST_DISK


def _size(path: Path) -> int:
    """Bytes of all parts of a model."""
    return sum(part.stat().st_size for part in parts(path))


def check_model_files(
    *paths: Path,
    offload: Offload = OFFLOADED,
    main: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Check that loading model files does not crash the process; slow only for the first call per file.

    Args:
        main: of a head, the main model that it drafts for; None: the head is only loaded.

    Raises:
        ModelFileError: the file is damaged or cannot be used.
        ContextOverflow: there is not enough memory for it.
        BackendCrash: llama.cpp or the CPU kernels crash on this machine.
    """
    for path in paths:
        check_header(path)
    _check(paths, offload, main, log)


def check_projector_file(
    path: Path, main: Path, *, offload: Offload = OFFLOADED, log: Callable[[str], None] = lambda line: None
) -> None:
    """Raise an error if a projector crashes llama.cpp, or cannot encode an image, or sound, for a main model.

    Raises:
        ModelFileError, ContextOverflow, BackendCrash: see `check_model_files`.
    """
    check_gguf(path)
    _check([path], offload, main, log)


def _check(paths: Sequence[Path], offload: Offload, main: Path | None, log: Callable[[str], None]) -> None:
    """Test the files that have not passed the test yet, at the same time."""
    marks = {}
    for path in paths:
        mark = _mark(path, offload, main)
        if not mark.exists():
            log(f"checking {path.name} (first use on this machine)")
            marks[path] = mark
    results = probe_files(list(marks), offload, main=main) if marks else []
    for (path, mark), result in zip(marks.items(), results, strict=True):
        _raise_failure(path, result, offload, main)
        with contextlib.suppress(OSError):  # without a cache folder, the file is tested again next time
            write_atomically(mark, os.fsencode(path))


def _mark(path: Path, offload: Offload, main: Path | None) -> Path:
    """The file that exists if a model file has passed the check."""
    fingerprint = runtime.fingerprint(path, str(offload), *([runtime.fingerprint(main)] if main else []))
    return user_folder("cache") / "checked-models" / fingerprint


def _raise_failure(path: Path, result: ChildResult, offload: Offload, main: Path | None) -> None:
    """Raise the error for a test that failed."""
    if result.error:
        is_short = result.facts.get("kind") == ContextOverflow.__name__
        raise ContextOverflow(result.error) if is_short else ModelFileError(result.error)
    if not result.crash:
        return
    if short := shortage(path, _size(path), result.crash):  # the system kills what takes too much
        raise short
    if not probe_build().works:
        raise BackendCrash(
            f"llama.cpp crashes on this machine ({result.crash}): run specdec doctor for a fix"
        )
    has_kernels = kernels.status().instruction_set
    if has_kernels and probe_files([path], offload, without_kernels=True, main=main)[0].works:
        raise BackendCrash(
            f"the CPU kernels crash with {path} ({result.crash}): add `kernels=off`, and please report it"
        )
    raise ModelFileError(
        f"{path} crashes llama.cpp ({result.crash}): the file is damaged, or too large for this machine; "
        "download it again or use a smaller model"
    )


def _run_children(calls: Sequence[Sequence[str]], *, deadline: float = DEADLINE_S) -> list[ChildResult]:
    # Threads that wait must not spin: those of another child need the processor.
    environment = {"OMP_WAIT_POLICY": "passive"}
    return run_children("spec_local.llama.setup.probe", calls, deadline=deadline, environment=environment)


def _exercise(path: Path, offload: Offload, main: Path | None = None) -> None:
    """Use a model as a session does: evaluate single tokens and a batch, roll back, read and write text."""
    import numpy as np

    from spec_local.llama.fitting import load_fitting
    from spec_local.llama.model import Model
    from spec_local.llama.open import open_sequence

    if main and read_metadata(path).get("general.architecture") == "clip":
        _exercise_projector(path, Model(main, weights=False))
        return
    model = load_fitting(path, offload, _CONTEXT, load_mtp=True)
    if model.is_head:
        if main:  # the session has it on the same GPU, too
            _exercise_head(load_fitting(main, offload, _CONTEXT), model)
        return
    vocabulary = model.vocabulary
    row = open_sequence(model, n_ctx=_CONTEXT, max_tokens=16, max_logits=16)
    tokens = [vocabulary.bos if vocabulary.bos >= 0 else 0, *range(min(7, vocabulary.n_tokens))]
    for batch in (tokens[:1], tokens[1:2], tokens):
        if not np.isfinite(run(row.call(batch))).any(axis=1).all():
            raise BackendError(f"{path} returns logits that are not numbers: download it again")
    row.checkpoint()
    length = len(row.cached)
    run(row.call(tokens[:2]))
    row.truncate(length)
    vocabulary.exercise()
    _exercise_head(model)


def _exercise_head(main: "Model", draft: "Model | None" = None) -> None:
    """Evaluate a few tokens with the head that drafts for a main model, if there is one."""
    from spec_local.llama.heads.choose import choose_head
    from spec_local.llama.open import open_sequences

    if head := choose_head(main, draft):
        mains = open_sequences(main, 1, n_ctx=64, max_tokens=16, max_logits=16, hidden=head.hidden)
        (row,) = head.open(mains)
        tokens = list(range(min(8, main.vocabulary.n_tokens)))
        run(mains[0].call(tokens, n_logits=0))
        row.receive(0, tokens, mains[0].states(range(len(tokens))))
        # Of several layers, each drafts one token.
        for new in (tokens, *[tokens[:1]] * min(row.limits.max_draft, 8)):
            run(row.call(new, n_logits=1))


def _exercise_projector(path: Path, main: "Model") -> None:
    """Encode an image of one colour, and a second of silence."""
    from spec_local.core.span import Cell
    from spec_local.images.audio import Audio
    from spec_local.images.image import Image
    from spec_local.images.media import Media
    from spec_local.llama.projector import Projector

    width, height = 64, 48
    size = 54 + 3 * width * height
    header = struct.pack("<2sIIIIiiHHIIiiII", b"BM", size, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    files: dict[type[Media], bytes] = {Image: header + bytes(size - len(header))}
    header = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 32036, b"WAVEfmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", 32000
    )
    files[Audio] = header + bytes(32000)
    projector = Projector(path, main, "", 1)
    for kind in projector.reads:
        for cell in projector.items(kind(files[kind], "test")):
            if isinstance(cell, Cell):
                cell.span.vectors()


def _exercise_build() -> None:
    from spec_local.llama.quantize import quantize
    from spec_local.llama.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        # K-quants and their kernels need a width of 256.
        source = write_tiny_model(Path(folder) / "f16.gguf", n_embd=256)
        _exercise(source, OFFLOADED)
        for kind in ("Q8_0", "Q4_0", "Q4_K_M"):
            _exercise(quantize(source, Path(folder) / f"{kind}.gguf", kind), OFFLOADED)


def _why_no_images() -> str:
    try:
        mtmd.library()
    except BackendError as error:
        return str(error)
    return ""


def _work(arguments: list[str]) -> dict[str, Any]:
    if arguments:
        if _WITHOUT_KERNELS in arguments:
            kernels.use("off")
        runtime.library()
        if native := kernels.installed():  # a crash depends on the sizes of a matrix, never on its content
            native.pack_ends()
        main = next((Path(a.removeprefix(_MAIN)) for a in arguments[2:] if a.startswith(_MAIN)), None)
        _exercise(Path(arguments[0]), Offload.parse(arguments[1]), main)
        return {}
    kernels.use("off")  # the kernels have their own self-test
    _exercise_build()
    found = [asdict(gpu) for gpu in gpus()]
    return {"system": runtime.system_info(), "gpus": found, "images": _why_no_images()}


if __name__ == "__main__":
    child_main(lambda: _work(sys.argv[1:]))
