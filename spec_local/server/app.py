"""The HTTP server: routes, and the way of a request from its body to its response."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spec_local.core.lazy_table import LazyTable
from spec_local.core.text import printable
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.server import errors
from spec_local.server.engine import Answers, Engine
from spec_local.server.events import Event, Refused
from spec_local.server.guard import Access, Guard
from spec_local.server.metrics import CONTENT_TYPE, Metrics
from spec_local.server.protocol import Exchange
from spec_local.server.served_models import ServedModel, ServedModels

_T = TypeVar("_T")
PROTOCOLS: LazyTable[type[Exchange]] = LazyTable(
    {
        "/v1/chat/completions": "spec_local.server.chat_completions:ChatCompletions",
        "/v1/completions": "spec_local.server.completions:Completions",
        "/v1/messages": "spec_local.server.messages:Messages",
        "/v1/responses": "spec_local.server.responses:Responses",
        "/completion": "spec_local.server.llama_completion:LlamaCompletion",
        "/completions": "spec_local.server.llama_completion:LlamaCompletion",
    }
)
"""The kind of `Exchange` for each path."""
PAGE = Path(__file__).with_name("page")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def create(
    served: ServedModels,
    access: Access,
    defaults: Mapping[str, Any] | None = None,
    kinds: Mapping[str, type[Exchange]] | None = None,
) -> Starlette:
    """The application; the caller starts and stops the models.

    Args:
        defaults: fields of bodies that do not have them, and of their object ``speculative``.
        kinds: the protocol of each path; None: `PROTOCOLS`.
    """
    metrics = Metrics(lambda: served.n_running, lambda: served.n_waiting)
    served.observe = metrics.observe
    kinds = kinds or PROTOCOLS
    started = int(time.time())
    watchers: set[asyncio.Task[None]] = set()

    async def use(
        request: Request, body: Mapping[str, Any] | None = None
    ) -> contextlib.AbstractContextManager[Engine]:
        """The model that a question is about: the one that was used last, unless it names another."""
        name = request.query_params.get("model") or (body or {}).get("model") or served.current.name
        return await _unless_gone(request, served.use(name))

    async def health(request: Request) -> Response:
        served.check_ready()
        return JSONResponse({"status": "ok"})

    def described(model: ServedModel) -> dict[str, Any]:
        facts = {"n_ctx": loaded.n_ctx, "draft": loaded.draft} if (loaded := model.loaded) else {}
        return {
            "id": model.name,
            "object": "model",
            "created": started,
            "owned_by": "specdec",
            "meta": {"status": "loaded" if loaded else "not loaded", **facts},
        }

    async def models(request: Request) -> Response:
        served.check_ready()
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [described(model) for model in served.models]})
        return JSONResponse(described(served.named(name)))

    async def props(request: Request) -> Response:
        with await use(request) as engine:
            loaded = engine.check_ready()
        return JSONResponse(
            {
                "model": loaded.name,
                "draft": loaded.draft,
                "n_ctx": loaded.n_ctx,
                "n_rows": loaded.n_rows,
                "total_slots": loaded.n_rows,
                "chat_template": loaded.template,
                "default_generation_settings": {"n_ctx": loaded.n_ctx},
                **loaded.properties,
            }
        )

    async def costs(request: Request) -> Response:
        with await use(request) as engine:
            return JSONResponse(await engine.ask("costs"))

    async def counters(request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def tokenize(request: Request) -> Response:
        body = await _body(request)
        text, add_special = _field(body, "content", str), _field(body, "add_special", bool, default=False)
        with await use(request, body) as engine:
            tokens = await engine.ask("tokenize", (text, add_special))
            if not _field(body, "with_pieces", bool, default=False):
                return JSONResponse({"tokens": tokens})
            pieces = await engine.ask("pieces", tokens)
        described = [{"id": token, "piece": _piece(p)} for token, p in zip(tokens, pieces, strict=True)]
        return JSONResponse({"tokens": described})

    async def detokenize(request: Request) -> Response:
        body = await _body(request)
        tokens = _field(body, "tokens", list)
        if not all(type(token) is int for token in tokens):
            raise InvalidRequest("tokens must be a list of numbers: give token ids")
        with await use(request, body) as engine:
            text = b"".join(await engine.ask("pieces", tokens)).decode("utf-8", "surrogateescape")
        return JSONResponse({"content": printable(text)})

    async def embeddings(request: Request) -> Response:
        message = (
            "this server has no embeddings: it generates text; use an embedding model with another server, "
            "such as llama-server --embeddings"
        )
        return errors.response(request.url.path, HTTPStatus.NOT_IMPLEMENTED, message, code="not_supported")

    async def answer(request: Request) -> Response:
        served.check_ready()
        body = _completed(await _body(request), defaults or {})
        use = await _unless_gone(request, served.use(body.get("model"), body.get("keep_alive")))
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(use)
            # In a thread: checking a large body or a JSON schema takes time that other requests would wait.
            exchange = await asyncio.to_thread(kinds[request.url.path], body, engine.check_ready())
            answers = engine.answer(exchange.requests)
            stack.callback(engine.cancel, answers)
            watching = asyncio.create_task(_cancel_when_gone(request, engine, answers))
            watchers.add(watching)  # the event loop itself does not keep tasks alive
            watching.add_done_callback(watchers.discard)
            stack.callback(watching.cancel)
            end = stack.pop_all().close
        if exchange.streams:
            return await _stream(exchange, answers, end)
        try:
            return await _whole(exchange, answers)
        finally:
            end()

    routes = [
        Route("/health", health),
        Route("/v1/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", models),
        Route("/props", props),
        Route("/costs", costs),
        Route("/metrics", counters),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/embeddings", embeddings, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *(Route(path, answer, methods=["POST"]) for path in kinds),
        *(Route(path, _page(file)) for path, file in page_files().items()),
    ]
    open_paths = {"/health", "/v1/health", *page_files()}
    middleware = [Middleware(Guard, access=access, open_paths=open_paths)]
    if access.origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            ),
        )
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            SpecLocalError: _library_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )


def page_files() -> dict[str, Path]:
    """The files of the page, by path."""
    return {"/": PAGE / "index.html"} | {f"/{file.name}": file for file in PAGE.glob("*.*")}


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return respond


# Bodies


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        InvalidRequest: there is none.
    """
    body = await request.body()
    try:
        value = await asyncio.to_thread(json.loads, body) if len(body) > 1 << 16 else json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"the body is not JSON ({reason}): send a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object: send one")
    return value


