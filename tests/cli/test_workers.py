"""A main model on workers: the same logits, and what happens when a worker is not there, or dies."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import workers
from spec_local.llama.tiny import write_tiny_model
from tests.waiting import wait_until
from tests.workers import Worker, needs_backend, two_workers

SCRIPT = """
import sys
import numpy as np
from spec_local import kernels
from spec_local.core.calls import run
from spec_local.llama.open import open_sequence
from spec_local.llama.model import Model

path, *addresses = sys.argv[1:]
kernels.use("off")  # workers compute with llama.cpp's own
found = []
for where in (addresses, addresses[:1], ()):
    model = Model(path, workers=where)
    # llama.cpp chooses flash attention by the device.
    options = {"n_ctx": 64, "max_tokens": 32, "max_logits": 32, "max_branches": 4}
    context = open_sequence(model, **options, flash_attention=False)
    logits = [run(context.call([5, 6, 7, 8])).copy(), run(context.call([9])).copy()]
    context.truncate(4)
    # A tree: two branches after the same token; the second one is committed, and then rolled back.
    call = context.call([9, 10, 11], [-1, 0, 0], 3)
    (nodes,) = context.context.decode([call])
    logits.append(np.array([nodes[i] for i in range(3)]))
    context.commit([0, 2])
    logits.append(run(context.call([12])).copy())
    context.truncate(4)
    logits.append(run(context.call([9])).copy())
    found.append(logits)
for remote in found[:2]:
    for a, b in zip(remote, found[2]):
        np.testing.assert_array_equal(a, b)
# The rollback left no trace. The same token in the tree may have other bits: with llama.cpp's kernels, they
# depend on the number of tokens in a call, on AVX2 also for these few.
np.testing.assert_array_equal(found[0][4], found[0][1])
print("equal")
"""


@pytest.fixture(scope="module")
def pair(specdec):
    with two_workers(specdec.environment) as started:
        yield started


@pytest.fixture(scope="module")
def f16(specdec):
    """F16: where this machine repacks weights, its logits differ from those of workers."""
    return write_tiny_model(specdec.folder / "f16.gguf", n_layers=4, n_ctx=1 << 15)


@needs_backend
def test_logits_are_those_of_this_machine(specdec, pair, f16):
    """Bit for bit, with trees and rollbacks, over two workers and on one."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(f16), *(worker.address for worker in pair)],
        capture_output=True,
        env=specdec.environment | {"GGML_NO_BACKTRACE": "1"},
        timeout=60,
        check=False,
    )
    assert done.stdout == b"equal\n", done.stderr.decode()


@needs_backend
def test_answers_are_those_of_this_machine(specdec, inside, pair, f16, draft):
    """The draft model is on this machine."""
    arguments = ["generate", "one two three", "--main", f16, "--draft", draft, "--ctx", 512]
    arguments += ["-n", 32, "--threads", 1, "--temp", 0, "--json", "--policy", "fixed", "--draft-max", 4]
    local = json.loads(inside(*arguments).stdout)
    done = specdec(*arguments, "--workers", ",".join(worker.address for worker in pair))
    assert done.returncode == 0, done.stderr.decode()
    remote = json.loads(done.stdout)
    assert remote["tokens"] == local["tokens"]
    assert remote["timings"]["draft_n"] > 0


@pytest.fixture
def impatient(specdec, tmp_path):
    """The environment of commands in which a worker may be silent for 3 s."""
    lines = 'import sys\nif "specdec_cli" in sys.orig_argv:\n    from spec_local.llama import workers\n'
    return specdec.sabotaged(tmp_path / "impatient", lines + "    workers._QUIET, workers._SILENT = 1, 3\n")


def lost(specdec, f16, loses, **options):
    """The addresses of two workers, the second of which is lost during an answer, and the errors."""
    with two_workers(specdec.environment) as started:
        addresses = [worker.address for worker in started]
        arguments = ["generate", "one", "--main", f16, "--ctx", 16384, "-n", 8000, "--threads", 1]
        process = specdec.start(*arguments, "--workers", ",".join(addresses), "--policy", "off", **options)
        assert process.stdout.read(1)  # it answers
        loses(started[1])
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    lines = errors.decode().splitlines()
    return addresses, errors.decode(), [line for line in lines if line.startswith("specdec: ")]


@needs_backend
def test_a_worker_that_dies(specdec, f16):
    addresses, errors, (line,) = lost(specdec, f16, Worker.kill)
    assert line != f"specdec: {workers.no_answer(addresses[1])}"  # it is noticed before that
    assert addresses[1] in line
    assert addresses[0] not in line
    assert not re.search("ggml|Traceback|abort", errors)


