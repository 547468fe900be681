"""The responses to requests: each method answers the requests to one path or some."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from spec_local.core.sampling_settings import SamplingSettings
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media
from spec_local.server.guard import Access
from spec_local.server.learning.idle_training import IdleTraining
from spec_local.server.metrics import CONTENT_TYPE, Metrics
from spec_local.server.protocols import errors, openapi, responding
from spec_local.server.protocols.protocol import QUESTIONS, Exchange
from spec_local.server.protocols.request_body import completed, read_json
from spec_local.server.protocols.work import in_thread, work_on
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import Supervisor
from spec_local.text import printable

PROMPTS: Mapping[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "/v1/messages/count_tokens": ("/v1/messages", lambda text, n: {"input_tokens": n}),
    **{
        f"{version}/{kind}/input_tokens": (
            f"/v1/{kind}",
            lambda text, n: {"object": "response.input_tokens", "input_tokens": n},
        )
        for version in ("", "/v1")
        for kind in ("responses", "chat/completions")
    },
    "/apply-template": ("/v1/chat/completions", lambda text, n: {"prompt": printable(text)}),
}
"""For each path of prompts without an answer: the path whose bodies it takes, and the response for a prompt's
text and number of tokens."""


def modalities(reads: Collection[type[Media]]) -> dict[str, bool]:
    """What a model reads besides text, in the words of llama.cpp's server."""
    return {"vision": Image in reads, "audio": Audio in reads}


class Handlers:
    """What the server does for each path.

    Args:
        served: the models.
        kinds: the protocol of each path.
        access: whose limits of bodies and hosts of images hold.
        learning: None: no model learns.
    """

    def __init__(
        self,
        served: ServedModels,
        kinds: Mapping[str, type[Exchange]],
        access: Access,
        learning: IdleTraining | None,
    ) -> None:
        self._served, self._kinds, self._learning = served, kinds, learning
        self._max_body, self._image_hosts = access.max_body, access.image_hosts
        self._started = int(time.time())
        self._metrics = Metrics(lambda: served.n_running, lambda: served.n_waiting)
        if learning:
            self._metrics.add_learning(lambda: learning.learner(served.current), lambda: learning.is_training)
        served.observe = self._metrics.observe

    def _name_in(self, request: Request, body: Mapping[str, Any] = {}) -> Any:
        """The model that a question is about: the one that was used last, unless it names another."""
        return request.query_params.get("model") or body.get("model") or self._served.current.name

    async def use(
        self, request: Request, body: Mapping[str, Any] = {}
    ) -> contextlib.AbstractContextManager[Supervisor]:
        return await self._served.use(self._name_in(request, body))

    async def health(self, request: Request) -> Response:
        self._served.check_ready()
        return JSONResponse({"status": "ok"})

    def _described(self, model: ServedModel) -> dict[str, Any]:
        facts = {"n_ctx": loaded.n_ctx, "draft": loaded.draft} if (loaded := model.loaded) else {}
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "specdec",
            "modalities": modalities(model.reads),
            "meta": {"status": "loaded" if loaded else "not loaded", **facts},
        }

    async def models(self, request: Request) -> Response:
        self._served.check_ready()
        if (name := request.path_params.get("name")) is None:
            return JSONResponse(
                {"object": "list", "data": [self._described(model) for model in self._served.models]}
            )
        return JSONResponse(self._described(self._served.named(name)))

    async def props(self, request: Request) -> Response:
        with await self.use(request) as engine:
            loaded = engine.check_ready()
        usual, chosen = SamplingSettings().body, self._served.chosen(self._name_in(request)).defaults
        return JSONResponse(
            {
                "model": loaded.name,
                "draft": loaded.draft,
                "n_ctx": loaded.n_ctx,
                "n_rows": loaded.n_parallel,
                "total_slots": loaded.n_parallel,
                "chat_template": loaded.template,
                "default_generation_settings": {
                    "n_ctx": loaded.n_ctx,
                    "params": {name: chosen.get(name, value) for name, value in usual.items()},
                },
                "modalities": modalities(loaded.reads),
                **loaded.properties,
            }
        )

    async def costs(self, request: Request) -> Response:
        with await self.use(request) as engine:
            return JSONResponse(await engine.ask("costs"))

    async def counters(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def learned(self, request: Request) -> Response:
        is_stranger = request.state.is_stranger
        model = self._served.current if is_stranger else self._served.chosen(self._name_in(request))
        facts = self._learning.described(model) if self._learning else {"enabled": False}
        if is_stranger:  # words may have the name of a draft
            facts = {name: value for name, value in facts.items() if not isinstance(value, str)}
        return JSONResponse(facts)

    async def description(self, request: Request) -> Response:
        return JSONResponse(openapi.describe(self._kinds))

    async def not_stored(self, request: Request) -> Response:
        message = "this server stores no answers: use what POST returned, and give all messages again"
        return errors.response(request.url.path, HTTPStatus.NOT_FOUND, message)

    async def _checked(
        self, kind: type[Exchange], request: Request, body: Mapping[str, Any], engine: Supervisor
    ) -> Exchange:
        loaded = replace(engine.check_ready(), image_hosts=self._image_hosts)

        def check() -> Exchange:
            exchange = kind(body, loaded)
            for each in exchange.requests:
                each.check_length(loaded.n_ctx)
            return exchange

        # In a thread: checking a large body or a JSON schema takes time that other requests would wait.
        return await in_thread(check, work_on(request, reads_images=bool(loaded.reads)))

    async def prompt(self, request: Request) -> Response:
        kind, response = PROMPTS[request.url.path]
        given = await read_json(request, self._max_body)
        body = completed(given, self._served.chosen(self._name_in(request, given)).defaults)
        with await self.use(request, body) as engine:
            exchange = await self._checked(self._kinds[kind], request, body, engine)
            return JSONResponse(response(*await engine.ask("prompt", exchange.requests[0])))

    async def answer(self, request: Request) -> Response:
        self._served.on_request()
        self._served.check_ready()
        body = await read_json(request, self._max_body)
        model = self._served.chosen(body.get("model"))
        body, path = completed(body, model.defaults), request.url.path
        kind = self._kinds[path]
        if not model.engine and (response := kind.without_model(body)):
            return JSONResponse(response)
        loaded = asyncio.get_running_loop().create_future()
        return await responding.with_signs(
            self._respond(kind, request, body, loaded),
            kind,
            path,
            begun=loaded if kind.wants_stream(body) else None,
            model=model.name,
        )

    async def _respond(
        self, kind: type[Exchange], request: Request, body: dict[str, Any], loaded: "asyncio.Future[None]"
    ) -> Response:
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(await self._served.use(body.get("model"), body.get("keep_alive")))
            loaded.set_result(None)
            waited_s = time.monotonic() - begun
            exchange = await self._checked(kind, request, body, engine)
            for name in QUESTIONS:  # the images are there once more
                body.pop(name, None)
            exchange.waited_s = waited_s
            answers = engine.answer(exchange.requests)
            stack.callback(engine.cancel, answers)
            end = stack.pop_all().close
        return await (responding.stream if exchange.streams else responding.whole)(exchange, answers, end)