def _completed(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The body with defaults in place of what is missing or null."""
    given = {name: value for name, value in body.items() if value is not None}
    if isinstance(speculative := given.get("speculative"), dict):
        given["speculative"] = {**defaults.get("speculative", {}), **speculative}
    elif speculative is True:  # as it is without the field
        del given["speculative"]
    return {**defaults, **given}


_MISSING: Any = object()


def _field(body: dict[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    value = body.get(name, default)
    if value is _MISSING:
        raise InvalidRequest(f"{name} is missing: add it")
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} has the wrong type: give a {kind.__name__}")
    return value


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not whole characters, as llama.cpp's server writes it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


# Answers


async def _unless_gone(request: Request, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of what a client waits for; ClientDisconnect if it goes first."""
    waiting, gone = asyncio.create_task(coroutine), asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnect
        return waiting.result()
    finally:
        waiting.cancel()
        gone.cancel()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_when_gone(request: Request, engine: Engine, answers: Answers) -> None:
    await _disconnection(request)
    engine.cancel(answers)


async def _whole(exchange: Exchange, answers: Answers) -> Response:
    """The response with all answers in one object, or with the first error."""
    found: list[list[Event]] = [[] for _ in exchange.requests]
    async for arrived in answers:
        for index, event in arrived:
            if isinstance(event, Refused):
                raise event.error
            found[index].append(event)
    return JSONResponse(exchange.whole(found))


async def _stream(exchange: Exchange, answers: Answers, end: Callable[[], None]) -> Response:
    """The response with the events of all answers; an error before the first one is a response of its own.

    Args:
        end: called when the response has ended, or the client has gone.
    """
    lists = aiter(answers)
    first = await anext(lists)
    if isinstance(event := first[0][1], Refused):
        end()
        raise event.error

    async def write() -> AsyncIterator[str]:
        arrived, parts = first, list(exchange.begin())
        while arrived:
            for index, event in arrived:
                if isinstance(event, Refused):
                    yield "".join([*parts, exchange.failed(event.error)])
                    return
                parts += exchange.write(index, event)
            yield "".join(parts)  # one write: asyncio complains about many to a client that has just gone
            arrived, parts = await anext(lists, []), []
        yield "".join(exchange.end())

    return _EventStream(write(), end)


class _EventStream(StreamingResponse):
    """A response of server-sent events. end: called when it has ended, for whatever reason."""

    def __init__(self, parts: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(parts, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


# Errors


async def _library_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecLocalError)
    return errors.response_for(request.url.path, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("Allow", "another method")
    messages = {
        404: f"there is nothing at {path}: see /v1/models and /v1/chat/completions",
        405: f"{path} does not support {request.method}: use {allowed}",
    }
    message = messages.get(error.status_code, error.detail)
    return errors.response(path, error.status_code, message, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    return errors.response(request.url.path, 500, "the server failed: please report what it printed")
