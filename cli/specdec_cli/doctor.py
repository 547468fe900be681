"""`specdec doctor`: check llama.cpp and the CPU kernels on this machine, and repair them."""

import platform
import time
from typing import Annotated

import typer
from typer import Option

import spec_local
from specdec_cli import exits, render


def doctor(
    fix: Annotated[
        bool,
        Option(
            "--fix",
            help="Rebuild llama-cpp-python if it crashes (takes minutes), and compile missing CPU kernels.",
        ),
    ] = False,
) -> None:
    """Check that llama.cpp runs on this machine, and show which CPU kernels are used.

    Examples:

      specdec doctor

      specdec doctor --fix
    """
    with exits.guarded():
        from importlib.metadata import PackageNotFoundError, version

        from spec_local.llama.build import recipes, repair
        from spec_local.llama.probe import probe_build

        try:
            binding = version("llama-cpp-python")
        except PackageNotFoundError:
            binding = "not installed"
        render.write(
            f"specdec {spec_local.__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        )
        render.write(f"llama-cpp-python {binding}\n")
        verdict = probe_build()
        if not verdict.works:
            render.write(f"llama.cpp does not work on this machine: {verdict.crash or verdict.error}\n")
            if not fix:
                render.write("To fix it:  specdec doctor --fix\n")
                render.write(f"or:         {recipes()[0].command()}\n")
                raise typer.Exit(exits.FAILURE)
            for recipe, works in repair(lambda: probe_build().works):
                if works is None:
                    render.write(f"installing {recipe.name}; this takes several minutes\n")
                else:
                    render.write(f"{recipe.name} {'works' if works else 'does not work either'}\n")
            verdict = probe_build()
            if not verdict.works:
                render.write("No build works on this machine. Please report this with the output above.\n")
                raise typer.Exit(exits.FAILURE)
        render.write(f"llama.cpp works: {verdict.facts['system'].strip()}\n")
        render.write(
            f"GPU offload: {'yes' if verdict.facts['gpu'] else 'no (this build uses only the CPU)'}\n"
        )
        _kernels(fix)


def _kernels(fix: bool) -> None:
    """Show which CPU kernels are used; with `fix`, compile missing ones."""
    from spec_local import kernels
    from spec_local.kernels.build import unsupported

    missing = not kernels.status().instruction_set and not unsupported() and kernels.mode() == "auto"
    if fix and missing:
        render.write("compiling the CPU kernels; this takes about half a minute\n")
        started = time.perf_counter()
        if reason := kernels.rebuild():
            render.write(f"CPU kernels: not used (not built: {reason})\n")
            return
        render.write(f"compiled in {time.perf_counter() - started:.0f} s\n")
    render.write(f"CPU kernels: {kernels.status()}\n")
