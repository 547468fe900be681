"""`specdec bench`: compare speculative with plain decoding on this machine."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from spec_local.errors import InvalidRequest
from specdec_cli import exits, plots, progress, render
from specdec_cli.commands import flattened
from specdec_cli.options import (
    STARTER,
    ModelOptions,
    SamplingOptions,
    generation_settings,
    paired,
)

if TYPE_CHECKING:
    from spec_local.bench.prompts import Prompt
    from spec_local.bench.report import Results
    from spec_local.bench.runner import Outcome, Run, TokenizedPrompt
    from spec_local.bench.variants import Variant
    from spec_local.session import Session

_PROMPTS, _VARIANTS, _RESULTS = "Prompts", "Variants", "Results"


class OutputChoice(StrEnum):
    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


@dataclasses.dataclass(frozen=True)
class BenchSampling(SamplingOptions):
    """`SamplingOptions` with the defaults of a benchmark."""

    temp: Annotated[
        float, Option(help="Temperature; 0 always takes the most probable token.", rich_help_panel="Sampling")
    ] = 0.0
    max_tokens: Annotated[
        int | None, Option("--tokens", "--max-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 128


@flattened
def bench(
    prompts: Annotated[
        Path | None,
        Option(
            help="File of prompts: TOML or .jsonl with category, name and text, or one prompt per line "
            "(default: built-in prompts).",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    category: Annotated[
        list[str] | None, Option(help="Use only this category; repeatable.", rich_help_panel=_PROMPTS)
    ] = None,
    per_category: Annotated[
        int | None, Option(help="Use only the first N prompts of each category.", rich_help_panel=_PROMPTS)
    ] = None,
    runs: Annotated[
        int, Option(help="Number of runs per prompt and variant.", rich_help_panel=_VARIANTS)
    ] = 1,
    sweep: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=A,B",
            help="Compare values of an option, for example draft-max=1,2,4,8; repeatable.",
            rich_help_panel=_VARIANTS,
        ),
    ] = None,
    proposers: Annotated[
        str | None, Option(metavar="A,B", help="Compare proposers.", rich_help_panel=_VARIANTS)
    ] = None,
    policies: Annotated[
        str | None, Option(metavar="A,B", help="Compare draft-length policies.", rich_help_panel=_VARIANTS)
    ] = None,
    delay: Annotated[
        float,
        Option(
            help="Seconds to wait before each run, so that a laptop can cool down.", rich_help_panel=_VARIANTS
        ),
    ] = 0.0,
    output: Annotated[
        OutputChoice,
        Option(help="Output format; jsonl writes one line after each run.", rich_help_panel=_RESULTS),
    ] = OutputChoice.md,
    out: Annotated[
        Path | None,
        Option(
            help="Write the results to this file (jsonl appends) and a report to standard output.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Also save a plot as a PNG file.", rich_help_panel=_RESULTS)
    ] = None,
    verbose: Annotated[
        int, Option("--verbose", "-v", count=True, help="Show a line per prompt; -vv: also llama.cpp's log.")
    ] = 0,
    *,
    models: ModelOptions,
    sampling: BenchSampling,
) -> None:
    """Measure the speed-up of speculative decoding on this machine, with real prompts.

    Plain and speculative runs of the same prompt alternate, and each run reads
    the prompt again.

    Examples:

      specdec bench --main qwen-7b.gguf --draft qwen-0.5b.gguf --per-category 2

      specdec bench --main qwen-7b.gguf --draft qwen-0.5b.gguf --sweep draft-max=2,4,8 --out result.md
    """
    with exits.guarded():
        # Report invalid values before starting anything slow.
        _check(runs=runs, per_category=per_category, tokens=sampling.max_tokens, delay=delay)
        selected = _prompts(prompts, category or [], per_category)
        variants = _variants(models, sampling, sweep or [], proposers, policies)
        for path in (out, plot):
            _check_output(path)
        if plot:
            plots.check()
        from spec_local.llama import runtime

        runtime.set_verbose(verbose > 1)
        with (
            _replacing(plot) as picture,
            _sink(output, out) as sink,
            _session_options(models, variants).open(render.note) as session,
            render.interruptible() as cancelled,
        ):
            results = _measured(
                session, selected, variants, runs, delay, models.threads, sink, verbose, cancelled=cancelled
            )
            if not results.outcomes:
                render.note("interrupted before the first prompt was finished: nothing to report")
                raise KeyboardInterrupt
            sink.finish(results)
            if picture:
                plots.draw(results.figures()[1:], picture)
        if results.interrupted:
            raise KeyboardInterrupt


def _check_output(path: Path | None) -> None:
    if path and path.exists() and not path.is_file():
        raise InvalidRequest(f"{path} is not a regular file: give another path")


def _check(runs: int, per_category: int | None, tokens: int | None, delay: float) -> None:
    for name, value in (("runs", runs), ("per-category", per_category), ("tokens", tokens)):
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} is {value}: give 1 or more")
    if not 0 <= delay < float("inf"):
        raise InvalidRequest(f"delay is {delay:g}: give a number of seconds, 0 or more")


def _prompts(path: Path | None, categories: Sequence[str], per_category: int | None) -> "list[Prompt]":
    from spec_local.bench import prompts

    return prompts.select(prompts.load(path), categories, per_category)


def _variants(
    models: ModelOptions,
    sampling: SamplingOptions,
    sweep: Sequence[str],
    proposers: str | None,
    policies: str | None,
) -> "list[Variant]":
    from spec_local.bench.variants import parse_list, parse_sweep, variants

    varied: dict[str, Sequence[Any]] = {}
    if proposers is not None:
        varied["proposer"] = parse_list(proposers)
    if policies is not None:
        varied["policy"] = parse_list(policies)
    for each in sweep:
        name, values = parse_sweep(each)
        varied[name] = values
    base = dataclasses.replace(generation_settings(models, sampling), seed=sampling.seed or 0)
    compared = variants(base, varied)
    _, draft = paired(models.main or STARTER, models.draft)
    if not draft and any(variant.settings.proposer == "draft" for variant in compared):
        raise InvalidRequest("the draft proposer needs a draft model: give --draft FILE")
    return compared


def _session_options(models: ModelOptions, variants: "Sequence[Variant]") -> ModelOptions:
    """The options of a session that can run all of these variants."""
    settings = [variant.settings for variant in variants[1:]]
    drafts = any(each.proposer in ("auto", "draft") for each in settings)
    shapes = {each.shape for each in settings} - {"chain"}
    policies = {each.policy for each in settings} - {"off"}
    return dataclasses.replace(
        models,
        proposer="auto" if drafts else "suffix",
        policy=min(policies) if policies else "off",
        shape=min(shapes) if shapes else "chain",
    )


@contextlib.contextmanager
def _replacing(path: Path | None) -> Iterator[Path | None]:
    """A temporary file that replaces `path` if the block succeeds; errors are raised at its start."""
    from spec_local.files import replacing

    if not path:
        yield None
        return
    with replacing(path) as part:
        yield part


class _Sink:
    """Base class of the outputs: some write results immediately, others at the end."""

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        pass

    def add(self, event: "Run | Outcome") -> None:
        pass

    def finish(self, results: "Results") -> None:
        raise NotImplementedError


class _Whole(_Sink):
    """Writes everything at the end: to standard output, or to a file with a report on standard output."""

    def __init__(self, output: OutputChoice, part: Path | None) -> None:
        self._output, self._part = output, part

    def finish(self, results: "Results") -> None:
        from spec_local.bench import report

        form = {"md": report.markdown, "csv": report.csv_rows, "json": report.as_json}[self._output.value]
        if self._part:
            self._part.write_text(form(results), encoding="utf-8")
        if self._part or self._output == OutputChoice.md:
            _report(results)
        else:
            render.write(form(results))


class _Lines(_Sink):
    """Writes one JSON object per line immediately, so that an aborted run loses no measurements."""

    def __init__(self, write: Callable[[str], object], *, reports: bool) -> None:
        self._write, self._reports = write, reports

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        self._write(json.dumps({"type": kind, **content}, ensure_ascii=False) + "\n")

    def begin(self, record: Mapping[str, Any], variants: "Sequence[Variant]") -> None:
        from spec_local.bench.report import settings_object

        settings = {variant.name: settings_object(variant) for variant in variants}
        self._line("start", {"record": record, "settings": settings})

    def add(self, event: "Run | Outcome") -> None:
        from spec_local.bench.report import outcome_object, run_object
        from spec_local.bench.runner import Run

        if isinstance(event, Run):
            self._line("run", run_object(event))
        else:
            self._line("prompt", outcome_object(event))

    def finish(self, results: "Results") -> None:
        from spec_local.bench.report import summary_object

        self._line("summary", summary_object(results))
        if self._reports:
            _report(results)


def _report(results: "Results") -> None:
    from spec_local.bench.report import markdown

    render.write(markdown(results, bars=sys.stdout.isatty()))


@contextlib.contextmanager
def _sink(output: OutputChoice, out: Path | None) -> Iterator[_Sink]:
    if output != OutputChoice.jsonl:
        with _replacing(out) as part:
            yield _Whole(output, part)
    elif not out:
        yield _Lines(render.write, reports=False)
    else:
        with out.open("a", encoding="utf-8", buffering=1) as file:  # line-buffered
            yield _Lines(file.write, reports=True)


def _measured(
    session: "Session",
    prompts: "Sequence[Prompt]",
    variants: "Sequence[Variant]",
    runs: int,
    delay: float,
    threads: int | None,
    sink: _Sink,
    verbose: int,
    *,
    cancelled: Callable[[], bool],
) -> "Results":
    from spec_local.bench.record import peak_memory, record
    from spec_local.bench.report import Results
    from spec_local.bench.runner import Outcome, measure

    session.main.model.check_can_roll_back()
    questions = _questions(session, prompts, variants[0].settings.max_tokens or 1)
    made = record(session, threads, render.note)
    sink.begin(made, variants)
    outcomes: list[Outcome] = []
    with _progress(len(questions) * len(variants) * runs, sink) as advance:
        for event in measure(
            session, questions, variants, runs=runs, delay=delay, cancelled=cancelled, on_progress=advance
        ):
            sink.add(event)
            if isinstance(event, Outcome):
                outcomes.append(event)
                if verbose:
                    render.note(f"{len(outcomes)}/{len(questions)} {_line(event)}")
    return Results(made, variants, outcomes, len(questions), runs, peak_memory())


def _questions(session: "Session", prompts: "Sequence[Prompt]", n_tokens: int) -> "list[TokenizedPrompt]":
    """Tokenize the prompts, and return those that fit into the context together with an answer."""
    from spec_local.bench.runner import tokenize

    model, n_ctx = session.main.model, session.main.n_ctx
    if not model.chat_template:
        render.note("this model has no chat template: the prompts are used as they are")
    questions = tokenize(model, prompts)
    fitting = [question for question in questions if len(question.tokens) + n_tokens <= n_ctx]
    if not fitting:
        raise InvalidRequest(
            f"no prompt fits into the context of {n_ctx} tokens with an answer of {n_tokens} tokens: "
            "give a larger --ctx"
        )
    if skipped := [str(question.prompt) for question in questions if question not in fitting]:
        render.note(
            f"skipped because an answer of {n_tokens} tokens would not fit "
            f"into the context of {n_ctx} tokens: "
            f"{', '.join(skipped)}"
        )
    return fitting


def _progress(n_runs: int, sink: _Sink) -> contextlib.AbstractContextManager[Callable[[float], None]]:
    lines = isinstance(sink, _Lines) and sys.stdout.isatty()
    return progress.bar("measuring", n_runs, visible=not lines)


def _line(outcome: "Outcome") -> str:
    """Format the results of a prompt as one line."""
    from spec_local.bench.figures import decode_rate, run_median, speedup

    parts = []
    for variant in outcome.runs:
        speed = f"{variant} {run_median(outcome, variant, decode_rate):.1f} tokens/s"
        if variant in outcome.differences:
            differs = outcome.differences[variant]
            verdict = f"differs after {differs.at} tokens (gap {differs.gap:.3g})" if differs else "identical"
            speed += f" ({speedup(outcome, variant):.2f} ×, {verdict})"
        parts.append(speed)
    return f"{outcome.prompt}: {' · '.join(parts)}"
