"""OpenAI's completions, which continue a text without a chat template: POST /v1/completions."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from spec_local.answers import json as answer_json
from spec_local.errors import InvalidRequest
from spec_local.server.protocols.answer_so_far import AnswerSoFar
from spec_local.server.protocols.openai_exchange import MAX_CHOICES, OpenAIBody, OpenAIExchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import choices, limit, schema_of, whole
from spec_local.server.supervision.events import AnswerRequest, Delta, Loaded, Prompt, Token
from spec_local.settings import GenerationSettings

_MAX_TOKEN = 2**31 - 1  # llama.cpp's tokens are 32-bit integers
_TEXT, _TOKEN = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN}
Prompts = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _TOKEN]}}]})
]
"""A text, token ids, both mixed, or a list of such prompts: see `prompts_of`."""


def _number(logprobs: object) -> object:
    """A number of log probabilities, which is true or false in chats."""
    return (0 if logprobs else None) if isinstance(logprobs, bool) else logprobs


class _Body(OpenAIBody):
    prompt: Prompts = ""  # OpenAI's API continues an empty text, too
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int | None, BeforeValidator(_number)] = None

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        n = self.n or 1
        if self.echo:
            raise InvalidRequest("echo is not supported: leave it out, and put the prompt before the answer")
        if self.best_of not in (None, n):
            raise InvalidRequest("best_of is not supported: leave it out, and choose among n answers")
        prompts = prompts_of(self.prompt, images=RequestImages.of(loaded))
        if self.suffix is not None and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidRequest("suffix needs a prompt of text: give text, or remove suffix")
        settings = self.settings(
            max_tokens=limit(self.most),
            stops=self.stop,
            logprobs=self.logprobs,
            json_schema=schema_of(self.response_format),
        )
        warnings = self.warnings(self.response_format)
        return text_requests(prompts, settings, n, suffix=self.suffix, warnings=warnings, **self.more())


def text_requests(
    prompts: Sequence[Prompt], settings: GenerationSettings, n: int, **more: Any
) -> list[AnswerRequest]:
    """The requests of n answers to each prompt; more: their other fields.

    Raises:
        InvalidRequest: they are too many.
    """
    if (n_all := len(prompts) * n) > MAX_CHOICES:
        raise InvalidRequest(f"{n_all} answers are too many: give at most {MAX_CHOICES} (prompts times n)")
    every = choices(settings, n)
    return [AnswerRequest(each, prompt=prompt, **more) for prompt in prompts for each in every]


def prompts_of(given: object, field: str = "prompt", *, images: RequestImages | None = None) -> list[Prompt]:
    """The prompts in a body: a text, token ids, both mixed, a text with images, or a list of such prompts.

    As in llama.cpp's server, a list with a number is one prompt, and other lists are several.

    Args:
        field: its name in errors.
        images: those of the request; None: the model reads only text.

    Raises:
        InvalidRequest: it is something else.
    """
    is_one = not isinstance(given, list) or any(isinstance(part, int | float) for part in given)
    parts: Sequence[object] = given if isinstance(given, list) and not is_one else [given]
    prompts = [_prompt(each, field if is_one else f"{field}[{i}]", images) for i, each in enumerate(parts)]
    if not prompts or None in prompts:
        raise InvalidRequest(f"{field} is not supported: give text, token ids, or a list of either")
    return prompts  # type: ignore[return-value]


def _prompt(given: object, field: str, images: RequestImages | None) -> Prompt | None:
    """One prompt, which llama.cpp's server also takes in an object, beside images; None: it is none."""
    if isinstance(given, dict):
        data, text = given.get("multimodal_data"), given.get("prompt_string")
        if data and images and isinstance(text, str):
            return images.prompt(text, data, field)
        given = None if data else text
    if isinstance(given, str):
        return given
    parts = [whole(part) for part in given] if isinstance(given, list) else []
    return parts if parts and all(isinstance(part, str) or _is_token(part) for part in parts) else None


def _is_token(part: object) -> bool:
    return type(part) is int and 0 <= part <= _MAX_TOKEN


class Completions(OpenAIExchange):
    """Completions of texts."""

    id_prefix = "cmpl-"
    kind = part_kind = "text_completion"
    key, opening = "text", ""

    body = _Body

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        super().__init__(body, loaded)
        self._offsets = [_Offsets() for _ in self.requests]

    def _part(self, answer: AnswerSoFar, added: Delta) -> str:
        return added.content

    def _whole(self, answer: AnswerSoFar) -> dict[str, Any]:
        return {"text": answer.content}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [answer_json.finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {_name(other): answer_json.finite(other.logprob) for other in token.top} for token in tokens
            ],
            "text_offset": [self._offsets[index].next(token) for token in tokens],
        }


class _Offsets:
    """The index of the character at which each token starts in the answer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def next(self, token: Token) -> int:
        offset = self._n_characters
        self._n_characters += len(self._decoder.decode(token.piece))
        return offset


def _name(token: Token) -> str:
    """The token's text, or its bytes if they are not whole characters: names of tokens must differ."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)
