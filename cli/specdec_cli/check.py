"""`specdec models check`: check whether a draft model or head fits a main model, without loading weights."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from spec_local.errors import DownloadError, InvalidRequest
from spec_local.llama import gguf_header
from spec_local.llama.devices import offload_of
from spec_local.llama.model_file import check_header
from spec_local.models import catalog, pairs
from spec_local.models.file_names import is_projector
from spec_local.models.names import FOUND_PROJECTOR, paired, resolve, resolve_pair
from spec_local.models.pairs import ExpectedSpeedup, MemoryNeed, ModelSummary, Report, VocabularyMatch
from spec_local.models.projectors import ProjectorFile, describe, find_projector, resolve_projector
from spec_local.system.files import format_size
from spec_local.system.machine import is_busy, used_by_others
from specdec_cli import render, waiting
from specdec_cli.options import named_pair
from specdec_cli.signatures.stores import ModelsCheckOptions

_SHOWN = 5


def check(options: ModelsCheckOptions) -> None:
    main, draft = named_pair(options.main, options.draft, options.main_option, options.draft_option)
    main_name, draft_name = paired(main, draft)
    if draft_name is None or is_projector(draft_name):
        if rows := _of_projector(main, draft_name):
            _write(rows)
            return
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
            n_ctx=options.ctx,
            threads=options.threads,
            offload=offload_of(options.device, options.gpu_layers),
            cache_type=options.cache_type,
        )
    times = report.draft.size / report.main.size
    pair = catalog.pairs().get(main)
    rows = [
        ("vocabulary", _vocabulary(report.vocabulary_match)),
        ("main", _model(report.main)),
        ("draft", f"{_model(report.draft)} ({times:.2f} times the main model's)"),
        *_projector(find_projector(main_file)),
        ("memory", _memory(report.memory, max(report.main.n_ctx, report.draft.n_ctx))),
        *_expected(options, report, [main_name, draft_name], pair.gain if pair and draft is None else None),
    ]
    _write(rows)
    for line in _warnings(report):
        render.note(f"warning: {line}")


def _of_projector(main: str, given: str | None) -> list[tuple[str, str]]:
    """Return rows on a projector alone, or on a main model and its projector; none: it has none.

    given: the projector in place of the one beside the main model.

    Raises:
        SpecLocalError: a file cannot be read, or is the projector of another model.
    """
    main_file = resolve(main)
    metadata = gguf_header.read_metadata(main_file)
    if given is None and metadata.get("general.architecture") == "clip":
        return _projector(describe(main_file))
    check_header(main_file)
    found = resolve_projector(main_file, Path(given) if given else FOUND_PROJECTOR)
    if not found:
        return []
    shown = f"{main_file.name}: {gguf_header.describe(metadata)}; {found.senses}"
    return [("main", shown), *_projector(found)]


def _projector(found: ProjectorFile | None) -> list[tuple[str, str]]:
    return [("projector", f"{found.path.name}: {found.description}")] if found else []


def _write(rows: Sequence[tuple[str, str]]) -> None:
    render.write("".join(f"{name:<13} {text}\n" for name, text in rows))


def _expected(
    options: ModelsCheckOptions, report: Report, names: Sequence[str], known_gain: str | None
) -> list[tuple[str, str]]:
    """Return rows with the expected speed-up, and how to measure it; known_gain: of a pair of the catalog."""
    is_measured = report.expectation is not None and report.expectation.is_measured
    if not is_measured and known_gain:  # it is known better than from sizes
        rows, how = [("speed-up", known_gain)], "to measure it here"
    elif report.expectation:
        rows = _speedup_rows(report.expectation.speedups)
        how = "estimated from the sizes; to measure it"
    else:
        rows, how = [("speed-up", "unknown")], "to measure it"
    if is_measured:
        return rows
    tune = ["specdec", "tune", *names]
    usual = ModelsCheckOptions()
    for name in ("ctx", "threads", "device", "gpu_layers", "cache_type", "kernels"):
        if (value := getattr(options, name)) != getattr(usual, name):
            tune += [f"--{name.replace('_', '-')}", str(value)]
    return [*rows, ("", f"{how}: run {shlex.join(tune)}")]


def _vocabulary(match: VocabularyMatch) -> str:
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


def _model(model: ModelSummary) -> str:
    window = ", sliding window (with a full-size KV cache)" if model.has_window else ""
    return f"{model.path.name}: {model.description}, {format_size(model.size)}{window}"


def _memory(memory: MemoryNeed, n_ctx: int) -> str:
    parts = [
        f"weights {format_size(memory.weights)}",
        f"KV caches of {n_ctx} tokens {format_size(memory.caches)}",
        f"overhead {format_size(memory.overhead)}",
        *([f"projector {format_size(memory.projector)}"] if memory.projector else []),
    ]
    return f"{format_size(memory.needed)} needed ({', '.join(parts)}); {format_size(memory.free)} free"


def _speedup_rows(speedups: Sequence[ExpectedSpeedup]) -> list[tuple[str, str]]:
    return [
        ("acceptance", "".join(f"{s.acceptance_rate:>7.2f}" for s in speedups) + "   acceptance rate"),
        ("length", "".join(f"{s.draft_length or 'none':>7}" for s in speedups) + "   draft tokens per step"),
        ("speed-up", "".join(f"{s.speedup:>7.2f}" for s in speedups) + "   times plain decoding, at best"),
    ]


def _warnings(report: Report) -> list[str]:
    main, draft = report.main, report.draft
    wrong = pairs.advice(main.path, draft.path, (main.size, draft.size), report.vocabulary_match.coverage)
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
