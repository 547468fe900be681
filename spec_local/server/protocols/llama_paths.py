"""The smaller paths of llama.cpp's server: tokens, the state of the slots, and what does not exist here."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spec_local.errors import InvalidRequest
from spec_local.server.protocols import errors
from spec_local.server.protocols.completions import prompts_of
from spec_local.server.protocols.request_body import flag, read_json
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import whole
from spec_local.server.protocols.work import in_thread, until_gone, work_on
from spec_local.server.supervision.events import Prompt
from spec_local.server.supervision.supervisor import Supervisor
from spec_local.settings import GenerationSettings
from spec_local.text import printable

_NOT_HERE = (
    "this server only generates text: embeddings, ranking and saved slots need another server, such as "
    "llama-server"
)
_FIXED = "this server cannot be changed while it runs: choose models and adapters at its start"
Use = Callable[[Request, Mapping[str, Any]], Awaitable[AbstractContextManager[Supervisor]]]
"""Chooses the model that a request is about, by its body; it stays loaded until the end of the context."""


def routes(use: Use, max_body: int) -> list[Route]:
    """The routes. max_body: maximum size of a body in bytes."""

    async def tokenize(request: Request) -> Response:
        body = await read_json(request, max_body)
        content = body.get("content")
        special = flag(body, "add_special", False), flag(body, "parse_special", True)
        with await use(request, body) as engine:
            loaded = engine.check_ready()
            images = RequestImages.of(loaded)

            def prompts() -> Sequence[Prompt]:
                return prompts_of(content, "content", images=images) if content not in (None, []) else [""]

            (text,) = await in_thread(prompts, work_on(request, reads_images=bool(loaded.reads)))
            tokens = await engine.ask("tokenize", (text, *special))
            if not flag(body, "with_pieces", False):
                return JSONResponse({"tokens": tokens})
            pieces = await engine.ask("pieces", tokens)
        described = [{"id": token, "piece": _piece(p)} for token, p in zip(tokens, pieces, strict=True)]
        return JSONResponse({"tokens": described})

    async def detokenize(request: Request) -> Response:
        body = await read_json(request, max_body)
        tokens = body.get("tokens") or []
        tokens = [whole(token) for token in tokens] if isinstance(tokens, list) else [None]
        if not all(type(token) is int for token in tokens):
            raise InvalidRequest("tokens must be a list of numbers: give token ids")
        with await use(request, body) as engine:
            text = b"".join(await engine.ask("pieces", tokens)).decode("utf-8", "surrogateescape")
        return JSONResponse({"content": printable(text)})

    async def slots(request: Request) -> Response:
        with await use(request, {}) as engine:
            loaded, slots = engine.check_ready(), await engine.ask("slots")
        if request.query_params.get("fail_on_no_slot") and None not in slots:
            message = f"all {loaded.n_parallel} places are in use: try again soon"
            return errors.response(request.url.path, HTTPStatus.SERVICE_UNAVAILABLE, message)
        return JSONResponse(
            [
                {"id": i, "id_task": -1, "n_ctx": loaded.n_ctx, "speculative": bool(loaded.draft)}
                | ({"is_processing": False} if slot is None else _in_use(*slot))
                for i, slot in enumerate(slots)
            ]
        )

    async def no_adapters(request: Request) -> Response:
        return JSONResponse([])

    not_here, fixed = (errors.refusing(message, "not_supported") for message in (_NOT_HERE, _FIXED))
    elsewhere = ["/v1/embeddings", "/embeddings", "/embedding", "/slots/{id}"]
    both = ("rerank", "reranking", "audio/transcriptions")
    elsewhere += [f"{version}/{name}" for version in ("", "/v1") for name in both]
    return [
        Route("/tokenize", until_gone(tokenize), methods=["POST"]),
        Route("/detokenize", until_gone(detokenize), methods=["POST"]),
        Route("/slots", until_gone(slots)),
        Route("/lora-adapters", no_adapters),
        *(Route(path, fixed, methods=["POST"]) for path in ("/lora-adapters", "/props")),
        *(Route(path, not_here, methods=["POST"]) for path in elsewhere),
    ]


def _in_use(task: int, n_prompt: int, n_generated: int, settings: GenerationSettings) -> dict[str, Any]:
    """The fields of a slot that an answer uses; llama.cpp's server tells no text either."""
    limit = -1 if settings.max_tokens is None else settings.max_tokens
    return {
        "id_task": task,
        "is_processing": True,
        "n_prompt_tokens": n_prompt,
        "params": {
            "n_predict": limit,
            "max_tokens": limit,
            "seed": -1 if settings.seed is None else settings.seed,
            **settings.sampling.body,
        },
        "next_token": [
            {
                "has_next_token": True,
                "n_decoded": n_generated,
                "n_remain": -1 if limit < 0 else max(0, limit - n_generated),
            }
        ],
    }


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not whole characters, as llama.cpp's server writes it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
