"""A second signal while a call does not return, and workers that do not answer."""

import json
import signal
import subprocess
import time

import pytest

from tests.waiting import wait_until

LIMIT_S = 10  # for what takes half a second on a machine that does nothing else
# The next call of a model does not return as soon as a file exists, as where a worker is stopped.
STUCK = """
import ctypes, os, sys
if "specdec_cli" in sys.orig_argv:
    from spec_local.llama import native_context
    decode = native_context.NativeContext._decode
    def stuck(self, batch):
        if os.path.exists({flag!r}):
            open({flag!r} + ".seen", "w").close()
            lock = ctypes.create_string_buffer(256)  # waiting for it is not interrupted by a signal
            libc = ctypes.CDLL(None)
            libc.pthread_mutex_init(lock, None)
            libc.pthread_mutex_lock(lock)
            libc.pthread_mutex_lock(lock)
        return decode(self, batch)
    native_context.NativeContext._decode = stuck
"""
LONG = ["--ctx", 16384, "-n", 16000, "--threads", 1, "--policy", "off", "--draft", "none"]


class Stuck:
    """env: of a command whose calls do not return after `begin`."""

    def __init__(self, specdec, folder):
        self._flag = folder / "flag"
        self.env = specdec.sabotaged(folder / "stuck", STUCK.format(flag=str(self._flag)))

    def begin(self):
        self._flag.touch()
        wait_until(self._flag.with_name("flag.seen").exists)


@pytest.fixture
def stuck(specdec, tmp_path):
    return Stuck(specdec, tmp_path)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_call(specdec, main, stuck, kind):
    process = specdec.start("generate", "--main", main, *LONG, "one", env=stuck.env)
    with process.stdout, process.stderr:
        assert process.stdout.read(1)
        stuck.begin()
        process.send_signal(kind)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)  # the first one waits for the end of the call
        process.send_signal(kind)
        assert process.wait(LIMIT_S) == 128 + kind
        assert process.stderr.read() == b""


def test_a_chat_keeps_what_it_has_said(specdec, terminal, main, stuck):
    chat = terminal("--main", main, *LONG, env=stuck.env)
    chat.prompt()
    chat.enter("one two three")
    chat.until_answer()
    stuck.begin()
    for _ in range(2):
        chat.child.sendintr()
        time.sleep(0.3)
    rest = chat.rest()
    assert chat.child.getecho()  # the editor, and an answer, have other modes
    assert chat.leaves_with() == 130
    assert rest.count("Traceback") == 0
    (kept,) = specdec.folder.rglob("last-chat.json")
    messages = json.loads(kept.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"]
