"""`specdec doctor`: check llama.cpp and the CPU kernels on this machine, and repair them."""

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

import spec_local
from spec_local import kernels
from spec_local.errors import InvalidRequest
from spec_local.kernels import Status, choice
from spec_local.kernels.measure import TYPES
from spec_local.llama import mtmd
from spec_local.llama import rpc as rpc_backend
from spec_local.llama.setup.build import (
    BuildRecipe,
    install,
    lacking,
    recipes,
    repair,
    with_gpu,
    with_images,
)
from spec_local.llama.setup.probe import probe_build
from spec_local.system.child_process import ChildResult
from spec_local.system.files import format_size
from spec_local.system.machine import default_threads
from specdec_cli import exits, facts, names, render
from specdec_cli.signatures.machine import DoctorOptions


def doctor(options: DoctorOptions) -> None:
    if options.report:
        _report()
        return
    try:
        binding = version("llama-cpp-python")
    except PackageNotFoundError:
        binding = "not installed"
    render.write(
        f"specdec {spec_local.__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    )
    render.write(f"llama-cpp-python {binding}\n")
    if options.fix and options.part == "images" and not mtmd.is_available():
        _rebuild(with_images(), "images")
    verdict = probe_build()
    if options.fix and options.part == "gpu" and not verdict.facts.get("gpus"):
        _rebuild(with_gpu(), "gpu")
        verdict = probe_build()
    if not verdict.works:
        _repair(verdict, options.fix)
        verdict = probe_build()
        if not verdict.works:
            render.write("No build works on this machine. Please report this with the output above.\n")
            raise typer.Exit(exits.FAILURE)
    render.write(f"llama.cpp works: {verdict.facts['system'].strip()}\n")
    _gpus(verdict.facts["gpus"], is_built=options.fix and options.part == "gpu")
    lacks = verdict.facts["images"]
    render.write(f"images: {f'no ({lacks})' if lacks else 'libmtmd'}\n")
    render.write(f"threads: {default_threads()}{facts.limit_note()}\n")
    _kernels(options.fix, again=options.part == "kernels")
    if options.part == "rpc":
        _rpc_backend(options.fix)


def _repair(verdict: ChildResult, fix: bool) -> None:
    """Say why llama.cpp does not work; with `fix`, try other builds.

    Raises:
        Exit: not `fix`.
    """
    cause = f" ({lacks})" if (lacks := lacking()) else ""
    reason = verdict.crash or verdict.error
    render.write(f"llama.cpp does not work on this machine: {reason}{cause}\n")
    if not fix:
        render.write("To fix it:  specdec doctor --fix\n")
        render.write(f"or:         {recipes()[0].command()}\n")
        raise typer.Exit(exits.FAILURE)
    for recipe, works in repair(lambda: probe_build().works):
        if works is None:
            render.write(f"installing {recipe.name}; this takes several minutes\n")
        else:
            render.write(f"{recipe.name} {'works' if works else 'does not work either'}\n")


def _rebuild(recipe: BuildRecipe, part: str) -> None:
    """Build llama.cpp again, with a part that is missing.

    Raises:
        Exit: that failed.
    """
    render.write(f"installing {recipe.name} of llama.cpp; this takes several minutes\n")
    if not install(recipe):
        render.write(f"{part}: no ({recipe.name} could not be installed: see above)\n")
        raise typer.Exit(exits.FAILURE)


def _gpus(found: list[dict[str, Any]], *, is_built: bool) -> None:
    """Show the GPUs, by the names that --device takes; is_built: llama.cpp has been built for one."""
    if not found:
        advice = "install its driver" if is_built else "to build it for one: specdec doctor --fix gpu"
        render.write(f"GPU: none that this build of llama.cpp can use ({advice})\n")
    for gpu in found:
        memory = f"{format_size(gpu['free'])} of {format_size(gpu['total'])} free"
        shared = ", shared with the CPU" if gpu["is_integrated"] else ""
        render.write(f"GPU: {gpu['name']}, {gpu['description']}, {memory}{shared}\n")


def _rpc_backend(fix: bool) -> None:
    """Show whether the RPC backend is there; with `fix`, compile it if it is missing."""
    if not rpc_backend.built() and fix:
        render.write("compiling llama.cpp's RPC backend; this takes about a minute\n")
        if reason := rpc_backend.build():
            render.write(f"RPC backend: not built ({reason})\n")
            raise typer.Exit(exits.FAILURE)
    if rpc_backend.built():
        rpc_backend.load()
    found = rpc_backend.built() or "missing (to build it: specdec doctor --fix rpc)"
    render.write(f"RPC backend: {found}\n")


def _kernels(fix: bool, again: bool) -> None:
    """Show which CPU kernels are used; with `fix`, compile missing ones, and compare what was not compared.

    again: compare all, whatever was measured before.
    """
    if fix and kernels.missing():
        render.write("compiling the CPU kernels; this takes about half a minute\n")
        started = time.perf_counter()
        if reason := kernels.rebuild():
            render.write(f"CPU kernels: not used (not built: {reason})\n")
            return
        render.write(f"compiled in {time.perf_counter() - started:.0f} s\n")
    status = kernels.status()
    render.write(names.with_options(f"CPU kernels: {status}\n"))
    if not status.instruction_set:
        return
    missing = [kind for kind in TYPES if again or kind not in status.times or kind in status.doubts]
    if fix and missing:
        render.write("comparing them with llama.cpp's kernels; this takes about half a minute\n")
        if reason := kernels.compare(missing):
            render.write(f"not compared: {reason}\n")
        status = kernels.status()
    if status.times:
        _speeds(status)
    note = "" if status.measured else " (not measured on this machine; specdec doctor --fix does it)"
    left = [f"{kind} from {n + 1} tokens on" if n else kind for kind, n in status.limits.items()]
    render.write(f"left to llama.cpp's kernels: {'; '.join(left) or 'nothing'}{note}\n")
    if packed := [kind for kind in choice.PACKED if status.limits.get(kind) == 0]:
        render.write(
            f"with {' or '.join(packed)} weights, a text can depend on what is drafted beside it, unless "
            "--reproducible is given\n"
        )


def _speeds(status: Status) -> None:
    """Show the measured speeds, and what the choice between the kernels is worth."""
    render.write("their speed relative to llama.cpp's, by number of tokens, and time of a session:\n")
    render.write(f"  {'':8}{'1':>6}{'2':>6}{'4':>6}{'8':>6}{'prompt':>8}{'session':>9}\n")
    for kind, each in status.times.items():
        speeds = "".join(f"{each.speed(n):6.2f}" for n in (1, 2, 4, 8))
        prompt = f"{each.speed(512):8.2f}" if 512 in each.sizes else f"{'':8}"
        session = choice.session_time(each, status.limits.get(kind))
        render.write(f"  {kind:8}{speeds}{prompt}{session:9.2f}\n")
    if not (other := status.other_reading):
        return
    packed, floats = other.chosen
    if packed:
        render.write(
            f"packed weights are not prefetched into the first-level cache: {other.packed:.2f} of the time\n"
        )
    if floats:
        render.write(
            f"several rows of F16, BF16 and F32 weights are read together: {other.floats:.2f} of the time\n"
        )


def _report() -> None:
    """Print what was measured about this processor, as an entry of benchmarks/processors.toml."""
    from spec_local.bench.record import processor  # imports a session, which takes long

    status = kernels.status()
    if not status.times:
        raise InvalidRequest(
            f"nothing was measured on this machine ({status.reason or 'the kernels were not compared'}): "
            "run specdec doctor --fix"
        )
    render.write("[[processor]]\n")
    render.write(f"name = {json.dumps(f'{processor()}, {status.instruction_set}')}\n")
    render.write(f"threads = {default_threads()}\n")
    if other := status.other_reading:
        relative = f"{{ packed = {other.packed:.2f}, floats = {other.floats:.2f} }}"
        render.write(f"other_reading = {relative}  # time, relative to that of the first way\n")
    render.write("\n")
    render.write("[processor.times]  # of a product by tokens, in microseconds: specdec's, llama.cpp's\n")
    for kind, each in status.times.items():
        pairs = zip(each.sizes, each.kernels, each.llama_cpp, strict=True)
        row = ", ".join(f"{n} = [{ours * 1e6:.0f}, {theirs * 1e6:.0f}]" for n, ours, theirs in pairs)
        render.write(f"{kind} = {{ {row} }}\n")
