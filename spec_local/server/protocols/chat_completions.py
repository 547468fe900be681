"""OpenAI's chat completions: POST /v1/chat/completions."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from spec_local.errors import InvalidRequest
from spec_local.server.protocols import openai_json
from spec_local.server.protocols.answer_so_far import AnswerSoFar
from spec_local.server.protocols.chat_body import Tool, chat_request, functions_of, variables_of
from spec_local.server.protocols.history import Items, messages_of
from spec_local.server.protocols.openai_exchange import OpenAIBody, OpenAIExchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import Count, choices, limit, schema_of
from spec_local.server.supervision.events import AnswerRequest, Delta, Loaded, Token


class _Body(OpenAIBody):
    messages: Items
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(functions_of)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # llama.cpp's names, of its server and of its option
    thinking_budget_tokens: Count | None = None
    reasoning_budget_tokens: Count | None = None
    reasoning_budget: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_responses(cls, body: Any) -> Any:
        """Read a body of OpenAI's responses, which Cursor sends here, too."""
        if not isinstance(body, dict) or "messages" in body or "input" not in body:
            return body
        items, instructions, reasoning = body["input"], body.get("instructions"), body.get("reasoning")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if instructions and isinstance(items, list):
            items = [{"role": "system", "content": instructions}, *items]
        effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
        names = {"max_completion_tokens": body.get("max_output_tokens"), "reasoning_effort": effort}
        return {**names, **body, "messages": items}

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise InvalidRequest("functions and function_call are not supported: give tools and tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: give true for it")
        self._check_last()
        budgets = self.thinking_budget_tokens, self.reasoning_budget_tokens, self.reasoning_budget
        budget = next((each for each in budgets if each is not None), None)
        settings = self.settings(
            max_tokens=limit(self.most),
            stops=self.stop,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=schema_of(self.response_format),
            reasoning_budget=sys.maxsize if budget == -1 else budget,
        )
        request = chat_request(
            settings,
            messages_of(self.messages, images=RequestImages.of(loaded)),
            [tool.function for tool in self.tools or ()],
            self.tool_choice,
            schemas="tools[{}].function.parameters",
            variables=variables_of(self.reasoning_effort, self.chat_template_kwargs),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            warnings=self.warnings(self.response_format),
            **self.more(),
        )
        return [replace(request, settings=each) for each in choices(settings, self.n or 1)]

    def _check_last(self) -> None:
        """Check the fields of vLLM's server that say whether the last message goes on."""
        if self.messages and self.messages[-1].get("role") == "assistant":
            if self.continue_final_message is False:
                raise InvalidRequest(
                    "continue_final_message: give true: a last message of the assistant goes on"
                )
        elif self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant: add its start"
            )
        elif self.add_generation_prompt is False:
            raise InvalidRequest("add_generation_prompt: give true, or add the start of the answer")


class ChatCompletions(OpenAIExchange):
    """Chat completions. Reasoning is ``reasoning_content``, beside ``content``."""

    id_prefix = "chatcmpl-"
    kind, part_kind = "chat.completion", "chat.completion.chunk"
    key, opening = "delta", {"role": "assistant", "content": ""}

    body = _Body

    def _part(self, answer: AnswerSoFar, added: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if added.reasoning:
            part["reasoning_content"] = added.reasoning
        if added.content:
            part["content"] = added.content
        n_before = len(answer.calls) - len(added.tool_calls)
        calls: list[dict[str, Any]] = []
        if added.arguments:
            calls.append({"index": n_before - 1, "function": {"arguments": added.arguments}})
        calls += [{"index": n_before + i, **call.message} for i, call in enumerate(added.tool_calls)]
        if calls:
            part["tool_calls"] = calls
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
