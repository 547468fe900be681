"""CPU time of --help, for the root and each command: what somebody waits for who only wants to look something up.

    python benchmarks/help_time.py

User and system time of whole processes, the median of some runs, beside that of an empty Python as this machine's scale.
"""

import resource
import statistics
import subprocess
import sys

import typer

from specdec_cli import commands, settings
from specdec_cli.app import app

RUNS = 9
BUDGET = 0.25


def cpu_seconds(*arguments: str) -> float:
    """Median CPU time of a Python with these arguments."""
    times = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times)


def main() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, commands.Group)
    pages = [[], *(name.split("-") for name, _ in settings.runnable(root))]
    empty = cpu_seconds("-c", "pass")
    print(f"{empty:6.3f} s  python -c pass")
    slowest = 0.0
    for command in pages:
        seconds = cpu_seconds("-m", "specdec_cli", *command, "--help")
        slowest = max(slowest, seconds)
        print(f"{seconds:6.3f} s  {seconds / empty:5.1f} ×  specdec {' '.join([*command, '--help'])}")
    print(f"slowest: {slowest:.3f} s, wanted: at most {BUDGET} s")


if __name__ == "__main__":
    main()
