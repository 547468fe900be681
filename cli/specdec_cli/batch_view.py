"""`specdec generate --input`: many prompts from a file, with a progress bar on a terminal."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from spec_local import batch
from spec_local.batch.answers import BatchOutput, BatchPrompt, open_answers
from spec_local.errors import SpecLocalError
from spec_local.settings import GenerationSettings
from spec_local.system.files import check_encoding
from spec_local.text import counted
from specdec_cli import exits, progress, render
from specdec_cli.given_files import STANDARD, read_given
from specdec_cli.sessions import n_parallel, opened_for
from specdec_cli.signatures.answers import GenerateOptions

if TYPE_CHECKING:
    from spec_local.session import Session

_MAX_BYTES = 1 << 28  # of the prompts, which are read as a whole


def answer_all(options: GenerateOptions, settings: GenerationSettings) -> None:
    """Answer the prompts of the file --input, and write the answers to --output.

    Raises:
        SpecLocalError: a line or a file is invalid, or, at the end, prompts have failed.
        Exit: answers under a grammar, of this run or an earlier one, were cut short.
    """
    assert options.input_file
    files = options.models.files()
    lines = _lines(options.input_file)
    entries = batch.read_entries(*lines, files[0], settings, system=options.system, raw=options.raw)
    output = options.output_file or STANDARD
    opened = nullcontext(BatchOutput(sys.stdout.buffer)) if output == STANDARD else open_answers(output)
    with opened as answers:
        left = answers.unanswered(entries)
        figures = options.verbose > 0 or (sys.stderr is not None and sys.stderr.isatty())
        if not left and figures:
            all_ = f"all {len(entries)} prompts are" if len(entries) > 1 else "the prompt is"
            render.note(f"{all_} already answered in {answers.name}")
        n_cut = len(answers.cut_short)
        if left:
            with opened_for(options.models, files, len(left), options.parallel) as session:
                at_a_time = n_parallel(session, len(left), options.parallel)
                n_cut += _answer(session, left, len(entries), answers, at_a_time, figures)
        if n_cut and settings.constrained:
            render.note(
                f"{n_cut} of {counted(len(entries), 'answer')} {'were' if n_cut > 1 else 'was'} cut short, "
                "and may be only the beginning of what the grammar allows "
                f'(see "stop_type" in {answers.name})'
            )
            raise Exit(exits.CUT_SHORT)


def _answer(
    session: "Session",
    left: list[BatchPrompt],
    n_entries: int,
    answers: BatchOutput,
    at_a_time: int,
    figures: bool,
) -> int:
    """Answer the prompts that are left, and return how many of the answers were cut short."""
    n_answers = n_failed = n_cut = n_tokens = 0
    with render.interruptible() as cancelled:
        started = time.perf_counter()
        lines = not answers.durable and sys.stdout.isatty()
        with progress.bar("answering", n_entries, done=n_entries - len(left), visible=not lines) as advance:
            for outcome in batch.run(session, left, answers, n_parallel=at_a_time, cancelled=cancelled):
                advance(1)
                n_failed += bool(outcome.error)
                if outcome.statistics:
                    n_answers += 1
                    n_cut += outcome.cut_short
                    n_tokens += outcome.statistics.predicted_n
        seconds = time.perf_counter() - started
        if figures and n_answers:
            rate = f"{counted(n_answers, 'answer')} in {seconds:.1f} s · {n_tokens / seconds:.1f} tokens/s"
            render.note(rate + (f" · {at_a_time} at a time" if at_a_time > 1 else ""))
        if n_missing := len(left) - n_answers - n_failed:
            if answers.durable:
                n_done = n_entries - n_missing - n_failed
                again = "run the same command again to resume"
                render.note(f"stopped after {n_done} of {counted(n_entries, 'prompt')}; {again}")
            raise KeyboardInterrupt
    if n_failed:
        again = "; run the same command again to retry them" if answers.durable else ""
        raise SpecLocalError(
            f'{n_failed} of {counted(n_entries, "prompt")} failed: see "error" in {answers.name}{again}'
        )
    return n_cut


def _lines(prompts: Path) -> tuple[list[bytes], str]:
    """The lines of the file, and its name for errors."""
    content, name = read_given(prompts, _MAX_BYTES)
    check_encoding(content, name)
    return content.split(b"\n"), name
