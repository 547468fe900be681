"""Select the instruction set: the best one whose self-test passes on this processor.

A processor can report instructions that it cannot execute, especially in a virtual machine, and executing one
of them kills the process. Each candidate is therefore tested in a child process,
``python -m spec_local.kernels.check LIBRARY INSTRUCTION_SET``. The result is stored together with the
processor and the build of llama.cpp that it applies to (`records`): another machine that shares the disk runs
the tests again.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from spec_local.kernels import records
from spec_local.kernels.build import reported
from spec_local.kernels.native import Native
from spec_local.system import json_file
from spec_local.system.child_process import child_main, run_child

_PASSED = "passed"


class CheckRecord(json_file.JsonRecord):
    """Results of the self-tests.

    instruction_set: the selected one, or None if no self-test passed. machine: see `records.machine_digest`.
    self_tests: "passed" or the error, by instruction set.
    """

    instruction_set: str | None
    machine: str
    self_tests: dict[str, str]


def verdict(library: Path) -> CheckRecord:
    """Return the results of a library's self-tests on this processor.

    Tests that have not been run on it yet are run now, which takes about a second each.
    """
    machine = records.machine_digest()
    for known in records.read(library, CheckRecord):
        if known.machine == machine:
            return known
    tests: dict[str, str] = {}
    for name in reported():
        tests[name] = failure(library, name) or _PASSED
        if tests[name] == _PASSED:
            break
    chosen = next((name for name, outcome in tests.items() if outcome == _PASSED), None)
    record = CheckRecord(instruction_set=chosen, machine=machine, self_tests=tests)
    with contextlib.suppress(OSError):  # no folder is writable: the next process tests again
        records.write(library, record)
    return record


def failure(library: Path, instruction_set: str) -> str | None:
    """Run the self-test of an instruction set. Returns None if it passes, otherwise the error or crash."""
    result = run_child("spec_local.kernels.check", str(library), instruction_set)
    return result.crash or result.error


def _self_test(library: str, instruction_set: str) -> dict[str, Any]:
    import llama_cpp  # noqa: F401  (the kernels link to the libraries it loads)

    native = Native(Path(library))
    reason = native.install(instruction_set) or native.self_test()
    return {"error": reason} if reason else {}


if __name__ == "__main__":
    child_main(lambda: _self_test(*sys.argv[1:]))
