"""Ollama's chats and completions: POST /api/chat and /api/generate."""

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.images.media import Media
from spec_local.server.protocols import errors, openai_json
from spec_local.server.protocols.answer_so_far import AnswerSoFar, Blocks, arguments_of
from spec_local.server.protocols.chat_body import Tool, chat_request, functions_of, variables_of
from spec_local.server.protocols.history import Items, messages_of
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import (
    Part,
    ResponseFormat,
    SamplingBody,
    Stops,
    schema_of,
)
from spec_local.server.supervision.events import AnswerRequest, Event, Loaded, Prompt
from spec_local.server.supervision.served_models import seconds_of
from spec_local.settings import MAX_LOGPROBS, GenerationSettings
from spec_local.text import printable

_ROLES = ("system", "user", "assistant")
_EFFORTS = ("low", "medium", "high", "max")


def timestamp(ns: int) -> str:
    """A time in nanoseconds since 1970, as ollama writes it."""
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"


# Bodies


def _response_format(form: object) -> object:
    """The ``response_format`` of OpenAI's protocol that ollama's ``format`` is."""
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"schema": form}}
    raise ValueError("give json, or a JSON schema")


def _check_effort(think: object) -> object:
    if isinstance(think, str) and think not in _EFFORTS:
        raise ValueError(f"give true, false, {', '.join(_EFFORTS[:-1])} or {_EFFORTS[-1]}")
    return think


class _Options(SamplingBody):
    """Options. Those that say how ollama loads and computes, such as ``num_thread``, are ignored."""

    stop: Stops | None = None
    num_predict: int | None = None
    num_ctx: int | None = None


class _Body(Part):
    model: str | None = None
    stream: bool | None = None
    options: _Options = Field(default_factory=lambda: _Options.model_validate({}))
    format: Annotated[
        ResponseFormat | None,
        BeforeValidator(_response_format),
        WithJsonSchema({"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]}),
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None, BeforeValidator(_check_effort)
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, body: Any) -> Any:
        """Put fields that other bodies have at the top, as the server's defaults are, into the options."""
        if isinstance(body, dict) and isinstance(options := body.get("options") or {}, dict):
            given = {name: value for name, value in options.items() if value is not None}
            defaults = {name: body[name] for name in _Options.model_fields if name in body}
            return {**body, "options": {**defaults, **given}}
        return body

    def settings(self) -> GenerationSettings:
        """The settings of the answer."""
        options = self.options
        most = options.most if options.num_predict is None else options.num_predict
        return options.settings(
            max_tokens=None if most is None or most < 0 else most,
            stops=options.stop,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=schema_of(self.format, "format"),
        )

    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = self.think if isinstance(self.think, str) else None
        return variables_of(effort, None if self.think is None else {"enable_thinking": bool(self.think)})

    def warnings(self, loaded: Loaded) -> list[str]:
        """Sentences about what is not honoured."""
        found = self.options.warnings(self.format, "format")
        if (n := self.options.num_ctx) and n > loaded.n_ctx:
            found.append(
                f"options.num_ctx is {n}, but this server's context has {loaded.n_ctx} tokens: "
                f"start it with --ctx {n}"
            )
        return found


class _ChatBody(_Body):
    messages: Items = Field(default_factory=list)
    tools: Annotated[list[Tool] | None, BeforeValidator(functions_of)] = None

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        """The answer to generate; none: the model is only loaded."""
        if not self.messages:
            return []
        request = chat_request(
            self.settings(),
            messages_of(self.messages, images=RequestImages.of(loaded)),
            [tool.function for tool in self.tools or ()],
            None,
            schemas="tools[{}].function.parameters",
            variables=self.variables(),
            warnings=self.warnings(loaded),
            **self.options.more(),
        )
        return [request]


class _GenerateBody(_Body):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        """The answer to generate; none: the model is only loaded."""
        return [self._request(loaded)] if self.prompt or self.suffix else []

    def _request(self, loaded: Loaded) -> AnswerRequest:
        if self.raw and (self.system or self.template or self.context):
            raise InvalidRequest("raw prompts have no system, template or context: leave them out")
        if self.template:
            raise InvalidRequest(
                "template is not supported: leave it out, or give the whole prompt and raw: true"
            )
        prompt, more = self.prompt or "", self.options.more() | {"warnings": self.warnings(loaded)}
        seen: Prompt = prompt
        if self.images and (images := RequestImages.of(loaded)):
            seen = images.before(self.images, "images", [prompt])
        if self.raw:  # as ollama, which leaves the suffix out
            return AnswerRequest(self.settings(), prompt=seen, parse_special=True, **more)
        if self.suffix and seen is not prompt:
            raise InvalidRequest("suffix needs a prompt of text: remove images or suffix")
        if self.suffix:
            return AnswerRequest(self.settings(), prompt=prompt, suffix=self.suffix, **more)
        if not loaded.template and not self.system and not self.context:
            return AnswerRequest(self.settings(), prompt=seen, **more)
        messages = self._earlier(more["warnings"])
        if self.system:
            others = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system}, *others]
        question = {"role": "user", "content": prompt, "images": self.images if seen is prompt else None}
        *before, asked = messages_of([*messages, question])
        if seen is not prompt:
            asked["images"] = [(0, part) for part in seen if isinstance(part, Media)]
        return AnswerRequest(self.settings(), [*before, asked], variables=self.variables(), **more)

    def _earlier(self, warnings: list[str]) -> list[dict[str, Any]]:
        """The messages of the conversation that `context` stands for; see `_context_of`."""
        try:
            pairs = json.loads(bytes(self.context or b"[]"))
            if all(role in _ROLES and isinstance(content, str) for role, content in pairs):
                return [{"role": role, "content": printable(content)} for role, content in pairs]
        except (TypeError, ValueError, RecursionError):
            pass
        warnings.append("context is not from this server, and is left out: use /api/chat")
        return []


