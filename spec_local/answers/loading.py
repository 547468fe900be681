"""Load a session's models, and open a context of each for every row."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from spec_local.answers.preload import take
from spec_local.core.kept_states import KINDS
from spec_local.core.proposal import MAX_DRAFT, MAX_STAGED
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.heads.base import HeadRow
from spec_local.llama.heads.choose import Chosen, choose_head
from spec_local.llama.limit_drafts import DraftVocab, limit_drafts
from spec_local.llama.memory import free_memory
from spec_local.llama.model import Model
from spec_local.llama.open import open_rows
from spec_local.llama.reproducible import open_reproducible_rows
from spec_local.llama.row import LlamaRow
from spec_local.llama.setup.probe import check_model_file

_DEFAULT_CONTEXT = 4096
_MAX_TOKENS = 96  # per call: a larger call reads prompts no faster on a CPU, and Ctrl-C waits for its end
_ROW_TOKENS = 8  # of them for each row: there is room for a draft
_MAX_ROWS = 8  # unless more are asked for


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """See `spec_local.session.Session.open`. workers: their addresses, checked."""

    n_ctx: int | None
    threads: int | None
    gpu_layers: int
    cache_type: str
    branches: int
    reproducible: bool
    parallel: int | None
    draft_vocab: DraftVocab
    mtp: bool
    workers: tuple[str, ...]


Rows = Sequence[tuple[LlamaRow, LlamaRow | HeadRow | None]]
"""A context of the main model, and one of the draft model or head, for each answer at the same time."""


def load(
    main: Path, draft: Path | None, settings: LoadSettings, log: Callable[[str], None]
) -> tuple[Rows, ExitStack]:
    """Load the models, and open their contexts.

    Args:
        main, draft: GGUF files; the draft is a model or a head.
        settings: of the session.
        log: called with one line for each slow operation and each decision.

    Returns:
        rows: contexts of both models.
        resources: frees contexts and models when it is closed.

    Raises:
        SpecLocalError: everything loaded before the error has been freed.
    """
    with ExitStack() as stack:
        models, head = _models(main, draft, settings, log, stack)
        wanted = _DEFAULT_CONTEXT if settings.n_ctx is None else settings.n_ctx
        lengths = [model.n_ctx(wanted) for model in models]
        if settings.n_ctx is not None and lengths[0] < settings.n_ctx:
            log(f"context: {lengths[0]} tokens, which is what the model was trained for")
        n_rows = settings.parallel
        if n_rows is None:
            n_rows = _rows_that_fit(models, lengths, settings.cache_type)
        mains, *others = _contexts(models, lengths, n_rows, head, settings, stack)
        drafts: Sequence[LlamaRow | HeadRow | None] = others[0] if others else [None] * n_rows
        if head:
            drafts = head.open(mains)
            stack.callback(drafts[0].close)
        for row in drafts:
            if row:
                limit_drafts(row, (mains[0] if head else row).model.vocabulary, settings.draft_vocab)
        return list(zip(mains, drafts, strict=True)), stack.pop_all()


def _models(
    main: Path, draft: Path | None, settings: LoadSettings, log: Callable[[str], None], stack: ExitStack
) -> tuple[list[Model], Chosen | None]:
    """The models that have contexts, and the head that drafts."""
    models: list[Model] = []
    for path in [main, draft] if draft else [main]:
        workers = settings.workers if not models else ()
        gpu_layers, load_mtp = settings.gpu_layers, settings.mtp and not draft
        model = None if workers else take(path, gpu_layers=gpu_layers, load_mtp=load_mtp)
        if not model:
            if not workers:  # the memory of this machine may be too small for what workers hold
                check_model_file(path, gpu_layers=gpu_layers, log=log)
            model = Model(path, gpu_layers=gpu_layers, load_mtp=load_mtp, workers=workers)
        models.append(model)
        stack.callback(models[-1].close)
    head = choose_head(*models, log=log)
    if head and draft:
        if not settings.workers:
            check_model_file(draft, gpu_layers=settings.gpu_layers, main=main, log=log)
        del models[1:]
    return models, head


def _contexts(
    models: Sequence[Model],
    lengths: Sequence[int],
    n_rows: int,
    head: Chosen | None,
    settings: LoadSettings,
    stack: ExitStack,
) -> list[Sequence[LlamaRow]]:
    """For each model, a context for each row."""
    found: list[Sequence[LlamaRow]] = []
    for model, length in zip(models, lengths, strict=True):
        create = open_reproducible_rows if settings.reproducible and not found else open_rows
        least = max(settings.branches, MAX_STAGED + 1) if found else MAX_DRAFT + 1
        max_tokens = max(_MAX_TOKENS, _ROW_TOKENS * n_rows)
        opened = create(
            model,
            n_rows,
            n_ctx=length,
            # Rows of logits take memory: the draft model needs one per branch or per staged token.
            max_logits=least if n_rows == 1 else max(least, min(max_tokens, least * n_rows)),
            max_tokens=max_tokens,
            max_branches=settings.branches,
            threads=settings.threads,
            cache_type=settings.cache_type,
            # The draft model's calls have one token of a chain: no state before them is kept.
            **{"max_rollback": 0} if found else {"hidden": head.hidden if head else None},
        )
        for row in opened:
            stack.callback(row.close)
        found.append(opened)
    return found


def _rows_that_fit(models: Sequence[Model], lengths: Sequence[int], cache_type: str) -> int:
    """Return the number of rows whose caches fit into half of the free memory: 1 to `_MAX_ROWS`."""
    need = sum(
        model.kv_bytes(n, CACHE_TYPES.get(cache_type, 2.0)) + (1 + len(KINDS)) * model.state_bytes
        for model, n in zip(models, lengths, strict=True)
    )
    return max(1, min(_MAX_ROWS, free_memory() // (2 * need) if need else _MAX_ROWS))
