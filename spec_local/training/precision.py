"""Which copy of main answers many texts quickest.

A call of one token waits for memory, and few bits are quick; a call of many tokens multiplies, and which precision is quick
then is up to the processor: on one with AVX512-BF16, bfloat16 wrote 2.5 times as many tokens a second as the Q4_1 that it
was made from. Such a copy has main's weights, rounded at their ninth bit.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from spec_local.errors import SpecLocalError
from spec_local.llama.model import Model
from spec_local.llama.parallel import ParallelContext
from spec_local.models.quantized_copy import quantize

KINDS = ("BF16", "F16", "Q8_0")
_MOST = 0.4  # of the free memory, and of the room on the disk, that a copy may take
_WORTH = 1.15  # times main's own rate: less is not worth a copy
_CALLS = 5


def quickest(
    main: Path,
    folder: Path,
    *,
    n_texts: int,
    threads: int | None = None,
    gpu_layers: int = -1,
    told: Callable[[str, float], None] = lambda kind, rate: None,
) -> Path:
    """The file to write with: main itself, or a copy of it, which is made in `folder`.

    Args:
        told: hears the tokens a second of each kind; main's own is called "main".

    Raises:
        SpecLocalError: main itself cannot write so many texts.
        OSError: a copy that is no good cannot be deleted.
    """
    best, best_rate = main, _rate(main, n_texts, threads, gpu_layers)
    told("main", best_rate)
    best_rate *= _WORTH
    for kind in KINDS:
        copy = folder / f"main-{kind}.gguf"
        try:
            size = quantize(main, kind)["size"]
            if size > _MOST * min(psutil.virtual_memory().available, shutil.disk_usage(folder).free):
                continue
            quantize(main, kind, copy, threads)
            rate = _rate(copy, n_texts, threads, gpu_layers)
        except SpecLocalError:  # this kind cannot be made of main, or not used here
            copy.unlink(missing_ok=True)
            continue
        told(kind, rate)
        if rate <= best_rate:
            copy.unlink()
            continue
        if best != main:
            best.unlink()
        best, best_rate = copy, rate
    return best


def _rate(path: Path, n_texts: int, threads: int | None, gpu_layers: int) -> float:
    """Tokens a second: the best of some calls, since others only ever make a call slower."""
    model = Model(path, gpu_layers=gpu_layers)
    parallel = ParallelContext(model, n_texts, 256, threads=threads)
    tokens = np.random.default_rng(0).integers(model.vocabulary.n_tokens, size=(_CALLS, n_texts)).tolist()
    spans = []
    for row in tokens:
        start = time.perf_counter()
        parallel.evaluate({text: [token] for text, token in enumerate(row)})
        spans.append(time.perf_counter() - start)
    parallel.close()
    model.close()
    return n_texts / min(spans)
