"""The end of the server in states in which something does not answer; and what it says until then."""

import asyncio
import contextlib
import signal
import time

import httpx
import pytest

from spec_local.server.supervision.supervisor import NotReady, Supervisor
from tests import shutdown
from tests.server.test_engine import GREEDY, AnswerRequest, arguments, collect, running  # noqa: F401
from tests.server.test_several_models import answer, engines, paths, start  # noqa: F401
from tests.waiting import wait_until
from tests.workers import needs_backend

BUSY_S = 4  # more than usual, as other tests run beside these
KEPT = [
    "requests waiting for a model",
    "a crashed engine without its file",
    "a stopped engine",
    "training that is stopped",
    "a client that does not read",
    "a slow upload",
]


@pytest.mark.parametrize("state", [*KEPT, pytest.param("a stopped worker", marks=needs_backend)])
def test_the_end(specdec, state):
    with shutdown.in_state(state, specdec) as world:
        seconds, code, errors = world.seconds()
    assert code == 0
    assert "Traceback" not in errors
    assert seconds < shutdown.STATES[state][1] + BUSY_S


@needs_backend
def test_a_server_is_not_healthy_while_its_worker_is_silent(specdec):
    with shutdown.in_state("a stopped worker", specdec) as world:
        wait_until(lambda: world.server.get("/health").status_code == 503)


def test_a_stopped_process_of_one_model(specdec, paths):  # noqa: F811
    """The event loop waits neither until it reads nor until it ends: others are answered meanwhile."""
    server = start(specdec, paths)

    def asked(prompt, timeout=0.3):
        """The status of the answer of the stopped process; None: there is none yet."""
        body = {"model": "Second", "prompt": prompt, "max_tokens": 4}
        with contextlib.suppress(httpx.ReadTimeout):
            return httpx.post(server.address + "/v1/completions", json=body, timeout=timeout).status_code

    try:
        assert answer(server, "Second")
        newest = max(engines(server), key=lambda engine: engine.create_time())
        newest.send_signal(signal.SIGSTOP)
        assert {asked("many " * 24_000) for _ in range(12)} <= {None, 503}
        begun = time.monotonic()
        assert server.get("/health").status_code == 200
        assert answer(server, "first")
        assert time.monotonic() - begun < 10
        wait_until(lambda: asked("one") == 503)  # it counts as silent
        newest.send_signal(signal.SIGCONT)
        wait_until(lambda: asked("one", timeout=10) == 200)
    finally:
        code, errors = server.stop()
    assert code == 0
    assert "Traceback" not in errors


async def test_a_process_is_killed_while_models_are_loaded_again(arguments):  # noqa: F811
    """Whichever it is, the old one or the new one, and whenever: the models are loaded in the end."""
    async with running(arguments) as engine:
        for delay in (0.0, 0.2, 1.0):
            reloading = asyncio.create_task(engine.reload(arguments | {"draft": None}))
            await asyncio.sleep(delay)
            engine._process.kill()
            await reloading
            async with asyncio.timeout(60):
                while not engine.loaded:
                    await asyncio.sleep(0.05)
            assert await collect(engine.answer([AnswerRequest(GREEDY, prompt="one")]))


async def test_the_end_of_a_pause_between_two_attempts(arguments, tmp_path):  # noqa: F811
    engine = Supervisor(arguments | {"main": tmp_path / "missing.gguf"}, "tiny")
    task = asyncio.create_task(engine.run(persist=True))
    await engine.ready.wait()
    await asyncio.sleep(0)
    engine.stop()
    async with asyncio.timeout(0.9):  # a pause takes 1 s at least
        await task
    with pytest.raises(NotReady, match="is stopping"):
        engine.check_ready()
