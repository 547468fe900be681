"""`specdec tune`: measure the cost of model calls, and show which draft lengths pay off."""

import shlex
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from spec_local.bench.layout import document, table
from spec_local.calibration import tuning
from spec_local.calibration.placement import DeviceCosts, choose
from spec_local.calibration.tuning import Measurement, chain_plans, thread_choices
from spec_local.core.proposal import MAX_DRAFT
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.devices import CPU, Offload, candidates, fixed_offload
from spec_local.llama.fitting import load_fitting
from spec_local.llama.heads.choose import Chosen, choose_head
from spec_local.llama.model import Model
from spec_local.llama.setup.probe import check_model_files
from spec_local.models.names import NO_DRAFT, resolve_pair
from spec_local.models.quantized_copy import quantize
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts
from spec_local.system.machine import OtherPrograms, default_threads, is_busy, used_by_others
from spec_local.text import counted
from specdec_cli import render, terminal, waiting
from specdec_cli.options import named_pair
from specdec_cli.signatures.drafts import TuneOptions

_ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_LOOKUP_ACCEPTANCE_RATES = (0.7, 0.8, 0.9, 0.95, 0.99)
_WORTHWHILE = 0.03  # time saved per draft token, in calls of the main model, that justifies a copy
_CALL_SIZES = (1, 2, 3, 4, 5, 8, 12, 16, 32, 64)


def tune(options: TuneOptions) -> None:
    main, draft = named_pair(options.main, options.draft, options.main_option, options.draft_option)
    # Report invalid values before starting anything slow.
    choices = sorted(set(options.threads)) if options.threads else thread_choices()
    for name, value, high in (
        ("threads", choices[0], 512),
        ("threads", choices[-1], 512),
        ("ctx", options.ctx, 1 << 24),
    ):
        if not 1 <= value <= high:
            raise InvalidRequest(f"{name} is {value}: give 1 to {high}")
    offload = fixed_offload(options.device, options.gpu_layers)
    drafting = draft != NO_DRAFT
    main_file, draft_file = resolve_pair(main, draft if drafting else None, drafting=drafting)
    job = _Job(main, main_file, draft_file, drafting, options)
    if offload:
        _tune(job, offload, choices)
        return
    costs, max_draft = {}, MAX_CALLS
    for each, place in candidates().items():
        # The speed of the GPU does not depend on the number of threads.
        on_device = choices if options.threads or each == CPU else [default_threads()]
        costs[each], max_draft = _tune(job, place, on_device, f": {each}")
    _show("## Device", *choose(costs, max_draft).sentences())


@dataclass(frozen=True, slots=True)
class _Job:
    """The models to measure, and how. main: the main model as it was named. drafting: a draft may be used."""

    main: str
    main_file: Path
    draft_file: Path | None
    drafting: bool
    options: TuneOptions


def _tune(job: _Job, offload: Offload, threads: list[int], device: str = "") -> tuple[DeviceCosts, int]:
    """Measure the models on a device, and show the tables.

    Args:
        device: the end of the title.

    Returns:
        costs: with the fastest number of threads.
        max_draft: maximum number of draft tokens per step.
    """
    with ExitStack() as stack:
        main_file, draft_file = job.main_file, job.draft_file
        n_ctx = job.options.ctx
        main_model = _opened(main_file, offload, n_ctx, stack, load_mtp=job.drafting and not draft_file)
        draft_model = _opened(draft_file, offload, n_ctx, stack) if draft_file else None
        head = choose_head(main_model, draft_model, log=render.note) if job.drafting else None
        if head and draft_file:
            check_model_files(draft_file, offload=offload, main=main_file, log=render.note)
        programs = OtherPrograms()
        mains = _tuned(job, main_model, threads, MAX_DRAFT + 1, head)
        best = min(mains, key=lambda t: t.costs.seconds(1))
        of_draft: CallCosts | None = best.head
        max_draft = min(MAX_CALLS, head.max_draft) if head else MAX_CALLS
        _show(f"# specdec tune{device}", *_costs("Main model", mains, best))
        if best.head:
            share = best.head.seconds(1) / best.costs.seconds(1)
            _show(
                *_costs("Head", mains, best, of_head=True),
                f"A call of the head takes {share:.2f} times as long as one of the main model.",
                *_speedups("Head", best, best.head, _ACCEPTANCE_RATES, max_draft),
            )
        elif draft_model:
            # Sessions use the default number of threads, even where another one is faster.
            wanted = sorted({best.threads, default_threads()} & set(threads))
            drafts = _tuned(job, draft_model, wanted, 1)
            tuned_draft = next(t for t in drafts if t.threads == best.threads)
            of_draft = tuned_draft.costs
            share = of_draft.seconds(1) / best.costs.seconds(1)
            _show(
                *_costs("Draft model", drafts, tuned_draft),
                f"A call of the draft model takes {share:.2f} times as long as one of the main model.",
                *_copy_hint(draft_model, share, job.main),
                *_speedups("Draft model", best, of_draft, _ACCEPTANCE_RATES, max_draft),
            )
        _show(*_speedups("Prompt lookup", best, None, _LOOKUP_ACCEPTANCE_RATES, max_draft))
        if best.threads != default_threads():
            _show(f"Fastest with --threads {best.threads} (default: {default_threads()}).")
        if is_busy(used := programs.cores()):
            render.note(f"{used_by_others(used)}: close them, and run the same command again")
        return DeviceCosts(best.costs, of_draft, is_head=best.head is not None), max_draft


