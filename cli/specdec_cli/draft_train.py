"""`specdec draft train`: a draft for a model that has none, made on the spot."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import completion, draft_view, exits, render
from specdec_cli.options import KernelsOption, resolve

if TYPE_CHECKING:
    from spec_local.training.recipe import Recipe


class SizeChoice(StrEnum):
    tiny = "tiny"
    small = "small"


class DeviceChoice(StrEnum):
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


def train(
    main: Annotated[
        str,
        Argument(
            metavar="MAIN",
            help="The model that answers: a file or a name.",
            autocompletion=completion.models,
        ),
    ],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="The draft's file (default: beside main; of a name, in this folder)."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        Option(
            help="Files and folders of what you ask and work on: prompts (.toml, .jsonl) or texts. Repeatable."
        ),
    ] = None,
    minutes: Annotated[
        float, Option(help="For all but the report; what main wrote in earlier runs counts.")
    ] = 60.0,
    size: Annotated[
        SizeChoice, Option(help="Of the draft: tiny for mains below a billion weights.")
    ] = SizeChoice.small,
    device: Annotated[DeviceChoice, Option(help="What the draft learns on.")] = DeviceChoice.cpu,
    seed: Annotated[int, Option(min=0, help="Of questions, sampling and learning.")] = 0,
    plot: Annotated[
        Path | None, Option(help="Draw how it learned, as a PNG (needs spec-local[plot]).")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Threads (default: one per physical core).")
    ] = None,
    gpu_layers: Annotated[int, Option(help="Layers of main on the GPU while it writes.")] = -1,
    kernels: KernelsOption = "auto",
) -> None:
    """Train a small draft for a model, on what the model itself writes; prints the draft's path.

    Main answers questions for a while, and a small model learns to foretell its answers. Nothing else is needed: no
    original weights, no data, no network. A run that was stopped goes on when it is called again; with more --minutes a
    finished one goes on, too. Needs PyTorch: pip install 'spec-local[train]'.

    Examples:

      specdec draft train main.gguf --minutes 480

      specdec draft train main.gguf -o draft.gguf --text src --text prompts.jsonl
    """
    with exits.guarded():
        from spec_local import training
        from spec_local.files import expanded, saving

        training.require()
        if plot:
            from specdec_cli import plots

            plots.check()
            if plot.exists() and not plot.is_file():
                raise InvalidRequest(f"{plot} is no ordinary file: give another place for the picture")
        if not 0 < minutes < float("inf"):
            raise InvalidRequest(f"--minutes {minutes:g} is no time: give a number above 0, such as 60")
        from spec_local.llama.probe import check_model_file
        from spec_local.models.quantized_copy import check_target
        from spec_local.training import making
        from spec_local.training.questions import from_files
        from spec_local.training.recipe import Recipe

        source = resolve(main)
        beside = source.parent if expanded(main).exists() else Path()  # a folder of models is none of ours
        recipe = Recipe(
            main=source,
            target=expanded(output) if output else beside / f"{source.stem}-draft.gguf",
            texts=[expanded(path) for path in text or ()],
            minutes=minutes,
            size=size.value,
            seed=seed,
            device=device.value,
            threads=threads,
            gpu_layers=gpu_layers,
        )
        # A run that is gone on with may write its own file again.
        check_target(recipe.target, recipe.main, force=force or recipe.folder.exists())
        making.check(recipe)
        own = from_files(recipe.texts)
        for reason, skipped in own.skipped.items():
            render.note(f"skipped, {reason}: {', '.join(map(str, skipped))}")
        if recipe.texts:
            render.note(f"your texts: {len(own.questions):,} prompts, {len(own.passages):,} passages")
        check_model_file(source, gpu_layers=gpu_layers, log=render.note)
        with _kept(recipe), draft_view.told(recipe) as told:
            made = making.make(recipe, own, told)
        for line in draft_view.report(made, recipe):
            render.note(line)
        if plot:
            with saving(plot) as picture:
                plots.draw_learning(made.curve, picture)
        render.prepare_stdout()
        render.write(f"{made.path}\n")


@contextlib.contextmanager
def _kept(recipe: "Recipe") -> Iterator[None]:
    """Whatever ends the work, say that it is not lost."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, SIGHUP
        render.note(f"stopped: the same command goes on from {recipe.folder}")
        raise
    except OSError as error:
        raise SpecLocalError(
            f"{recipe.folder} cannot be written ({error.strerror or error}): "
            "mend that, and the same command goes on, or give another --output"
        ) from None
