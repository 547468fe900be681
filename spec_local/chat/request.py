"""What is asked of a model: a question, a text to continue, or a gap to fill, as the tokens that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from spec_local.chat.conversation import ChatTemplate, Message
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Args:
        prompt: the question; the text to continue (`raw`); what comes before the gap (`suffix`).
        messages: a conversation instead of a prompt.
        system: what the conversation begins with.
        suffix: what comes after a gap: the answer is what belongs between.
        raw: no chat template.
    """

    prompt: str = ""
    messages: Sequence[Message] = ()
    system: str | None = None
    suffix: str | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.messages and self.prompt:
            raise InvalidRequest("there is a prompt and a conversation: give one of them")
        if self.messages and self.messages[-1]["role"] != "user":
            raise InvalidRequest("the conversation ends with no question: let the last message be the user's")
        if not self.messages and not self.prompt.strip() and self.suffix is None:
            raise InvalidRequest("there is no prompt: give one, or pipe a text in")
        if self.suffix is not None and (self.system or self.messages):
            raise InvalidRequest("a gap in a text is filled without a chat: leave --system and messages out")
        if self.raw and self.system:
            raise InvalidRequest("--system needs a chat template, and --raw has none")
        if self.raw and self.messages:
            raise InvalidRequest("messages need a chat template, and --raw has none: give a prompt")

    def is_plain(self, model: Model) -> bool:
        """Whether this model reads the prompt as it is, without a chat template."""
        return self.raw or self.suffix is not None or not model.chat_template

    def tokens(self, model: Model) -> list[int]:
        """What the model is to read, up to where the answer begins.

        Raises:
            ModelError: the model has no tokens for a gap, no chat template, or one that refuses these messages.
            InvalidRequest: the text cannot be tokenized.
        """
        vocabulary = model.vocabulary
        if self.suffix is not None:
            return _gap(vocabulary, self.prompt, self.suffix, model.path.name)
        if self.is_plain(model):
            if self.system or self.messages:
                raise ModelError("this model has no chat template: leave --system and messages out")
            return vocabulary.tokenize(self.prompt, add_special=True)
        messages = [*self.messages] or [Message(role="user", content=self.prompt)]
        if self.system:
            messages.insert(0, Message(role="system", content=self.system))
        text = ChatTemplate(model).render(messages)
        return vocabulary.tokenize(text, add_special=True, parse_special=True)


def _gap(vocabulary: Vocabulary, before: str, after: str, name: str) -> list[int]:
    """Prefix, suffix, middle: the order of llama.cpp's server. What stands in the texts never means a special token."""
    if not vocabulary.fill_in:
        raise ModelError(
            f"{name} cannot fill gaps (it has no such tokens): leave --suffix out, or take a model for code, "
            "such as Qwen2.5-Coder"
        )
    begin, pause, fill = vocabulary.fill_in
    bos = [vocabulary.bos] if vocabulary.add_bos else []
    return [*bos, begin, *vocabulary.tokenize(before), pause, *vocabulary.tokenize(after), fill]
