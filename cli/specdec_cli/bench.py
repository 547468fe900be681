"""`specdec bench`: compare speculative with plain decoding on this machine."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from spec_local.errors import InvalidRequest
from spec_local.text import counted
from specdec_cli import exits, plots, progress, render, waiting
from specdec_cli.bench_output import FormatChoice, Sink, file_format, replacing, shows_lines, sink
from specdec_cli.options import (
    DraftArgument,
    ModelArgument,
    ModelOptions,
    SamplingOptions,
    VerboseFlag,
    generation_settings,
)

if TYPE_CHECKING:
    from spec_local.bench.parallel import CategoryOutcome, CategoryRun
    from spec_local.bench.prompts import Prompt
    from spec_local.bench.runner import Outcome, TokenizedPrompt
    from spec_local.bench.variants import Variant
    from spec_local.session import Session
    from spec_local.system.machine import OtherPrograms

_Prompts, _Variants, _Results = (
    functools.partial(Option, rich_help_panel=panel) for panel in ("Prompts", "Variants", "Results")
)


@dataclasses.dataclass(frozen=True)
class BenchModels(ModelOptions):
    """`ModelOptions` without a prompt cache: what was read once would not be measured again."""

    prompt_cache: ClassVar[str] = "off"  # type: ignore[misc]  # no option


@dataclasses.dataclass(frozen=True)
class BenchSampling(SamplingOptions):
    """`SamplingOptions` with the defaults of a benchmark."""

    temp: Annotated[
        float | None,
        Option(help="Temperature; 0 always takes the most probable token.", rich_help_panel="Sampling"),
    ] = 0.0
    max_tokens: Annotated[
        int | None, Option("--tokens", "--max-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 128
    json_schema: Annotated[
        str | None,
        Option(
            metavar="FILE|JSON",
            help="JSON schema for the answers: a file, or the schema itself.",
            rich_help_panel="Sampling",
        ),
    ] = None


def bench(
    model: ModelArgument = None,
    draft_model: DraftArgument = None,
    prompts: Annotated[
        Path | None,
        _Prompts(
            metavar="FILE|FOLDER",
            help="Prompts: TOML or .jsonl with category, name and text; a set in the format of Spec-Bench, "
            "EAGLE or SPEED-Bench (.jsonl), or a folder of them; or one prompt per line (default: built-in "
            "prompts of 8 categories).",
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Use only the categories with this name or word: chat, code writing, code editing, "
            "summarising, translation, extraction, maths, retrieval answer; repeatable.",
        ),
    ] = None,
    per_category: Annotated[
        int | None, Option(metavar="N", help="Use only the first N prompts of each category.")
    ] = None,
    runs: Annotated[
        int | None,
        _Variants(
            help="Number of runs per prompt and variant (default: 1, or up to 3 if the result is unclear)."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=A,B",
            help="Compare values of an option, for example draft-max=1,2,4,8; repeatable.",
        ),
    ] = None,
    proposers: Annotated[str | None, _Variants(metavar="A,B", help="Compare proposers.")] = None,
    policies: Annotated[str | None, _Variants(metavar="A,B", help="Compare draft-length policies.")] = None,
    parallel: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Measure the total speed of several answers at the same time, for example 1,2,4,8.",
        ),
    ] = None,
    delay: Annotated[
        float, _Variants(help="Seconds to wait before each run, to let a laptop cool down.")
    ] = 0.0,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write the results to this file: .md, .csv, .json, or .jsonl (each run appends).",
        ),
    ] = None,
    form: Annotated[
        FormatChoice | None,
        _Results(
            "--format", help="Format on standard output, or of a file with another suffix (default: md)."
        ),
    ] = None,
    plot: Annotated[Path | None, _Results(metavar="FILE", help="Also draw a plot, as a PNG file.")] = None,
    verbose: Annotated[int, VerboseFlag(help="Show a line per prompt; -vv: also llama.cpp's log.")] = 0,
    *,
    models: BenchModels,
    sampling: BenchSampling,
) -> None:
    """Measure the speed-up of speculative decoding on this machine, with real prompts.

    Answers each prompt with and without speculation, and compares the speeds; the
    report ends with the conclusion.

    Examples:

      specdec bench coder-7b --per-category 2
      specdec bench main.gguf draft.gguf --sweep draft-max=2,4,8 -o out.md
      specdec bench coder-7b --parallel 1,2,4,8 --category chat
    """
    with exits.guarded():
        models = models.with_models(model, draft_model)
        # Report invalid values before starting anything slow.
        _check(runs=runs, per_category=per_category, tokens=sampling.max_tokens, delay=delay)
        selected = _prompts(prompts, category or [], per_category)
        variants = _variants(models, sampling, sweep or [], proposers, policies)
        rows = _rows(parallel, selected, plot)
        output, plot = _writable(output), _writable(plot)
        if output:
            file_format(output, form)
        if plot:
            plots.check()
        from spec_local.bench import parallel_report, report
        from spec_local.bench.parallel import check_prompts
        from spec_local.bench.record import peak_memory, record
        from spec_local.llama import runtime

        runtime.set_verbose(verbose > 1)
        with (
            replacing(plot) as picture,
            sink(parallel_report if rows else report, output, form) as target,
            _session_options(models, variants).open(render.note, parallel=max(rows, default=1)) as session,
            render.interruptible() as cancelled,
        ):
            if not session.draft and any(each.settings.proposer == "draft" for each in variants):
                raise InvalidRequest("the draft proposer needs a draft model: give --draft FILE")
            how = _Conditions(runs, delay, verbose, not shows_lines(output, form), cancelled)
            if rows and any(prompt.later for prompt in selected):
                render.note("--parallel measures the first turn of each conversation only")
                selected = [dataclasses.replace(prompt, later=()) for prompt in selected]
            questions = _questions(session, selected, variants[0].settings.max_tokens or 1)
            if rows:
                check_prompts([question.prompt for question in questions], rows)  # some may have been skipped
            with waiting.line("looking at the machine and the models …"):
                about = record(session, models.threads, render.note)
                target.begin(about, variants)
                programs = _other_programs()
            results: report.Results | parallel_report.ParallelResults
            if rows:
                results = parallel_report.ParallelResults(
                    record=about,
                    variants=variants,
                    rows=rows,
                    outcomes=_measured_parallel(session, questions, variants, rows, how, target),
                    n_categories=len({question.prompt.category for question in questions}),
                    runs=how.runs or 1,
                    peak_memory=peak_memory(),
                    other_programs=programs.cores(),
                )
            else:
                results = report.Results(
                    record=about,
                    variants=variants,
                    outcomes=_measured(session, questions, variants, how, target, programs),
                    n_prompts=_n_turns(questions),
                    peak_memory=peak_memory(),
                    other_programs=programs.cores(),
                )
            if not results.outcomes:
                what = "category" if rows else "prompt"
                render.note(f"interrupted before the first {what} was finished: nothing to report")
                raise KeyboardInterrupt
            target.finish(results)
            if picture and isinstance(results, report.Results):
                plots.draw(results.figures()[1:], picture)
        if results.interrupted or cancelled():
            raise KeyboardInterrupt


def _n_turns(questions: "Sequence[TokenizedPrompt]") -> int:
    return sum(question.prompt.n_turns for question in questions)


def _rows(parallel: str | None, prompts: "Sequence[Prompt]", plot: Path | None) -> list[int]:
    """The numbers of answers at the same time; none: one answer after another."""
    if parallel is None:
        return []
    from spec_local.bench.parallel import check_prompts, parse_rows

    if plot:
        raise InvalidRequest("--plot draws the speed of single answers: remove it, or --parallel")
    rows = parse_rows(parallel)
    check_prompts(prompts, rows)
    return rows


def _writable(path: Path | None) -> Path | None:
    """A path that a user gave for a file, with ~ expanded."""
    from spec_local.system.files import expanded

    if not path:
        return None
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise InvalidRequest(f"{path} is not a regular file: give another path")
    return path


def _check(runs: int | None, per_category: int | None, tokens: int | None, delay: float) -> None:
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
    return variants(base, varied)


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
        datastore=models.datastore or models.learn,  # without adding to it
        learn=False,
    )


@dataclasses.dataclass(frozen=True)
class _Conditions:
    """The plan of a benchmark; see `spec_local.bench.runner.measure`.

    runs: None: one, and more while the result is unclear. shows_progress: on stderr.
    """

    runs: int | None
    delay: float
    verbose: int
    shows_progress: bool
    cancelled: Callable[[], bool]


def _measured(
    session: "Session",
    questions: "Sequence[TokenizedPrompt]",
    variants: "Sequence[Variant]",
    how: _Conditions,
    target: Sink,
    programs: "OtherPrograms",
) -> "list[Outcome]":
    from spec_local.bench.conclusions import MOST_RUNS, reason_to_repeat
    from spec_local.bench.runner import Outcome, measure

    outcomes: list[Outcome] = []
    for number in range(1, 2 if how.runs else MOST_RUNS + 1):
        if number > 1:
            reason = reason_to_repeat(outcomes, variants, programs.cores())
            if how.cancelled() or not reason:
                break
            render.note(f"{reason}: measuring again ({number} of at most {MOST_RUNS})")
        earlier, n_done, runs = list(outcomes), 0, how.runs or 1
        with _progress(_n_turns(questions) * len(variants) * runs, how) as advance:
            for event in measure(
                session,
                questions,
                variants,
                runs=runs,
                earlier=earlier,
                delay=how.delay,
                cancelled=how.cancelled,
                on_progress=advance,
            ):
                target.add(event)
                if isinstance(event, Outcome):
                    outcomes[n_done : n_done + 1] = [event]
                    n_done += 1
                    if how.verbose:
                        render.note(f"{n_done}/{_n_turns(questions)} {_line(event)}")
    return outcomes


def _measured_parallel(
    session: "Session",
    questions: "Sequence[TokenizedPrompt]",
    variants: "Sequence[Variant]",
    rows: Sequence[int],
    how: _Conditions,
    target: Sink,
) -> "list[CategoryOutcome]":
    from spec_local.bench.parallel import CategoryOutcome, measure

    outcomes: list[CategoryOutcome] = []
    runs = how.runs or 1
    with _progress(len(questions) * len(variants) * len(rows) * runs, how) as advance:
        for event in measure(
            session,
            questions,
            variants,
            rows,
            runs=runs,
            delay=how.delay,
            cancelled=how.cancelled,
            on_progress=advance,
        ):
            target.add(event)
            if isinstance(event, CategoryOutcome):
                outcomes.append(event)
            elif how.verbose:
                render.note(_batch_line(event))
    return outcomes


def _questions(session: "Session", prompts: "Sequence[Prompt]", n_tokens: int) -> "list[TokenizedPrompt]":
    """Tokenize the prompts, and return those that fit into the context together with their answers."""
    from spec_local.bench.runner import longest, tokenize

    model, n_ctx = session.main.model, session.main.n_ctx
    if not model.chat_template:
        render.note("this model has no chat template: the prompts are used as they are")
    questions = tokenize(model, prompts)
    fitting = [question for question in questions if longest(question, n_tokens) <= n_ctx]
    if not fitting:
        raise InvalidRequest(
            f"no prompt fits into the context of {n_ctx} tokens with an answer of "
            f"{counted(n_tokens, 'token')}: give a larger --ctx"
        )
    if skipped := [str(question.prompt) for question in questions if question not in fitting]:
        render.note(
            f"skipped because an answer of {counted(n_tokens, 'token')} would not fit "
            f"into the context of {n_ctx} tokens: "
            f"{', '.join(skipped)}"
        )
    return fitting


def _other_programs() -> "OtherPrograms":
    """Count what other programs use from now on; write a note if it is too much already."""
    from spec_local.system.machine import OtherPrograms, default_threads, is_busy

    if is_busy(cores := OtherPrograms.now()):
        render.note(
            f"other programs use {cores:.1f} of {counted(default_threads(), 'core')}: close them for an "
            "accurate result"
        )
    return OtherPrograms()


def _progress(n_runs: int, how: _Conditions) -> contextlib.AbstractContextManager[Callable[[float], None]]:
    return progress.bar("measuring", n_runs, visible=how.shows_progress)


def _batch_line(batch: "CategoryRun") -> str:
    """Format a batch as one line."""
    return (
        f"{batch.category}, {batch.variant}, {batch.n_rows} at the same time: "
        f"{batch.tokens_per_second:.1f} tokens/s in all"
    )


def _line(outcome: "Outcome") -> str:
    """Format the results of a prompt as one line."""
    from spec_local.bench.figures import decode_rate, run_median, speedup

    parts = []
    for variant in outcome.runs:
        speed = f"{variant} {run_median(outcome, variant, decode_rate):.1f} tokens/s"
        if variant in outcome.differences:
            differs = outcome.differences[variant]
            verdict = (
                f"differs after {counted(differs.at, 'token')} (gap {differs.gap:.3g})"
                if differs
                else "identical"
            )
            speed += f" ({speedup(outcome, variant):.2f} ×, {verdict})"
        parts.append(speed)
    return f"{outcome.prompt}: {' · '.join(parts)}"
