"""`specdec generate`: answer one prompt, or a file of prompts."""

import sys
from dataclasses import replace
from functools import partial

from typer import Exit

from spec_local.answers.running import ChatPrompt
from spec_local.answers.text import Done
from spec_local.chat.request import ChatRequest
from spec_local.chat.template import start_template_process
from spec_local.engine.events import Statistics
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.context import MAX_SEQUENCES
from spec_local.settings import GenerationSettings
from spec_local.system.files import decoded
from spec_local.text import counted
from specdec_cli import answer_output, exits, facts, render
from specdec_cli.answer_output import Asked
from specdec_cli.first_argument import model_and_prompt
from specdec_cli.given_files import STANDARD, read_given
from specdec_cli.given_images import given_images
from specdec_cli.sessions import generation_settings, n_parallel, opened_for
from specdec_cli.signatures.answers import GenerateOptions

_MAX_PROMPT = 1 << 24  # bytes
_MAX_ANSWERS = 10_000  # of one prompt; for more, a batch can be resumed


def generate(options: GenerateOptions) -> None:
    given_elsewhere = options.prompt_option is not None or options.input_file is not None
    model, prompt = model_and_prompt(
        options.model, options.prompt, command="generate", given_elsewhere=given_elsewhere
    )
    options = replace(options, models=options.models.with_models(model))
    # Before any model is loaded, so that an invalid value is reported at once.
    settings = generation_settings(options.models, options.sampling)
    if prompt is not None and options.prompt_option is not None:
        raise InvalidRequest("the prompt is given twice: remove --prompt or the argument")
    options = replace(options, prompt=options.prompt_option if prompt is None else prompt)
    _check(options)
    if options.logprobs is not None:
        settings = replace(settings, logprobs=options.logprobs)
    runtime.set_verbose(options.verbose > 1)
    if options.input_file or options.output_file:
        from specdec_cli import batch_view  # imports a session, which `open_session` does while models load

        _check_batch(options)
        batch_view.answer_all(options, settings)
    else:
        _answer(options, settings, _request(options))


def _check(options: GenerateOptions) -> None:
    """Raise InvalidRequest for options that exclude each other, and for invalid values."""
    answers, parallel, of_file = options.answers, options.parallel, options.input_file
    if options.as_json and options.as_jsonl:
        raise InvalidRequest("--json and --jsonl exclude each other: give one of them")
    if options.logprobs is not None and not (options.as_json or options.as_jsonl or of_file):
        raise InvalidRequest("--logprobs needs JSON output: add --json or --jsonl")
    if options.suffix is not None and options.suffix_file:
        raise InvalidRequest("--suffix and --suffix-file set the same text: give one of them")
    if answers is not None and not 1 <= answers <= _MAX_ANSWERS:
        raise InvalidRequest(f"--answers is {answers}: give 1 to {_MAX_ANSWERS}")
    single = options.echo or options.show_drafts or options.profile
    if answers is not None and (of_file or options.output_file or single):
        raise InvalidRequest(
            "--answers is for one prompt: remove --input, --output, --echo, --show-drafts and --profile"
        )
    if parallel is not None and not (of_file or answers is not None):
        raise InvalidRequest("--parallel is for several answers: add --input or --answers")
    if parallel is not None and not 1 <= parallel <= MAX_SEQUENCES:
        raise InvalidRequest(f"--parallel is {parallel}: give 1 to {MAX_SEQUENCES}")


def _check_batch(options: GenerateOptions) -> None:
    """Raise InvalidRequest for options of a single prompt beside those of a file of prompts."""
    of_prompt = options.prompt or options.file or options.suffix is not None or options.suffix_file
    of_prompt = of_prompt or options.image
    if of_prompt or options.echo or options.as_json or options.as_jsonl or not options.input_file:
        raise InvalidRequest(
            "--output needs --input, which provides the prompts and produces JSON Lines: "
            "remove the prompt, --file, --image, --suffix, --echo and --json"
        )


def _request(options: GenerateOptions) -> ChatRequest:
    """Compose the prompt: files, or piped standard input, then the argument."""
    suffix, files, images = options.suffix, options.file or [], options.image or []
    if STANDARD in files and STANDARD in images:
        raise InvalidRequest("standard input cannot be both --file and --image: give a file for one of them")
    if options.suffix_file:
        suffix = decoded(*read_given(options.suffix_file, _MAX_PROMPT))
    if not files and STANDARD not in images and sys.stdin is not None and not sys.stdin.isatty():
        files = [STANDARD]
    if not files and not options.prompt and suffix is None:
        raise InvalidRequest("there is no prompt: give one, pipe text in, or chat with specdec run")
    parts = [*(decoded(*read_given(path, _MAX_PROMPT)) for path in files), options.prompt or ""]
    if options.raw or suffix is not None:  # text that goes on: all white space is significant
        prompt = "".join(parts)
    else:
        prompt = "\n\n".join(part.rstrip("\r\n") for part in parts if part.strip())
    return ChatRequest(
        prompt, suffix=suffix, system=options.system, raw=options.raw, images=given_images(images)
    )


def _answer(options: GenerateOptions, settings: GenerationSettings, request: ChatRequest) -> None:
    continues = request.raw or request.suffix is not None
    if not continues:
        start_template_process()
    n = options.answers or 1
    with (
        opened_for(options.models, options.models.files(), n, options.parallel) as session,
        render.interruptible() as cancelled,
    ):
        model = session.main.model
        if options.verbose:
            render.notes(facts.setting_lines(session))
        if not continues and request.is_plain(model):
            render.note("this model has no chat template: continuing the text as it is")
        tokens = request.tokens(model, session.main.n_ctx)
        splitter = partial(request.splitter, model, tokens)
        prompt = tokens if request.is_plain(model) else ChatPrompt(tokens, splitter())
        asked = Asked(session, prompt, splitter, settings, cancelled, options)
        if options.answers is None:
            done = answer_output.print_answer(asked, request)
            _explain(asked, [done], done.statistics)
        else:
            totals = Statistics()
            at_a_time = n_parallel(session, n, options.parallel)
            _explain(asked, answer_output.print_answers(asked, n, at_a_time, totals), totals)


def _explain(asked: Asked, ends: list[Done], statistics: Statistics) -> None:
    """Write statistics, and notes on how the answers ended.

    Raises:
        Exit: one under a grammar was cut short.
        KeyboardInterrupt: one was stopped.
    """
    options, session, settings = asked.options, asked.session, asked.settings
    is_cut = any(done.reason == "length" for done in ends) and not settings.constrained
    if is_cut and not (options.as_json or options.as_jsonl):  # JSON says so
        length = counted(settings.max_tokens or 0, "token")
        render.note(f"cut at {length}: for the rest, give a larger -n, or leave it out")
    if closed := next(filter(None, map(facts.reasoning_note, ends)), None):
        render.note(closed)
    if options.verbose:
        gain = facts.gain(session, settings, statistics) if options.answers is None else ""
        render.note(facts.statistics_line(statistics, gain))
    if options.profile:
        render.notes(facts.profile_lines(statistics))
    if any(done.reason == "context" for done in ends):
        render.note(f"the context of {session.main.n_ctx} tokens is full: give a larger --ctx to continue")
    if cut := next(filter(None, (facts.cut_note(done, settings) for done in ends)), None):
        render.note(cut)
    if any(done.reason == "cancelled" for done in ends):
        raise KeyboardInterrupt
    if cut:
        raise Exit(exits.CUT_SHORT)
