"""`specdec tune`: what models cost on this machine, and how much to guess that makes worth while."""

import shlex
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import completion, exits, render
from specdec_cli.options import CacheChoice, KernelsOption, MainArgument, resolve_pair

if TYPE_CHECKING:
    from pathlib import Path

    from spec_local.calibration.tuning import Tuned
    from spec_local.llama.model import Model
    from spec_local.policies.planner import Plan

_CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_COPIES = (0.7, 0.8, 0.9, 0.95, 0.99)
_WORTH = 0.03  # of main's time a guess: less is not worth a copy
_SHOWN = (1, 2, 3, 4, 5, 8, 12, 16, 32, 64)


def tune(
    main: MainArgument,
    draft: Annotated[
        str | None,
        Argument(metavar="DRAFT", help="The model that guesses.", autocompletion=completion.models),
    ] = None,
    ctx: Annotated[int, Option(help="Tokens of context of the sessions to come.")] = 4096,
    threads: Annotated[
        list[int] | None, Option(help="Only this number of threads. Repeatable. Default: those worth trying.")
    ] = None,
    gpu_layers: Annotated[int, Option(help="Layers on the GPU; negative: all.")] = -1,
    cache_type: Annotated[CacheChoice, Option(help="Precision of the KV caches.")] = "f16",
    kernels: KernelsOption = "auto",
    rounds: Annotated[int, Option(min=1, max=100, help="Measurements of each size.")] = 5,
) -> None:
    """Measure models thoroughly, show what calls cost and what that implies, and keep it for later sessions.

    The adaptive policy measures by itself for a second when it meets a model; this takes longer and knows more.

    Examples:

      specdec tune main.gguf draft.gguf

      specdec tune main.gguf --threads 4 --threads 8
    """
    with exits.guarded(), ExitStack() as stack:
        from spec_local.calibration.tuning import chain_plans, thread_choices
        from spec_local.machine import default_threads
        from spec_local.settings import MAX_DRAFT

        # Everything that could be wrong with the request is told before anything slow.
        choices = sorted(set(threads)) if threads else thread_choices()
        for name, value, high in (
            ("threads", choices[0], 512),
            ("threads", choices[-1], 512),
            ("ctx", ctx, 1 << 24),
        ):
            if not 1 <= value <= high:
                raise InvalidRequest(f"{name} is {value}: give 1 to {high}")
        render.prepare_stdout()
        main_file, draft_file = resolve_pair(main, draft)
        main_model = _opened(main_file, gpu_layers, stack)
        draft_model = _opened(draft_file, gpu_layers, stack) if draft_file else None
        mains = _tuned(main_model, choices, ctx, MAX_DRAFT + 1, cache_type, rounds)
        best = min(mains, key=lambda t: t.costs.seconds(1))
        _show("main", mains, best)
        if draft_model:
            # Sessions that are not told otherwise take the default, whatever is fastest.
            wanted = sorted({best.threads, default_threads()} & set(choices))
            drafts = _tuned(draft_model, wanted, ctx, 1, cache_type, rounds)
            guesser = next(t for t in drafts if t.threads == best.threads)
            _show("draft", drafts, guesser)
            share = guesser.costs.seconds(1) / best.costs.seconds(1)
            render.write(
                f"A call of the draft takes {share:.2f} of main's.\n{_quicker(draft_model, share, main)}\n"
            )
            _plan("draft model", best, chain_plans(best.costs, guesser.costs, _CHANCES), _CHANCES)
        _plan("copied text", best, chain_plans(best.costs, None, _COPIES), _COPIES)
        if best.threads != default_threads():
            render.write(f"Fastest with --threads {best.threads} (default: {default_threads()}).\n")


def _opened(path: "Path", gpu_layers: int, stack: ExitStack) -> "Model":
    from spec_local.llama.model import Model
    from spec_local.llama.probe import check_model_file

    check_model_file(path, gpu_layers=gpu_layers, log=render.note)
    model = Model(path, gpu_layers=gpu_layers)
    stack.callback(model.close)
    model.check_can_roll_back()
    return model


def _tuned(
    model: "Model", threads: list[int], ctx: int, max_logits: int, cache_type: str, rounds: int
) -> list["Tuned"]:
    from spec_local.calibration.tuning import tune

    several = tune(
        model,
        threads,
        n_ctx=model.n_ctx(ctx),
        max_logits=max_logits,
        cache_type=cache_type,
        rounds=rounds,
        log=render.note,
    )
    return list(several)


def _quicker(draft: "Model", share: float, main: str) -> str:
    """A line on a copy of the draft that would take less of main's time, if much less."""
    from spec_local.models.quantized_copy import quantize

    with suppress(SpecLocalError):  # of a model that cannot be quantized nothing is said
        copys = share * quantize(draft.path, "Q4_0")["size"] / draft.size
        if share - copys >= _WORTH:
            command = shlex.join(["specdec", "draft", "quantize", str(draft.path), "--for", main])
            return f"A copy in Q4_0 would take about {copys:.2f}, and guess nearly as well: {command}\n"
    return ""


def _show(role: str, several: list["Tuned"], best: "Tuned") -> None:
    table = _table(
        f"{role}: milliseconds a call, by its tokens",
        ["threads", *map(str, _SHOWN), "prompt, tokens/s"],
        [
            [
                str(t.threads) + (" ←" if t is best and len(several) > 1 else ""),
                *(f"{1e3 * t.costs.seconds(n):.1f}" for n in _SHOWN),
                f"{t.prefill:.0f}",
            ]
            for t in several
        ],
    )
    render.write(table + "\n")


def _plan(kind: str, best: "Tuned", plans: list["Plan"], chances: tuple[float, ...]) -> None:
    plain = 1.0 / best.costs.seconds(1)
    rows = [
        [f"{chance:.2f}", str(len(p.parents)) if p.parents else "none", f"{p.speed / plain:.2f}"]
        for chance, p in zip(chances, plans, strict=True)
    ]
    head = ["chance that a guess stands", "guesses a step", "times plain"]
    render.write(_table(f"{kind}: what would pay", head, rows) + "\n")


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in head:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=max(100, _width()), force_terminal=_on_terminal())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _on_terminal() -> bool:
    import os
    import sys

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
