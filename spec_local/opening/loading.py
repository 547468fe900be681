"""Load a session's models, and open a context of each for every sequence."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.calibration.cost_store import Conditions
from spec_local.core.proposal import MAX_DRAFT, MAX_STAGED
from spec_local.errors import BackendCrash, ModelError, ModelFileError, SpecLocalError, VocabularyMismatch
from spec_local.llama import runtime
from spec_local.llama.compatibility import difference
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.devices import OFFLOADED, Offload
from spec_local.llama.fitting import free_bytes, n_that_fit, size_of_files
from spec_local.llama.headers import open_header
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.heads.choose import Chosen, choose_head
from spec_local.llama.limit_drafts import DraftVocab, limit_drafts
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.llama.projector import Projector
from spec_local.llama.reproducible import open_reproducible_sequences
from spec_local.llama.sequence import LlamaSequence
from spec_local.llama.setup.probe import check_model_files, check_projector_file
from spec_local.models.projectors import ProjectorFile
from spec_local.opening.preload import take
from spec_local.system.machine import default_threads

if TYPE_CHECKING:
    from spec_local.opening.drafters import Drafter

DEFAULT_CONTEXT = 4096
_MAX_TOKENS = 96  # per call: a larger call reads prompts no faster on a CPU, and Ctrl-C waits for its end
_MAX_TOKENS_GPU = 512  # llama.cpp's default, where GPUs compute all layers: they need large calls to be busy
_SEQUENCE_TOKENS = 8  # of them for each sequence: there is room for a draft
_MOST_SEQUENCES = 8  # unless more are asked for
_MAX_TRIED = 3  # drafters that nobody has asked for: the first test of each takes some seconds
_OF_THE_FILE = (ModelFileError, ModelError, VocabularyMismatch)  # errors that another try would repeat
OF_A_HEAD = (*_OF_THE_FILE, BackendCrash)
"""Errors of a file that nobody can use, if the main model can be loaded without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """See `spec_local.session.Session.open`. workers: their addresses, checked.

    offload, draft_offload: of the main model, and of the draft model; a head runs where the main model does.
    find_draft: without a draft, and without layers for multi-token prediction, look for one on this machine.
    projector: that of the main model.
    """

    n_ctx: int | None
    threads: int | None
    cache_type: str
    branches: int
    reproducible: bool
    parallel: int | None
    draft_vocab: DraftVocab
    mtp: bool
    workers: tuple[str, ...]
    offload: Offload = OFFLOADED
    draft_offload: Offload = OFFLOADED
    find_draft: bool = False
    projector: ProjectorFile | None = None

    @property
    def projector_bytes(self) -> int:
        """Bytes of memory that the projector takes, at most; it is loaded with the first image."""
        return self.projector.memory if self.projector else 0


Sequences = Sequence[tuple[LlamaSequence, LlamaSequence | HeadSequence | None]]
"""A context of the main model, and one of the draft model or head, for each answer at the same time."""


def load(
    main: Path, draft: Path | None, settings: LoadSettings, log: Callable[[str], None]
) -> tuple[Sequences, ExitStack]:
    """Load the models, and open their contexts.

    Args:
        main, draft: GGUF files; the draft is a model or a head.
        settings: of the session.
        log: called with one line for each slow operation and each decision.

    Returns:
        sequences: contexts of both models.
        resources: frees contexts and models when it is closed.

    Raises:
        SpecLocalError: everything loaded before the error has been freed.
    """
    with ExitStack() as stack:
        free = free_bytes(settings.offload)
        reserved = settings.projector_bytes
        if draft and settings.draft_offload == settings.offload:
            reserved += size_of_files([draft])
        model = _model(main, settings, log, stack, load_mtp=settings.mtp and not draft, reserved=reserved)
        if found := settings.projector:
            check = functools.partial(
                check_projector_file, found.path, main, offload=settings.offload, log=log
            )
            threads = settings.threads or default_threads()
            model.projector = Projector(found.path, model, found.type, threads, check)
        wanted = DEFAULT_CONTEXT if settings.n_ctx is None else settings.n_ctx
        if settings.n_ctx is not None and model.n_ctx(wanted) < wanted:
            log(f"context: {model.n_ctx(wanted)} tokens, which is what the model was trained for")
        if settings.find_draft and not draft and not choose_head(model):
            sequences, resources = _load_found(model, wanted, free, settings, log)
        else:
            sequences, resources = _load_sequences(model, draft, wanted, settings, log)
        stack.push(resources)
        return sequences, stack.pop_all()


