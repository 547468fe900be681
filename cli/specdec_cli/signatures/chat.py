"""The options of `specdec chat`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from specdec_cli import options
from specdec_cli.parameters import option

_chat = partial(option, rich_help_panel="Chat")


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
    model: str | None = options.model_argument()
    draft_model: str | None = options.draft_argument()
    image: list[Path] | None = option(
        "--image",
        "--audio",
        metavar="FILE",
        help="Image or sound to send with the first message; repeatable.",
    )
    system: str | None = options.system_option()
    load: Path | None = _chat(metavar="FILE", help="Continue a conversation that was saved with /save.")
    continue_: bool = option(
        "--continue", "-C", default=False, help="Continue the last conversation on a terminal."
    )
    when_full: Literal["stop", "drop-oldest"] = _chat(
        default="stop",
        help="When the context is full, stop, or drop the oldest messages except the system message.",
    )
    show_drafts: bool = options.show_drafts_option()
    hide_thinking: bool = options.hide_thinking_option(rich_help_panel="Chat")
    markdown: bool = _chat(default=False, help="Render Markdown; each block is shown when it is complete.")
    no_wrap: bool = options.no_wrap_option(rich_help_panel="Chat")
    no_stats: bool = _chat(default=False, help="Do not print statistics after each answer.")
    verbose: int = options.verbose_option()
