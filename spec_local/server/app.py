"""The HTTP server: routes, and the way of a request from its body to its response."""

import asyncio
import contextlib
import dataclasses
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
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from spec_local.core.lazy_table import LazyTable
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import SpecLocalError
from spec_local.server.guard import Access, Guard
from spec_local.server.learning.idle_training import IdleTraining
from spec_local.server.metrics import CONTENT_TYPE, Metrics
from spec_local.server.protocols import errors, llama_paths, ollama_paths, openapi, responding
from spec_local.server.protocols.prompts import PROMPTS
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.request_body import completed, read_json
from spec_local.server.protocols.work import in_thread, until_gone
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import NotReady, Supervisor

PROTOCOLS: LazyTable[type[Exchange]] = LazyTable(
    {
        "/v1/chat/completions": "spec_local.server.protocols.chat_completions:ChatCompletions",
        "/v1/completions": "spec_local.server.protocols.completions:Completions",
        "/v1/messages": "spec_local.server.protocols.messages:Messages",
        "/v1/responses": "spec_local.server.protocols.responses:Responses",
        "/completion": "spec_local.server.protocols.llama_completion:LlamaCompletion",
        "/completions": "spec_local.server.protocols.llama_completion:LlamaCompletion",
        "/infill": "spec_local.server.protocols.llama_completion:LlamaInfill",
        # llama.cpp's server has these paths without a version, too
        "/chat/completions": "spec_local.server.protocols.chat_completions:ChatCompletions",
        "/responses": "spec_local.server.protocols.responses:Responses",
        "/api/chat": "spec_local.server.protocols.ollama:OllamaChat",
        "/api/generate": "spec_local.server.protocols.ollama:OllamaGenerate",
    }
)
"""The kind of `Exchange` for each path."""
PAGE = Path(__file__).with_name("page")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; "  # blob: of the page itself
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STORED = ("/v1/responses/{id}", "/v1/responses/{id}/{what}", "/v1/chat/completions/{id}")


def create(
    served: ServedModels,
    access: Access,
    kinds: Mapping[str, type[Exchange]] | None = None,
    learning: IdleTraining | None = None,
) -> Starlette:
    """The application; the caller starts and stops the models, and the training of heads.

    Args:
        kinds: the protocol of each path; None: `PROTOCOLS`.
        learning: None: no model learns.
    """
    metrics = Metrics(lambda: served.n_running, lambda: served.n_waiting)
    if learning:
        metrics.add_learning(lambda: learning.learner(served.current), lambda: learning.is_training)
    served.observe = metrics.observe
    kinds = kinds or PROTOCOLS
    started = int(time.time())

    def name_in(request: Request, body: Mapping[str, Any] | None = None) -> Any:
        """The model that a question is about: the one that was used last, unless it names another."""
        return request.query_params.get("model") or (body or {}).get("model") or served.current.name

    async def use(
        request: Request, body: Mapping[str, Any] | None = None
    ) -> contextlib.AbstractContextManager[Supervisor]:
        return await served.use(name_in(request, body))

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
        defaults = {**dataclasses.asdict(SamplingSettings()), **served.chosen(name_in(request)).defaults}
        # Those that are fields of a body, and have one value.
        left_out = ("speculative", "logit_bias", "penalize_prompt", "penalty_window")
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
                    "params": {name: value for name, value in defaults.items() if name not in left_out},
                },
                **loaded.properties,
            }
        )

    async def costs(request: Request) -> Response:
        with await use(request) as engine:
            return JSONResponse(await engine.ask("costs"))

    async def counters(request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def learned(request: Request) -> Response:
        is_stranger = request.state.is_stranger
        model = served.current if is_stranger else served.chosen(name_in(request))
        facts = learning.described(model) if learning else {"enabled": False}
        if is_stranger:  # words may have the name of a draft
            facts = {name: value for name, value in facts.items() if not isinstance(value, str)}
        return JSONResponse(facts)

    async def description(request: Request) -> Response:
        return JSONResponse(openapi.describe(kinds))

    async def not_stored(request: Request) -> Response:
        message = "this server stores no answers: use what POST returned, and give all messages again"
        return errors.response(request.url.path, HTTPStatus.NOT_FOUND, message)

    async def checked(
        kind: type[Exchange], request: Request, body: Mapping[str, Any], engine: Supervisor
    ) -> Exchange:
        loaded = engine.check_ready()

        def check() -> Exchange:
            exchange = kind(body, loaded)
            for each in exchange.requests:
                each.check_length(loaded.n_ctx)
            return exchange

        # In a thread: checking a large body or a JSON schema takes time that other requests would wait.
        return await in_thread(check, large=request.state.is_large)

    async def prompt(request: Request) -> Response:
        kind, response = PROMPTS[request.url.path]
        given = await read_json(request, access.max_body)
        body = completed(given, served.chosen(name_in(request, given)).defaults)
        with await use(request, body) as engine:
            exchange = await checked(kinds[kind], request, body, engine)
            return JSONResponse(response(*await engine.ask("prompt", exchange.requests[0])))

    async def answer(request: Request) -> Response:
        served.on_request()
        served.check_ready()
        given = await read_json(request, access.max_body)
        model = served.chosen(given.get("model"))
        body, path = completed(given, model.defaults), request.url.path
        kind = kinds[path]
        if not model.engine and (response := kind.without_model(body)):
            return JSONResponse(response)
        loaded = asyncio.get_running_loop().create_future()
        return await responding.with_signs(
            respond(kind, request, body, loaded),
            kind,
            path,
            begun=loaded if kind.wants_stream(body) else None,
            model=model.name,
        )

    async def respond(
        kind: type[Exchange], request: Request, body: Mapping[str, Any], loaded: "asyncio.Future[None]"
    ) -> Response:
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(await served.use(body.get("model"), body.get("keep_alive")))
            loaded.set_result(None)
            waited_s = time.monotonic() - begun
            exchange = await checked(kind, request, body, engine)
            exchange.waited_s = waited_s
            answers = engine.answer(exchange.requests)
            stack.callback(engine.cancel, answers)
            end = stack.pop_all().close
        return await (responding.stream if exchange.streams else responding.whole)(exchange, answers, end)

    routes = [
        Route("/health", health),
        Route("/v1/health", health),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{name:path}", models),
        Route("/props", until_gone(props)),
        Route("/costs", until_gone(costs)),
        Route("/metrics", counters),
        Route("/learning", learned),
        Route("/openapi.json", description),
        *llama_paths.routes(use, access.max_body),
        *ollama_paths.routes(served, access.max_body),
        *(
            Route(path, until_gone(prompt), methods=["POST"])
            for path, (kind, _) in PROMPTS.items()
            if kind in kinds
        ),
        *(Route(path, until_gone(answer), methods=["POST"]) for path in kinds),
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
    return {"/": PAGE / "index.html"} | {
        f"/{file.relative_to(PAGE).as_posix()}": file for file in PAGE.rglob("*.*")
    }


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        if request.url.path == "/" and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(ollama_paths.IS_RUNNING, headers={"vary": "accept"})
        return FileResponse(file, headers=_PAGE_HEADERS)

    return respond


# Errors


async def _library_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecLocalError)
    if request.state.is_stranger:  # the reason may have names of files
        error = NotReady("the models are not loaded: try again soon")
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
