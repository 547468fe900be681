"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.server import openai_json
from spec_local.server.answer_so_far import AnswerSoFar
from spec_local.server.chat_body import ChatMessage, Tool, choice_of, messages_of
from spec_local.server.events import AnswerRequest, Delta, Loaded, Token
from spec_local.server.openai_exchange import OpenAIBody, OpenAIExchange
from spec_local.server.sampling_body import choices, limit, read, schema_of


class _Body(OpenAIBody):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None

    def requests(self) -> list[AnswerRequest]:
        if self.functions or self.function_call:
            raise InvalidRequest("functions and function_call are not supported: give tools and tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: give true for it")
        settings = self.settings(
            max_tokens=limit(self.most),
            stops=self.stop,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=schema_of(self.response_format),
        )
        functions = [tool.function for tool in self.tools or ()]
        tool_choice = choice_of(self.tool_choice, functions)
        messages, tools = messages_of(self.messages), [function.tool() for function in functions]
        return [
            AnswerRequest(
                each,
                messages,
                tools,
                tool_choice,
                marks=bool(self.marks),
                ignore_end=bool(self.ignore_eos),
            )
            for each in choices(settings, self.n or 1)
        ]


class ChatCompletions(OpenAIExchange):
    """Chat completions. Reasoning is ``reasoning_content``, beside ``content``."""

    id_prefix = "chatcmpl-"
    kind, part_kind = "chat.completion", "chat.completion.chunk"
    key, opening = "delta", {"role": "assistant", "content": ""}

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        given = read(_Body, body)
        super().__init__(given, given.requests(), loaded.name, with_logprobs=bool(given.logprobs))

    def _part(self, answer: AnswerSoFar, added: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if added.reasoning:
            part["reasoning_content"] = added.reasoning
        if added.content:
            part["content"] = added.content
        if added.tool_calls:
            n_before = len(answer.calls) - len(added.tool_calls)
            part["tool_calls"] = [
                {"index": n_before + i, **call.message} for i, call in enumerate(added.tool_calls)
            ]
        return part

    def _whole(self, answer: AnswerSoFar) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.message for call in answer.calls]
            message["content"] = answer.content or None
        return {"message": message}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": [openai_json.probabilities(token) for token in tokens], "refusal": None}
