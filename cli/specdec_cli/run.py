"""`specdec run`: chat with a model, or let it answer one prompt."""

from functools import partial
from typing import Annotated

from typer import Argument

from specdec_cli import chat, chat_input, generate
from specdec_cli.options import (
    HideThinkingOption,
    ModelArgument,
    ModelOptions,
    SamplingOptions,
    ShowDraftsOption,
    SystemOption,
)


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Prompt; text from a pipe precedes it.")
    ] = None,
    system: SystemOption = None,
    show_drafts: ShowDraftsOption = False,
    hide_thinking: HideThinkingOption = False,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Chat with a model on a terminal; with a prompt or in a pipe, print one answer.

    The commands chat and generate have more options.

    Examples:

      specdec run qwen3-4b

      specdec run qwen3-4b "Why is the sky blue?"

      git diff | specdec run coder-7b "Write a commit message."
    """
    start = chat.chat if prompt is None and chat_input.interactive() else partial(generate.generate, prompt)
    start(
        system=system,
        show_drafts=show_drafts,
        hide_thinking=hide_thinking,
        models=models.with_main(model),
        sampling=sampling,
    )
