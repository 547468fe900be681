"""Fetch images from the hosts that the user of the server allows, and from no others.

A client, or a text that it passes on, could otherwise let the server read what only the server can reach:
files, the page of a router, the credentials of a cloud (server-side request forgery). The addresses that a
name resolves to are checked, and the connection is made to the address that was checked.
"""

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

from spec_local import __version__
from spec_local.errors import InvalidRequest
from spec_local.images.media import MAX_BYTES
from spec_local.system.cancellation import check_wanted

_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16  # bytes that are read at a time
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_INLINE = "send the image itself as a data URI"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SAFE = "%/:=&?~#+!$,;'@()*[]"


def checked_host(text: str) -> str:
    """A host of `--image-urls` in the form in which it is compared: ``name``, or ``name:port``.

    Raises:
        InvalidRequest: it is neither.
    """
    name, port = _parts(text.strip())
    if not _HOST.fullmatch(name) or (port and not 0 < int(port) < 1 << 16):
        raise InvalidRequest(
            f"{text[:80]!a} is not a host with images: give a name such as upload.wikimedia.org, or HOST:PORT"
        )
    return f"{name}:{int(port)}" if port else name


def _parts(host: str) -> tuple[str, str]:
    """The name of a host, and its port; empty: there is none."""
    found = re.fullmatch(r"(.*?)(?::(\d{1,5}))?", host.lower(), re.ASCII | re.DOTALL)
    assert found
    name, port = found.groups("")
    return name.removesuffix("."), port


class ImageHosts:
    """The hosts from which images may be fetched.

    Args:
        hosts: results of `checked_host`. A name stands for https on its usual port, and with a port for both
            protocols. Only a host that is itself an address, or localhost, may be in a private network.
        timeout: in seconds, for an image, from the first connection to the last byte.
    """

    def __init__(self, hosts: Sequence[str], timeout: float = _TIMEOUT_S) -> None:
        self._hosts = frozenset(hosts)
        self._timeout = timeout

    def fetch(self, url: str) -> bytes:
        """The content of a URL.

        Raises:
            InvalidRequest: it may not, or cannot, be fetched.
        """
        deadline = time.monotonic() + self._timeout
        for _ in range(_MAX_REDIRECTS + 1):
            is_tls, name, port, path = self._target(url)
            data, location = self._get(is_tls, name, port, path, deadline)
            if location is None:
                return data
            following = urllib.parse.urljoin(url, location)
            if self._target(following)[1:3] != (name, port):
                raise InvalidRequest(f"{name} redirects to another host, which is not followed: {_INLINE}")
            url = following
        raise InvalidRequest(f"{name} redirects more than {_MAX_REDIRECTS} times: {_INLINE}")

    def _target(self, url: str) -> tuple[bool, str, int, str]:
        """Whether a URL is encrypted, its host, port and path; raises as `fetch`."""
        scheme = url.partition(":")[0].lower()[:20]
        if scheme not in ("http", "https"):
            what = f"URLs of the kind {scheme!a}" if "://" in url[:30] else "paths and other texts"
            raise InvalidRequest(f"an image is not read from {what}: {_INLINE}")
        try:
            parts = urllib.parse.urlsplit(url)
            name, port = _parts(parts.netloc)
        except ValueError:
            name, port = "", ""
        if not _HOST.fullmatch(name):  # no name and password, either
            raise InvalidRequest(f"the image's URL has no valid host: {_INLINE}")
        is_tls = scheme == "https"
        number = int(port) if port else 443 if is_tls else 80
        if f"{name}:{number}" not in self._hosts and not (is_tls and number == 443 and name in self._hosts):
            shown = f"{name}:{number}" if number != 443 or not is_tls else name
            raise InvalidRequest(
                f"this server fetches no images from {shown[:80]}: {_INLINE}, or start it with --image-urls "
                f"{shown[:80]}"
            )
        path = urllib.parse.quote(parts.path or "/", safe=_SAFE)
        query = urllib.parse.quote(parts.query, safe=_SAFE)
        return is_tls, name, number, f"{path}?{query}" if query else path

    def _get(
        self, is_tls: bool, name: str, port: int, path: str, deadline: float
    ) -> tuple[bytes, str | None]:
        """The content of a path, or where it redirects to."""
        try:
            with _connected(is_tls, name, port, deadline) as connection:
                headers = {
                    "User-Agent": f"specdec/{__version__}",
                    "Accept": "image/*, audio/*",
                    "Connection": "close",
                }
                connection.request("GET", path, headers=headers)
                with contextlib.closing(connection.getresponse()) as response:
                    if response.status in _REDIRECTS and (location := response.getheader("location")):
                        return b"", location
                    if response.status != 200:
                        raise InvalidRequest(
                            f"{name} has no such image (status {response.status}): {_INLINE}"
                        )
                    return _body(response, name, deadline), None
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"no reply within {self._timeout:g} s" if time.monotonic() >= deadline else _reason(error)
            raise InvalidRequest(f"the image cannot be fetched from {name} ({why}): {_INLINE}") from None


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:100] or type(error).__name__


def _body(response: http.client.HTTPResponse, name: str, deadline: float) -> bytes:
    if (response.length or 0) > MAX_BYTES:
        raise _too_large(name)
    expected, parts, size = response.length, list[bytes](), 0
    while piece := response.read1(_PIECE):
        check_wanted()
        parts.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise _too_large(name)
    if time.monotonic() >= deadline or (expected is not None and size < expected):
        raise http.client.IncompleteRead(b"", expected)
    return b"".join(parts)


def _too_large(name: str) -> InvalidRequest:
    return InvalidRequest(f"the image from {name} has more than {MAX_BYTES >> 20} MiB: make it smaller")


@contextlib.contextmanager
def _connected(is_tls: bool, name: str, port: int, deadline: float) -> Iterator[http.client.HTTPConnection]:
    """A connection to an address of a host that may be used. At the deadline, it is cut."""
    opened, plain_name = _opened(name.strip("[]"), port, deadline), name.strip("[]")
    if is_tls:
        opened = ssl.create_default_context().wrap_socket(
            opened, server_hostname=plain_name, do_handshake_on_connect=False
        )
    # A timeout of the socket counts anew with each byte.
    cut = threading.Timer(deadline - time.monotonic(), _shut, [opened])
    cut.daemon = True
    cut.start()
    connection = http.client.HTTPConnection(name, port)
    connection.sock, connection.auto_open = opened, 0
    try:
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()
        yield connection
    finally:
        cut.cancel()
        connection.close()
        opened.close()


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)  # that of TLS would wait for its peer


def _opened(name: str, port: int, deadline: float) -> socket.socket:
    """A socket that is connected to the first address of a host that replies."""
    is_literal = name == "localhost" or _address(name) is not None
    failure: OSError = OSError("it has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        check_wanted()
        if not is_literal and not _is_public(str(address[0])):
            raise InvalidRequest(f"{name} is in a private network, from which nothing is fetched: {_INLINE}")
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(max(0.01, deadline - time.monotonic()))
            opened.connect(address)
        except OSError as error:
            opened.close()
            failure = error
        else:
            return opened
    raise failure


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _is_public(text: str) -> bool:
    """Return whether an address is one of the Internet, also where it contains one of IPv4."""
    address = _address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = inner or address
    return address is not None and address.is_global and not address.is_multicast
