"""What the shared options stand for: models, sessions, and the settings of an answer."""

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_local.core.proposal import MAX_DRAFT
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.devices import AUTO, check_device, fixed_offload
from spec_local.llama.fitting import fit_easily
from spec_local.models.names import FOUND_DRAFT, NO_DRAFT
from spec_local.models.sampling_defaults import sampling_defaults
from spec_local.opening.preload import preload
from spec_local.prompt_cache.folder import default_folder, default_limit
from spec_local.settings import GenerationSettings
from spec_local.system.files import read_text
from specdec_cli import render, terminal, waiting
from specdec_cli.options import ModelOptions, SamplingOptions, cache_limit

if TYPE_CHECKING:
    from spec_local.session import Session

_MAX_TEXT = 1 << 20


def open_session(
    models: ModelOptions, files: tuple[Path, Path | None] | None = None, *, parallel: int | None = 1
) -> "Session":
    """Load the models.

    Args:
        files: the result of `models.files()` if the caller has it.
        parallel: maximum number of answers at the same time; None: as many as there is memory for.
    """
    files = files or models.files()
    names = " and ".join(terminal.visible(path.name) for path in files if path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting.line(f"loading {names} …"))
        offload = fixed_offload(models.device, models.gpu_layers, _workers(models))
        paths = [path for path in files if path]
        as_main = models.draft_device == AUTO
        if offload and as_main and not models.workers and fit_easily(paths, offload):
            mtp = models.drafting and not files[1]
            stack.enter_context(preload(paths, offload=offload, load_mtp=mtp, log=render.note))
        from spec_local.session import Session  # takes as long as loading a model, which happens meanwhile

        session = Session.open(**session_arguments(models, files, parallel=parallel), log=render.note)
    if models.drafting and models.shape in ("tree", "beam") and not session.draft:
        session.close()
        raise InvalidRequest(
            f"--shape {models.shape} has no effect without a draft model: use --draft, or remove --shape"
        )
    return session


def opened_for(
    models: ModelOptions, files: tuple[Path, Path | None], n_prompts: int, parallel: int | None
) -> "Session":
    """Load the models for this number of prompts.

    Args:
        parallel: maximum number of answers at the same time; None: as many as may pay.
    """
    if parallel is not None:
        parallel = min(parallel, n_prompts)
    elif n_prompts == 1 or models.reproducible:  # reproducible rows share no calls
        parallel = 1
    return open_session(models, files, parallel=parallel)


def n_parallel(session: "Session", n_prompts: int, parallel: int | None) -> int:
    """The number of answers to generate at the same time."""
    return min(session.best_parallel() if parallel is None else session.n_parallel, n_prompts)


def session_arguments(
    models: ModelOptions, files: tuple[Path, Path | None], *, parallel: int | None = 1
) -> dict[str, Any]:
    """Return the arguments of `Session.open`, except `log`; see `open_session`."""
    workers = _workers(models)
    check_device(models.device, models.gpu_layers, workers)
    check_device(models.draft_device, setting="draft_device")
    main, draft = files
    cache = models.prompt_cache
    return {
        "main": main,
        "draft": draft or (FOUND_DRAFT if models.drafting else NO_DRAFT),
        "n_ctx": models.ctx,
        "threads": models.threads,
        "device": models.device,
        "draft_device": models.draft_device,
        "gpu_layers": models.gpu_layers,
        "cache_type": models.cache_type,
        "branches": 1 if models.shape == "chain" else MAX_DRAFT,
        "datastore": models.datastore,
        "learn": models.learn,
        "reproducible": models.reproducible,
        "parallel": parallel,
        "draft_vocab": int(models.draft_vocab) if models.draft_vocab.isdecimal() else models.draft_vocab,
        "workers": workers,
        "mmproj": models.mmproj,
        "prompt_cache": default_limit(default_folder()) if cache is None else cache_limit(cache),
    }


def generation_settings(models: ModelOptions, sampling: SamplingOptions) -> GenerationSettings:
    """Return the settings of one answer from both groups of options, with the defaults of the main model.

    Raises:
        InvalidRequest: an invalid value.
    """
    recommended = {}
    with contextlib.suppress(SpecLocalError):  # there is no such model, which is an error when it is opened
        recommended = sampling_defaults(models.files()[0])
    speculation = {
        each.name: getattr(models, each.name)
        for each in fields(GenerationSettings)
        if hasattr(models, each.name)
    }
    return GenerationSettings(
        **speculation | ({"proposer": "none"} if models.no_spec else {}),
        sampling=sampling.settings(recommended),
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stops=sampling.stop or (),
        grammar=read_text(sampling.grammar_file, _MAX_TEXT) if sampling.grammar_file else None,
        json_schema=_schema(sampling.json_schema) if sampling.json_schema is not None else None,
        reasoning_budget=sampling.thinking_budget,
    )


def _schema(given: str) -> str:
    return given if given.lstrip().startswith("{") else read_text(Path(given), _MAX_TEXT)


def _workers(models: ModelOptions) -> Sequence[str]:
    return models.workers.split(",") if models.workers else ()
