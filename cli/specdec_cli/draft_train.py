"""`specdec draft train`: train a head for any main model."""

import shutil
from dataclasses import replace
from pathlib import Path

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.devices import offload_of
from spec_local.llama.setup.probe import check_model_files
from spec_local.models.names import resolve
from spec_local.system import extras
from spec_local.system.files import check_target, expanded
from spec_local.training.recipe import Recipe, general_data
from specdec_cli import plots, render
from specdec_cli.options import needed_main
from specdec_cli.signatures.drafts import DraftTrainOptions

_DATASTORE = "datastore"  # as a source: the answers that are kept there
_LEARNED = "-learned"  # added to the name of a head that was trained further
_MINUTES = 60.0
_MAX_BYTES = 20 * 10**9  # of training data, by default: two million tokens of a model with 1,536 channels


def train(options: DraftTrainOptions) -> None:
    main = needed_main(options.main, options.main_option)
    _check(options)
    texts = [expanded(Path(each)) for each in options.sources or () if each != _DATASTORE]
    recipe = _recipe(options, main, bool(texts))
    # A resumed run may replace its own head.
    check_target(recipe.target, recipe.main, force=options.force or recipe.folder.exists())
    check_model_files(recipe.main, offload=recipe.offload, log=render.note)
    from specdec_cli import draft_training  # imports PyTorch, which takes seconds

    draft_training.run(recipe, texts, options.plot)


def _check(options: DraftTrainOptions) -> None:
    """Check, without importing PyTorch, that it is installed, and the options.

    Raises:
        SpecLocalError: PyTorch or matplotlib is missing.
        InvalidRequest: an option is invalid.
    """
    if why := extras.without_torch():
        raise SpecLocalError(why)
    if options.plot:
        plots.check()
        if options.plot.exists() and not options.plot.is_file():
            raise InvalidRequest(f"{options.plot} is not a regular file: give another path for the plot")
    if options.minutes is not None and options.tokens:
        raise InvalidRequest("--minutes and --tokens exclude each other: give one of them")
    for option, value in (("minutes", options.minutes), ("disk", options.disk)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidRequest(f"--{option} {value:g} is not a positive number: give, for example, 60")


def _recipe(options: DraftTrainOptions, main: str, has_texts: bool) -> Recipe:
    source = resolve(main)
    # The file of a model name is in the folder of downloaded models, where no head belongs.
    folder = source.parent if expanded(main).exists() else Path()
    head = expanded(options.continued) if options.continued else None
    target = head.with_stem(head.stem.removesuffix(_LEARNED) + _LEARNED) if head else None
    target = expanded(options.output) if options.output else target or folder / f"{source.stem}-head.gguf"
    recipe = Recipe(
        main=source,
        target=target,
        minutes=_MINUTES if options.minutes is None else options.minutes,
        tokens=options.tokens,
        continued=head,
        learns=_DATASTORE in (options.sources or ()),
        general=general_data(head) if head and not has_texts else None,
        n_drafted=options.vocabulary,
        seed=options.seed,
        device=options.torch_device,
        threads=options.threads,
        offload=offload_of(options.device, options.gpu_layers),
    )
    return replace(recipe, max_bytes=_max_bytes(options.disk, recipe.folder))


def _max_bytes(disk: float | None, folder: Path) -> int:
    """Maximum size of the training data: as asked for, or half of what is free without earlier data."""
    if disk is not None:
        return int(disk * 1e9)
    used = sum(path.stat().st_size for path in folder.glob("data/*"))
    exists = next(parent for parent in folder.absolute().parents if parent.exists())
    return min(_MAX_BYTES, (shutil.disk_usage(exists).free + used) // 2)
