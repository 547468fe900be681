"""The `specdec` command: the tree of its commands.

Each has its options and its help in `signatures`, and a body of its own, which is imported when it runs.
"""

from typing import Annotated

import typer

import spec_local
from specdec_cli import commands, render
from specdec_cli.signatures import answers, drafts, machine, stores

app = typer.Typer(
    name="specdec",
    cls=commands.CommandGroup,
    help="Speculative decoding for GGUF models on your own machine: faster, same output distribution.",
    epilog="Start with: specdec models pull starter, then specdec run. Every command has examples in its "
    "--help. Options can also be set in the environment and in a config file: see specdec config --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Colours of Typer's own messages would be shown as escapes: see `terminal.Screen`.
    context_settings={"help_option_names": ["-h", "--help"], "color": False},
)


def _group(name: str, help_: str) -> typer.Typer:
    group = typer.Typer(help=help_, no_args_is_help=True)
    app.add_typer(group, name=name, cls=commands.CommandGroup)
    return group


commands.add(app, "run", answers.RunOptions, "run:run")
commands.add(app, "generate", answers.GenerateOptions, "generate:generate")
commands.add(app, "chat", answers.ChatOptions, "chat:chat")
commands.add(app, "serve", answers.ServeOptions, "serve:serve")
commands.add(app, "bench", drafts.BenchOptions, "bench:bench")
commands.add(app, "tune", drafts.TuneOptions, "tune:tune")
commands.add(app, "worker", machine.WorkerOptions, "worker:worker")
commands.add(app, "doctor", machine.DoctorOptions, "doctor:doctor")

_models = _group("models", "List, download, locate and delete models by name, and check pairs.")
commands.add(_models, "list", stores.ModelsListOptions, "models:list_models")
commands.add(_models, "pull", stores.ModelsPullOptions, "models:pull")
commands.add(_models, "path", stores.ModelsPathOptions, "models:path")
commands.add(_models, "show", stores.ModelsShowOptions, "models:show")
commands.add(_models, "rm", stores.ModelsRmOptions, "models:rm")
commands.add(_models, "check", stores.ModelsCheckOptions, "check:check")

_draft = _group("draft", "Make drafts for a main model: train or convert a head, or quantize a draft model.")
commands.add(_draft, "train", drafts.DraftTrainOptions, "draft_train:train")
commands.add(_draft, "versions", drafts.DraftVersionsOptions, "draft_versions:versions")
commands.add(_draft, "rollback", drafts.DraftRollbackOptions, "draft_versions:rollback")
commands.add(_draft, "quantize", drafts.DraftQuantizeOptions, "draft:quantize")
commands.add(_draft, "convert", drafts.DraftConvertOptions, "draft:convert")

_datastore = _group("datastore", "Show, add and delete what --datastore and --learn keep across sessions.")
commands.add(_datastore, "show", stores.DatastoreShowOptions, "datastore:show")
commands.add(_datastore, "add", stores.DatastoreAddOptions, "datastore:add")
commands.add(_datastore, "clear", stores.DatastoreClearOptions, "datastore:clear")

_cache = _group("cache", "Show and delete the prompts and answers that --prompt-cache keeps on disk.")
commands.add(_cache, "show", stores.CacheShowOptions, "cache:show")
commands.add(_cache, "clear", stores.CacheClearOptions, "cache:clear")

_config = _group(
    "config", "Show and set options in the config file; show those set in the environment (SPECDEC_*)."
)
commands.add(_config, "path", machine.ConfigPathOptions, "config:show_path", configurable=False)
commands.add(_config, "show", machine.ConfigShowOptions, "config:show", configurable=False)
commands.add(
    _config,
    "set",
    machine.ConfigSetOptions,
    "config:set_value",
    configurable=False,
    context_settings={"ignore_unknown_options": True},  # for values such as -1
)
commands.add(_config, "unset", machine.ConfigUnsetOptions, "config:unset", configurable=False)


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
