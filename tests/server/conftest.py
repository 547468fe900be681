"""Servers in processes of their own, with tiny models."""

import contextlib
import re
import signal

import httpx
import psutil
import pytest

from spec_local.llama.tiny import write_tiny_model
from tests import processes
from tests.chat_templates import TOOL_TEMPLATES
from tests.cli.conftest import Inside, Specdec, folders


class Server:
    """A running ``specdec serve``.

    Attributes:
        address: such as http://localhost:1234.
        process: of the command.
    """

    def __init__(self, specdec, *arguments, env=None):
        self.process = specdec.start("serve", "--port", 0, "--threads", 1, *arguments, env=env)
        self.line = specdec.wait_for(self.process, b" serves ").decode()
        self.address = re.search(r"http://\S+", self.line)[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def engine(self):
        """The process with the models; there may be others for some milliseconds, which read headers."""
        (child,) = processes.children("spec_local.server.supervision.engine_process", self.process.pid)
        return child

    def request(self, method, path, **options):
        return httpx.request(method, self.address + path, timeout=30, **options)

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body, **options):
        return self.request("POST", path, json=body, **options)

    def stream(self, path, body, **options):
        return httpx.stream("POST", self.address + path, json=body, timeout=30, **options)

    def chat(self, text, **options):
        """The answer to a message, at temperature 0 unless the options say otherwise."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
        response = self.post("/v1/chat/completions", body | options)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name):
        """The value of a counter."""
        found = re.search(rf"^specdec:{re.escape(name)} (\S+)$", self.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    def stop(self, signum=signal.SIGTERM):
        """End it; return its exit code and what it printed since it was ready."""
        with contextlib.suppress(psutil.NoSuchProcess):
            engines = psutil.Process(self.process.pid).children()
            self.process.send_signal(signum)
            ended = self.wait()
            psutil.wait_procs(engines, timeout=10)
            assert not any(engine.is_running() for engine in engines)
            return ended

    def wait(self, timeout=30):
        """Wait for its end; return its exit code and what it printed since it was ready."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors.decode()


@pytest.fixture(scope="session")
def specdec(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return Specdec(home, folders(home))


@pytest.fixture(scope="session")
def inside(specdec):
    return Inside(specdec.folder, specdec.environment)


@pytest.fixture(scope="session")
def models(specdec):
    """A main model that never ends its answer and its draft model, in F32, so that batches are accurate."""
    return [
        write_tiny_model(
            specdec.folder / name,
            n_layers=1,
            tensor_type="F32",
            n_ctx=1 << 15,
            noise=noise,
            chat_template=TOOL_TEMPLATES["Hermes"],
        )
        for name, noise in (("main.gguf", 0.0), ("draft.gguf", 0.1))
    ]


@pytest.fixture(scope="session")
def arguments(models):
    return [models[0], "--draft", models[1], "--ctx", 4096, "--parallel", 4]


@pytest.fixture(scope="module")
def server(specdec, arguments):
    """A server that the tests of a module share."""
    with Server(specdec, *arguments) as started:
        yield started
