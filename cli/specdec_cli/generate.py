"""`specdec generate`: answer one prompt, or a file of prompts."""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from spec_local.errors import InvalidRequest
from spec_local.text import counted, printable
from specdec_cli import answer_view, batch_view, exits, progress, render, several_view, thinking_view
from specdec_cli.first_argument import model_and_prompt
from specdec_cli.options import (
    STANDARD,
    HideThinkingOption,
    ModelArgument,
    ModelOptions,
    NoWrapOption,
    PromptOption,
    SamplingOptions,
    ShowDraftsOption,
    SystemOption,
    VerboseOption,
    generation_settings,
    read_given,
)

if TYPE_CHECKING:
    from spec_local.answers import json as answer_json
    from spec_local.chat.request import ChatRequest
    from spec_local.engine.events import Prefilled
    from spec_local.reasoning.markers import Splitter
    from spec_local.session import Done, Session, Text

_MAX_PROMPT = 1 << 24  # bytes
_Text = functools.partial(Option, rich_help_panel="Text and code")
_Output = functools.partial(Option, rich_help_panel="Output")
_Batch = functools.partial(Option, rich_help_panel="Many prompts and answers")
_MAX_ANSWERS = 10_000  # of one prompt; for more, a batch can be resumed


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT",
            help="Prompt; a single argument is the prompt unless it is a model. Text from --file or a pipe "
            "precedes it.",
        ),
    ] = None,
    prompt_option: PromptOption = None,
    file: Annotated[
        list[Path] | None,
        Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Text to put before the prompt; repeatable; - is standard input.",
        ),
    ] = None,
    system: SystemOption = None,
    raw: Annotated[
        bool, _Text("--raw", help="Continue the text exactly as it is, without the chat template.")
    ] = False,
    suffix: Annotated[
        str | None,
        _Text(metavar="TEXT", help="Fill the gap between the prompt and this text (for code models)."),
    ] = None,
    suffix_file: Annotated[Path | None, _Text(metavar="FILE", help="File that contains the suffix.")] = None,
    echo: Annotated[
        bool, _Text("--echo", help="Print the prompt before the answer, and the suffix after it.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object at the end.")] = False,
    as_jsonl: Annotated[
        bool, _Output("--jsonl", help="Print a JSON object for each step as it completes.")
    ] = False,
    logprobs: Annotated[
        int | None,
        _Output(
            metavar="N",
            help="Add the log probabilities of each token and of the N most probable ones to JSON output.",
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        _Batch(
            "--input",
            metavar="FILE",
            help='One prompt per line, or JSON Lines with "prompt" or "messages" and optionally "id", '
            '"system", "suffix", "seed" or "max_tokens"; - is standard input.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        _Batch(
            "--output",
            "-o",
            metavar="FILE",
            help="File for one JSON object per answer; run the command again to resume and to retry failed "
            "prompts (default: standard output, without resuming).",
        ),
    ] = None,
    answers: Annotated[
        int | None,
        _Batch(
            metavar="N",
            help="Number of answers to one prompt, which is read once; the seed increases by one per answer. "
            "In text output, lines with --- separate the answers.",
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        _Batch(
            metavar="N",
            help="Maximum number of answers at the same time (default: as many as pay off, up to 8, in half "
            "of the free memory).",
        ),
    ] = None,
    show_drafts: ShowDraftsOption = False,
    hide_thinking: Annotated[bool, HideThinkingOption(rich_help_panel="Output")] = False,
    no_wrap: Annotated[bool, NoWrapOption(rich_help_panel="Output")] = False,
    no_newline: Annotated[
        bool,
        _Output("--no-newline", help="Print the exact answer, without adding a newline at the end."),
    ] = False,
    profile: Annotated[
        bool, _Output("--profile", help="Show where the time goes, and how much of it drafts save.")
    ] = False,
    verbose: VerboseOption = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer one prompt, or many prompts from a file.

    Examples:

      specdec generate "Why is the sky blue?"
      git diff | specdec generate coder-7b "Write a commit message."
      specdec generate --json "Name three colours." | jq -r .content
      head -40 f.py | specdec generate coder-7b --suffix "$(tail -n +42 f.py)"
      specdec generate --input prompts.txt --output answers.jsonl --seed 1

    In a shell loop that reads lines, add < /dev/null, or the command reads the
    lines of the loop. The exit code is 3 if an answer under a grammar or schema
    is cut short.
    """
    with exits.guarded():
        is_elsewhere = prompt_option is not None or input_file is not None
        model, prompt = model_and_prompt(model, prompt, command="generate", given_elsewhere=is_elsewhere)
        models = models.with_models(model)
        # Before any model is loaded, so that an invalid value is reported at once.
        settings = generation_settings(models, sampling)
        if prompt is not None and prompt_option is not None:
            raise InvalidRequest("the prompt is given twice: remove --prompt or the argument")
        prompt = prompt_option if prompt is None else prompt
        if as_json and as_jsonl:
            raise InvalidRequest("--json and --jsonl exclude each other: give one of them")
        if logprobs is not None:
            if not (as_json or as_jsonl or input_file):
                raise InvalidRequest("--logprobs needs JSON output: add --json or --jsonl")
            settings = dataclasses.replace(settings, logprobs=logprobs)
        if suffix is not None and suffix_file:
            raise InvalidRequest("--suffix and --suffix-file set the same text: give one of them")
        if answers is not None and not 1 <= answers <= _MAX_ANSWERS:
            raise InvalidRequest(f"--answers is {answers}: give 1 to {_MAX_ANSWERS}")
        if answers is not None and (input_file or output_file or echo or show_drafts or profile):
            raise InvalidRequest(
                "--answers is for one prompt: remove --input, --output, --echo, --show-drafts and --profile"
            )
        if parallel is not None and not (input_file or answers is not None):
            raise InvalidRequest("--parallel is for several answers: add --input or --answers")
        if parallel is not None and not 1 <= parallel <= batch_view.MAX_ROWS:
            raise InvalidRequest(f"--parallel is {parallel}: give 1 to {batch_view.MAX_ROWS}")
        from spec_local.chat.template import start_template_process
        from spec_local.engine.events import Statistics
        from spec_local.llama import runtime
        from spec_local.session import ChatPrompt

        runtime.set_verbose(verbose > 1)
        if input_file or output_file:
            single = prompt or file or suffix is not None or suffix_file or echo or as_json or as_jsonl
            if single or not input_file:
                raise InvalidRequest(
                    "--output needs --input, which provides the prompts and produces JSON Lines: "
                    "remove the prompt, --file, --suffix, --echo and --json"
                )
            batch_view.answer_all(
                models, settings, input_file, output_file or STANDARD, system, raw, parallel, verbose > 0
            )
            return
        request = _request(prompt, file or [], suffix, suffix_file, system, raw)
        if not raw and request.suffix is None:
            start_template_process()
        n = answers or 1
        with (
            batch_view.opened(models, models.files(), n, parallel) as session,
            render.interruptible() as cancelled,
        ):
            if verbose:
                render.notes(render.setting_lines(session))
            if not raw and request.suffix is None and request.is_plain(session.main.model):
                render.note("this model has no chat template: continuing the text as it is")
            tokens = request.tokens(session.main.model, session.main.n_ctx)
            splitter = functools.partial(request.splitter, session.main.model, tokens)
            asked = tokens if request.is_plain(session.main.model) else ChatPrompt(tokens, splitter())
            if answers is None:
                events = progress.reading(
                    lambda on_read: session.generate(asked, settings, cancelled=cancelled, on_read=on_read),
                    in_one_piece=as_json,
                )
                if as_json or as_jsonl:
                    done = _in_json(
                        session,
                        events,
                        splitter(),
                        {"prompt": printable(request.prompt)} if echo else {},
                        as_jsonl,
                    )
                else:
                    continues = raw or request.suffix is not None
                    wrap = not (no_wrap or continues or echo)  # these begin in any column
                    view = answer_view.view(
                        session.main.model.vocabulary.piece, show_drafts=show_drafts, wrap=wrap
                    )
                    view = thinking_view.before(view, splitter, hidden=hide_thinking, wrap=wrap)
                    is_exact = no_newline or (continues and not sys.stdout.isatty())
                    done = _as_text(events, view, request if echo else None, is_exact)
                ends, statistics = [done], done.statistics
            else:
                statistics = Statistics()
                ends = several_view.answer(
                    session,
                    asked,
                    n,
                    settings,
                    splitter,
                    max_rows=batch_view.n_rows(session, n, parallel),
                    totals=statistics,
                    cancelled=cancelled,
                    as_json=as_json,
                    as_jsonl=as_jsonl,
                )
            is_cut = any(done.reason == "length" for done in ends) and not settings.constrained
            if is_cut and not (as_json or as_jsonl):  # JSON says so
                length = counted(settings.max_tokens or 0, "token")
                render.note(f"cut at {length}: for the rest, give a larger -n, or leave it out")
            if closed := next(filter(None, map(render.reasoning_note, ends)), None):
                render.note(closed)
            if verbose:
                gain = render.gain(session, settings, statistics) if answers is None else ""
                render.note(render.statistics_line(statistics, gain))
            if profile:
                render.notes(render.profile_lines(statistics))
            if any(done.reason == "context" for done in ends):
                render.note(
                    f"the context of {session.main.n_ctx} tokens is full: give a larger --ctx to continue"
                )
            cut = next(filter(None, (render.cut_note(done, settings) for done in ends)), None)
            if cut:
                render.note(cut)
            if any(done.reason == "cancelled" for done in ends):
                raise KeyboardInterrupt
            if cut:
                raise Exit(exits.CUT_SHORT)


def _as_text(
    events: "Iterator[Prefilled | Text | Done]",
    view: answer_view.AnswerView,
    echoed: "ChatRequest | None",
    is_exact: bool,
) -> "Done":
    """Print the answer as it is generated, between the prompt and the suffix if they are to be echoed.

    is_exact: add no newline.
    """
    from spec_local.session import Done, Text

    if isinstance(view, answer_view.Drafts):
        render.note(view.legend)
    for event in events:
        if isinstance(event, Text):
            view.show(event)
        elif isinstance(event, Done):
            view.end("")
        else:  # Prefilled: the prompt has been evaluated, so nothing can fail before the answer
            render.answer(_before(echoed) if echoed else "")
    assert isinstance(event, Done)
    if echoed and echoed.suffix:
        render.answer(echoed.suffix)
    if not is_exact:
        render.end_answer()
    render.notes(view.notes())
    return event


def _before(request: "ChatRequest") -> str:
    """Return the text to echo before the answer."""
    continued = request.raw or request.suffix is not None
    return request.prompt if continued else request.prompt + "\n\n"


def _in_json(
    session: "Session",
    events: "Iterator[Prefilled | Text | Done]",
    splitter: "Splitter",
    more: "answer_json.Object",
    streamed: bool,
) -> "Done":
    """Print one object, or one per step if streamed; the last one includes `more`."""
    from spec_local.answers import json as answer_json
    from spec_local.session import Done, Text

    steps: list[Text] = []
    for event in events:
        if not isinstance(event, Text):
            continue
        if streamed:
            render.write_object(answer_json.step(session.main.model, event, splitter))
        else:
            steps.append(event)
    assert isinstance(event, Done)
    if streamed:
        last = answer_json.end(session.main.model, event, splitter)
    else:
        last = answer_json.whole(session.main.model, steps, event, splitter)
    render.write_object(more | last)
    return event


def _request(
    argument: str | None,
    files: Sequence[Path],
    suffix: str | None,
    suffix_file: Path | None,
    system: str | None,
    raw: bool,
) -> "ChatRequest":
    """Compose the prompt: files, or piped standard input, then the argument."""
    from spec_local.chat.request import ChatRequest

    if suffix_file:
        suffix = _text(suffix_file)
    if not files and sys.stdin is not None and not sys.stdin.isatty():
        files = [STANDARD]
    if not files and not argument and suffix is None:
        raise InvalidRequest("there is no prompt: give one, pipe text in, or chat with specdec run")
    parts = [*map(_text, files), argument or ""]
    if raw or suffix is not None:  # text that goes on: all white space is significant
        prompt = "".join(parts)
    else:
        prompt = "\n\n".join(part.rstrip("\r\n") for part in parts if part.strip())
    return ChatRequest(prompt, suffix=suffix, system=system, raw=raw)


def _text(path: Path) -> str:
    """Return the text of a file, or of standard input for -."""
    from spec_local.system.files import decoded

    return decoded(*read_given(path, _MAX_PROMPT))
