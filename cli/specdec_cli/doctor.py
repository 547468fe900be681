"""`specdec doctor`: does llama.cpp work on this machine, and if not, what mends it."""

import platform
import sys
from typing import Annotated

import typer
from typer import Option

import spec_local
from specdec_cli import exits


def doctor(
    fix: Annotated[bool, Option("--fix", help="Rebuild llama-cpp-python until it works (minutes).")] = False,
) -> None:
    """Try llama.cpp in a child process, and say how to mend it if it crashes.

    Examples:

      specdec doctor

      specdec doctor --fix
    """
    with exits.guarded():
        from importlib.metadata import PackageNotFoundError, version

        from spec_local.llama.build import mend, recipes
        from spec_local.llama.probe import probe_build

        try:
            binding = version("llama-cpp-python")
        except PackageNotFoundError:
            binding = "not installed"
        typer.echo(
            f"specdec {spec_local.__version__}, Python {platform.python_version()}, {platform.platform()}"
        )
        typer.echo(f"llama-cpp-python {binding}")
        verdict = probe_build()
        if not verdict.works:
            typer.echo(f"llama.cpp does NOT work here: {verdict.crash or verdict.error}")
            if not fix:
                typer.echo("To mend it:  specdec doctor --fix")
                typer.echo(f"or by hand:  {recipes()[0].command()}")
                raise typer.Exit(exits.FAILURE)
            for recipe, works in mend(lambda: probe_build().works):
                if works is None:
                    typer.echo(f"installing {recipe.name}; this takes minutes")
                else:
                    typer.echo(f"{recipe.name} {'works' if works else 'does not work either'}")
                sys.stdout.flush()
            verdict = probe_build()
            if not verdict.works:
                typer.echo("No build works. Please report this with the lines above.")
                raise typer.Exit(exits.FAILURE)
        typer.echo(f"llama.cpp works: {verdict.facts['system'].strip()}")
        typer.echo(f"GPU offload: {'yes' if verdict.facts['gpu'] else 'no (this build computes on the CPU)'}")
