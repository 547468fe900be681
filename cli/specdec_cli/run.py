"""`specdec run`: chat with a model, or let it answer one prompt."""

from specdec_cli import chat_input, commands
from specdec_cli.first_argument import model_and_prompt
from specdec_cli.signatures.answers import ChatOptions, GenerateOptions, RunOptions


def run(options: RunOptions) -> None:
    is_given = options.prompt_option is not None
    model, prompt = model_and_prompt(options.model, options.prompt, command="run", given_elsewhere=is_given)
    models = options.models.with_models(model)
    values = vars(options) | {"models": models, "model": None, "prompt": prompt}
    if prompt is None and not is_given and chat_input.interactive():
        del values["prompt"], values["prompt_option"]
        commands.body_of("chat:chat")(ChatOptions(**values))
    else:
        commands.body_of("generate:generate")(GenerateOptions(**values))
