"""`specdec chat`: a conversation in the terminal."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from spec_local.errors import SpecLocalError
from specdec_cli import exits, render
from specdec_cli.options import (
    ModelArgument,
    ModelOptions,
    SamplingOptions,
    ShowDraftsOption,
    SystemOption,
    generation_settings,
)


class WhenFullChoice(StrEnum):
    stop = "stop"
    drop_oldest = "drop-oldest"


def chat(
    model: ModelArgument = None,
    system: SystemOption = None,
    load: Annotated[
        Path | None, Option(metavar="FILE", help="Continue a conversation that was saved with /save.")
    ] = None,
    when_full: Annotated[
        WhenFullChoice,
        Option(help="When the context is full, stop, or drop the oldest messages except the system message."),
    ] = WhenFullChoice.stop,
    show_drafts: ShowDraftsOption = False,
    markdown: Annotated[
        bool, Option("--markdown", help="Render Markdown; each block is shown when it is complete.")
    ] = False,
    no_stats: Annotated[
        bool, Option("--no-stats", help="Do not print statistics after each answer.")
    ] = False,
    verbose: Annotated[
        int,
        Option("--verbose", "-v", count=True, help="Show build, device and threads; -vv: llama.cpp's log."),
    ] = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Chat with a model in the terminal.

    Type /help for the commands of the chat.

    Examples:

      specdec chat

      specdec chat qwen3-4b --system "Answer in French."

      specdec chat llama-13b.gguf --draft tiny.gguf --show-drafts
    """
    with exits.guarded():
        models = models.with_main(model)
        settings = generation_settings(models, sampling)
        from spec_local.chat.conversation import Conversation
        from spec_local.chat.template import ChatTemplate, start_template_process
        from spec_local.chat_session import ChatSession
        from spec_local.llama import runtime
        from specdec_cli.chat_commands import completions, run_command
        from specdec_cli.chat_input import Command, EndOfChat, interactive, message_reader
        from specdec_cli.chat_view import ChatView

        runtime.set_verbose(verbose > 1)
        start_template_process()
        with models.open(render.note) as session:
            conversation = Conversation(session.main.model, ChatTemplate(session.main.model))
            chat_session = ChatSession(session, conversation, settings, when_full.value)
            view = ChatView(chat_session, not no_stats, show_drafts, markdown)
            if verbose:
                for line in render.setting_lines(session):
                    render.note(line)
            render.note(view.banner())
            if load:
                view.load(load)
            if system:  # replaces the system message of a loaded conversation
                view.conversation.system = system
            read = message_reader(completions())
            while True:
                try:
                    typed = read()
                    _report_errors(
                        partial(run_command, view, typed)
                        if isinstance(typed, Command)
                        else partial(view.send, typed)
                    )
                except EndOfChat:
                    return
                except KeyboardInterrupt:
                    if not interactive():
                        raise
                    render.note("type /exit or press Ctrl-D to leave")


def _report_errors(action: Callable[[], None]) -> None:
    """Run an action and report its errors as notes, so that the chat continues."""
    from specdec_cli.chat_input import interactive

    try:
        action()
    except KeyboardInterrupt:
        if not interactive():
            raise
        render.note("(stopped)")
    except SpecLocalError as error:
        render.note(f"specdec: {' '.join(str(error).split())}")
    except OSError as error:
        if not error.filename:  # standard output
            raise
        render.note(f"specdec: {error.filename}: {error.strerror}")
