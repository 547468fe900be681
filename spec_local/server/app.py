"""The HTTP server: its routes, its page, and the errors that no protocol has a form of its own for."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from spec_local.core.lazy_table import LazyTable
from spec_local.errors import SpecLocalError
from spec_local.server.guard import Access, Guard
from spec_local.server.handlers import PROMPTS, Handlers
from spec_local.server.learning.idle_training import IdleTraining
from spec_local.server.protocols import errors, llama_paths, ollama_paths
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.work import until_gone
from spec_local.server.supervision.served_models import ServedModels
from spec_local.server.supervision.supervisor import NotReady

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
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; media-src blob:; "  # of the page
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
    kinds = kinds or PROTOCOLS
    handlers = Handlers(served, kinds, access, learning)
    open_paths = {"/health", "/v1/health", *page_files()}
    guard = Middleware(Guard, access=access, open_paths=open_paths)
    cors = Middleware(
        CORSMiddleware, allow_origins=list(access.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    application = Starlette(
        routes=_routes(handlers, kinds, served, access.max_body),
        middleware=[cors, guard] if access.origins else [guard],
        exception_handlers={
            SpecLocalError: _library_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )
    application.router.redirect_slashes = False  # the guard removes them
    return application


def _routes(
    handlers: Handlers, kinds: Mapping[str, type[Exchange]], served: ServedModels, max_body: int
) -> list[Route]:
    prompt, answer = until_gone(handlers.prompt), until_gone(handlers.answer)
    return [
        Route("/health", handlers.health),
        Route("/v1/health", handlers.health),
        Route("/v1/models", handlers.models),
        Route("/models", handlers.models),
        Route("/v1/models/{name:path}", handlers.models),
        Route("/props", until_gone(handlers.props)),
        Route("/costs", until_gone(handlers.costs)),
        Route("/metrics", handlers.counters),
        Route("/learning", handlers.learned),
        Route("/openapi.json", handlers.description),
        *llama_paths.routes(handlers.use, max_body),
        *ollama_paths.routes(served, max_body),
        *(Route(path, prompt, methods=["POST"]) for path, (kind, _) in PROMPTS.items() if kind in kinds),
        *(Route(path, answer, methods=["POST"]) for path in kinds),
        *(Route(path, handlers.not_stored, methods=["GET", "POST", "DELETE"]) for path in _STORED),
        *(Route(path, _page(file)) for path, file in page_files().items()),
    ]


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
