"""Connections of the server, with raw sockets."""

import asyncio
import time

import pytest
import uvicorn

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


def converse(talk):
    """The result of a coroutine that gets both ends of a connection, and the seconds that it took."""

    async def main():
        opened = run.listen("127.0.0.1", 0)
        config = uvicorn.Config(slow, lifespan="off", log_level="error", http=run._Protocol)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve(sockets=[opened]))
        reader, writer = await asyncio.open_connection(*opened.getsockname())
        begun = time.monotonic()
        async with asyncio.timeout(10):
            result = await talk(reader, writer)
        seconds = time.monotonic() - begun
        writer.close()
        server.should_exit = True
        await serving
        return result, seconds

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(run, "_HEADERS_S", LIMIT_S)


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
