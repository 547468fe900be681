"""The options of `specdec run`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument

from specdec_cli import options


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
    model: options.ModelArgument = None
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Prompt; text from a pipe precedes it.")
    ] = None
    prompt_option: options.PromptOption = None
    image: options.ImageOption = None
    system: options.SystemOption = None
    show_drafts: options.ShowDraftsOption = False
    hide_thinking: Annotated[bool, options.HideThinkingOption(rich_help_panel="Output")] = False
    verbose: options.VerboseOption = 0
