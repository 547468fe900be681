"""The options of `specdec run`."""

from dataclasses import dataclass
from pathlib import Path

from specdec_cli import options
from specdec_cli.parameters import argument


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Chat with a model on a terminal; with a prompt or in a pipe, print one answer.

    A single argument is the prompt if it cannot be a model's name. A prompt of
    one word needs -p, or a model before it. The commands chat and generate have
    more options.

    Examples:

      specdec run qwen3-4b
      specdec run qwen3-4b "Why is the sky blue?"
      specdec run gemma3-4b --image photo.jpg "What is this?"
      git diff | specdec run coder-7b "Write a commit message."
    """

    models: options.ModelOptions
    sampling: options.SamplingOptions
    model: str | None = options.model_argument()
    prompt: str | None = argument(metavar="PROMPT", help="Prompt; text from a pipe precedes it.")
    prompt_option: str | None = options.prompt_option()
    image: list[Path] | None = options.image_option()
    system: str | None = options.system_option()
    show_drafts: bool = options.show_drafts_option()
    hide_thinking: bool = options.hide_thinking_option(rich_help_panel="Output")
    verbose: int = options.verbose_option()
