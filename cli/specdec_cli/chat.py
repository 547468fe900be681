"""`specdec chat`: a conversation in the terminal."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from spec_local.chat.conversation import Conversation
from spec_local.chat.saved_chat import paths_of
from spec_local.chat.template import ChatTemplate, start_template_process
from spec_local.chat_session import ChatSession
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.images.media import Media
from spec_local.llama import runtime, workers
from specdec_cli import chat_input, facts, last_resort, render, typed_ahead
from specdec_cli.chat_commands import completions, run_command
from specdec_cli.chat_models import ChatModels
from specdec_cli.chat_view import ChatView
from specdec_cli.given_files import STANDARD
from specdec_cli.given_images import given_images
from specdec_cli.sessions import generation_settings
from specdec_cli.signatures.answers import ChatOptions


def chat(options: ChatOptions) -> None:
    options = _with_models(options)
    images = _images(options)
    settings = generation_settings(options.models, options.sampling)
    runtime.set_verbose(options.verbose > 1)
    start_template_process()
    (starting := ExitStack()).enter_context(typed_ahead.collecting())
    with starting, (opened := ChatModels(options.models, options.sampling)) as session:
        conversation = Conversation(session.main.model, ChatTemplate(session.main.model))
        view = ChatView(
            ChatSession(session, conversation, settings, options.when_full),
            opened,
            show_statistics=not options.no_stats,
            show_drafts=options.show_drafts,
            markdown=options.markdown,
            wrap=not options.no_wrap,
            hide_thinking=options.hide_thinking,
        )
        if options.verbose:
            render.notes(facts.setting_lines(session))
        if chat_input.interactive():
            view.kept = chat_input.last_chat()
        render.note(view.banner())
        if options.load:
            view.load(options.load)
        if options.system:  # replaces the system message of a loaded conversation
            view.conversation.system = options.system
        for image in images:
            view.attach(image)
        read = chat_input.message_reader(completions())
        starting.close()
        _converse(view, read)


def _with_models(options: ChatOptions) -> ChatOptions:
    """Return the options with the models and the conversation that the arguments and --continue name."""
    models = options.models.with_models(options.model, options.draft_model)
    if not options.continue_:
        return replace(options, models=models)
    if options.load:
        raise InvalidRequest("--continue and --load exclude each other: give one of them")
    load = chat_input.last_chat()
    if not load.exists():
        raise InvalidRequest("there is no conversation to continue: start one with specdec chat")
    if not models.main:  # the conversation's own models
        main, draft, *_ = [*map(str, paths_of(load)), None, None]
        models = replace(models, main=main, draft=models.draft or draft)
    return replace(options, models=models, load=load)


def _images(options: ChatOptions) -> list[Media]:
    """The images of --image, before any model is loaded."""
    if STANDARD in (options.image or []):
        raise InvalidRequest("standard input is for messages: give --image a file")
    return given_images(options.image or [])


def _converse(view: ChatView, read: Callable[[], chat_input.TypedMessage | chat_input.TypedCommand]) -> None:
    """Read messages and commands until the end of the chat."""
    while True:
        try:
            measuring = view.chat.measuring_costs() if chat_input.interactive() else nullcontext()
            with measuring, workers.idle():
                typed = read()
            with last_resort.counting_signals():  # which the editor ends
                if isinstance(typed, chat_input.TypedCommand):
                    with typed_ahead.collecting():
                        _report_errors(partial(run_command, view, typed))
                else:
                    _report_errors(partial(view.enter, typed))
        except chat_input.EndOfChat:
            return
        except KeyboardInterrupt as interrupt:
            if not chat_input.interactive():
                raise
            render.note(f"{interrupt}type /exit or press Ctrl-D to leave")


def _report_errors(action: Callable[[], None]) -> None:
    """Run an action and report its errors as notes, so that the chat continues."""
    try:
        action()
    except KeyboardInterrupt:
        if not chat_input.interactive():
            raise
        render.note("(stopped)")
    except SpecLocalError as error:
        render.note(f"specdec: {' '.join(str(error).split())}")
    except OSError as error:
        if not error.filename:  # standard output
            raise
        render.note(f"specdec: {error.filename}: {error.strerror}")
