"""Errors in the shapes that clients expect, the HTTP status of each kind, and their responses."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from spec_local.errors import (
    BackendCrash,
    ContextOverflow,
    DeadEnd,
    InvalidRequest,
    ModelError,
    SpecLocalError,
)
from spec_local.server.supervision.served_models import UnknownModel
from spec_local.server.supervision.supervisor import Busy, NotReady

_STATUS: Mapping[type[SpecLocalError], HTTPStatus] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    ContextOverflow: HTTPStatus.BAD_REQUEST,
    DeadEnd: HTTPStatus.BAD_REQUEST,  # the grammar or the bias of the request
    ModelError: HTTPStatus.BAD_REQUEST,  # such as a chat template that rejects the messages
    NotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    BackendCrash: HTTPStatus.SERVICE_UNAVAILABLE,
    Busy: HTTPStatus.TOO_MANY_REQUESTS,
    UnknownModel: HTTPStatus.NOT_FOUND,
}
_CODES: Mapping[type[SpecLocalError], str] = {
    ContextOverflow: "context_length_exceeded",
    UnknownModel: "model_not_found",
}
_TYPES = {  # OpenAI's and Anthropic's names
    HTTPStatus.UNAUTHORIZED: ("authentication_error", "authentication_error"),
    HTTPStatus.FORBIDDEN: ("permission_error", "permission_error"),
    HTTPStatus.NOT_FOUND: ("not_found_error", "not_found_error"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("invalid_request_error", "request_too_large"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_error"),
    HTTPStatus.NOT_IMPLEMENTED: ("not_supported_error", "invalid_request_error"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("unavailable_error", "overloaded_error"),
}
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""The beginnings of the paths of protocols with errors of their own."""
LLAMA = ("/completion", "/completions", "/infill")
_RETRY_S = 2  # while models load
_OF_CLIENTS = ("invalid_request_error", "invalid_request_error")
_OTHERS = ("server_error", "api_error")


def status_of(error: SpecLocalError) -> HTTPStatus:
    """The HTTP status for an error."""
    return next(
        (status for kind, status in _STATUS.items() if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def body_for(path: str, error: SpecLocalError) -> dict[str, Any]:
    """The JSON object for an error of the library, in the shape of the protocol that a path belongs to."""
    body = _body(path, status_of(error), str(error), _CODES.get(type(error)))
    if isinstance(error, ContextOverflow) and error.n_prompt:
        found = _too_long(path, error)
        if path.startswith(OLLAMA):
            return {"error": found["message"]}
        body["error"] |= found
    return body


def _too_long(path: str, error: ContextOverflow) -> dict[str, Any]:
    """The keys of an error for a prompt that is too long, by which agents know that they must shorten it."""
    n = f"{'' if error.is_exact else 'at least '}{error.n_prompt} tokens"
    if path.startswith(ANTHROPIC):
        return {"message": f"prompt is too long: {n} > {error.n_ctx} maximum"}
    counts = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    if path in LLAMA:
        message = f"request ({n}) exceeds the available context size ({error.n_ctx} tokens): shorten it"
        return {"message": message, "type": "exceed_context_size_error", "code": 400, **counts}
    message = f"the prompt has {n}, but the maximum context length is {error.n_ctx} tokens: shorten it"
    return {"message": message, **counts}


def response(
    path: str, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with an error."""
    return JSONResponse(_body(path, status, message, code), status, headers)


def refusing(message: str, code: str | None = None) -> Callable[[Request], Awaitable[JSONResponse]]:
    """A handler of requests for what does not exist here."""

    async def respond(request: Request) -> JSONResponse:
        return response(request.url.path, HTTPStatus.NOT_IMPLEMENTED, message, code=code)

    return respond


def response_for(path: str, error: SpecLocalError) -> JSONResponse:
    """The response for an error of the library."""
    headers = {}
    if isinstance(error, Busy | NotReady):
        headers["retry-after"] = str(error.retry_s if isinstance(error, Busy) else _RETRY_S)
    return JSONResponse(body_for(path, error), status_of(error), headers)


def _body(path: str, status: int, message: str, code: str | None) -> dict[str, Any]:
    ours, theirs = _TYPES.get(HTTPStatus(status), _OF_CLIENTS if status < 500 else _OTHERS)
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": {"type": theirs, "message": message}}
    if path.startswith(OLLAMA):
        return {"error": message}
    return {"error": {"message": message, "type": ours, "param": None, "code": code}}
