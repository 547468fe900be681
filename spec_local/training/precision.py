"""Find the copy of the main model that generates many sequences at a time fastest.

A call with one token is bound by memory bandwidth and fast with few bits; a call with many tokens is bound by
arithmetic, and the fastest precision depends on the processor: with AVX512-BF16, a bfloat16 copy of a Q4_1
model generated 2.5 times as many tokens per second. Such a copy has the same weights, rounded to 8
significant bits.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from spec_local.errors import SpecLocalError
from spec_local.llama.devices import OFFLOADED, Offload
from spec_local.llama.fitting import load_fitting
from spec_local.models.quantized_copy import quantize
from spec_local.training.parallel_rows import next_outputs, open_parallel_rows

KINDS = ("BF16", "F16", "Q8_0")
_MAX_SHARE = 0.4  # maximum share of free memory and free disk space for a copy
_MIN_SPEEDUP = 1.15  # over the main model's own file
_CALLS = 5


def fastest_copy(
    main: Path,
    folder: Path,
    *,
    n_parallel: int,
    threads: int | None = None,
    offload: Offload = OFFLOADED,
    on_progress: Callable[[str, float], None] = lambda kind, rate: None,
    measured: Callable[[Path, int, int | None, Offload], float] | None = None,
) -> Path:
    """Return the main model's file, or a faster copy written to `folder`.

    Args:
        on_progress: receives each kind and its tokens per second; the main model's own file is called "main".
        measured: returns the tokens per second of a file; by default, `rate`.

    Raises:
        SpecLocalError: the main model cannot generate this number of sequences.
        OSError: a slower copy cannot be deleted.
    """
    measured = measured or rate
    best, best_rate = main, measured(main, n_parallel, threads, offload)
    on_progress("main", best_rate)
    best_rate *= _MIN_SPEEDUP
    for kind in KINDS:
        copy = folder / f"main-{kind}.gguf"
        try:
            size = quantize(main, kind)["size"]
            if size > _MAX_SHARE * min(psutil.virtual_memory().available, shutil.disk_usage(folder).free):
                continue
            quantize(main, kind, copy, threads)
            found = measured(copy, n_parallel, threads, offload)
        except SpecLocalError:  # the main model has no copy of this kind, or it does not run here
            copy.unlink(missing_ok=True)
            continue
        on_progress(kind, found)
        if found <= best_rate:
            copy.unlink()
            continue
        if best != main:
            best.unlink()
        best, best_rate = copy, found
    return best


def rate(path: Path, n_parallel: int, threads: int | None, offload: Offload) -> float:
    """Return the tokens per second of the fastest of a few calls: interference only makes calls slower."""
    model = load_fitting(path, offload, n_parallel * 256)
    rows = open_parallel_rows(model, n_parallel, 256, threads)
    tokens = np.random.default_rng(0).integers(model.vocabulary.n_tokens, size=(_CALLS, n_parallel)).tolist()
    times = []
    for each in tokens:
        start = time.perf_counter()
        next_outputs(rows, [[token] for token in each], with_states=False)
        times.append(time.perf_counter() - start)
    rows[0].close()
    model.close()
    return n_parallel / min(times)
