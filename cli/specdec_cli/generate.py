"""`specdec generate`: one prompt, one answer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from spec_local.errors import InvalidRequest
from specdec_cli import exits, render
from specdec_cli.options import ModelOptions, SamplingOptions, flattened, generation_settings

if TYPE_CHECKING:
    from spec_local.session import Done, Session


@flattened
def generate(
    prompt: Annotated[
        str | None, Argument(help="The prompt; text from a pipe or --file goes before it.")
    ] = None,
    file: Annotated[Path | None, Option("--file", "-f", help="Read the prompt from a file.")] = None,
    system: Annotated[str | None, Option(help="System message.")] = None,
    raw: Annotated[
        bool, Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object when done.")] = False,
    profile: Annotated[bool, Option("--profile", help="Show where the time of a step goes.")] = False,
    verbose: Annotated[
        int, Option("--verbose", "-v", count=True, help="Statistics and build; -vv: llama.cpp's own log.")
    ] = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer one prompt, streaming.

    Examples:

      specdec generate "Why is the sky blue?"

      git diff | specdec generate --main qwen-7b.gguf --draft qwen-0.5b.gguf "Write a commit message."
    """
    with exits.guarded():
        settings = generation_settings(
            models, sampling
        )  # before anything slow: a wrong value is told at once
        text = _prompt(prompt, file)
        from spec_local.llama import runtime

        runtime.set_verbose(verbose > 1)
        render.prepare_stdout()
        with models.open(render.note) as session, render.interruptible() as cancelled:
            if verbose:
                for line in _setting(session):
                    render.note(line)
            tokens = _tokens(session, text, system, raw)
            from spec_local.session import Done, Text

            answer = ""
            for event in session.generate(tokens, settings, cancelled=cancelled):
                if isinstance(event, (Text, Done)):
                    answer += event.text
                    if not as_json:
                        render.say(event.text)
            done = event
            assert isinstance(done, Done)
            if as_json:
                render.say(json.dumps(_as_json(session, answer, done), ensure_ascii=False) + "\n")
            elif sys.stdout.isatty() and not answer.endswith("\n"):
                render.say("\n")
            if verbose:
                render.note(render.statistics_line(done.statistics))
            if profile:
                for line in render.profile_lines(done.statistics):
                    render.note(line)
            if done.reason == "context":
                render.note(
                    f"the context of {session.main.n_ctx} tokens is full: give a larger --ctx to go on"
                )
            if done.reason == "cancelled":
                raise KeyboardInterrupt


def _prompt(argument: str | None, file: Path | None) -> str:
    """What was piped or is in the file, a blank line, and the argument."""
    parts = []
    if file is not None:
        parts.append(_decoded(file.read_bytes(), str(file)))
    elif sys.stdin is not None and not sys.stdin.isatty():
        parts.append(_decoded(sys.stdin.buffer.read(), "standard input"))
    parts.append(argument or "")
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise InvalidRequest("there is no prompt: give one, or pipe a text in")
    return text


def _decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 (byte {error.start}): convert it first, for instance with iconv"
        ) from None


def _tokens(session: "Session", text: str, system: str | None, raw: bool) -> list[int]:
    from spec_local.chat import ChatTemplate, Conversation

    model = session.main.model
    if not raw and model.chat_template:
        conversation = Conversation(model, ChatTemplate(model))
        if system:
            conversation.messages.append({"role": "system", "content": system})
        return conversation.ask(text)
    if system:
        raise InvalidRequest("--system needs a chat template, and --raw (or this model) has none")
    if not raw:
        render.note("this model has no chat template: continuing the text as it is")
    return model.vocabulary.tokenize(text, add_special=True)


def _setting(session: "Session") -> list[str]:
    from spec_local.llama import runtime

    models = [f"main {session.main.model.path.name} ({session.main.model.description})"]
    if session.draft:
        models.append(f"draft {session.draft.model.path.name} ({session.draft.model.description})")
    return [" · ".join(models), f"llama.cpp {runtime.system_info()}"]


def _as_json(session: "Session", answer: str, done: "Done") -> dict[str, Any]:
    """Field names are those of llama.cpp's server."""
    from spec_local.text import printable

    s = done.statistics
    return {
        "content": printable(answer),
        "model": session.main.model.path.name,
        "stop_type": done.reason,
        "timings": {
            "prompt_n": s.prompt_n,
            "prompt_ms": 1e3 * s.prompt_s,
            "first_token_ms": 1e3 * s.first_token_s,
            "predicted_n": s.predicted_n,
            "predicted_ms": 1e3 * s.predicted_s,
            "predicted_per_second": s.tokens_per_second,
            "steps_n": s.n_steps,
            "draft_n": s.draft_n,
            "draft_n_accepted": s.draft_n_accepted,
            "steps_by": dict(s.steps_by),
            "profile_ms": {part: 1e3 * seconds for part, seconds in s.profile.items()},
        },
    }
