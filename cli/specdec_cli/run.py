"""`specdec run`: chat with a model, or let it answer one prompt."""

import os
import re
import shlex
from typing import Annotated

from typer import Argument

from spec_local.errors import InvalidRequest
from spec_local.models.names import resolve
from specdec_cli import chat, chat_input, exits, generate
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

    A single argument that cannot be a model's name is the prompt; a prompt of one
    word needs -p, or a model before it. The commands chat and generate have more
    options.

    Examples:

      specdec run qwen3-4b
      specdec run qwen3-4b "Why is the sky blue?"
      git diff | specdec run coder-7b "Write a commit message."
    """
    with exits.guarded():
        if model and prompt is None and _is_prompt(model):
            model, prompt = None, model
        if model and prompt is None and prompt_option is None:
            _check_word(model)
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


def _check_word(model: str) -> None:
    """Raise the error of an unknown model at once, and what to type if it was meant as a prompt."""
    try:
        resolve(model)
    except InvalidRequest as error:
        if "/" in model:  # a path, or a repository
            raise
        word = shlex.quote(model)
        raise InvalidRequest(
            f"{error}; if it is a prompt, type specdec run -p {word}, or a model before it: "
            f"specdec run MODEL {word}"
        ) from None


def _is_prompt(text: str) -> bool:
    """Return whether a text has characters that no model's name has, and names none."""
    if re.fullmatch(r"[\w./:@~+-]+", text, re.ASCII) or text.endswith(".gguf"):
        return False
    from spec_local.models import catalog

    return not (os.path.exists(os.path.expanduser(text)) or catalog.is_known(text) or text in catalog.pairs())
