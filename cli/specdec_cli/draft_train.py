"""`specdec draft train`: train a head for any main model."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.models.names import resolve
from spec_local.text import counted
from specdec_cli import completion, draft_view, exits, render
from specdec_cli.options import (
    DeviceOption,
    GpuLayersOption,
    KernelsOption,
    NeededMainOption,
    gpu_layers_of,
    needed_main,
)

if TYPE_CHECKING:
    from spec_local.datastore.answer_store import AnswerStore
    from spec_local.training.recipe import Recipe


_DATASTORE = "datastore"  # as a source: the answers that are kept there
_LEARNED = "-learned"  # added to the name of a head that was trained further
_MINUTES = 60.0
_MAX_BYTES = 20 * 10**9  # of training data, by default: two million tokens of a model with 1,536 channels


def train(
    main: Annotated[
        str | None,
        Argument(
            metavar="MAIN",
            help="Main model to train a head for: a file or a name.",
            autocompletion=completion.models,
        ),
    ] = None,
    main_option: NeededMainOption = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Output file (default: beside the main model or the head to continue; for a model name, in "
            "the current folder).",
        ),
    ] = None,
    sources: Annotated[
        list[str] | None,
        Option(
            "--from",
            metavar="datastore|FILE",
            help="Learn from the answers that --learn has kept, or from your own prompts (.toml, .jsonl), "
            "texts or code: a file or folder; repeatable.",
        ),
    ] = None,
    continued: Annotated[
        Path | None,
        Option(
            "--continue",
            metavar="HEAD",
            help="Train a head further, instead of a new one; the new file is HEAD-learned.gguf.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        Option(
            help="Time for everything except the report, including data generation in earlier runs "
            "(default: 60).",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(
            min=1000,
            max=10**9,
            help="Tokens of training data, instead of --minutes; training then takes as long as it needs.",
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        Option(
            min=256,
            max=1 << 20,
            help="Number of tokens that the head can draft (default: 4,096 to 32,768, as many as cover 96 % "
            "of the main model's output).",
        ),
    ] = None,
    disk: Annotated[
        float | None,
        Option(help="Maximum size of the training data in GB (default: 20, or half of the free space)."),
    ] = None,
    torch_device: Annotated[
        Literal["cpu", "cuda", "mps"], Option(help="PyTorch device to train on.")
    ] = "cpu",
    seed: Annotated[int, Option(min=0, help="Random seed for prompts, sampling and training.")] = 0,
    plot: Annotated[Path | None, Option(help="Save a PNG of the training curve (needs matplotlib).")] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Number of threads (default: one per usable core).")
    ] = None,
    device: DeviceOption = "auto",
    gpu_layers: GpuLayersOption = None,
    kernels: KernelsOption = "auto",
) -> None:
    """Train a head that drafts for a main model, and print its path.

    The main model answers prompts for a while, and an EAGLE-3 head learns to
    predict its answers from its hidden states. No original weights, data or
    network access are needed. With --from datastore, it learns mainly from the
    answers that you have received. To resume a run that was stopped, run the same
    command again. To extend a finished run, give more --minutes or --tokens.

    Requires PyTorch; where it is missing, an error shows how to install it.

    Examples:

      specdec draft train main.gguf --minutes 480
      specdec draft train main.gguf -o head.gguf --from src --from prompts.jsonl
      specdec draft train main.gguf --continue head.gguf --from datastore
    """
    with exits.guarded():
        from spec_local import training
        from spec_local.system.files import expanded, saving

        main = needed_main(main, main_option)

        training.check_torch()
        if plot:
            from specdec_cli import plots

            plots.check()
            if plot.exists() and not plot.is_file():
                raise InvalidRequest(f"{plot} is not a regular file: give another path for the plot")
        if minutes is not None and tokens:
            raise InvalidRequest("--minutes and --tokens exclude each other: give one of them")
        minutes = _MINUTES if minutes is None else minutes
        for option, value in (("minutes", minutes), ("disk", disk)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(f"--{option} {value:g} is not a positive number: give, for example, 60")
        from spec_local.llama.setup.probe import check_model_file
        from spec_local.models.quantized_copy import check_target
        from spec_local.training import material, pipeline
        from spec_local.training.prompts import read_user_texts
        from spec_local.training.recipe import Recipe, general_data

        layers = gpu_layers_of(device, gpu_layers)
        source = resolve(main)
        # The file of a model name is in the folder of downloaded models, where no head belongs.
        folder = source.parent if expanded(main).exists() else Path()
        head = expanded(continued) if continued else None
        target = head.with_stem(head.stem.removesuffix(_LEARNED) + _LEARNED) if head else None
        target = expanded(output) if output else target or folder / f"{source.stem}-head.gguf"
        texts = [expanded(Path(each)) for each in sources or () if each != _DATASTORE]
        recipe = Recipe(
            main=source,
            target=target,
            minutes=minutes,
            tokens=tokens,
            continued=head,
            learns=_DATASTORE in (sources or ()),
            general=general_data(head) if head and not texts else None,
            n_drafted=vocabulary,
            seed=seed,
            device=torch_device,
            threads=threads,
            gpu_layers=layers,
        )
        recipe = replace(recipe, max_bytes=_max_bytes(disk, recipe.folder))
        # A resumed run may replace its own head.
        check_target(recipe.target, recipe.main, force=force or recipe.folder.exists())
        check_model_file(source, gpu_layers=layers, log=render.note)
        answers = _kept_answers(recipe)
        render.note(draft_view.plan(recipe, material.check(recipe)))
        user_texts = read_user_texts(texts)
        for reason, skipped in user_texts.skipped.items():
            render.note(f"skipped, {reason}: {', '.join(map(str, skipped))}")
        if texts:
            n_prompts, n_passages = len(user_texts.prompts), len(user_texts.passages)
            prompts = counted(n_prompts, "prompt", separator=",")
            render.note(f"your texts: {prompts}, {counted(n_passages, 'passage', separator=',')}")
        with _resumable(recipe), draft_view.progress(recipe) as on_progress:
            trained = pipeline.run(recipe, user_texts, on_progress, answers)
            measured = pipeline.measure(recipe, trained, on_progress)
        render.notes(draft_view.report(trained, measured, recipe))
        if plot:
            with saving(plot) as picture:
                plots.draw_training_curve(trained.curve, picture)
        render.write(f"{trained.path}\n")


def _kept_answers(recipe: "Recipe") -> "AnswerStore | None":
    """The store of the answers to learn from, if the run learns.

    Raises:
        InvalidRequest: there are too few.
    """
    if not recipe.learns:
        return None
    from spec_local.datastore.answer_store import answer_store_of
    from spec_local.training.own_answers import usable

    store = answer_store_of(recipe.main, render.note)
    render.note(f"your answers: {len(usable(store.answers())):,}")
    return store


def _max_bytes(disk: float | None, folder: Path) -> int:
    """Maximum size of the training data: as asked for, or half of what is free without earlier data."""
    if disk is not None:
        return int(disk * 1e9)
    used = sum(path.stat().st_size for path in folder.glob("data/*"))
    exists = next(parent for parent in folder.absolute().parents if parent.exists())
    return min(_MAX_BYTES, (shutil.disk_usage(exists).free + used) // 2)


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
