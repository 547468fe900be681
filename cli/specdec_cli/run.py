"""`specdec run`: chat with a model, or let it answer one prompt."""

from typing import Annotated

from typer import Argument

from specdec_cli import chat, chat_input, exits, generate
from specdec_cli.first_argument import model_and_prompt
from specdec_cli.options import (
    HideThinkingOption,
    ModelArgument,
    ModelOptions,
    PromptOption,
    SamplingOptions,
    ShowDraftsOption,
    SystemOption,
    VerboseOption,
)


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, Argument(metavar="PROMPT", help="Prompt; text from a pipe precedes it.")
    ] = None,
    prompt_option: PromptOption = None,
    system: SystemOption = None,
    show_drafts: ShowDraftsOption = False,
    hide_thinking: Annotated[bool, HideThinkingOption(rich_help_panel="Output")] = False,
    verbose: VerboseOption = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Chat with a model on a terminal; with a prompt or in a pipe, print one answer.

    A single argument is the prompt if it cannot be a model's name. A prompt of
    one word needs -p, or a model before it. The commands chat and generate have
    more options.

    Examples:

      specdec run qwen3-4b
      specdec run qwen3-4b "Why is the sky blue?"
      git diff | specdec run coder-7b "Write a commit message."
    """
    with exits.guarded():
        model, prompt = model_and_prompt(
            model, prompt, command="run", given_elsewhere=prompt_option is not None
        )
    models = models.with_models(model)
    if prompt is None and prompt_option is None and chat_input.interactive():
        chat.chat(
            system=system,
            show_drafts=show_drafts,
            hide_thinking=hide_thinking,
            verbose=verbose,
            models=models,
            sampling=sampling,
        )
    else:
        generate.generate(
            prompt=prompt,
            prompt_option=prompt_option,
            system=system,
            show_drafts=show_drafts,
            hide_thinking=hide_thinking,
            verbose=verbose,
            models=models,
            sampling=sampling,
        )
