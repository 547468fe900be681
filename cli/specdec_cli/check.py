"""`specdec models check`: check whether a draft model or head fits a main model, without loading weights."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.models.names import paired, resolve_pair
from spec_local.system.files import format_size
from specdec_cli import exits, render, waiting
from specdec_cli.options import (
    CacheChoice,
    DeviceOption,
    DraftArgument,
    DraftOption,
    GpuLayersOption,
    KernelsOption,
    MainOption,
    ModelArgument,
    gpu_layers_of,
    named_pair,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_local.models.pairs import ExpectedSpeedup, MemoryNeed, ModelSummary, Report, VocabularyMatch

_SHOWN = 5


def check(
    main: ModelArgument = None,
    draft: DraftArgument = None,
    main_option: MainOption = None,
    draft_option: DraftOption = None,
    ctx: Annotated[int, Option(min=1, max=1 << 24, help="Context size of later sessions, in tokens.")] = 4096,
    threads: Annotated[
        int | None,
        Option(min=1, max=512, help="Number of threads in later sessions (default: one per usable core)."),
    ] = None,
    device: DeviceOption = "auto",
    gpu_layers: GpuLayersOption = None,
    cache_type: Annotated[CacheChoice, Option(help="Precision of the KV caches.")] = "f16",
    kernels: KernelsOption = "auto",
) -> None:
    """Check whether a draft model or head fits a main model: vocabulary, memory, expected speed-up.

    Only the headers of the files are read. The expected speed-up comes from costs
    that specdec tune MAIN DRAFT has measured, or else from the sizes of the models.

    Examples:

      specdec models check coder-7b
      specdec models check main.gguf draft.gguf --ctx 16384
    """
    with exits.guarded():
        import shlex

        from spec_local.models import catalog, pairs

        main, draft = named_pair(main, draft, main_option, draft_option)
        main_name, draft_name = paired(main, draft)
        if draft_name is None:
            raise InvalidRequest(f"{main_name} is not a pair: also give a draft model")
        try:
            main_file, draft_file = resolve_pair(main, draft)
        except DownloadError as error:
            known = f"specdec models show {shlex.quote(main)}"
            raise DownloadError(f"{error}; before the download, {known} shows what is known") from None
        assert draft_file
        with waiting.line("comparing the models …"):
            report = pairs.check(
                main_file,
                draft_file,
                n_ctx=ctx,
                threads=threads,
                gpu_layers=gpu_layers_of(device, gpu_layers),
                cache_type=cache_type,
            )
        rows = [
            ("vocabulary", _vocabulary(report.vocabulary_match)),
            ("main", _model(report.main)),
            (
                "draft",
                f"{_model(report.draft)} ({report.draft.size / report.main.size:.2f} times the main model's)",
            ),
            ("memory", _memory(report.memory, max(report.main.n_ctx, report.draft.n_ctx))),
        ]
        is_measured = report.expectation is not None and report.expectation.is_measured
        pair = catalog.pairs().get(main)
        if not is_measured and draft is None and pair and pair.gain:  # it is known better than from sizes
            rows.append(("speed-up", pair.gain))
            how = "to measure it here"
        elif report.expectation:
            rows += _speedup_rows(report.expectation.speedups)
            how = "estimated from the sizes; to measure it"
        else:
            rows.append(("speed-up", "unknown"))
            how = "to measure it"
        if not is_measured:
            tune = ["specdec", "tune", main_name, draft_name]
            for name, value, usual in (
                ("--ctx", ctx, 4096),
                ("--threads", threads, None),
                ("--device", device, "auto"),
                ("--gpu-layers", gpu_layers, None),
                ("--cache-type", cache_type, "f16"),
                ("--kernels", kernels, "auto"),
            ):
                tune += [name, str(value)] if value != usual else []
            rows.append(("", f"{how}: run {shlex.join(tune)}"))
        render.write("".join(f"{name:<13} {text}\n" for name, text in rows))
        for line in _warnings(report):
            render.note(f"warning: {line}")


def _vocabulary(match: "VocabularyMatch") -> str:
    ids = ", ".join(map(str, match.differing_ids[:_SHOWN]))
    more = len(match.differing_ids) - _SHOWN
    if more > 0:
        ids += f" and {more} more"
    if match.verdict == "same":
        return f"the same, except ids {ids}" if ids else "the same"
    coverage = f"the draft model can propose {_percent(match.coverage)} of the main model's tokens"
    if match.verdict == "nearly the same":
        which = f"ids {ids}" if ids else match.difference
        return f"nearly the same, except {which}; {coverage}"
    return f"different ({match.difference}); {coverage}"


def _percent(share: float) -> str:
    """Format a share in percent; any share below 1 stays below 100 %."""
    return "all" if share == 1 else f"{min(share, 0.999):.1%}"


def _model(model: "ModelSummary") -> str:
    window = ", sliding window (with a full-size KV cache)" if model.has_window else ""
    return f"{model.path.name}: {model.description}, {format_size(model.size)}{window}"


def _memory(memory: "MemoryNeed", n_ctx: int) -> str:
    parts = [
        f"weights {format_size(memory.weights)}",
        f"KV caches of {n_ctx} tokens {format_size(memory.caches)}",
        f"overhead {format_size(memory.overhead)}",
    ]
    return f"{format_size(memory.needed)} needed ({', '.join(parts)}); {format_size(memory.free)} free"


def _speedup_rows(speedups: "Sequence[ExpectedSpeedup]") -> list[tuple[str, str]]:
    return [
        ("acceptance", "".join(f"{s.acceptance_rate:>7.2f}" for s in speedups) + "   acceptance rate"),
        ("length", "".join(f"{s.draft_length or 'none':>7}" for s in speedups) + "   draft tokens per step"),
        ("speed-up", "".join(f"{s.speedup:>7.2f}" for s in speedups) + "   times plain decoding, at best"),
    ]


def _warnings(report: "Report") -> list[str]:
    from spec_local.models.pairs import advice
    from spec_local.system.machine import is_busy, used_by_others

    main, draft = report.main, report.draft
    wrong = advice(main.path, draft.path, (main.size, draft.size), report.vocabulary_match.coverage)
    lines = [wrong] if wrong else []
    if not report.memory.suffices:
        lines.append(
            "there is not enough free memory: use smaller models, a smaller --ctx, or --cache-type q8_0"
        )
    if is_busy(report.others):
        lines.append(
            f"the measured costs are not used, as {used_by_others(report.others)} meanwhile: close them, and "
            "run specdec tune"
        )
    elif report.expectation and report.expectation.cannot_pay:
        lines.append("this draft model is too slow to pay off: use a smaller one")
    return lines
