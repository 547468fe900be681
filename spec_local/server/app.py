"""The HTTP server: routes, and the way of a request from its body to its response."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from spec_local.core.lazy_table import LazyTable
from spec_local.errors import SpecLocalError
from spec_local.server import errors, llama_paths, openapi, responding
from spec_local.server.engine import Answers, Engine
from spec_local.server.guard import Access, Guard
from spec_local.server.metrics import CONTENT_TYPE, Metrics
from spec_local.server.prompts import PROMPTS
from spec_local.server.protocol import Exchange
from spec_local.server.request_body import completed, read_json

PROTOCOLS: LazyTable[type[Exchange]] = LazyTable(
    {
        "/v1/chat/completions": "spec_local.server.chat_completions:ChatCompletions",
        "/v1/completions": "spec_local.server.completions:Completions",
        "/v1/messages": "spec_local.server.messages:Messages",
        "/v1/responses": "spec_local.server.responses:Responses",
        "/completion": "spec_local.server.llama_completion:LlamaCompletion",
        "/completions": "spec_local.server.llama_completion:LlamaCompletion",
        "/infill": "spec_local.server.llama_completion:LlamaInfill",
        # llama.cpp's server has these paths without a version, too
        "/chat/completions": "spec_local.server.chat_completions:ChatCompletions",
        "/responses": "spec_local.server.responses:Responses",
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
_STORED = ("/v1/responses/{id}", "/v1/responses/{id}/{what}", "/v1/chat/completions/{id}")


def create(
    engine: Engine,
    access: Access,
    defaults: Mapping[str, Any] | None = None,
    kinds: Mapping[str, type[Exchange]] | None = None,
) -> Starlette:
    """The application; the caller starts `engine.run`.

    Args:
        defaults: fields of bodies that do not have them, and of their object ``speculative``.
        kinds: the protocol of each path; None: `PROTOCOLS`.
    """
    metrics = Metrics(lambda: engine.n_running, lambda: engine.n_unfinished - engine.n_running)
    engine.observe = metrics.observe
    kinds = kinds or PROTOCOLS
    started = int(time.time())
    watchers: set[asyncio.Task[None]] = set()

    async def health(request: Request) -> Response:
        engine.check_ready()
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        loaded = engine.check_ready()
        described = {
            "id": loaded.name,
            "object": "model",
            "created": started,
            "owned_by": "specdec",
            "meta": {"n_ctx": loaded.n_ctx, "draft": loaded.draft},
        }
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [described]})
        if name != loaded.name:
            message = f"there is no model {name!r} here: this server has {loaded.name}"
            return errors.response(request.url.path, 404, message, code="model_not_found")
        return JSONResponse(described)

    async def props(request: Request) -> Response:
        loaded = engine.check_ready()
        return JSONResponse(
            {
                "model": loaded.name,
                "draft": loaded.draft,
                "n_ctx": loaded.n_ctx,
                "n_rows": loaded.n_rows,
                "total_slots": loaded.n_rows,
                "chat_template": loaded.template,
                "default_generation_settings": {
                    "n_ctx": loaded.n_ctx,
                    "params": {k: v for k, v in (defaults or {}).items() if k != "speculative"},
                },
                **loaded.properties,
            }
        )

    async def costs(request: Request) -> Response:
        return JSONResponse(await engine.ask("costs"))

    async def counters(request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def described(request: Request) -> Response:
        return JSONResponse(openapi.describe(kinds))

    async def not_stored(request: Request) -> Response:
        message = "this server stores no answers: use what POST returned, and give all messages again"
        return errors.response(request.url.path, HTTPStatus.NOT_FOUND, message)

    async def prompt(request: Request) -> Response:
        loaded = engine.check_ready()
        kind, response = PROMPTS[request.url.path]
        body = completed(await read_json(request, access.max_body), defaults or {})
        exchange = await asyncio.to_thread(kinds[kind], body, loaded)
        return JSONResponse(response(*await engine.ask("prompt", exchange.requests[0])))

    async def answer(request: Request) -> Response:
        loaded = engine.check_ready()
        body = completed(await read_json(request, access.max_body), defaults or {})
        # In a thread: checking a large body or a JSON schema takes time that other requests would wait.
        exchange = await asyncio.to_thread(kinds[request.url.path], body, loaded)
        answers = engine.answer(exchange.requests)
        watching = asyncio.create_task(_cancel_when_gone(request, engine, answers))
        watchers.add(watching)  # the event loop itself does not keep tasks alive
        watching.add_done_callback(watchers.discard)

        def end() -> None:
            engine.cancel(answers)
            watching.cancel()

        if exchange.streams:
            return await responding.stream(exchange, answers, end)
        return await responding.whole(exchange, answers, request.url.path, end)

    routes = [
        Route("/health", health),
        Route("/v1/health", health),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{name:path}", models),
        Route("/props", props),
        Route("/costs", costs),
        Route("/metrics", counters),
        Route("/openapi.json", described),
        *llama_paths.routes(engine, access.max_body),
        *(Route(path, prompt, methods=["POST"]) for path, (kind, _) in PROMPTS.items() if kind in kinds),
        *(Route(path, answer, methods=["POST"]) for path in kinds),
        *(Route(path, not_stored, methods=["GET", "POST", "DELETE"]) for path in _STORED),
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
    application = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            SpecLocalError: _library_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )
    application.router.redirect_slashes = False  # the guard removes them
    return application


def page_files() -> dict[str, Path]:
    """The files of the page, by path."""
    return {"/": PAGE / "index.html"} | {f"/{file.name}": file for file in PAGE.glob("*.*")}


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return respond


# Answers


async def _cancel_when_gone(request: Request, engine: Engine, answers: Answers) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    engine.cancel(answers)


# Errors


async def _library_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecLocalError)
    return errors.response_for(request.url.path, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("Allow", "another method")
    messages = {
        404: f"there is nothing at {ascii(path[:100])[1:-1]}: see /v1/models and /v1/chat/completions",
        405: f"{path} does not support {request.method}: use {allowed}",
    }
    message = messages.get(error.status_code, error.detail)
    return errors.response(path, error.status_code, message, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    return errors.response(request.url.path, 500, "the server failed: please report what it printed")
