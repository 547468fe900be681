"""Open the models of a session: what its options ask for, on this machine."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spec_local import kernels
from spec_local.errors import InvalidRequest, ModelFileError, SpecLocalError
from spec_local.llama.context import MAX_SEQUENCES
from spec_local.llama.devices import AUTO, OFFLOADED, ON_CPU, fixed_offload
from spec_local.models.names import FOUND_DRAFT, NO_DRAFT, resolve_pair
from spec_local.models.projectors import ProjectorFile, resolve_projector
from spec_local.opening.loading import OF_A_HEAD, LoadSettings, Sequences, load
from spec_local.opening.placing import placed

_Loaded = tuple[Sequences, ExitStack]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions(LoadSettings):
    """What is asked for, from which the other settings follow; see `spec_local.session.Session.open`."""

    device: str
    draft_device: str
    gpu_layers: int | None
    learn: bool
    mmproj: Path | str

    def check(self) -> None:
        """Raise InvalidRequest if a value is out of range, or excludes another one."""
        if isinstance(self.draft_vocab, int) and self.draft_vocab < 1:
            raise InvalidRequest(f"draft_vocab is {self.draft_vocab}: give a number from 1, auto or all")
        if self.parallel is not None and not 1 <= self.parallel <= MAX_SEQUENCES:
            raise InvalidRequest(f"parallel is {self.parallel}: give 1 to {MAX_SEQUENCES}")
        if self.workers and self.reproducible:
            raise InvalidRequest("workers do not give reproducible output: give one of the two")


@dataclass(frozen=True, slots=True)
class OpenedModels:
    """Models that are open.

    sequences: their contexts. draft: the file of the draft that was given, or that has learned in its place.
    projector: that of the main model. resources: frees everything when it is closed.
    """

    sequences: Sequences
    draft: Path | None
    projector: ProjectorFile | None
    resources: ExitStack


def open_models(
    main: Path | str, draft: Path | str | None, options: OpenOptions, log: Callable[[str], None]
) -> OpenedModels:
    """Load models by their names, where they are fastest, and open their contexts.

    Raises:
        SpecLocalError: see `Session.open`.
    """
    options.check()
    fixed = fixed_offload(options.device, options.gpu_layers, options.workers)
    if fixed is None and options.reproducible:
        fixed = ON_CPU  # works on no other device
    of_draft = (
        None if options.draft_device == AUTO else fixed_offload(options.draft_device, setting="draft_device")
    )
    if of_draft is not None and fixed is None:
        fixed = OFFLOADED
    drafting, find_draft = draft != NO_DRAFT, draft == FOUND_DRAFT
    main, draft = resolve_pair(main, None if find_draft else draft, drafting=drafting)
    settings = replace(
        options,
        offload=fixed or OFFLOADED,
        draft_offload=of_draft or fixed or OFFLOADED,
        mtp=options.mtp and drafting,
        find_draft=find_draft,
        projector=resolve_projector(main, options.mmproj),
    )
    if doubts := kernels.status().doubts:
        log(f"comparing the CPU kernels for {', '.join(doubts)} again: a session's calls took longer")
        kernels.compare(doubts)

    def load_with(draft: Path | None) -> _Loaded:
        return load(main, draft, placed(main, draft, settings, log) if fixed is None else settings, log)

    if options.learn and not find_draft:
        draft, (sequences, resources) = _load_learned(main, draft, load_with, log)
    else:
        sequences, resources = load_with(draft)
    return OpenedModels(sequences, draft, settings.projector, resources)


def _load_learned(
    main: Path,
    draft: Path | None,
    load_with: Callable[[Path | None], _Loaded],
    log: Callable[[str], None],
) -> tuple[Path | None, _Loaded]:
    """Load the head that has learned from the user's answers and began with a draft, or else the draft.

    Versions that cannot be loaded are rolled back, if the models can be loaded without them.

    Returns:
        what is used as the draft, and the result of `load_with` for it.
    """
    from spec_local.models.head_versions import HeadVersions, roll_back  # takes some milliseconds

    heads, broken = list[Path](), list[tuple[Path, SpecLocalError]]()
    with suppress(ModelFileError):  # of the main model, which loading reports
        versions = HeadVersions(main)
        heads = [versions.path(version) for version in versions.continuing(draft)]
    if heads[:1] == [draft]:  # the caller has chosen it
        heads = []
    used: Path | None
    for used in heads:
        try:
            loaded = load_with(used)
        except OF_A_HEAD as error:
            broken.append((used, error))
            continue
        log(f"drafting with {used.name}, a head that has learned from your answers")
        break
    else:
        used, loaded = draft, load_with(draft)
    for head, reason in broken:
        roll_back(main, head, reason, log)
    return used, loaded
