"""A single prompt as tokens: a question, a conversation, text to continue, or a gap to fill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import InstanceOf

from spec_local.arguments import checked_fields
from spec_local.chat.messages import Tool, check_last, messages_of
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.chat.tool_use import ToolUse
from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.media import Media
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary
from spec_local.reasoning.markers import Splitter
from spec_local.settings import GenerationSettings
from spec_local.text import bytes_of


@checked_fields
@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One prompt.

    Args:
        prompt: the question; with `raw`, the text to continue; with `suffix`, the text before the gap.
        messages: a conversation in place of a prompt.
        system: the system message of the conversation.
        suffix: the text after a gap, which the answer fills.
        raw: use no chat template.
        images: stand before the prompt.
        tools, tool_choice: see `ToolUse`.
    """

    prompt: str = ""
    messages: Sequence[Mapping[str, object]] = ()
    system: str | None = None
    suffix: str | None = None
    raw: bool = False
    images: Sequence[InstanceOf[Media]] = ()
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"

    def __post_init__(self) -> None:
        if self.messages and self.prompt:
            raise InvalidRequest("both a prompt and messages were given: give one of them")
        if self.messages:
            check_last(messages_of(self.messages))
        text = self.prompt if self.raw else self.prompt.strip()
        if not self.messages and not text and self.suffix is None:
            raise InvalidRequest("there is no prompt: give one, or pipe text in")
        if self.suffix is not None and (self.system or self.messages):
            raise InvalidRequest("a gap is filled without a chat template: remove `system` and messages")
        if self.raw and self.system:
            raise InvalidRequest("`system` needs a chat template: remove `raw` or `system`")
        if self.raw and self.messages:
            raise InvalidRequest("messages need a chat template: remove `raw`, or give a prompt")
        if self.images and (self.messages or self.suffix is not None):
            raise InvalidRequest("images stand before a prompt: give one, or put them into the messages")
        if self.tools and (self.raw or self.suffix is not None):
            raise InvalidRequest("tools need a chat template: remove them, or give messages")

    def is_plain(self, model: Model) -> bool:
        """Return whether this model reads the prompt without a chat template."""
        return self.raw or self.suffix is not None or not model.chat_template

    def tokens(self, model: Model, n_ctx: int | None = None) -> list[int]:
        """The tokens up to the start of the answer.

        Args:
            n_ctx: length of the context; None: the prompt may have any length.

        Raises:
            ContextOverflow: they are certainly longer than the context; then nothing is tokenized.
            ModelError: the model has no fill-in-the-middle tokens, no chat template, or the template
                rejects these messages.
            InvalidRequest: the text cannot be tokenized.
        """
        vocabulary = model.vocabulary
        if self.suffix is not None or self.is_plain(model):
            vocabulary.check_length(bytes_of(self.prompt) + bytes_of(self.suffix or ""), n_ctx)
        if self.suffix is not None:
            return _fill_in_tokens(vocabulary, self.prompt, self.suffix, model.path.name)
        if self.is_plain(model):
            if self.system or self.messages or self.tools:
                raise ModelError("this model has no chat template: remove `system`, messages and tools")
            return model.tokenize([*self.images, self.prompt])
        messages = [*self.messages] or [{"role": "user", "content": [*self.images, self.prompt]}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = self._tool_use(model).render(messages)
        vocabulary.check_length(rendered.text, n_ctx)
        return rendered.tokens(vocabulary, image_tokens=model.image_tokens)

    def settings(self, model: Model, settings: GenerationSettings) -> GenerationSettings:
        """The settings with which the answer has the form of calls; they are changed only if it has tools."""
        return self._tool_use(model, settings.json_schema).settings(settings) if self.tools else settings

    def parser(self, model: Model) -> ToolCallParser:
        """A parser of the tool calls in the answer, without its reasoning; see `splitter`."""
        return self._tool_use(model).parser() if self.tools else ToolCallParser()

    def _tool_use(self, model: Model, json_schema: str | None = None) -> ToolUse:
        return ToolUse(ChatTemplate(model), self.tools, self.tool_choice, json_schema=json_schema)

    def splitter(self, model: Model, prompt: Sequence[int]) -> Splitter:
        """A splitter of the model's output for these tokens of the request.

        Without a chat template, all of the output is the answer.
        """
        if self.is_plain(model):
            return Splitter()
        return ChatTemplate(model).splitter(messages_of(self.messages), prompt)


def _fill_in_tokens(vocabulary: Vocabulary, before: str, after: str, name: str) -> list[int]:
    """Order the parts as llama.cpp's server does. Special tokens in the texts are not parsed."""
    if not vocabulary.fill_in:
        raise ModelError(
            f"{name} has no fill-in-the-middle tokens: remove the suffix, or use a model trained for code, "
            "such as Qwen2.5-Coder"
        )
    prefix, suffix, middle = vocabulary.fill_in
    bos = [vocabulary.bos] if vocabulary.add_bos else []
    return [*bos, prefix, *vocabulary.tokenize(before), suffix, *vocabulary.tokenize(after), middle]
