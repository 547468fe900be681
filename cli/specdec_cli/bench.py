"""`specdec bench`: compare speculative with plain decoding on this machine."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spec_local.bench import parallel, parallel_report, prompts, report, runner
from spec_local.bench.conclusions import MOST_RUNS, reason_to_repeat
from spec_local.bench.figures import decode_rate, run_median, speedup
from spec_local.bench.parallel import CategoryOutcome, CategoryRun, check_prompts
from spec_local.bench.parallel_report import ParallelResults
from spec_local.bench.prompts import Prompt
from spec_local.bench.record import peak_memory, record
from spec_local.bench.report import Results
from spec_local.bench.runner import Outcome, TokenizedPrompt
from spec_local.bench.variants import Variant, parse_list, parse_sweep, variants
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.system.files import saving
from spec_local.system.machine import OtherPrograms, default_threads, is_busy
from spec_local.text import counted
from specdec_cli import plots, progress, render, waiting
from specdec_cli.bench_output import Sink, output_path, shows_lines, sink
from specdec_cli.options import ModelOptions
from specdec_cli.sessions import generation_settings, open_session
from specdec_cli.signatures.drafts import BenchOptions

if TYPE_CHECKING:
    from spec_local.session import Session


def bench(options: BenchOptions) -> None:
    models = options.models.with_models(options.model, options.draft_model)
    # Report invalid values before starting anything slow.
    _check(options)
    selected = prompts.select(prompts.load(options.prompts), options.category or [], options.per_category)
    compared = _variants(options, models)
    rows = _rows(options, selected)
    output, plot = output_path(options.output), output_path(options.plot)
    target = sink(parallel_report if rows else report, output, options.form)
    if plot:
        plots.check()
    runtime.set_verbose(options.verbose > 1)
    with (
        open_session(_session_options(models, compared), parallel=max(rows, default=1)) as session,
        render.interruptible() as cancelled,
    ):
        if not session.draft and any(each.settings.proposer == "draft" for each in compared):
            raise InvalidRequest("the draft proposer needs a draft model: give --draft FILE")
        if rows and any(prompt.later for prompt in selected):
            render.note("--parallel measures the first turn of each conversation only")
            selected = [dataclasses.replace(prompt, later=()) for prompt in selected]
        questions = _questions(session, selected, compared[0].settings.max_tokens or 1)
        if rows:
            check_prompts([question.prompt for question in questions], rows)  # some may have been skipped
        shows_progress = not shows_lines(output, options.form)
        run = _Benchmark(session, questions, compared, target, options, shows_progress, cancelled)
        results = run.results(rows)
        if not results.outcomes:
            what = "category" if rows else "prompt"
            render.note(f"interrupted before the first {what} was finished: nothing to report")
            raise KeyboardInterrupt
        target.finish(results)
        if plot and isinstance(results, Results):
            with saving(plot) as picture:
                plots.draw(results.figures()[1:], picture)
    if results.interrupted or cancelled():
        raise KeyboardInterrupt


def _check(options: BenchOptions) -> None:
    values = {
        "runs": options.runs,
        "per-category": options.per_category,
        "tokens": options.sampling.max_tokens,
    }
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} is {value}: give 1 or more")
    if not 0 <= options.delay < float("inf"):
        raise InvalidRequest(f"delay is {options.delay:g}: give a number of seconds, 0 or more")


def _variants(options: BenchOptions, models: ModelOptions) -> list[Variant]:
    varied: dict[str, Sequence[Any]] = {}
    if options.proposers is not None:
        varied["proposer"] = parse_list(options.proposers)
    if options.policies is not None:
        varied["policy"] = parse_list(options.policies)
    varied.update(map(parse_sweep, options.sweep or []))
    settings = generation_settings(models, options.sampling)
    return variants(dataclasses.replace(settings, seed=options.sampling.seed or 0), varied)


def _rows(options: BenchOptions, selected: Sequence[Prompt]) -> list[int]:
    """The numbers of answers at the same time; none: one answer after another."""
    if options.parallel is None:
        return []
    if options.plot:
        raise InvalidRequest("--plot draws the speed of single answers: remove it, or --parallel")
    rows = parallel.parse_rows(options.parallel)
    check_prompts(selected, rows)
    return rows


def _session_options(models: ModelOptions, variants: Sequence[Variant]) -> ModelOptions:
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


def _questions(session: "Session", prompts: Sequence[Prompt], n_tokens: int) -> list[TokenizedPrompt]:
    """Tokenize the prompts, and return those that fit into the context together with their answers."""
    model, n_ctx = session.main.model, session.main.n_ctx
    if not model.chat_template:
        render.note("this model has no chat template: the prompts are used as they are")
    questions = runner.tokenize(model, prompts)
    fitting = [question for question in questions if runner.longest(question, n_tokens) <= n_ctx]
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


def _other_programs() -> OtherPrograms:
    """Count what other programs use from now on; write a note if it is too much already."""
    if is_busy(cores := OtherPrograms.now()):
        render.note(
            f"other programs use {cores:.1f} of {counted(default_threads(), 'core')}: close them for an "
            "accurate result"
        )
    return OtherPrograms()


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """What to measure, and how. target: receives the measurements. shows_progress: on stderr."""

    session: "Session"
    questions: Sequence[TokenizedPrompt]
    variants: Sequence[Variant]
    target: Sink
    options: BenchOptions
    shows_progress: bool
    cancelled: Callable[[], bool]

    def results(self, rows: Sequence[int]) -> Results | ParallelResults:
        """Measure. rows: the numbers of answers at the same time; none: one answer after another."""
        with waiting.line("looking at the machine and the models …"):
            about = record(self.session, self.options.models.threads, render.note)
            self.target.begin(about, self.variants)
            programs = _other_programs()
        if rows:
            return ParallelResults(
                record=about,
                variants=self.variants,
                rows=rows,
                outcomes=self._measured_parallel(rows),
                n_categories=len({question.prompt.category for question in self.questions}),
                runs=self.options.runs or 1,
                peak_memory=peak_memory(),
                other_programs=programs.cores(),
            )
        return Results(
            record=about,
            variants=self.variants,
            outcomes=self._measured(programs),
            n_prompts=self._n_turns,
            peak_memory=peak_memory(),
            other_programs=programs.cores(),
        )

    @property
    def _n_turns(self) -> int:
        return sum(question.prompt.n_turns for question in self.questions)

    def _measured(self, programs: OtherPrograms) -> list[Outcome]:
        """Measure once, or --runs times; without that option, again while the result is unclear."""
        outcomes: list[Outcome] = []
        for number in range(1, 2 if self.options.runs else MOST_RUNS + 1):
            if number > 1:
                reason = reason_to_repeat(outcomes, self.variants, programs.cores())
                if self.cancelled() or not reason:
                    break
                render.note(f"{reason}: measuring again ({number} of at most {MOST_RUNS})")
            earlier, n_done, runs = list(outcomes), 0, self.options.runs or 1
            for event in self._events(runner.measure, self._n_turns * runs, runs=runs, earlier=earlier):
                if isinstance(event, Outcome):
                    outcomes[n_done : n_done + 1] = [event]
                    n_done += 1
                    if self.options.verbose:
                        render.note(f"{n_done}/{self._n_turns} {_line(event)}")
        return outcomes

    def _measured_parallel(self, rows: Sequence[int]) -> list[CategoryOutcome]:
        outcomes: list[CategoryOutcome] = []
        runs = self.options.runs or 1
        n_answers = len(self.questions) * len(rows) * runs
        for event in self._events(parallel.measure, n_answers, rows=rows, runs=runs):
            if isinstance(event, CategoryOutcome):
                outcomes.append(event)
            elif self.options.verbose:
                render.note(_batch_line(event))
        return outcomes

    def _events(self, measure: Callable[..., Iterator[Any]], n_of_each: int, **how: Any) -> Iterator[Any]:
        """Measure this number of answers of each variant with a progress bar, and write each event."""
        how |= {"delay": self.options.delay, "cancelled": self.cancelled}
        n_answers = n_of_each * len(self.variants)
        with progress.bar("measuring", n_answers, visible=self.shows_progress) as advance:
            for event in measure(self.session, self.questions, self.variants, on_progress=advance, **how):
                self.target.add(event)
                yield event


def _batch_line(batch: CategoryRun) -> str:
    """Format a batch as one line."""
    return (
        f"{batch.category}, {batch.variant}, {batch.n_parallel} at the same time: "
        f"{batch.tokens_per_second:.1f} tokens/s in all"
    )


def _line(outcome: Outcome) -> str:
    """Format the results of a prompt as one line."""
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
