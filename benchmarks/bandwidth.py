"""Measure how fast products with one token read their weights, beside a plain read of as many bytes.

    python benchmarks/bandwidth.py [--types Q4_K,Q6_K] [--rounds 15] [--megabytes 64]

Gigabytes of the file's weights per second, with specdec's kernels and with llama.cpp's, in medians of
alternating rounds, and of a loop that only adds up the bytes. A product with one token can be as fast as that
loop, not faster. SPECDEC_INSTRUCTION_SET names another instruction set than the best one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from common import machine, note, numbers, parser, table

from spec_local import kernels
from spec_local.kernels.measure import TYPES
from spec_local.llama import runtime
from spec_local.system import native_build
from spec_local.system.machine import default_threads

_LENGTHS = (2048, 8192)  # of a row: those of a hidden state, and of the second feed-forward matrix
_MULTIPLE = 256  # rows, as in measure.py


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--types", type=numbers(str), default=list(TYPES))
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--megabytes", type=int, default=64, help="of a matrix; more than the caches")
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    runtime.library()
    if not (native := kernels.installed()):
        sys.exit(f"kernels {kernels.status()}")
    n_bytes = options.megabytes << 20
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = _compiled(Path(folder))
        for name in options.types:
            note(name)
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
            rates, plain = [], []
            for length in _LENGTHS:
                n_rows = n_bytes // (length // block * size) // _MULTIPLE * _MULTIPLE
                seconds = native.time(name, n_rows, length, [1], options.threads, options.rounds)
                rates.append(n_rows * (length // block * size) / np.median(seconds, axis=0)[0] / 1e9)
                command = [str(program), str(n_bytes), str(options.threads), str(options.rounds)]
                plain.append(float(subprocess.run(command, capture_output=True, check=True).stdout))
            ours, theirs = 1 / np.mean(1 / np.array(rates), axis=0)
            read = float(1 / np.mean(1 / np.array(plain)))
            figures = [ours, theirs, read]
            rows.append([name, *(f"{x:.1f}" for x in figures), f"{ours / read:.2f}", f"{ours / theirs:.2f}"])
    note("")
    head = ["type", "specdec, GB/s", "llama.cpp, GB/s", "plain read, GB/s", "of plain read", "of llama.cpp"]
    table(head, rows)
    print(f"kernels {kernels.status()}; {machine()}")


def _compiled(folder: Path) -> Path:
    """Compile the plain read."""
    if not (compiler := native_build.compiler()):
        sys.exit("a C++ compiler is needed")
    program = folder / "bandwidth"
    options = [
        "-O3",
        "-march=native",
        "-std=c++17",
        "-pthread",
        str(Path(__file__).with_suffix(".cpp")),
        "-o",
        str(program),
    ]
    if reason := native_build.run(folder, [*compiler, *options]):
        sys.exit(reason)
    return program


if __name__ == "__main__":
    main()
