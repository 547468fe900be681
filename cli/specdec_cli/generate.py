"""`specdec generate`: one prompt and its answer, or a file of them."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from spec_local.core.text import printable
from spec_local.errors import InvalidRequest
from specdec_cli import answer_view, batch_view, exits, render
from specdec_cli.commands import flattened
from specdec_cli.options import STANDARD, ModelOptions, SamplingOptions, generation_settings

if TYPE_CHECKING:
    from spec_local import answer_json
    from spec_local.chat.request import Request
    from spec_local.engine.events import Prefilled
    from spec_local.session import Done, Session, Text

_MOST = 1 << 24  # bytes of a prompt; more is more than any tokenizer takes
_OUTPUT, _MANY = "Output", "Many prompts"


@flattened
def generate(
    prompt: Annotated[
        str | None,
        Argument(help="The prompt. Text from --file or a pipe goes before it, with an empty line between."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read this before the prompt; repeatable, in the order given. -: standard input, which otherwise is "
            "read only if no file is given.",
        ),
    ] = None,
    system: Annotated[str | None, Option(help="System message.")] = None,
    raw: Annotated[
        bool, Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    suffix: Annotated[
        str | None,
        Option(
            metavar="TEXT", help="Fill the gap between the prompt and this text (models for code can do it)."
        ),
    ] = None,
    suffix_file: Annotated[Path | None, Option(metavar="FILE", help="The same, from a file.")] = None,
    echo: Annotated[
        bool,
        Option(
            "--echo",
            help="Print the prompt before the answer (and a suffix after it).",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    as_object: Annotated[
        bool, Option("--json", help="Print one JSON object when done.", rich_help_panel=_OUTPUT)
    ] = False,
    as_lines: Annotated[
        bool,
        Option("--jsonl", help="Print a JSON object for each step, as it comes.", rich_help_panel=_OUTPUT),
    ] = False,
    logprobs: Annotated[
        int | None,
        Option(
            metavar="N",
            help="In JSON: log probabilities of each token and of the N most probable ones.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    many: Annotated[
        Path | None,
        Option(
            "--input",
            metavar="FILE",
            help='A JSON object a line: "prompt" or "messages", and perhaps "id", "system", "suffix", "seed", '
            '"max_tokens"; -: standard input.',
            rich_help_panel=_MANY,
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        Option(
            "--output",
            metavar="FILE",
            help="Where a JSON object for each answer goes, at once. The same command again goes on where a run was "
            "stopped, and tries again what failed (default: standard output, always from the start).",
            rich_help_panel=_MANY,
        ),
    ] = None,
    show_drafts: Annotated[
        bool,
        Option(
            "--show-drafts",
            help="On a terminal: mark what had been guessed, and the guesses that were wrong.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    profile: Annotated[bool, Option("--profile", help="Show where the time of a step goes.")] = False,
    verbose: Annotated[
        int,
        Option(
            "--verbose",
            "-v",
            count=True,
            help="Statistics, build, device and threads; -vv: llama.cpp's own log.",
        ),
    ] = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer one prompt, streaming; or many, from a file to a file.

    Examples:

      specdec generate "Why is the sky blue?"

      git diff | specdec generate --main qwen-7b.gguf --draft qwen-0.5b.gguf "Write a commit message."

      specdec generate --json "Name three colours." | jq -r .content

      head -40 sum.py | specdec generate --main qwen-coder.gguf --suffix "$(tail -n +42 sum.py)"

      specdec generate --input prompts.jsonl --output answers.jsonl --seed 1

    In a loop that reads lines give each command an input of its own: < /dev/null
    """
    with exits.guarded():
        # Before anything slow: a wrong value is told at once.
        settings = generation_settings(models, sampling)
        if as_object and as_lines:
            raise InvalidRequest("--json is one object and --jsonl many: give one of them")
        if logprobs is not None:
            if not (as_object or as_lines or many):
                raise InvalidRequest("--logprobs are shown in JSON only: add --json or --jsonl")
            settings = dataclasses.replace(settings, logprobs=logprobs)
        if suffix is not None and suffix_file:
            raise InvalidRequest("--suffix and --suffix-file say the same: give one of them")
        from spec_local.llama import runtime

        runtime.set_verbose(verbose > 1)
        render.prepare_stdout()
        if many or answers:
            one = prompt or file or suffix is not None or suffix_file or echo or as_object or as_lines
            if one or not many:
                raise InvalidRequest(
                    "--output is for the answers to --input, which brings the prompts and gives JSON lines: "
                    "leave the prompt, --file, --suffix, --echo and --json out"
                )
            batch_view.answer_all(models, settings, many, answers or STANDARD, system, raw, verbose > 0)
            return
        request = _request(prompt, file or [], suffix, suffix_file, system, raw)
        with models.open(render.note) as session, render.interruptible() as cancelled:
            if verbose:
                for line in render.setting_lines(session):
                    render.note(line)
            if not raw and request.suffix is None and request.is_plain(session.main.model):
                render.note("this model has no chat template: continuing the text as it is")
            events = session.generate(request.tokens(session.main.model), settings, cancelled=cancelled)
            if as_object or as_lines:
                done = _in_json(
                    session, events, {"prompt": printable(request.prompt)} if echo else {}, as_lines
                )
            else:
                view = answer_view.view(session.main.model.vocabulary.piece, show_drafts=show_drafts)
                done = _as_text(events, view, request if echo else None)
            if verbose:
                render.note(render.statistics_line(done.statistics))
            if profile:
                for line in render.profile_lines(done.statistics):
                    render.note(line)
            if done.reason == "context":
                render.note(
                    f"the context of {session.main.n_ctx} tokens is full: give a larger --ctx to go on"
                )
            if cut := render.cut_note(done, settings):
                render.note(cut)
            if done.reason == "cancelled":
                raise KeyboardInterrupt


