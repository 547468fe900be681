"""`specdec models`: the models that specdec knows by name."""

from typing import Annotated

import typer
from typer import Argument

from spec_local.errors import DownloadError
from specdec_cli import exits, render

app = typer.Typer(help="Models by name: list them, fetch them, find their files.", no_args_is_help=True)
_Name = Annotated[str, Argument(help="The model's name.")]


@app.command("list")
def list_models() -> None:
    """List the models that specdec knows by name."""
    with exits.guarded():
        from spec_local import registry

        for name, entry in registry.models().items():
            state = "here" if registry.find(name) else f"{entry.size / 1e6:.0f} MB to fetch"
            typer.echo(f"{name}\t{state}\t{entry.licence}\t{entry.description}")


@app.command()
def pull(name: _Name = "starter") -> None:
    """Fetch a model and check it; prints its path."""
    with exits.guarded():
        from spec_local import registry

        typer.echo(registry.pull(name, render.note))


@app.command()
def path(name: _Name = "starter") -> None:
    """Print where a model's file is."""
    with exits.guarded():
        from spec_local import registry

        found = registry.find(name)
        if not found:
            raise DownloadError(f"the model {name} is not here: run specdec models pull {name}")
        typer.echo(found)
