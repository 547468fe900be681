"""Chat templates: messages as the text of a prompt."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from spec_local.arguments import checked
from spec_local.errors import ModelError
from spec_local.llama.model import Model


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatTemplate:
    """Renders messages with the chat template in the model's file.

    Raises:
        ModelError: the file has no template, or the template is not valid Jinja.
    """

    @checked
    def __init__(self, model: Model) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = model.chat_template
        if not template:
            raise ModelError(f"{model.path} has no chat template: use specdec generate --raw")
        vocabulary = model.vocabulary
        self._bos = vocabulary.text(vocabulary.bos).decode("utf-8", "replace") if vocabulary.bos >= 0 else ""
        eos = vocabulary.text(vocabulary.eos).decode("utf-8", "replace") if vocabulary.eos >= 0 else ""
        self._adds_bos = vocabulary.add_bos
        try:
            self._formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=self._bos)
        except Exception as error:  # Jinja raises exceptions of many types for an invalid template
            raise ModelError(
                f"the chat template of {model.path} is invalid ({error}): use specdec generate --raw"
            ) from None

    @checked
    def render(self, messages: Sequence[Message]) -> str:
        """The text of the prompt, up to the start of the answer.

        Raises:
            ModelError: the template rejects these messages (some support no system message).
        """
        try:
            text: str = self._formatter(messages=list(messages)).prompt
        except Exception as error:  # a template can raise on purpose, or fail on unexpected input
            raise ModelError(
                f"the model's chat template rejects this conversation ({error}): change the roles, or remove "
                "the system message"
            ) from None
        # The tokenizer adds the beginning-of-sequence token; a second one would change the output.
        return text.removeprefix(self._bos) if self._adds_bos and self._bos else text