def _load_found(
    main: Model, wanted: int, free: int, settings: LoadSettings, log: Callable[[str], None]
) -> tuple[Sequences, ExitStack]:
    """`_load_sequences` with the first drafter on this machine that can be used, or without one.

    free: bytes of memory where the main model runs, before it was loaded.
    """
    from spec_local.models.head_versions import roll_back
    from spec_local.models.pairs import OVERHEAD
    from spec_local.opening import drafters  # takes 30 ms

    caches = main.kv_bytes(main.n_ctx(wanted), CACHE_TYPES.get(settings.cache_type, 2.0))
    # Of the main model and, at most as large, of the draft model.
    needed = 2 * caches * (settings.parallel or 1) + OVERHEAD + (0 if settings.workers else main.size)
    conditions = Conditions.of_file(
        main.path, settings.offload, wanted, settings.threads, settings.cache_type, settings.workers
    )
    spare = free - needed - settings.projector_bytes
    quiet = log if runtime.is_verbose() else lambda line: None  # nobody has asked for these files
    for found in islice(drafters.find_drafters(conditions, spare), _MAX_TRIED):
        try:
            loaded = _load_sequences(main, found.path, wanted, settings, quiet, found)
        except SpecLocalError as error:
            if isinstance(error, OF_A_HEAD) and roll_back(main.path, found.path, error, log):
                continue
            quiet(f"not drafting with {found.path.name}: {error}")
            if isinstance(error, _OF_THE_FILE):
                drafters.reject(main.path, found.path, str(error))
            continue
        log(f"drafting with {found.path.name} ({found.why}; `draft=none` turns it off)")
        return loaded
    loaded = _load_sequences(main, None, wanted, settings, log)
    if offered := drafters.offer(main.path, spare):
        log(offered)
    return loaded


def _load_sequences(
    main: Model,
    draft: Path | None,
    wanted: int,
    settings: LoadSettings,
    log: Callable[[str], None],
    found: "Drafter | None" = None,
) -> tuple[Sequences, ExitStack]:
    """Load the draft, and open the contexts of both; if that fails, only the main model stays loaded.

    Args:
        wanted: context length in tokens.
        found: the draft, if nobody has asked for it.
    """
    with ExitStack() as stack:
        models = [main]
        if draft:
            # llama.cpp ends the process if a head is on the CPU but shares tensors that are on a GPU.
            differs = settings.draft_offload != settings.offload and not _is_head(draft)
            offload = settings.draft_offload if differs else settings.offload
            of_draft = replace(settings, offload=offload, workers=())
            models.append(_model(draft, of_draft, log, stack))
        head = choose_head(*models, log=(lambda line: None) if found else log)
        if head and draft:
            if not settings.workers:
                check_model_files(draft, offload=settings.offload, main=main.path, log=log)
            del models[1:]
        elif found and not found.is_of_pair and (why := difference(*(m.vocabulary for m in models))):
            raise VocabularyMismatch(f"another vocabulary ({why})")
        lengths = [model.n_ctx(wanted) for model in models]
        n_parallel = settings.parallel
        if n_parallel is None:
            n_parallel = sequences_that_fit(
                sequence_bytes(models, lengths, settings.cache_type),
                free_bytes(settings.offload) - settings.projector_bytes,
            )
        mains, *others = _contexts(models, lengths, n_parallel, head, settings, stack)
        drafts: Sequence[LlamaSequence | HeadSequence | None] = others[0] if others else [None] * n_parallel
        if head:
            drafts = head.open(mains)
            stack.callback(drafts[0].close)
        for sequence in drafts:
            if sequence:
                limit_drafts(
                    sequence, (mains[0] if head else sequence).model.vocabulary, settings.draft_vocab
                )
        return list(zip(mains, drafts, strict=True)), stack.pop_all()


