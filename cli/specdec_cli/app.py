"""The `specdec` command. Its commands import what they need only when they run, so that --help is fast."""

from typing import Annotated

import typer

import spec_local
from specdec_cli import (
    bench,
    cache,
    chat,
    check,
    commands,
    config,
    datastore,
    doctor,
    draft,
    generate,
    models,
    render,
    run,
    serve,
    tune,
    worker,
)

app = typer.Typer(
    name="specdec",
    cls=commands.Group,
    help="Speculative decoding for GGUF models on your own machine: faster, same output distribution.",
    epilog="Start with: specdec models pull starter, then specdec run. Every command has examples in its "
    "--help. Options can also be set in the environment and in a config file: see specdec config --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Colours of Typer's own messages would be shown as escapes: see `terminal.Screen`.
    context_settings={"help_option_names": ["-h", "--help"], "color": False},
)
app.command("run")(run.run)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("worker")(worker.worker)
app.command("doctor")(doctor.doctor)
models.app.command("check")(check.check)
app.add_typer(models.app, name="models")
app.add_typer(draft.app, name="draft")
app.add_typer(datastore.app, name="datastore")
app.add_typer(cache.app, name="cache")
commands.adopt(app)
app.add_typer(config.app, name="config", cls=commands.Group)  # not adopted: works with a broken config file


def _version(value: bool) -> None:
    if value:
        render.write(f"specdec {spec_local.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    no_color: commands.NoColor = False,
) -> None:
    pass
