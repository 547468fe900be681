"""Chat templates: messages as the text of a prompt."""

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from spec_local.arguments import checked
from spec_local.chat.image_marks import rendered_with_images
from spec_local.chat.messages import Arguments, Message, Tool, check_last, for_template, messages_of, tools_of
from spec_local.chat.rendered import Rendered
from spec_local.chat.roles import arrangements, joined, without_calls
from spec_local.chat.template_process import TemplateFailed, TemplateRefused, process
from spec_local.core.span import text_of
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.reasoning.markers import Splitter, markers_of, splitter_after

NO_TOOLS = (
    "the model's chat template has no tools: remove the tools, or use a model trained for tool calls, such "
    "as Qwen3"
)
_SHORT_IDS = "length != 9"
"""A string in those templates of Mistral that reject other ids of calls."""
_OWN_VARIABLES = """
    messages tools bos_token eos_token add_generation_prompt tool_choice functions function_call
""".split()  # noqa: SIM905
"""Variables of templates that are set here."""
_PROBE: list[Message] = [{"role": "system", "content": "?"}, {"role": "user", "content": "?"}]
_PROBE_TOOLS = tools_of([{"type": "function", "function": {"name": "probe"}}])


def start_template_process() -> None:
    """Start the process that renders templates. Before a model is loaded, this saves a tenth of a second."""
    process.start()


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
        self._vocabulary = vocabulary = model.vocabulary
        self._bos = vocabulary.text(vocabulary.bos).decode("utf-8", "replace") if vocabulary.bos >= 0 else ""
        eos = vocabulary.text(vocabulary.eos).decode("utf-8", "replace") if vocabulary.eos >= 0 else ""
        self._adds_bos = vocabulary.add_bos
        self._template = {"template": template, "bos": self._bos, "eos": eos}
        self._variables: Mapping[str, object] = {}
        try:
            process.request(**self._template, messages=None)
        except TemplateFailed as error:
            raise ModelError(
                f"the chat template of {model.path} is invalid ({error}): use specdec generate --raw"
            ) from None

    def with_variables(self, variables: Mapping[str, object]) -> "ChatTemplate":
        """The template with more variables, such as ``enable_thinking``, which each template names itself.

        Raises:
            InvalidRequest: one of them is set by the library.
        """
        if own := [name for name in _OWN_VARIABLES if name in variables]:
            raise InvalidRequest(f"chat_template_kwargs.{own[0]} is set by the library: remove it")
        if not variables:
            return self
        changed = copy.copy(self)
        changed._variables = variables
        return changed

    @functools.cached_property
    def has_tools(self) -> bool:
        """True if the template shows tools to the model."""
        for messages in (_PROBE, _PROBE[1:]):  # some templates support no system message
            try:
                texts = [self._request(messages, tools, {})["text"] for tools in ([], _PROBE_TOOLS)]
            except TemplateFailed:
                continue
            if texts[0] != texts[1]:
                return True
        return False

    @checked
    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Tool] | None = None
    ) -> Rendered:
        """The text of a conversation, up to the start of the next answer.

        Messages whose roles the template does not accept in their order are arranged so that it does: see
        `spec_local.chat.roles`.

        Args:
            messages: see `spec_local.chat.messages.Message`.
            tools: that the model may call.

        Raises:
            ModelError: the template rejects these messages (some support no system message), or has no tools,
                or exceeds a limit of time or memory.
            InvalidRequest: a message or a tool is incomplete, or is not valid Unicode.
        """
        return rendered_with_images(messages_of(messages), lambda given: self._rendered(given, tools or ()))

    @checked
    def prompt(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Tool] | None = None
    ) -> Rendered:
        """The text of a prompt: as `render`, but a last message of the assistant is continued.

        It ends with the text of that message, white space included. Without text, its reasoning is continued.

        Raises:
            InvalidRequest, ModelError: see `render`; there is no message; the last one calls tools.
        """
        given = messages_of(messages)
        check_last(given)
        return rendered_with_images(given, lambda shown: self._prompt(shown, tools))

    def _prompt(self, given: Sequence[Message], tools: Sequence[Tool] | None) -> Rendered:
        """See `prompt`."""
        if given[-1]["role"] != "assistant":
            return self._rendered(given, tools or ())
        *before, begun = joined(given)
        markers = markers_of(self.source)
        reasoning, content = begun.get("reasoning_content", ""), begun["content"]
        rendered = self._rendered(before, tools or ())
        if not markers or not (reasoning or content):
            return rendered + Rendered.of(content, [(0, len(content))])
        if not reasoning and "enable_thinking" not in self._variables:
            # Many templates can write that there is no reasoning.
            without = self._rendered(before, tools or (), {"enable_thinking": False})
            rendered = without if without.text.startswith(rendered.text) else rendered
        opened, reasoning, closed = markers.before_answer(str(rendered), reasoning, is_over=bool(content))
        start, end = len(opened) + len(reasoning), len(opened) + len(reasoning) + len(closed)
        text = opened + reasoning + closed + content
        return rendered + Rendered.of(text, [(len(opened), start), (end, len(text))])

    def splitter(self, messages: Sequence[Message], prompt: Sequence[int]) -> Splitter:
        """A splitter of the text that the model generates after these messages.

        Args:
            prompt: their tokens.
        """
        markers = markers_of(self.source)
        if not markers:
            return Splitter()
        begun = joined(messages)[-1] if messages and messages[-1]["role"] == "assistant" else None
        if begun and (begun["content"] or begun.get("reasoning_content")):
            splitter = Splitter(markers)
            reasoning, content = begun.get("reasoning_content", ""), begun["content"]
            splitter.skip("".join(markers.before_answer("", reasoning, is_over=bool(content))) + content)
            return splitter
        return splitter_after(
            self.source, functools.partial(self._vocabulary.piece, special=True), text_of(prompt)
        )

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], more: Mapping[str, object] | None = None
    ) -> Rendered:
        shown = tools_of(tools)
        calls = shown or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if calls and not self.has_tools:
            if shown:
                raise ModelError(NO_TOOLS)
            messages = without_calls(messages)  # another model made them
        reply = self._accepted(messages, shown, more or {})
        rendered = Rendered.of(reply["text"], reply["content"])
        # The tokenizer adds the beginning-of-sequence token; a second one would change the output.
        return rendered.without_prefix(self._bos) if self._adds_bos else rendered

    def _accepted(
        self, messages: Sequence[Message], tools: Sequence[Tool], more: Mapping[str, object]
    ) -> dict[str, Any]:
        """The child's reply for the first arrangement that the template accepts and shows completely."""
        incomplete: dict[str, Any] | None = None
        refused: TemplateFailed | None = None
        for arranged in chain(arrangements(messages), self._arranged_without_markers(messages)):
            try:
                reply = self._request(arranged, tools, more)
            except TemplateRefused as error:
                refused = refused or error
                continue
            except TemplateFailed as error:
                refused = error
                break
            if _shows(reply["text"], messages):
                return reply
            incomplete = incomplete or reply
        if incomplete:
            return incomplete
        raise ModelError(
            f"the model's chat template rejects this conversation ({refused}): change the roles, remove "
            "the system message, or give a text without a chat template"
        )

    def _arranged_without_markers(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Arrangements without the markers that another server has left in answers: gpt-oss refuses them."""
        if not (markers := markers_of(self.source)):
            return

        def without_markers(message: Message) -> Message:
            reasoning, text = Splitter(markers, markers.header).finish(message["content"])
            if message["role"] != "assistant" or text == message["content"]:
                return message
            return message | {"content": text, "reasoning_content": reasoning}

        made = [*map(without_markers, messages)]
        if made != messages:
            yield from arrangements(made)

    def _request(
        self, messages: Sequence[Message], tools: Sequence[Tool], more: Mapping[str, object]
    ) -> dict[str, Any]:
        """The child's reply. Most templates expect the arguments of calls as objects, others as text."""
        short_ids, variables = _SHORT_IDS in self.source, {**self._variables, **more}

        def reply(arguments: Arguments) -> dict[str, Any]:
            given = for_template(messages, arguments, short_ids=short_ids)
            shown = list(tools) or None
            return process.request(**self._template, messages=given, tools=shown, variables=variables)

        try:
            return reply("parsed")
        except TemplateFailed as error:
            if any("tool_calls" in message for message in messages):
                for arguments in ("text", "repaired"):
                    with contextlib.suppress(TemplateFailed):
                        return reply(arguments)
            raise error


def _shows(prompt: str, messages: Sequence[Message]) -> bool:
    """Return whether a prompt has the content of messages in their order.

    Templates may leave out parts of what the model wrote, and quote the results of tools.
    """
    end = 0
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "tool":
            continue
        at = prompt.find(content, end)
        if at >= 0:
            end = at + len(content)
        elif message["role"] != "assistant" or content in prompt:
            return False
    return True
