"""Connections of the server, with raw sockets."""

import asyncio
import contextlib
import errno
import socket
import time

import pytest
import uvicorn

from spec_local.errors import InvalidRequest
from spec_local.server import run

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT_S = 0.2


async def slow(scope, receive, send):
    """Answers later than the limit for headers, once the body has arrived."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(2 * LIMIT_S)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


class Short(run._Protocol):
    headers_s = LIMIT_S


def converse(talk):
    """The result of a coroutine that gets both ends of a connection, and the seconds that it took."""

    async def main():
        config = uvicorn.Config(slow, lifespan="off", log_level="error", http=Short)
        server = uvicorn.Server(config)
        with run.listening("127.0.0.1", 0) as opened:
            serving = asyncio.create_task(server._serve(sockets=opened))
            reader, writer = await asyncio.open_connection(*opened[0].getsockname())
            begun = time.monotonic()
            async with asyncio.timeout(10):
                result = await talk(reader, writer)
            seconds = time.monotonic() - begun
            writer.close()
            server.should_exit = True
            await serving
        return result, seconds

    return asyncio.run(main())


@pytest.mark.parametrize("data", [b"", b"G", REQUEST[:-2]], ids=["silent", "a letter", "headers"])
def test_headers_that_do_not_arrive(data):
    async def talk(reader, writer):
        writer.write(data)
        return await reader.read()

    received, seconds = converse(talk)
    assert received == b""
    assert LIMIT_S <= seconds < 5


def test_headers_that_drip():
    """Each byte is too little to begin a new limit."""

    async def talk(reader, writer):
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b"G" * 10)
            await asyncio.sleep(LIMIT_S / 5)
        return await reading

    _, seconds = converse(talk)
    assert seconds < 5


def test_slow_responses_and_bodies_are_not_cut():
    async def talk(reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(2 * LIMIT_S)
        writer.write(b"b")
        first = await reader.readuntil(b"ok")
        writer.write(REQUEST)  # over the same connection
        second = await reader.readuntil(b"ok")
        return first, second

    (first, second), _ = converse(talk)
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")


def test_headers_of_the_next_request():
    async def talk(reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"ok")
        begun = time.monotonic()
        writer.write(REQUEST[:10])
        assert await reader.read() == b""
        return time.monotonic() - begun

    seconds, _ = converse(talk)
    assert LIMIT_S <= seconds < 5


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def addresses(host, port=0):
    with run.listening(host, port) as opened:
        for each in opened:
            socket.create_connection(each.getsockname()[:2], 5).close()
        return [each.getsockname()[:2] for each in opened]


@needs_ipv6
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_both_loopback_addresses(host):
    """Node's fetch tries that of IPv6 first for localhost."""
    (first, port), (second, other) = addresses(host)
    assert (first, second, port) == ("127.0.0.1", "::1", other)
    assert addresses(host, port) == [(first, port), (second, port)]


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_a_machine_without_ipv6(monkeypatch, code):
    class WithoutIPv6(socket.socket):
        def __init__(self, family=-1, *more, **options):
            if family == socket.AF_INET6:
                raise OSError(code, "no IPv6")
            super().__init__(family, *more, **options)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    ((host, port),) = addresses("localhost")
    assert host == "127.0.0.1"
    assert addresses("127.0.0.1", port) == [(host, port)]
    with pytest.raises(InvalidRequest, match=r"cannot listen on ::1 port 0 \(no IPv6\): give another --host"):
        addresses("::1")


@needs_ipv6
def test_a_port_that_another_program_has_of_one_address(monkeypatch):
    """Clients that use the name localhost would reach the other program."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on ::1 port {port}"):
            addresses("localhost", port)
        given = []

        class FirstGetsThatPort(socket.socket):
            def bind(self, address):
                given.append(address[0])
                super().bind((address[0], port, *address[2:]) if len(given) == 1 else address)

        monkeypatch.setattr(socket, "socket", FirstGetsThatPort)
        assert port not in [number for _, number in addresses("localhost")]
        assert given == ["127.0.0.1", "::1"] * 2


@needs_ipv6
def test_all_addresses_are_of_both_kinds():
    with run.listening("::", 0) as opened:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, opened[0].getsockname()[1]), 5).close()
