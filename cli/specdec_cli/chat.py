"""`specdec chat`: a conversation in the terminal."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import chat_input, exits, last_resort, render, typed_ahead
from specdec_cli.options import (
    DraftArgument,
    HideThinkingOption,
    ModelArgument,
    ModelOptions,
    NoWrapOption,
    SamplingOptions,
    ShowDraftsOption,
    SystemOption,
    VerboseOption,
    generation_settings,
)

_Chat = partial(Option, rich_help_panel="Chat")


def chat(
    model: ModelArgument = None,
    draft_model: DraftArgument = None,
    system: SystemOption = None,
    load: Annotated[
        Path | None, _Chat(metavar="FILE", help="Continue a conversation that was saved with /save.")
    ] = None,
    continue_: Annotated[
        bool, Option("--continue", "-C", help="Continue the last conversation on a terminal.")
    ] = False,
    when_full: Annotated[
        Literal["stop", "drop-oldest"],
        _Chat(help="When the context is full, stop, or drop the oldest messages except the system message."),
    ] = "stop",
    show_drafts: ShowDraftsOption = False,
    hide_thinking: Annotated[bool, HideThinkingOption(rich_help_panel="Chat")] = False,
    markdown: Annotated[
        bool, _Chat("--markdown", help="Render Markdown; each block is shown when it is complete.")
    ] = False,
    no_wrap: Annotated[bool, NoWrapOption(rich_help_panel="Chat")] = False,
    no_stats: Annotated[bool, _Chat("--no-stats", help="Do not print statistics after each answer.")] = False,
    verbose: VerboseOption = 0,
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
      specdec chat --continue
    """
    with exits.guarded():
        if continue_:
            if load:
                raise InvalidRequest("--continue and --load exclude each other: give one of them")
            load = chat_input.last_chat()
            if not load.exists():
                raise InvalidRequest("there is no conversation to continue: start one with specdec chat")
        models = models.with_models(model, draft_model)
        if continue_ and load and not models.main:  # the conversation's own models
            from spec_local.chat.saved_chat import paths_of

            own = [str(path) for path in paths_of(load)]
            models = replace(
                models, main=next(iter(own), None), draft=models.draft or next(iter(own[1:]), None)
            )
        settings = generation_settings(models, sampling)
        from spec_local.chat.conversation import Conversation
        from spec_local.chat.template import ChatTemplate, start_template_process
        from spec_local.chat_session import ChatSession
        from spec_local.llama import runtime, workers
        from specdec_cli.chat_commands import completions, run_command
        from specdec_cli.chat_input import Command, EndOfChat, interactive, message_reader
        from specdec_cli.chat_models import ChatModels
        from specdec_cli.chat_view import ChatView

        runtime.set_verbose(verbose > 1)
        start_template_process()
        (starting := ExitStack()).enter_context(typed_ahead.collecting())
        with starting, (opened := ChatModels(models, sampling)) as session:
            conversation = Conversation(session.main.model, ChatTemplate(session.main.model))
            chat_session = ChatSession(session, conversation, settings, when_full)
            view = ChatView(chat_session, not no_stats, show_drafts, markdown, not no_wrap, hide_thinking)
            view.models = opened
            if verbose:
                render.notes(render.setting_lines(session))
            if interactive():
                view.kept = chat_input.last_chat()
            render.note(view.banner())
            if load:
                view.load(load)
            if system:  # replaces the system message of a loaded conversation
                view.conversation.system = system
            read = message_reader(completions())
            starting.close()
            while True:
                try:
                    measuring = chat_session.measuring_costs() if interactive() else nullcontext()
                    with measuring, workers.idle():
                        typed = read()
                    with last_resort.counting_signals():  # which the editor ends
                        if isinstance(typed, Command):
                            with typed_ahead.collecting():
                                _report_errors(partial(run_command, view, typed))
                        else:
                            _report_errors(partial(view.send, typed))
                except EndOfChat:
                    return
                except KeyboardInterrupt as interrupt:
                    if not interactive():
                        raise
                    render.note(f"{interrupt}type /exit or press Ctrl-D to leave")


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
