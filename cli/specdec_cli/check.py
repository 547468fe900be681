"""`specdec models check`: whether two models make a pair, without loading them."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from spec_local.errors import InvalidRequest
from spec_local.files import format_size
from specdec_cli import completion, exits, render
from specdec_cli.options import (
    CacheChoice,
    KernelsOption,
    MainArgument,
    paired,
    resolve_pair,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_local.models.pairs import ExpectedSpeedup, Memory, ModelSummary, Report, VocabularyMatch

_SHOWN = 5


def check(
    main: MainArgument,
    draft: Annotated[
        str | None,
        Argument(
            metavar="DRAFT",
            help="The model that guesses; a pair's name says it.",
            autocompletion=completion.models,
        ),
    ] = None,
    ctx: Annotated[int, Option(min=1, max=1 << 24, help="Tokens of context of the sessions to come.")] = 4096,
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Their threads (default: one per physical core).")
    ] = None,
    gpu_layers: Annotated[int, Option(help="Their layers on the GPU; negative: all.")] = -1,
    cache_type: Annotated[CacheChoice, Option(help="Precision of their KV caches.")] = "f16",
    kernels: KernelsOption = "auto",
) -> None:
    """Say whether a draft suits a main model: vocabularies, architectures, memory, and the speed-up to expect.

    No weights are loaded. The speed-up needs costs that were measured on this machine: specdec tune MAIN DRAFT.

    Examples:

      specdec models check coder-7b

      specdec models check main.gguf draft.gguf --ctx 16384
    """
    with exits.guarded():
        import shlex

        from spec_local.models import pairs

        main_name, draft_name = paired(main, draft)
        if draft_name is None:
            raise InvalidRequest(f"{main_name} is no pair: give its draft, too")
        main_file, draft_file = resolve_pair(main, draft)
        assert draft_file
        report = pairs.check(
            main_file,
            draft_file,
            n_ctx=ctx,
            threads=threads,
            gpu_layers=gpu_layers,
            cache_type=cache_type,
        )
        render.prepare_stdout()
        rows = [
            ("vocabulary", _vocabulary(report.vocabulary_match)),
            ("main", _member(report.main)),
            (
                "draft",
                f"{_member(report.draft)} ({report.draft.size / report.main.size:.2f} of main's bytes)",
            ),
            ("memory", _memory(report.memory, max(report.main.n_ctx, report.draft.n_ctx))),
        ]
        if report.expected_speedups:
            rows += _prospects(report.expected_speedups)
        else:
            tune = ["specdec", "tune", main_name, draft_name]
            for name, value, usual in (
                ("--ctx", ctx, 4096),
                ("--threads", threads, None),
                ("--gpu-layers", gpu_layers, -1),
                ("--cache-type", cache_type, "f16"),
                ("--kernels", kernels, "auto"),
            ):
                tune += [name, str(value)] if value != usual else []
            rows.append(("speed-up", f"unknown: run {shlex.join(tune)}"))
        render.write("".join(f"{name:<13} {text}\n" for name, text in rows))
        for line in _warnings(report):
            render.note(f"warning: {line}")


def _vocabulary(match: "VocabularyMatch") -> str:
    ids = ", ".join(map(str, match.differing_ids[:_SHOWN]))
    more = len(match.differing_ids) - _SHOWN
    if more > 0:
        ids += f" and {more} more"
    if match.verdict == "same":
        return f"the same, but for ids {ids}" if ids else "the same"
    guessable = f"the draft can guess {_percent(match.coverage)} of main's tokens"
    if match.verdict == "nearly the same":
        which = f"ids {ids}" if ids else match.difference
        return f"nearly the same, but for {which}; {guessable}"
    return f"another one ({match.difference}); {guessable}"


def _percent(share: float) -> str:
    """Never 100 % of what is not all of it."""
    return "all" if share == 1 else f"{min(share, 0.999):.1%}"


def _member(member: "ModelSummary") -> str:
    window = ", sliding window (its cache is kept whole)" if member.has_window else ""
    return f"{member.path.name}: {member.description}, {format_size(member.size)}{window}"


def _memory(memory: "Memory", n_ctx: int) -> str:
    parts = f"weights {format_size(memory.weights)}, caches of {n_ctx} tokens {format_size(memory.caches)}, all else {format_size(memory.overhead)}"
    return f"{format_size(memory.needed)} needed ({parts}); {format_size(memory.free)} free"


def _prospects(several: "Sequence[ExpectedSpeedup]") -> list[tuple[str, str]]:
    return [
        ("chance", "".join(f"{p.acceptance_rate:>7.2f}" for p in several) + "   that a guess stands"),
        ("guesses", "".join(f"{p.draft_length or 'none':>7}" for p in several) + "   a step"),
        ("speed-up", "".join(f"{p.speedup:>7.2f}" for p in several) + "   times plain, at best"),
    ]


def _warnings(report: "Report") -> list[str]:
    lines = []
    if not report.memory.suffices:
        lines.append(
            "there is too little memory free: take smaller models, a smaller --ctx or --cache-type q8_0"
        )
    if report.expected_speedups and not report.expected_speedups[-1].draft_length:
        lines.append("this draft costs too much next to main to pay: take a smaller one")
    return lines
