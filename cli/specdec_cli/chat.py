"""`specdec chat`: a conversation in the terminal."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from spec_local.errors import SpecLocalError
from specdec_cli import exits, render
from specdec_cli.commands import flattened
from specdec_cli.options import ModelOptions, SamplingOptions, generation_settings


class WhenFullChoice(StrEnum):
    stop = "stop"
    drop_oldest = "drop-oldest"


@flattened
def chat(
    system: Annotated[str | None, Option(help="System message.")] = None,
    load: Annotated[
        Path | None, Option(metavar="FILE", help="Go on with a conversation that /save has kept.")
    ] = None,
    when_full: Annotated[
        WhenFullChoice,
        Option(
            help="When the context is full: stop, or drop the oldest messages (never the system message)."
        ),
    ] = WhenFullChoice.stop,
    show_drafts: Annotated[
        bool, Option("--show-drafts", help="Mark what had been guessed, and the guesses that were wrong.")
    ] = False,
    markdown: Annotated[
        bool, Option("--markdown", help="Render Markdown, block by block as each is complete.")
    ] = False,
    no_stats: Annotated[bool, Option("--no-stats", help="No line of figures after each answer.")] = False,
    verbose: Annotated[
        int,
        Option("--verbose", "-v", count=True, help="Build, device and threads; -vv: llama.cpp's own log."),
    ] = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model; each turn reads only what is new.

    Examples:

      specdec chat

      specdec chat --main llama-13b.gguf --draft tiny.gguf --system "Answer in French."

      specdec chat --main llama-13b.gguf --draft tiny.gguf --show-drafts
    """
    with exits.guarded():
        settings = generation_settings(models, sampling)
        from spec_local.chat.chat_session import ChatSession
        from spec_local.chat.conversation import Conversation
        from spec_local.chat.template import ChatTemplate
        from spec_local.llama import runtime
        from specdec_cli.chat_commands import obey, words
        from specdec_cli.chat_input import Command, Ended, by_hand, reader
        from specdec_cli.talk import Talk

        runtime.set_verbose(verbose > 1)
        render.prepare_stdout()
        with models.open(render.note) as session:
            conversation = Conversation(session.main.model, ChatTemplate(session.main.model))
            answering = ChatSession(session, conversation, settings, when_full.value)
            talk = Talk(answering, not no_stats, show_drafts, markdown)
            if verbose:
                for line in render.setting_lines(session):
                    render.note(line)
            render.note(talk.greeting())
            if load:
                talk.load(load)
            if system:  # also instead of one that was kept
                talk.conversation.system = system
            read = reader(words())
            while True:
                try:
                    said = read()
                    _noted(
                        partial(obey, talk, said) if isinstance(said, Command) else partial(talk.hear, said)
                    )
                except Ended:
                    return
                except KeyboardInterrupt:
                    if not by_hand():
                        raise
                    render.note("to leave: /exit or Ctrl-D")


def _noted(act: Callable[[], None]) -> None:
    """What goes wrong is said, and the conversation goes on."""
    from specdec_cli.chat_input import by_hand

    try:
        act()
    except KeyboardInterrupt:
        if not by_hand():
            raise
        render.note("(stopped)")
    except SpecLocalError as error:
        render.note(f"specdec: {error}")
    except OSError as error:
        if not error.filename:  # standard output
            raise
        render.note(f"specdec: {error.filename}: {error.strerror}")
