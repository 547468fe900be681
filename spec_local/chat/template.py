"""Chat templates: messages as the text of a prompt."""

from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

from spec_local.arguments import checked
from spec_local.chat.rendered import Rendered
from spec_local.chat.template_process import TemplateFailed, process
from spec_local.core.reasoning import Splitter, markers_of
from spec_local.errors import ModelError
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary

_TAIL = 64
"""Tokens of a prompt that may be a marker: more than the characters of the longest."""


class Message(TypedDict):
    """A message of a conversation; reasoning_content: what the model wrote before this answer."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: NotRequired[str]


def start_template_process() -> None:
    """Start the process that renders templates. Before a model is loaded, this saves a tenth of a second."""
    process.start()


def splitter_after(template: str, vocabulary: Vocabulary, prompt: Sequence[int]) -> Splitter:
    """A splitter of the text that follows a prompt, which this chat template rendered."""
    markers = markers_of(template)
    if not markers:
        return Splitter()
    end = b"".join(vocabulary.piece(token, special=True) for token in prompt[-_TAIL:])
    return Splitter(markers, end.decode("utf-8", "replace"))


class ChatTemplate:
    """Renders messages with the chat template in the model's file.

    Raises:
        ModelError: the file has no template, or the template is invalid.
    """

    @checked
    def __init__(self, model: Model) -> None:
        template = model.chat_template
        if not template:
            raise ModelError(f"{model.path} has no chat template: use specdec generate --raw")
        self.source = template
        vocabulary = model.vocabulary
        self._bos = vocabulary.text(vocabulary.bos).decode("utf-8", "replace") if vocabulary.bos >= 0 else ""
        eos = vocabulary.text(vocabulary.eos).decode("utf-8", "replace") if vocabulary.eos >= 0 else ""
        self._adds_bos = vocabulary.add_bos
        self._template = {"template": template, "bos": self._bos, "eos": eos}
        try:
            process.request(**self._template, messages=None)
        except TemplateFailed as error:
            raise ModelError(
                f"the chat template of {model.path} is invalid ({error}): use specdec generate --raw"
            ) from None

    @checked
    def render(self, messages: Sequence[Message]) -> Rendered:
        """The text of the prompt, up to the start of the answer.

        Raises:
            ModelError: the template rejects these messages (some support no system message), or exceeds a
                limit of time or memory.
            InvalidRequest: a message is not valid Unicode.
        """
        try:
            reply = process.request(**self._template, messages=list(messages))
        except TemplateFailed as error:
            raise ModelError(
                f"the model's chat template rejects this conversation ({error}): change the roles, remove "
                "the system message, or use specdec generate --raw"
            ) from None
        rendered = Rendered.of(reply["text"], reply["content"])
        # The tokenizer adds the beginning-of-sequence token; a second one would change the output.
        return rendered.without_prefix(self._bos) if self._adds_bos else rendered