@needs_backend
def test_a_worker_that_is_stopped(specdec, f16, impatient):
    """It is as if its machine slept: its connections stay open, and nothing arrives."""
    addresses, _, lines = lost(
        specdec, f16, lambda worker: worker.process.send_signal(signal.SIGSTOP), env=impatient
    )
    assert lines == [f"specdec: {workers.no_answer(addresses[1])}".replace("20 s", "3 s")]


@needs_backend
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_while_a_worker_is_stopped(specdec, f16, signum):
    worker = Worker(specdec.environment)
    arguments = ["generate", "one", "--main", f16, "--ctx", 16384, "-n", 8000, "--threads", 1]
    process = specdec.start(*arguments, "--workers", worker.address, "--policy", "off")
    try:
        assert process.stdout.read(1)
        worker.process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        for _ in range(2):
            process.send_signal(signum)
            time.sleep(0.3)
        process.communicate(timeout=10)
        assert process.returncode == 128 + signum
    finally:
        worker.kill()


def test_replies_of_workers():
    """A worker counts from its first reply on, and is silent after as many datagrams without one."""
    watch, silent = workers._Watch(ask_s=0.02), []
    watch.on_silence = silent.append
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)]
        addresses = []
        for each in opened:
            each.bind(("127.0.0.1", 0))
            each.settimeout(10)
            addresses.append(f"127.0.0.1:{each.getsockname()[1]}")
            watch.add(addresses[-1])

        def reply(text):
            received, client = opened[0].recvfrom(100)
            assert received == workers._ASKED
            opened[0].sendto(text, client)

        reply(b"something else")
        time.sleep(1)  # no reply has come, as where a firewall drops datagrams
        assert silent == watch.unanswered() == []
        reply(workers._REPLIED)
        wait_until(lambda: watch.unanswered() == addresses[:1])
        reply(workers._REPLIED)
        wait_until(lambda: watch.unanswered() == [])
        watch.is_idle = True
        wait_until(lambda: watch._unanswered and max(watch._unanswered.values()) > 30)
        assert silent == []
        watch.is_idle = False
        wait_until(lambda: silent)
        assert set(silent) == {addresses[0]}


@needs_backend
def test_a_worker_that_is_not_there(specdec, f16, pair):
    worker = Worker(specdec.environment)
    worker.kill()
    addresses = f"{pair[0].address},{worker.address}"
    line = specdec.one_line(specdec("generate", "x", "--main", f16, "--workers", addresses), 1)
    assert worker.address in line
    assert pair[0].address not in line


@needs_backend
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_a_worker(specdec, signum):
    worker = Worker(specdec.environment)
    worker.process.send_signal(signum)
    output, errors = worker.process.communicate(timeout=10)
    assert worker.process.returncode == 0
    assert output == b""
    assert errors.decode().splitlines() == [f"specdec: worker at {worker.address}, 1 thread; Ctrl-C ends it"]


@needs_backend
def test_ctrl_c_while_a_worker_computes(specdec, pair, f16):
    addresses = ",".join(worker.address for worker in pair)
    process = specdec.start(
        *("generate", "one", "--main", f16, "--ctx", 16384, "-n", 8000, "--workers", addresses)
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_workers_do_not_give_reproducible_output(specdec, f16):
    arguments = ["generate", "x", "--main", f16, "--workers", "127.0.0.1", "--reproducible"]
    assert "reproducible" in specdec.one_line(specdec(*arguments), 2)


@pytest.mark.parametrize(
    "arguments",
    [["generate", "x", "--workers", "8.8.8.8"], ["worker", "--host", "0.0.0.0"]],
    ids=["client", "worker"],
)
def test_public_addresses_are_refused(inside, arguments):
    assert "ssh tunnel" in inside.one_line(inside(*arguments), 2)


@pytest.mark.parametrize(
    "text", ["", ":1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "no such host:1", "a\0b:1"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(InvalidRequest):
        workers.parse([text])


def test_addresses():
    given = ["127.0.0.1", " 192.168.1.2:7 ", "localhost:08"]
    assert workers.parse(given) == ["127.0.0.1:50052", "192.168.1.2:7", "127.0.0.1:8"]
    with pytest.raises(InvalidRequest, match="given twice"):
        workers.parse(["localhost:5", "127.0.0.1:5"])


@needs_backend
def test_a_worker_that_serves_another_client(specdec, f16, pair):
    address = pair[0].address
    arguments = ["generate", "one", "--main", f16, "--ctx", 16384, "--workers", address]
    first = specdec.start(*arguments, "-n", 8000)
    try:
        assert first.stdout.read(1)
        (client,) = psutil.Process(first.pid).children()
        client.suspend()  # its connection stays open
        line = specdec.one_line(specdec(*arguments, "-n", 1), 1)
        assert f"{address} serves another client" in line
    finally:
        client.resume()
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=20)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request"], ids=["silent", "HTTP"])
def test_what_is_no_worker(reply):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BackendError, match="no worker"):
            workers.check_ready(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
