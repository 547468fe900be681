"""Many clients at the same time, some of them rude: nothing is lost, and nothing grows.

    python -m tests.load --seconds 300 http://localhost:8080 [--models a,b] [--same]

The server must run on this machine. Each client does one thing after another, at random: it reads an answer
whole or as a stream, stays away for a while in the middle of one, disconnects early, or sends garbage. Eight
clients do each of these at least once. Some answers have a stop string or a grammar, which may end in the
step in which the model does. An answer that was not given up must be complete, or refused because too many
wait; the processes' memory, files and threads must be after the clients what they were after the first fifth
of the time. With --same, a request at temperature 0 must always have the same answer: for models whose logits
do not depend on the size of a call (see docs/kernels.md).
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import psutil

MAX_GROWTH = 0.05
"""Of the memory, over the last four fifths of the time."""
N_TOKENS = 24
GARBAGE = (
    b"{",
    b"[1]",
    b'{"messages": 1}',
    b'{"messages": []}',
    b"\xff" * 99,
    b"[" * 9999,
    b'{"temperature": 1e999}',
)
BYTES = (
    b"\x00\xff" * 500,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{",
)


STOPS = (".", "e", " t", "on", "\n", "!", "1")
GRAMMARS = ('root ::= "ok."', 'root ::= [a-z ]+ "."')


@dataclass
class Load:
    """The observations of the clients.

    models: names to draw from. same: whether to compare answers to the same request. texts: answers at
    temperature 0, by request. failures: what must not happen.
    """

    address: str
    models: list = field(default_factory=list)
    same: bool = False
    texts: dict = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)

    def body(self, rng, **more):
        words = random.Random(rng.randint(1, 40))  # so that questions come again
        question = " ".join(words.choices(("one", "two", "three", "four", "five"), k=words.randint(1, 60)))
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": rng.choice((0, 1))} | more
        if self.models:
            body["model"] = rng.choice(self.models)
        if rng.random() < 0.5:
            body["stop"] = rng.sample(STOPS, rng.randint(1, 2))
        if rng.random() < 0.1:
            body["grammar"] = rng.choice(GRAMMARS)
        return body

    def compare(self, body, text):
        """Note an answer; it must be what it was before."""
        if body["temperature"] == 0 and self.same:
            before = self.texts.setdefault(json.dumps(body, sort_keys=True), text)
            assert before == text, f"{before!r} before, now {text!r}"
            self.counts["compared"] += 1

    async def whole(self, client, rng):
        body = self.body(rng)
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            self.counts["refused"] += 1
            await asyncio.sleep(rng.random())
            return
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] <= N_TOKENS
        self.compare(body, response.json()["choices"][0]["message"]["content"])

    async def stream(self, client, rng, wait=0.0, give_up=False):
        body = self.body(rng, stream=True, stream_options={"include_usage": True})
        last = ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                self.counts["refused"] += 1
                await asyncio.sleep(rng.random())
                return
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if give_up and rng.random() < 0.2:
                    return
                if line:
                    before, last = last, line
                if wait:
                    await asyncio.sleep(wait)
                    wait = 0.0
        assert last == "data: [DONE]", last
        assert json.loads(before.removeprefix("data: "))["usage"]["completion_tokens"] <= N_TOKENS

    async def stay_away(self, client, rng):
        await self.stream(client, rng, wait=rng.random() * 3)

    async def give_up(self, client, rng):
        await self.stream(client, rng, give_up=True)

    async def give_up_waiting(self, client, rng):
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/chat/completions", json=self.body(rng), timeout=rng.random() / 2)

    async def garbage(self, client, rng):
        response = await client.post("/v1/chat/completions", content=rng.choice(GARBAGE))
        assert response.status_code in (400, 404), response.text  # 404: it names none of several models
        assert "Traceback" not in response.text

    async def no_http(self, client, rng):
        parts = urlsplit(self.address)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(rng.choice(BYTES))
        await writer.drain()
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(100), 1)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def ask(self, client, rng):
        path = rng.choice(("/health", "/metrics", "/v1/models", "/props", "/costs", "/nothing"))
        assert (await client.get(path)).status_code in (200, 404)

    async def client(self, number, until):
        rng = random.Random(number)
        kinds = [self.whole, self.stream, self.stay_away, self.give_up, self.give_up_waiting]
        kinds += [self.garbage, self.no_http, self.ask]
        kind = kinds[number % len(kinds)]
        async with httpx.AsyncClient(base_url=self.address, timeout=120) as client:
            while time.monotonic() < until:
                try:
                    await kind(client, rng)
                except Exception as error:
                    self.failures.append(f"{kind.__name__}: {type(error).__name__} {error}"[:300])
                self.counts[kind.__name__] += 1
                (kind,) = rng.choices(kinds, (6, 6, 2, 2, 1, 1, 1, 1))


@dataclass(frozen=True)
class Size:
    """Resident memory in bytes, open files and threads of the server's processes."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid):
        main = psutil.Process(pid)
        processes = [main, *main.children()]
        return cls(
            sum(process.memory_info().rss for process in processes),
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
        )


async def run(address, pid, seconds, n_clients, **options):
    """Let the clients work for so many seconds; return what they saw, and the sizes before and after."""
    load, started = Load(address, **options), time.monotonic()
    first = [asyncio.create_task(load.client(i, started + seconds / 5)) for i in range(n_clients)]
    await asyncio.gather(*first)
    await asyncio.sleep(1)  # until the last rows are cancelled
    before = Size.of(pid)
    rest = [asyncio.create_task(load.client(n_clients + i, started + seconds)) for i in range(n_clients)]
    await asyncio.gather(*rest)
    await asyncio.sleep(1)
    return load, before, Size.of(pid)


def pid_of(address):
    port = urlsplit(address).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return connection.pid
    sys.exit(f"nothing listens at {address} on this machine")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--models", type=lambda names: names.split(","), default=[])
    parser.add_argument("--same", action="store_true")
    given = parser.parse_args()
    load, before, after = asyncio.run(
        run(
            given.address,
            pid_of(given.address),
            given.seconds,
            given.clients,
            models=given.models,
            same=given.same,
        )
    )
    print(dict(load.counts))
    print(f"memory {before.memory / after.memory:.3f} → 1, {before} → {after}")
    for failure in load.failures[:20]:
        print(failure)
    sys.exit(bool(load.failures) or after.memory > (1 + MAX_GROWTH) * before.memory)


if __name__ == "__main__":
    main()
