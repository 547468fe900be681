"""The options of `specdec chat`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from specdec_cli import options

_Chat = partial(Option, rich_help_panel="Chat")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Chat with a model in the terminal.

    Type /help for the commands of the chat.

    Examples:

      specdec chat
      specdec chat qwen3-4b --system "Answer in French."
      specdec chat llama-13b.gguf --draft tiny.gguf --show-drafts
      specdec chat --continue
    """

    models: options.ModelOptions
    sampling: options.SamplingOptions
    model: options.ModelArgument = None
    draft_model: options.DraftArgument = None
    image: Annotated[
        list[Path] | None,
        Option(
            "--image",
            "--audio",
            metavar="FILE",
            help="Image or sound to send with the first message; repeatable.",
        ),
    ] = None
    system: options.SystemOption = None
    load: Annotated[
        Path | None, _Chat(metavar="FILE", help="Continue a conversation that was saved with /save.")
    ] = None
    continue_: Annotated[
        bool, Option("--continue", "-C", help="Continue the last conversation on a terminal.")
    ] = False
    when_full: Annotated[
        Literal["stop", "drop-oldest"],
        _Chat(help="When the context is full, stop, or drop the oldest messages except the system message."),
    ] = "stop"
    show_drafts: options.ShowDraftsOption = False
    hide_thinking: Annotated[bool, options.HideThinkingOption(rich_help_panel="Chat")] = False
    markdown: Annotated[
        bool, _Chat("--markdown", help="Render Markdown; each block is shown when it is complete.")
    ] = False
    no_wrap: Annotated[bool, options.NoWrapOption(rich_help_panel="Chat")] = False
    no_stats: Annotated[bool, _Chat("--no-stats", help="Do not print statistics after each answer.")] = False
    verbose: options.VerboseOption = 0
