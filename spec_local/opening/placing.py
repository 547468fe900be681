"""Choose the devices of a session's models: those that were measured as fastest, or are now."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.calibration.known_costs import KnownCosts
from spec_local.calibration.placement import DeviceCosts, choose, shown
from spec_local.errors import SpecLocalError
from spec_local.llama.devices import CPU, Offload, candidates
from spec_local.llama.fitting import free_bytes
from spec_local.llama.heads.base import HeadSequence
from spec_local.opening.loading import DEFAULT_CONTEXT, LoadSettings, load
from spec_local.policies.cost_model import CostModel
from spec_local.system.machine import OtherPrograms


def placed(
    main: Path, draft: Path | None, settings: LoadSettings, log: Callable[[str], None]
) -> LoadSettings:
    """Return the settings with the devices on which these models are fastest.

    The costs of their calls come from disk. The first time, they are measured, for a second or two per model
    and device, and stored.

    Args:
        log: called before a measurement, with its result, and if the models do not run on one of the devices.
    """
    devices = candidates()
    gpu = next(iter(devices))
    drafter = draft or _found(main, settings, devices[gpu])
    costs = {name: _stored(main, drafter, settings, device) for name, device in devices.items()}
    if not all(costs.values()):
        names = " and ".join(path.name for path in (main, draft) if path)
        log(f"measuring {names} on {shown(gpu)} and on {shown(CPU)} (first use with these settings)")
        for name, device in devices.items():
            costs[name] = costs[name] or _measured(main, draft, settings, device, name, log)
        if all(costs.values()):
            for line in choose(_known(costs)).sentences():
                log(line)
    if not (known := _known(costs)):
        return settings  # loading the models raises the error
    best = choose(known).best
    return replace(settings, offload=devices[best.main], draft_offload=devices[best.draft])


def _known(costs: Mapping[str, DeviceCosts | None]) -> dict[str, DeviceCosts]:
    return {name: each for name, each in costs.items() if each}


def _measured(
    main: Path,
    draft: Path | None,
    settings: LoadSettings,
    device: Offload,
    name: str,
    log: Callable[[str], None],
) -> DeviceCosts | None:
    """Load the models on a device, measure their costs, and store them; None: they do not run there."""
    # The costs of one answer with chains: those that reports use, too.
    alone = replace(
        settings,
        offload=device,
        draft_offload=device,
        parallel=1,
        branches=1,
        draft_vocab="auto",
        projector=None,
    )
    programs = OtherPrograms()
    try:
        sequences, resources = load(main, draft, alone, lambda line: None)
        with resources:
            verifying, drafting = sequences[0]
            of_main, of_draft = KnownCosts().measured(verifying, drafting)
            others = programs.cores()
            cost_store.save(verifying, of_main, others=others)
            if drafting and of_draft:
                cost_store.save(drafting, of_draft, others=others)
    except SpecLocalError as error:
        log(f"`device={name}` cannot be used for these models: {error}")
        return None
    if isinstance(drafting, HeadSequence) and of_draft:
        of_draft.drafts_blocks = drafting.limits.drafts_blocks
    return DeviceCosts(of_main, of_draft, isinstance(drafting, HeadSequence))


def _stored(main: Path, draft: Path | None, settings: LoadSettings, device: Offload) -> DeviceCosts | None:
    """The costs on a device that were measured earlier; None: some are missing."""
    of_main = cost_store.measured(_conditions(main, settings, device))
    if not of_main:
        return None
    if draft and (of_draft := cost_store.measured_drafting(_conditions(draft, settings, device))):
        return DeviceCosts(of_main.costs, of_draft.costs)
    if (draft or settings.mtp) and (of_head := _stored_of_head(draft or main, main, settings, device)):
        return DeviceCosts(of_main.costs, of_head, is_head=True)
    return None if draft else DeviceCosts(of_main.costs)


def _stored_of_head(head: Path, main: Path, settings: LoadSettings, device: Offload) -> CostModel | None:
    """The costs of a head in this file, which may be that of the main model; None: there are none."""
    for drafts_blocks in (False, True):
        key = _of_head(head, main, settings, device, drafts_blocks=drafts_blocks)
        if found := cost_store.measured_drafting(key):
            found.costs.drafts_blocks = drafts_blocks
            return found.costs
    return None


def _of_head(
    head: Path, main: Path, settings: LoadSettings, device: Offload, *, drafts_blocks: bool
) -> Conditions:
    """The conditions of a head: its context is as long as that of the main model."""
    # One that drafts blocks drafts trees with them.
    return replace(_conditions(main, settings, device), path=head, is_head=True, branching=drafts_blocks)


def _conditions(model: Path, settings: LoadSettings, device: Offload) -> Conditions:
    """The conditions of one answer with this model on this device."""
    wanted = DEFAULT_CONTEXT if settings.n_ctx is None else settings.n_ctx
    return Conditions.of_file(model, device, wanted, settings.threads, settings.cache_type)


def _found(main: Path, settings: LoadSettings, device: Offload) -> Path | None:
    """The draft that loading will probably find on this machine; None: it does not look for one."""
    if not settings.find_draft or _stored_of_head(main, main, settings, device):
        return None
    from spec_local.opening import drafters  # takes 30 ms

    spare = free_bytes(device) - main.stat().st_size
    found = drafters.find_drafters(_conditions(main, settings, device), spare)
    return next((drafter.path for drafter in found), None)
