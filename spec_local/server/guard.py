"""Request checks: host, origin, API key, and limits of size and time."""

import asyncio
import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_local.errors import InvalidRequest
from spec_local.server.protocols import errors
from spec_local.server.protocols.request_body import TooLarge
from spec_local.system.machine import is_loopback, own_names

_METHODS = "GET, HEAD, POST, OPTIONS"
# To any name of this machine, they tell whether it works, and counts.
_PROBES = ("/health", "/v1/health", "/metrics", "/learning")
_VERSIONS = ("1.0", "1.1", "2")


_ABSOLUTE = re.compile("https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
"""A request's target as proxies get it."""
_AND_PORT = re.compile(r":\d*\Z", re.ASCII)
_IN_CONTAINERS = ("host.docker.internal", "host.containers.internal")
"""Names of this machine in the containers of Docker and Podman. Nobody can register a name in `internal`."""
_HOST = re.compile(r"(?:\*\.)?[\w:](?:[\w.:-]*[\w:])?", re.ASCII)


class Stalled(OSError):
    """A client does not send the rest of its request, or does not read the response."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of the server.

    Args:
        api_key: the key that clients must give; None: none is needed.
        origins: of the web pages elsewhere that may use the server; ``*``: all.
        max_body: maximum size of a body in bytes.
        image_hosts: from which the server fetches images: see `ImageHosts`.
        hosts: results of `host_pattern`: further names under which clients reach the server without a key.
        body_s: seconds for a body to arrive: one of 16 MiB needs 2 Mbit/s. stall_s: for a client to read what
            it was sent.
    """

    api_key: str | None = None
    origins: Collection[str] = ()
    max_body: int = 16 << 20
    hosts: Collection[str] = ()
    image_hosts: Sequence[str] = ()
    body_s: float = 60
    stall_s: float = 60


def host_pattern(text: str) -> str:
    """The name of a host, or ``*.DOMAIN`` for all names below a domain, in the form in which it is compared.

    Raises:
        InvalidRequest: it is neither.
    """
    name = _name(f"[{text}]") if text.count(":") > 1 and text[:1] != "[" else _name(text)
    if "/" in text or not _HOST.fullmatch(name):
        raise InvalidRequest(
            f"{text[:80]!a} is not the name of a host: give one such as box.example.org, or *.example.org"
        )
    return name


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
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        if target := _ABSOLUTE.fullmatch(path):
            host, path = target.groups()  # and the header does not count (RFC 9112, 3.2.2)
        path = "/" + "/".join(filter(None, path.split("/")))  # base URLs that end with a slash
        is_foreign, has_key = self._is_foreign(host), self._has_key(headers)
        state = {**scope.get("state", {}), "is_stranger": is_foreign or not has_key}
        scope = {**scope, "path": path, "state": state}
        if scope["method"] == "OPTIONS":  # those of web pages that may use the server are answered before
            await Response(status_code=204, headers={"allow": _METHODS})(scope, receive, send)
            return
        is_open = path in self._open_paths and scope["method"] in ("GET", "HEAD")
        if refusal := self._refusal(scope, headers, host, is_open, has_key):
            status, message = refusal
            extra = {401: {"www-authenticate": "Bearer"}, 400: {"connection": "close"}}.get(status)
            await errors.response(path, status, message, headers=extra)(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            try:
                async with asyncio.timeout(self._access.stall_s):
                    await send(message)
            except TimeoutError:
                raise Stalled from None

        try:
            await self._app(scope, _limited(receive, self._access), watched_send)
        except TooLarge:
            if not started:
                message = f"the body is larger than {self._access.max_body >> 20} MiB: send less"
                await errors.response(path, 413, message)(scope, receive, send)
        except Stalled:
            if not started:
                message = f"the body did not arrive within {self._access.body_s} s: send it again"
                await errors.response(path, 408, message)(scope, receive, send)

    def _is_foreign(self, host: str) -> bool:
        """Return whether a request without a key comes through a name that may be a web page's own.

        A page that controls its name can let it resolve to this machine (DNS rebinding), so that the browser
        takes the server for the page's origin. But it has no key, and no name that nobody can register:
        without a key, only such names are accepted, and those that the user gives. A browser always sends a
        host; probes that speak HTTP/1.0 do not.
        """
        name = _name(host)
        return bool(
            name
            and not self._access.api_key
            and not is_loopback(name)
            and not name.endswith(".localhost")
            and name not in (*_IN_CONTAINERS, *own_names())
            and not any(_matches(name, pattern) for pattern in self._access.hosts)
        )

    def _has_key(self, headers: Headers) -> bool:
        if not (key := self._access.api_key):
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("latin-1"), key.encode())

    def _refusal(
        self, scope: Scope, headers: Headers, host: str, is_open: bool, has_key: bool
    ) -> tuple[int, str] | None:
        path = scope["path"]
        if scope.get("http_version", "1.1") not in _VERSIONS:
            return 505, "this version of HTTP is unknown: use HTTP/1.1"
        if "content-length" in headers and "transfer-encoding" in headers:
            # Programs before this one may have read a body of another length (RFC 9112, 6.3).
            return 400, "the request has Content-Length and Transfer-Encoding: send one of them"
        if len(headers.getlist("host")) > 1:
            return 400, "the request has more than one Host: send one"
        if self._is_foreign(host) and path not in _PROBES:
            name = ascii(_name(host)[:80])[1:-1]
            return 403, (
                f"without a key, this server does not answer to the name {name}: use http://localhost, start "
                f"it with --allow-host {name}, or with --api-key"
            )
        # A page of another origin has no key: a browser would ask the server before it sends one.
        is_trusted = is_open or (self._access.api_key and has_key)
        if (origin := headers.get("origin")) and not is_trusted and not self._accepts(origin, host, headers):
            page = ascii(origin[:80])[1:-1]
            return 403, f"web pages of {page} may not use this server: its option --cors can allow them"
        if not has_key and path not in self._open_paths:
            return 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        return None

    def _accepts(self, origin: str, host: str, headers: Headers) -> bool:
        """Return whether a web page is the server's own, or one that the user has named.

        Where a proxy replaces the host, the page has the proxy's origin. Browsers say that a request is of
        the same origin where the connection is encrypted; elsewhere, the user has named the host. A wildcard
        does not count: pages of many people share such domains.
        """
        scheme, _, there = origin.partition("://")
        if scheme in ("http", "https"):  # not an extension's
            site = headers.get("sec-fetch-site")
            if there.lower() == host.lower() or site == "same-origin":
                return True
            if site is None and _name(there) in self._access.hosts:
                return True
        return "*" in self._access.origins or origin in self._access.origins


def _name(host: str) -> str:
    """The host without its port, and as names are compared: without case, and without the root's dot."""
    name = _AND_PORT.sub("", host).lower().removesuffix(".")
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _matches(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


def _limited(receive: Receive, access: Access) -> Receive:
    """Receive the parts of a body, up to its maximum size and within the time for it."""
    n, complete = 0, False
    deadline = asyncio.get_running_loop().time() + access.body_s

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
        if n > access.max_body:
            raise TooLarge
        return message

    return limited
