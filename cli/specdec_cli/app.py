"""All commands. Each imports what it needs when it runs, so that ``specdec --help`` is instant."""

from typing import Annotated

import typer

import spec_local
from specdec_cli import bench, chat, check, doctor, draft, generate, models, tune

app = typer.Typer(
    name="specdec",
    help="Speculative decoding for GGUF models on your own machine: the same text, in fewer steps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("doctor")(doctor.doctor)
models.app.command("check")(check.check)
app.add_typer(models.app, name="models")
app.add_typer(draft.app, name="draft")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"specdec {spec_local.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass
