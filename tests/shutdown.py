"""How long the server takes to end, by what it does when the signal comes: ``python -m tests.shutdown``.

tests/server/test_shutdown.py has the states of which each is a risk of its own.
"""

import contextlib
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from spec_local.llama import rpc as rpc_backend
from spec_local.llama.tiny import write_tiny_model
from tests import processes
from tests.chat_templates import TOOL_TEMPLATES
from tests.cli.conftest import Specdec, folders
from tests.server.conftest import Server
from tests.workers import Worker

ENDLESS = {"prompt": "one two", "n_predict": 100_000, "stream": True, "speculative": False}
LIMIT_S, QUIET_LIMIT_S = 8, 1
"""Seconds in which the server ends, and where it answers nothing."""
STATES = {}
_TRAINING = """
import sys
if "serve" in sys.orig_argv:
    from spec_local.server.learning import idle_training as learning
    learning.extras.without_torch = lambda: None
    learning.IdleTraining.__init__.__kwdefaults__.update(
        idle_s=0.1, min_new=0, check_s=0.1, free=lambda: 1 << 40,
        command=[sys.executable, "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nwhile True: time.sleep(1)"])
"""


@dataclass
class World:
    """A folder with models, and what has been started.

    Attributes:
        server: the one that is to end.
    """

    specdec: Specdec
    server: Server | None = None
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def model(self, name="main"):
        path = self.specdec.folder / f"{name}.gguf"
        if not path.exists():
            template = TOOL_TEMPLATES["Hermes"]
            write_tiny_model(path, n_layers=1, tensor_type="F32", n_ctx=1 << 15, chat_template=template)
        return path

    def serve(self, *arguments, models=("main",), env=None):
        options = ["--draft", "none", *arguments]
        self.server = Server(self.specdec, *map(self.model, models), *options, env=env)
        return self.server

    def in_background(self, ask):
        """Call a function in a thread, whatever becomes of it."""

        def run():
            with contextlib.suppress(httpx.HTTPError, OSError):
                ask()

        threading.Thread(target=run, daemon=True).start()

    def post(self, body, path="/completion"):
        def ask():
            with httpx.stream("POST", self.server.address + path, json=body, timeout=60) as response:
                for _ in response.iter_raw():
                    pass

        self.in_background(ask)

    def stop_process(self, process):
        """Stop a process until the end of the test."""

        def go_on():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGCONT)

        process.send_signal(signal.SIGSTOP)
        self.ends.callback(go_on)

    def seconds(self):
        """Send SIGTERM; return the seconds until the end, the exit code, and what was printed."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        begun = time.monotonic()
        self.server.process.send_signal(signal.SIGTERM)
        code, errors = self.server.wait(60)
        seconds = time.monotonic() - begun
        _, left = psutil.wait_procs(children, timeout=5)
        assert not left, left
        return seconds, code, errors


def state(limit):
    """Register a function that brings a `World` into a state; limit: seconds until the end."""
    return lambda function: STATES.setdefault(function.__name__.replace("_", " "), (function, limit))


@state(QUIET_LIMIT_S)
def idle(world):
    world.serve()


@state(QUIET_LIMIT_S)
def loading(world):
    process = world.specdec.start("serve", "--port", 0, world.model(), "--draft", "none")
    world.specdec.wait_for(process, b": loading")
    world.server = Server.__new__(Server)
    world.server.process = process
    time.sleep(0.5)


@state(LIMIT_S)
def answering(world):
    world.serve("--ctx", 1 << 15)
    world.post(ENDLESS)
    time.sleep(0.5)


@state(LIMIT_S)
def reading_a_long_prompt(world):
    world.serve("--ctx", 1 << 15)
    world.post(ENDLESS | {"prompt": "many " * 30_000})
    time.sleep(0.5)


@state(LIMIT_S)
def waiting_for_a_row(world):
    world.serve("--ctx", 1 << 15, "--parallel", 1)
    for _ in range(12):
        world.post(ENDLESS)
    time.sleep(0.5)


@state(QUIET_LIMIT_S)
def requests_waiting_for_a_model(world):
    world.serve("--ctx", 4096, "--parallel", 2, "--memory", 0.2, models=("main", "second"))
    for _ in range(12):
        world.post(ENDLESS | {"model": "second"}, "/v1/completions")
    time.sleep(0.3)


@state(QUIET_LIMIT_S)
def a_crashed_engine_without_its_file(world):
    world.model("lost")
    server = world.serve(models=("lost",))
    world.model("lost").unlink()
    server.engine.kill()
    time.sleep(5)


@state(LIMIT_S)
def a_stopped_engine(world):
    server = world.serve("--ctx", 1 << 15)
    world.stop_process(server.engine)
    for _ in range(12):
        world.post(ENDLESS | {"prompt": "many " * 24_000})
    time.sleep(1)


@state(QUIET_LIMIT_S)
def an_idle_engine_that_has_been_stopped(world):
    server = world.serve()
    world.stop_process(server.engine)
    time.sleep(8)


@state(LIMIT_S)
def a_stopped_worker(world):
    worker = Worker(world.specdec.environment)
    world.ends.callback(worker.kill)
    world.serve("--ctx", 1 << 15, "--workers", worker.address)
    world.post(ENDLESS)
    time.sleep(1)
    world.stop_process(worker.process)
    time.sleep(1)


def _training(world):
    folder = world.specdec.folder / "training"
    env = world.specdec.sabotaged(folder, _TRAINING)
    server = world.serve("--learn", env=env)

    while not (trainings := processes.children("-c", server.process.pid)):
        time.sleep(0.05)
    time.sleep(0.5)
    return trainings[0]


@state(QUIET_LIMIT_S)
def training(world):
    _training(world)


@state(QUIET_LIMIT_S)
def training_that_is_stopped(world):
    world.stop_process(_training(world))


@state(LIMIT_S)
def a_client_that_does_not_read(world):
    server = world.serve("--ctx", 1 << 15)
    connection = _connection(server)
    world.ends.callback(connection.close)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = b'{"prompt": "one two", "n_predict": 100000, "stream": true, "n_probs": 20}'
    _send_headers(connection, len(body))
    connection.sendall(body)
    time.sleep(3)


@state(QUIET_LIMIT_S)
def a_slow_upload(world):
    connection = _connection(world.serve())
    world.ends.callback(connection.close)
    _send_headers(connection, 1000)
    connection.sendall(b'{"prompt": ')
    time.sleep(0.5)


def _connection(server):
    host, port = re.search(r"//(\S+):(\d+)", server.address).groups()
    return socket.create_connection((host, int(port)))


def _send_headers(connection, size):
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())


@contextlib.contextmanager
def in_state(name, specdec):
    """A world in a state."""
    world = World(specdec)
    try:
        with world.ends:
            STATES[name][0](world)
            yield world
    finally:
        if world.server:
            world.server.process.kill()
            world.server.process.communicate()


def main():
    chosen = sys.argv[1:] or STATES
    with tempfile.TemporaryDirectory() as folder:
        specdec = Specdec(Path(folder), folders(Path(folder)))
        print("| state | seconds | limit | exit code | printed |\n| --- | --- | --- | --- | --- |")
        for name in chosen:
            if "worker" in name and not rpc_backend.built():
                print(f"| {name} | no RPC backend | | | |")
                continue
            try:
                with in_state(name, specdec) as world:
                    seconds, code, errors = world.seconds()
                    lines = [line for line in errors.splitlines() if line.strip()]
                    print(f"| {name} | {seconds:.1f} | {STATES[name][1]} | {code} |", *lines[-1:], "|")
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error)[:80]} | | | |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
