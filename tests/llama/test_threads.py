"""Several threads at once: what they may share, and what is freed while they use it."""

import ctypes
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.native_object import NativeObject
from spec_local.system import deep_stack

DEADLINE = 60  # seconds; what takes longer hangs


@pytest.fixture
def often():
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(n, work):
    """Call work(i) in n threads that start together, and return the results."""
    barrier = threading.Barrier(n, timeout=DEADLINE)

    def start(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(start, range(n)))


@pytest.fixture
def new_vocabulary(tiny_path):
    """A function that returns a vocabulary which has cached nothing."""
    return lambda: Model(tiny_path, weights=False).vocabulary


def test_pieces_in_threads(new_vocabulary, monkeypatch):
    """Both threads are within llama.cpp's call, and one token is longer than the first buffer."""
    both, to_piece = threading.Barrier(2, timeout=DEADLINE), runtime.library().llama_token_to_piece

    def slow(*arguments):
        n = to_piece(*arguments)
        both.wait()
        return n

    n_tokens = new_vocabulary().n_tokens
    for tokens in ((65, 66), (n_tokens - 2, n_tokens - 2)):
        expected, vocabulary = [new_vocabulary().piece(token) for token in tokens], new_vocabulary()
        with monkeypatch.context() as patch:
            patch.setattr(runtime.library(), "llama_token_to_piece", slow)
            found = in_threads(2, lambda i, tokens=tokens, shared=vocabulary: shared.piece(tokens[i]))
        assert found == expected


def test_the_stack_size_stays_the_same(monkeypatch):
    """A second thread must not take the first one's temporary stack size for the usual one."""
    first_starts, second_starts, first_done = (threading.Event() for _ in range(3))

    class Slow(threading.Thread):
        def start(self):
            if first_starts.is_set():
                second_starts.set()
                super().start()
                first_done.wait(DEADLINE)
            else:
                first_starts.set()
                second_starts.wait(0.1)  # in vain if the second thread waits for the first, as it should
                super().start()

    def call(i):
        if i:
            first_starts.wait(DEADLINE)
        deep_stack.call_with_stack((i + 1) << 20, lambda: None)
        first_done.set()

    before = threading.stack_size()
    threads = [threading.Thread(target=call, args=[i]) for i in range(2)]
    monkeypatch.setattr(threading, "Thread", Slow)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.stack_size() == before


def test_errors_quote_the_log_of_their_own_thread(capfd):
    both = threading.Barrier(2, timeout=DEADLINE)

    def fail(i):
        runtime.clear_log()
        both.wait()
        runtime._on_log(runtime._WARN, b"a warning", None)
        both.wait()
        runtime._on_log(runtime._ERROR if i else runtime._WARN, b"failure %d, " % i, None)
        both.wait()
        runtime._on_log(runtime._CONTINUE, b"continued", None)
        both.wait()
        return runtime.failure_reason()

    assert in_threads(2, fail) == ["a warning", "failure 1,"]


def test_llama_cpp_is_initialized_once():
    """In a new process, whose threads wait for the first one, which takes a tenth of a second."""
    script = """
import time
from concurrent.futures import ThreadPoolExecutor
from llama_cpp import llama_cpp
from spec_local.llama import runtime

def slow(started=[]):
    started.append(1)
    print(len(started))
    time.sleep(0.1)

llama_cpp.llama_backend_init = slow
with ThreadPoolExecutor(8) as pool:
    (library,) = set(pool.map(lambda i: runtime.library(), range(8)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_closing_during_a_call():
    """The memory is freed when the call returns."""
    entered, leave, happened = threading.Event(), threading.Event(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def native_call(address):
        entered.set()
        leave.wait(DEADLINE)
        happened.append(f"called with {address}")

    native = NativeObject(lambda address: happened.append(f"freed {address}"), 4096, "model")
    thread = threading.Thread(target=lambda: native_call(native.pointer))
    thread.start()
    assert entered.wait(DEADLINE)
    native.close()
    assert happened == []
    with pytest.raises(InvalidRequest, match="the model is closed"):
        _ = native.pointer
    leave.set()
    thread.join()
    assert happened == ["called with 4096", "freed 4096"]
    native.close()
    assert len(happened) == 2


def test_a_parent_is_freed_later():
    freed = []
    parent = NativeObject(freed.append, 1, "model")
    child = NativeObject(freed.append, 2, "context", parent.pointer)
    parent.close()
    assert freed == []
    child.close()
    assert freed == [2, 1]


def test_exit_while_a_daemon_thread_computes(tiny_path):
    script = """
import sys, threading
from spec_local.core.calls import run
from spec_local.llama.open import open_sequence
from spec_local.llama.model import Model

def decode():
    while True:
        run(context.call(range(90)))
        context.truncate(0)
        running.set()

running = threading.Event()
context = open_sequence(Model(sys.argv[1]), n_ctx=128, max_tokens=96, max_logits=96, threads=1)
threading.Thread(target=decode, daemon=True).start()
running.wait()
"""
    command = [sys.executable, "-X", "faulthandler", "-c", script, str(tiny_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
