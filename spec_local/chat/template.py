"""Chat templates: messages as the text of a prompt."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from spec_local.arguments import checked
from spec_local.chat.messages import Message, Tool, for_template, messages_of, tools_of
from spec_local.chat.rendered import Rendered
from spec_local.chat.template_process import TemplateFailed, process
from spec_local.core.reasoning import Splitter, markers_of
from spec_local.errors import ModelError
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary

NO_TOOLS = (
    "the model's chat template has no tools: remove the tools and the messages with calls, or use a model "
    "trained for tool calls, such as Qwen3"
)
_TAIL = 64
"""Tokens of a prompt that may be a marker: more than the characters of the longest."""
_SHORT_IDS = "length != 9"
"""A string in those templates of Mistral that reject other ids of calls."""
_PROBE: list[Message] = [{"role": "system", "content": "?"}, {"role": "user", "content": "?"}]
_PROBE_TOOLS = tools_of([{"type": "function", "function": {"name": "probe"}}])


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

    @functools.cached_property
    def has_tools(self) -> bool:
        """True if the template shows tools to the model."""
        for messages in (_PROBE, _PROBE[1:]):  # some templates support no system message
            try:
                texts = [self._request(messages, tools)["text"] for tools in ([], _PROBE_TOOLS)]
            except TemplateFailed:
                continue
            if texts[0] != texts[1]:
                return True
        return False

    @checked
    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Tool] | None = None
    ) -> Rendered:
        """The text of the prompt, up to the start of the answer.

        Args:
            messages: see `spec_local.chat.messages.Message`.
            tools: that the model may call.

        Raises:
            ModelError: the template rejects these messages (some support no system message), or has no tools,
                or exceeds a limit of time or memory.
            InvalidRequest: a message or a tool is incomplete, or is not valid Unicode.
        """
        given, shown = messages_of(messages), tools_of(tools or ())
        calls = shown or any(m["role"] == "tool" or "tool_calls" in m for m in given)
        if calls and not self.has_tools:
            raise ModelError(NO_TOOLS)
        try:
            reply = self._request(given, shown)
        except TemplateFailed as error:
            raise ModelError(
                f"the model's chat template rejects this conversation ({error}): change the roles, remove "
                "the system message, or use specdec generate --raw"
            ) from None
        rendered = Rendered.of(reply["text"], reply["content"])
        # The tokenizer adds the beginning-of-sequence token; a second one would change the output.
        return rendered.without_prefix(self._bos) if self._adds_bos else rendered

    def _request(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[str, Any]:
        """The child's reply. Most templates expect the arguments of calls as objects, others as text."""
        short_ids = _SHORT_IDS in self.source

        def reply(parsed: bool) -> dict[str, Any]:
            given = for_template(messages, parsed=parsed, short_ids=short_ids)
            return process.request(**self._template, messages=given, tools=list(tools) or None)

        try:
            return reply(True)
        except TemplateFailed as error:
            if any("tool_calls" in message for message in messages):
                with contextlib.suppress(TemplateFailed):
                    return reply(False)
            raise error