def _is_head(path: Path) -> bool:
    """Return whether a file is a head.

    Raises:
        ModelFileError, ModelError: see `Model`.
    """
    with closing(open_header(path)) as header:
        return header.is_head


def _model(
    path: Path,
    settings: LoadSettings,
    log: Callable[[str], None],
    stack: ExitStack,
    *,
    load_mtp: bool = False,
    reserved: int = 0,
) -> Model:
    """Load a model; reserved: bytes on the same GPUs for other ones."""
    workers, offload, n = settings.workers, settings.offload, None
    model = None if workers else take(path, offload=offload, load_mtp=load_mtp)
    if not model:
        if not workers:  # the memory of this machine may be too small for what workers hold
            check_model_files(path, offload=offload, log=log)
            n = n_that_fit(path, offload, lambda header: _context_bytes(header, settings), reserved)
        model = Model(path, offload=offload, n_offloaded=n, load_mtp=load_mtp, workers=workers)
        if n is not None:
            log(f"{path.name}: {model.device}, as the memory is too small for more; the others on the CPU")
    stack.callback(model.close)
    return model


def _contexts(
    models: Sequence[Model],
    lengths: Sequence[int],
    n_parallel: int,
    head: Chosen | None,
    settings: LoadSettings,
    stack: ExitStack,
) -> list[Sequence[LlamaSequence]]:
    """For each model, a context for each sequence."""
    found: list[Sequence[LlamaSequence]] = []
    for model, length in zip(models, lengths, strict=True):
        create = open_reproducible_sequences if settings.reproducible and not found else open_sequences
        least = max(settings.branches, MAX_STAGED + 1) if found else MAX_DRAFT + 1
        least_tokens = _MAX_TOKENS if model.uses_cpu or model.workers else _MAX_TOKENS_GPU
        max_tokens = max(least_tokens, _SEQUENCE_TOKENS * n_parallel)
        opened = create(
            model,
            n_parallel,
            n_ctx=length,
            # Logits take memory: the draft model needs one per branch or per staged token.
            max_logits=least if n_parallel == 1 else max(least, min(max_tokens, least * n_parallel)),
            max_tokens=max_tokens,
            max_span=model.projector.max_span if model.projector else 0,
            max_branches=settings.branches,
            threads=settings.threads,
            cache_type=settings.cache_type,
            # The draft model's calls have one token of a chain: no state before them is kept.
            **{"max_rollback": 0} if found else {"hidden": head.hidden if head else None},
        )
        for sequence in opened:
            stack.callback(sequence.close)
        found.append(opened)
    return found


def _context_bytes(header: Model, settings: LoadSettings) -> int:
    """Bytes of the caches of all sequences."""
    length = header.n_ctx(settings.n_ctx or DEFAULT_CONTEXT)
    return header.kv_bytes(length, CACHE_TYPES.get(settings.cache_type, 2.0)) * (settings.parallel or 1)


def sequence_bytes(models: Sequence[Model], lengths: Sequence[int], cache_type: str) -> int:
    """Return the bytes of a sequence's caches, with so many tokens of context; states need loaded weights."""
    return sum(
        model.kv_bytes(n, CACHE_TYPES.get(cache_type, 2.0)) + 2 * model.state_bytes
        for model, n in zip(models, lengths, strict=True)
    )


def sequences_that_fit(size: int, free: int) -> int:
    """Return how many sequences' caches, of `size` bytes each, fit into half of the free memory: 1 to 8."""
    return max(1, min(_MOST_SEQUENCES, free // (2 * size) if size else _MOST_SEQUENCES))
