"""Workers on loopback, for tests of main models over several machines."""

import contextlib
import socket
import subprocess
import sys

import pytest

from spec_local.llama import rpc as rpc_backend
from spec_local.llama.workers import silent
from tests.waiting import wait_until

needs_backend = pytest.mark.skipif(
    not rpc_backend.built(), reason="there is no RPC backend: specdec doctor --fix rpc"
)


class Worker:
    """A running ``specdec worker``."""

    def __init__(self, environment=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._environment = environment
        self.start()

    def start(self):
        command = [sys.executable, "-m", "specdec_cli", "worker", "--port", str(self.port), "--threads", "1"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=self._environment, stdout=pipe, stderr=pipe)
        wait_until(lambda: not silent([self.address]))

    def kill(self):
        """Kill it; return what it wrote on stdout."""
        self.process.kill()
        return self.process.communicate()[0]


@contextlib.contextmanager
def two_workers(environment=None):
    started = [Worker(environment) for _ in range(2)]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()