def _as_text(
    events: "Iterator[Prefilled | Text | Done]", view: answer_view.AnswerView, echoed: "Request | None"
) -> "Done":
    """Print the answer as it comes; around it what it stands between, if that is wanted."""
    from spec_local.session import Done, Text

    if isinstance(view, answer_view.Drafts):
        render.note(view.legend)
    said = ""
    for event in events:
        if isinstance(event, Text):
            said = event.text or said
            view.show(event)
        elif isinstance(event, Done):
            said = event.text or said
            view.end(event.text)
        else:  # the prompt has been read, and nothing stands in the way any more
            said = _before(echoed) if echoed else ""
            render.say(said)
    assert isinstance(event, Done)
    if echoed and echoed.suffix:
        said = echoed.suffix
        render.say(said)
    if sys.stdout.isatty() and not said.endswith("\n"):
        render.say("\n")
    return event


def _before(request: "Request") -> str:
    continued = request.raw or request.suffix is not None
    return request.prompt if continued else request.prompt + "\n\n"


def _in_json(
    session: "Session",
    events: "Iterator[Prefilled | Text | Done]",
    more: "answer_json.Object",
    streamed: bool,
) -> "Done":
    """Print an object for each step, or one for all of them; `more` goes into the last."""
    from spec_local import answer_json
    from spec_local.session import Done, Text

    steps: list[Text] = []
    for event in events:
        if not isinstance(event, Text):
            continue
        if streamed:
            _say_object(answer_json.step(session, event))
        else:
            steps.append(event)
    assert isinstance(event, Done)
    last = answer_json.end(session, event) if streamed else answer_json.whole(session, steps, event)
    _say_object(more | last)
    return event


def _say_object(content: "answer_json.Object") -> None:
    render.say(json.dumps(content, ensure_ascii=False) + "\n")


def _request(
    argument: str | None,
    files: Sequence[Path],
    suffix: str | None,
    suffix_file: Path | None,
    system: str | None,
    raw: bool,
) -> "Request":
    from spec_local.chat.request import Request

    if suffix_file:
        suffix = _text(suffix_file)
    if not files and sys.stdin is not None and not sys.stdin.isatty():
        files = [STANDARD]
    parts = [*map(_text, files), argument or ""]
    if suffix is not None:  # what stands before a gap counts to the last space
        prompt = "".join(parts)
    else:
        prompt = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    return Request(prompt, suffix=suffix, system=system, raw=raw)


def _text(path: Path) -> str:
    """What a file holds; of -, standard input."""
    from spec_local.files import decoded, read_text

    if path != STANDARD:
        return read_text(path, _MOST)
    return decoded(
        sys.stdin.buffer.read(_MOST + 1) if sys.stdin is not None else b"", "standard input", _MOST
    )