def _opened(path: Path, offload: Offload, n_ctx: int, stack: ExitStack, *, load_mtp: bool = False) -> Model:
    with waiting.line(f"loading {terminal.visible(path.name)} …"):
        check_model_files(path, offload=offload, log=render.note)
        model = load_fitting(path, offload, n_ctx, load_mtp=load_mtp)
    stack.callback(model.close)
    return model


def _tuned(
    job: _Job, model: Model, threads: list[int], max_logits: int, head: Chosen | None = None
) -> list[Measurement]:
    several = tuning.tune(
        model,
        threads,
        n_ctx=model.n_ctx(job.options.ctx),
        max_logits=max_logits,
        cache_type=job.options.cache_type,
        rounds=job.options.rounds,
        head=head,
        log=render.note,
    )
    return list(several)


def _show(*parts: str) -> None:
    """Write headings, paragraphs and tables, and an empty line."""
    render.write(f"{document(parts, render.width())}\n")


def _copy_hint(draft: Model, share: float, main: str) -> list[str]:
    """Return paragraphs that suggest a quantized copy of the draft model; none if it gains little."""
    with suppress(SpecLocalError):  # for a model that cannot be quantized
        share_of_copy = share * quantize(draft.path, "Q4_0")["size"] / draft.size
        if share - share_of_copy >= _WORTHWHILE:
            command = shlex.join(["specdec", "draft", "quantize", str(draft.path), "--for", main])
            takes = f"A Q4_0 copy takes about {share_of_copy:.2f}"
            return [f"{takes}, with nearly the same acceptance rate:", f"    {command}"]
    return []


def _costs(role: str, several: list[Measurement], best: Measurement, *, of_head: bool = False) -> list[str]:
    """Return a heading, the costs by number of tokens, a column for each number of threads, and the speed
    of reading prompts."""
    costs = [t.head if of_head and t.head else t.costs for t in several]
    marks = [" ←" if t is best and len(several) > 1 else "" for t in several]
    head = [f"{counted(t.threads, 'thread')}{mark}" for t, mark in zip(several, marks, strict=True)]
    rows = [[str(n), *(f"{1e3 * each.seconds(n):.1f}" for each in costs)] for n in _CALL_SIZES]
    parts = [f"## {role}: milliseconds per call", table(["tokens", *head], rows, render.width())]
    if not of_head:
        speeds = ", ".join(f"{t.prefill:.0f} with {name}" for t, name in zip(several, head, strict=True))
        parts.append(f"Prompts, in tokens/s: {speeds.replace(' ←', '')}.")
    return parts


def _speedups(
    proposer: str,
    best: Measurement,
    draft: CallCosts | None,
    acceptance_rates: tuple[float, ...],
    max_draft: int,
) -> list[str]:
    """Return a heading, and the best draft length and its speed-up by acceptance rate."""
    plain = 1.0 / best.costs.seconds(1)
    plans = chain_plans(best.costs, draft, acceptance_rates, max_draft)
    rows = [
        [f"{rate:.2f}", str(len(p.parents)) if p.parents else "none", f"{p.speed / plain:.2f}"]
        for rate, p in zip(acceptance_rates, plans, strict=True)
    ]
    head = ["acceptance rate", "draft tokens per step", "times as fast"]
    return [f"## {proposer}: expected speed-up over plain decoding", table(head, rows, render.width())]