def _context_of(messages: Sequence[Mapping[str, Any]], answer: str) -> list[int]:
    """A conversation as the numbers that a client sends back for its next prompt.

    In ollama they are tokens. Here they are the bytes of the messages' JSON, which the chat template renders
    again with the next prompt. As there, they do not contain images.
    """
    pairs = [[message["role"], _without_images(message)] for message in messages]
    return [*json.dumps([*pairs, ["assistant", answer]]).encode()]


def _without_images(message: Mapping[str, Any]) -> str:
    """The content of a message, with a word in the place of each image."""
    content = str(message["content"])
    for at, each in reversed(message.get("images", ())):
        content = f"{content[:at]}[{each.noun}]{content[at:]}"
    return content


# Exchanges


class OllamaExchange(Exchange):
    """One answer as lines of JSON. An empty question loads the model, or unloads it: ``keep_alive`` 0."""

    media_type, has_chunks = "application/x-ndjson", True
    body: ClassVar[type[_ChatBody] | type[_GenerateBody]]
    question: ClassVar[Sequence[str]]
    """The fields of the body without all of which the model is only loaded."""

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        self._created = time.monotonic()
        super().__init__(body, loaded)
        self._reason = "unload" if _unloads(body) else "load"
        self._answer = self._answers[0] if self._answers else AnswerSoFar()
        self._blocks, self._n_calls = Blocks(()), 0

    @classmethod
    @abstractmethod
    def part(
        cls, content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """A part of the answer, or all of it."""

    def last(self) -> dict[str, Any]:
        """What the last object has besides."""
        return {}

    @classmethod
    def wants_stream(cls, body: Mapping[str, Any]) -> bool:
        return body.get("stream") is not False and cls._asks(body)

    @classmethod
    def _asks(cls, body: Mapping[str, Any]) -> bool:
        return any(body.get(name) for name in cls.question)

    @classmethod
    def without_model(cls, body: Mapping[str, Any]) -> dict[str, Any] | None:
        if cls._asks(body) or not _unloads(body):
            return None
        return cls._object(body.get("model") or "", cls.part("")) | {"done": True, "done_reason": "unload"}

    @classmethod
    def sign_of_life(cls, state: str, model: str) -> str:
        return _line(cls._object(model, cls.part("")))

    def write(self, index: int, event: Event) -> Iterator[str]:
        added = self._answer.add(event)
        if added is None:
            return
        ended = bool(self._answer.ended)
        changes = self._blocks.changes(added, is_last=ended)
        calls = [self._call(change[1]) for change in changes if change[0] == "close call"]
        logprobs = self._logprobs(added.tokens)
        if added.content or added.reasoning or calls or logprobs:
            part = self.part(added.content, added.reasoning, calls)
            yield _line(self._object(self.model, part) | logprobs)
        if ended:
            yield _line(self._object(self.model, self.part("")) | self._end())

    @classmethod
    def refused(cls, error: SpecLocalError) -> str:
        return _line(errors.body_for(errors.OLLAMA, error))

    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Any]:
        if not self.requests:
            made = self._object(self.model, self.part(""))
            return made | {"done": True, "done_reason": self._reason}
        answer = self._answer
        answer.add_all(answers[0])
        part = self.part(answer.content, answer.reasoning, [self._call(call) for call in answer.calls])
        return self._object(self.model, part) | self._logprobs(answer.tokens) | self._end()

    @classmethod
    def _object(cls, model: str, part: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": model, "created_at": timestamp(time.time_ns()), **part, "done": False}

    def _call(self, call: Any) -> dict[str, Any]:
        index, self._n_calls = self._n_calls, self._n_calls + 1
        arguments = arguments_of(call)
        return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}

    def _logprobs(self, tokens: Sequence[Any]) -> dict[str, Any]:
        if not self._given.logprobs or not tokens:
            return {}
        return {"logprobs": [openai_json.probabilities(token) for token in tokens]}

    def _end(self) -> dict[str, Any]:
        answer, ended = self._answer, self._answer.ended
        assert ended
        statistics, passed = ended.statistics, time.monotonic() - self._created
        return {
            "done": True,
            "done_reason": "length" if ended.reason in ("length", "context") else "stop",
            "total_duration": _ns(self.waited_s + passed),
            "load_duration": _ns(self.waited_s),
            "prompt_eval_count": answer.n_prompt,
            "prompt_eval_duration": _ns(statistics.prompt_s),
            "eval_count": statistics.predicted_n,
            "eval_duration": _ns(statistics.predicted_s),
            **self.last(),
            **openai_json.warnings(self.requests, ended),
        }


class OllamaChat(OllamaExchange):
    """Ollama's chat. Reasoning is ``thinking``, beside ``content``."""

    body, question = _ChatBody, ("messages",)

    @classmethod
    def part(
        cls, content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        more = {"thinking": thinking} if thinking else {}
        return {
            "message": {"role": "assistant", "content": content, **more}
            | ({"tool_calls": calls} if calls else {})
        }


class OllamaGenerate(OllamaExchange):
    """Ollama's answer to one prompt, through the chat template unless it is raw; or the text of a gap."""

    body, question = _GenerateBody, ("prompt", "suffix")

    @classmethod
    def part(
        cls, content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})

    def last(self) -> dict[str, Any]:
        messages = self.requests[0].messages
        return {"context": _context_of(messages, self._answer.content)} if messages else {}


def _unloads(body: Mapping[str, Any]) -> bool:
    return (keep := body.get("keep_alive")) is not None and seconds_of(keep) == 0


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
