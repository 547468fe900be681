"""`specdec draft train`: train a draft model for any main model."""

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
            help="Main model to train a draft model for: a file or a name.",
            autocompletion=completion.models,
        ),
    ],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Output file (default: beside the main model; for a model name, in the current folder).",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        Option(help="Your own prompts (.toml, .jsonl), texts or code: a file or folder; repeatable."),
    ] = None,
    minutes: Annotated[
        float,
        Option(help="Time for everything except the report, including data generation in earlier runs."),
    ] = 60.0,
    size: Annotated[
        SizeChoice, Option(help="Size of the draft model; tiny suits main models below a billion weights.")
    ] = SizeChoice.small,
    device: Annotated[DeviceChoice, Option(help="PyTorch device to train on.")] = DeviceChoice.cpu,
    seed: Annotated[int, Option(min=0, help="Random seed for prompts, sampling and training.")] = 0,
    plot: Annotated[
        Path | None, Option(help="Save a PNG of the training curve (needs spec-local\\[plot]).")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Number of threads (default: one per physical core).")
    ] = None,
    gpu_layers: Annotated[int, Option(help="Number of layers of the main model on the GPU.")] = -1,
    kernels: KernelsOption = "auto",
) -> None:
    """Train a small draft model on the main model's own output, and print its path.

    The main model answers prompts for a while, and a small model learns to
    predict its answers. No original weights, data or network access are needed.
    Run the same command again to resume a run that was stopped, or with more
    --minutes to continue a finished one.

    Requires PyTorch: pip install 'spec-local\\[train]'.

    Examples:

      specdec draft train main.gguf --minutes 480

      specdec draft train main.gguf -o draft.gguf --text src --text prompts.jsonl
    """
    with exits.guarded():
        from spec_local import training
        from spec_local.files import expanded, saving

        training.check_torch()
        if plot:
            from specdec_cli import plots

            plots.check()
            if plot.exists() and not plot.is_file():
                raise InvalidRequest(f"{plot} is not a regular file: give another path for the plot")
        if not 0 < minutes < float("inf"):
            raise InvalidRequest(f"--minutes {minutes:g} is not a positive number: give, for example, 60")
        from spec_local.llama.probe import check_model_file
        from spec_local.models.quantized_copy import check_target
        from spec_local.training import pipeline
        from spec_local.training.prompts import read_user_texts
        from spec_local.training.recipe import Recipe

        source = resolve(main)
        # The file of a model name is in the folder of downloaded models, where no draft model belongs.
        folder = source.parent if expanded(main).exists() else Path()
        recipe = Recipe(
            main=source,
            target=expanded(output) if output else folder / f"{source.stem}-draft.gguf",
            minutes=minutes,
            size=size.value,
            seed=seed,
            device=device.value,
            threads=threads,
            gpu_layers=gpu_layers,
        )
        # A resumed run may replace its own draft.
        check_target(recipe.target, recipe.main, force=force or recipe.folder.exists())
        pipeline.check(recipe)
        user_texts = read_user_texts(expanded(path) for path in text or ())
        for reason, skipped in user_texts.skipped.items():
            render.note(f"skipped, {reason}: {', '.join(map(str, skipped))}")
        if text:
            n_prompts, n_passages = len(user_texts.prompts), len(user_texts.passages)
            render.note(f"your texts: {n_prompts:,} prompts, {n_passages:,} passages")
        check_model_file(source, gpu_layers=gpu_layers, log=render.note)
        with _resumable(recipe), draft_view.progress(recipe) as on_progress:
            draft = pipeline.run(recipe, user_texts, on_progress)
        for line in draft_view.report(draft, recipe):
            render.note(line)
        if plot:
            with saving(plot) as picture:
                plots.draw_training_curve(draft.curve, picture)
        render.write(f"{draft.path}\n")


@contextlib.contextmanager
def _resumable(recipe: "Recipe") -> Iterator[None]:
    """Explain how to resume if the run is stopped or a file cannot be written."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, SIGHUP
        render.note(f"stopped: run the same command again to resume from {recipe.folder}")
        raise
    except OSError as error:
        raise SpecLocalError(
            f"{recipe.folder} cannot be written ({error.strerror or error}): "
            "fix that and run the same command again to resume, or give another --output"
        ) from None
