"""Request checks: host, origin, API key, and limits of size and time."""

import asyncio
import hmac
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_local.server import errors
from spec_local.server.request_body import TooLarge
from spec_local.system.machine import is_loopback

_BODY_S = 60  # for a body to arrive: one of 16 MiB needs 2 Mbit/s
_METHODS = "GET, HEAD, POST, OPTIONS"
# To any name of this machine, they tell whether it works, and counts.
_PROBES = ("/health", "/v1/health", "/metrics", "/learning")
_STALL_S = 60  # for a client to read what it was sent


class Stalled(OSError):
    """A client does not send the rest of its request, or does not read the response."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of the server.

    Args:
        api_key: the key that clients must give; None: none is needed.
        local_only: accept only names of this machine as the host. A web page could otherwise reach a server
            on the loopback address through a name of its own that resolves to it.
        origins: of the web pages elsewhere that may use the server; ``*``: all.
        max_body: maximum size of a body in bytes.
    """

    api_key: str | None = None
    local_only: bool = True
    origins: Collection[str] = ()
    max_body: int = 16 << 20


class Guard:
    """An ASGI application around another one. open_paths: what can be read without the key.

    Its requests have the state `is_stranger`: they have no key, or come through a name that is not one of
    this machine, and may learn no names of models or files.
    """

    def __init__(self, app: ASGIApp, access: Access, open_paths: Collection[str]) -> None:
        self._app, self._access, self._open_paths = app, access, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"].rstrip("/") or "/", Headers(scope=scope)
        is_foreign, has_key = self._is_foreign(headers), self._has_key(headers)
        state = {**scope.get("state", {}), "is_stranger": is_foreign or not has_key}
        scope = {**scope, "path": path, "state": state}
        if scope["method"] == "OPTIONS":  # those of web pages that may use the server are answered before
            await Response(status_code=204, headers={"allow": _METHODS})(scope, receive, send)
            return
        if refusal := self._refusal(path, headers, is_foreign, has_key):
            status, message = refusal
            extra = {401: {"www-authenticate": "Bearer"}, 400: {"connection": "close"}}.get(status)
            await errors.response(path, status, message, headers=extra)(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            try:
                async with asyncio.timeout(_STALL_S):
                    await send(message)
            except TimeoutError:
                raise Stalled from None

        try:
            await self._app(scope, _limited(receive, self._access.max_body), watched_send)
        except TooLarge:
            if not started:
                message = f"the body is larger than {self._access.max_body >> 20} MiB: send less"
                await errors.response(path, 413, message)(scope, receive, send)
        except Stalled:
            if not started:
                message = f"the body did not arrive within {_BODY_S} s: send it again"
                await errors.response(path, 408, message)(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        # A browser always sends a host; probes that speak HTTP/1.0 do not.
        host = headers.get("host")
        return bool(host and self._access.local_only and not is_loopback(_name(host)))

    def _has_key(self, headers: Headers) -> bool:
        if not (key := self._access.api_key):
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("latin-1"), key.encode())

    def _refusal(
        self, path: str, headers: Headers, is_foreign: bool, has_key: bool
    ) -> tuple[int, str] | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Programs before this one may have read a body of another length (RFC 9112, 6.3).
            return 400, "the request has Content-Length and Transfer-Encoding: send one of them"
        if is_foreign and path not in _PROBES:
            return 403, "this server answers to names of this machine only: use http://localhost"
        if (origin := headers.get("origin")) and not self._accepts(origin, headers.get("host", "")):
            return 403, f"web pages of {origin} may not use this server: its option --cors can allow them"
        if not has_key and path not in self._open_paths:
            return 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        return None

    def _accepts(self, origin: str, host: str) -> bool:
        scheme, _, there = origin.partition("://")
        same = scheme in ("http", "https") and there.lower() == host.lower()  # not an extension's scheme
        return same or "*" in self._access.origins or origin in self._access.origins


def _name(host: str) -> str:
    """The host without its port, and as names are compared: without case, and without the root's dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _limited(receive: Receive, max_body: int) -> Receive:
    """Receive the parts of a body, up to its maximum size and within the time for it."""
    n, complete = 0, False
    deadline = asyncio.get_running_loop().time() + _BODY_S

    async def limited() -> Message:
        nonlocal n, complete
        if complete:  # the client is only watched
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Stalled from None
        n += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if n > max_body:
            raise TooLarge
        return message

    return limited
