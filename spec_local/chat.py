"""Chat templates, and conversations that keep the tokens they have said.

A conversation is rendered anew for each turn, but only the text that is new since the last turn is tokenized:
the tokens of an answer are kept as the model said them. Tokenizing an answer's text again can cut it
differently, and then the KV cache of everything after that place would be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from spec_local.errors import ModelError
from spec_local.llama.model import Model


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatTemplate:
    """Renders messages with the template that the model's file carries.

    Raises:
        ModelError: the file has no template, or one that is no valid Jinja.
    """

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
        except Exception as error:  # jinja2 raises what it likes on a broken template
            raise ModelError(f"the chat template of {model.path} is broken ({error}): use --raw") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text up to where the answer begins.

        Raises:
            ModelError: the template refuses these messages (some know no system message).
        """
        try:
            text: str = self._formatter(messages=list(messages)).prompt
        except Exception as error:  # a template raises by itself, or trips over what it did not expect
            raise ModelError(f"the model's chat template refuses this conversation ({error})") from None
        # The tokenizer adds the beginning-of-sequence token by itself; twice would confuse the model.
        return text.removeprefix(self._bos) if self._adds_bos and self._bos else text


@dataclass
class Conversation:
    """Messages, and the tokens that they became."""

    model: Model
    template: ChatTemplate
    messages: list[Message] = field(default_factory=list)
    _text: str = ""
    _tokens: list[int] = field(default_factory=list)

    def ask(self, content: str) -> list[int]:
        """Add a user message.

        Returns:
            the tokens of the whole conversation, up to where the answer begins.
        """
        self.messages.append({"role": "user", "content": content})
        try:
            text = self.template.render(self.messages)
        except ModelError:
            self.messages.pop()
            raise
        vocabulary = self.model.vocabulary
        if self._text and text.startswith(self._text):
            new = vocabulary.tokenize(text[len(self._text) :], parse_special=True)
            self._tokens = self._tokens + new
        else:
            # The first turn, or a template that changes what was said (trims it, drops its thoughts).
            self._tokens = vocabulary.tokenize(text, add_special=True, parse_special=True)
        self._text = text
        return self._tokens

    def answer(self, content: str, tokens: Sequence[int]) -> None:
        """Add what the model said (`tokens` without the end token), as far as it came."""
        self.messages.append({"role": "assistant", "content": content})
        if self.model.vocabulary.detokenize(tokens) == content:
            self._text += content
            self._tokens = [*self._tokens, *tokens]
        else:  # a stop string cut the text: the next turn tokenizes everything anew
            self._text, self._tokens = "", []

    def withdraw(self) -> None:
        """Take the last question back, with its answer if it has one."""
        while self.messages and self.messages[-1]["role"] != "system":
            if self.messages.pop()["role"] == "user":
                break
        self._text, self._tokens = "", []

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self._text, self._tokens = "", []
