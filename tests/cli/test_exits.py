"""How a command ends when it is told to: what was said is there, nothing is left over, and the code says why."""

import json
import signal
import subprocess
import sys
import time

import pexpect
import pytest
import typer

from specdec_cli import exits, render

TOLD = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
ENDLESS = ["--threads", 1, "--ctx", 1 << 16, "--raw", "--temp", 0]


def begun(specdec, *arguments):
    """A command that is in the middle of an answer."""
    process = specdec.start(*arguments, bufsize=0)
    first = b""
    while len(first) < 30:
        more = process.stdout.read(30)
        assert more, process.stderr.read()
        first += more
    return process, first


@pytest.mark.parametrize(("signum", "code"), TOLD)
def test_an_answer_is_cut_and_all_of_it_is_out(specdec, main, signum, code):
    process, first = begun(specdec, "generate", "--main", main, *ENDLESS, "--no-spec", "-v", "words")
    process.send_signal(signum)
    rest, notes = process.communicate(timeout=20)
    assert process.returncode == code
    plain = specdec("generate", "--main", main, *ENDLESS, "--no-spec", "-n", 40, "words").stdout
    said = first + rest
    assert said[: len(plain)] == plain[: len(said)]
    assert b"tokens/s" in notes  # the figures of what was said: it ended as an answer ends
    assert b"Traceback" not in notes
    assert b"Exception" not in notes


@pytest.mark.parametrize(("signum", "code"), TOLD)
def test_json_is_whole(specdec, main, signum, code):
    process = specdec.start("generate", "--main", main, *ENDLESS, "--json", "words", "-vv")
    specdec.wait_for(process, b"n_ctx")  # the context is being made
    time.sleep(0.3)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code
    if out:  # not stopped before the answer began
        assert json.loads(out)["stop_type"] == "none"


@pytest.mark.parametrize(("signum", "code"), TOLD)
def test_while_loading(specdec, main, signum, code):
    """llama.cpp's log is written by Python, in which an exception would be lost."""
    slow = "from spec_local.llama import runtime\n"
    slow += "said = runtime._on_log\n"
    slow += "def slow(*a):\n import time, sys; print('loading', flush=True, file=sys.stderr); time.sleep(0.003); said(*a)\n"
    slow += "runtime._on_log = slow\n"
    slow += "import sys; sys.argv[0] = 'specdec'\nfrom specdec_cli.__main__ import main\nmain()\n"
    arguments = [sys.executable, "-c", slow, "generate", "--main", main, *ENDLESS, "words"]
    process = subprocess.Popen(
        list(map(str, arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
        cwd=specdec.folder,
    )
    assert process.stderr.readline() == b"loading\n"
    process.send_signal(signum)
    out, notes = process.communicate(timeout=30)
    assert process.returncode == code, notes
    assert out == b""
    assert set(notes.splitlines()) <= {b"loading"}


@pytest.fixture
def handlers():
    """Handlers of signals in this process, as they were."""
    before = {signum: signal.getsignal(signum) for signum, _ in TOLD}
    yield before
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(("signum", "code"), TOLD)
def test_the_second_does_not_wait(handlers, signum, code):
    """But for hangups: a shell and the terminal both tell of one. In this process, where nothing is a matter of time."""
    reached = []

    def ask_twice():
        with exits.guarded(), render.interruptible() as cancelled:
            assert not cancelled()
            signal.raise_signal(signum)
            reached.append(cancelled())
            signal.raise_signal(signum)
            reached.append(cancelled())

    with pytest.raises((SystemExit, typer.Exit)) as end:
        ask_twice()
    assert getattr(end.value, "exit_code", None) == code or getattr(end.value, "code", None) == code
    assert reached == ([True, True] if signum == signal.SIGHUP else [True])
    ignored = (
        {signal.SIGHUP: signal.SIG_IGN} if signum == signal.SIGHUP else {}
    )  # until the process has ended
    assert {s: signal.getsignal(s) for s in handlers} == handlers | ignored


def test_under_nohup_a_hangup_is_nothing(specdec, main):
    command = 'trap "" HUP; exec "$@"'
    arguments = [*specdec.command, "generate", "--main", main, *ENDLESS, "words"]
    process = subprocess.Popen(
        ["sh", "-c", command, "sh", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.read(2000)  # it goes on
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_what_was_measured_is_kept(fresh, main):
    """The costs of calls, which a session saves when it is closed."""
    process, _ = begun(fresh, "generate", "--main", main, *ENDLESS, "words")
    assert not list(fresh.folder.rglob("costs/*"))
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert list(fresh.folder.rglob("costs/*"))
    assert not [p for p in fresh.folder.rglob("*") if p.suffix == ".part"]


def test_bench_reports_what_it_has(specdec, main, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n" * 500)
    arguments = [
        "bench",
        "--main",
        main,
        "--threads",
        1,
        "--ctx",
        512,
        "--tokens",
        8,
        "--prompts",
        prompts,
        "-v",
    ]
    process = specdec.start(*arguments)
    specdec.wait_for(process, b"1/1000")
    process.terminate()
    out, notes = process.communicate(timeout=20)
    assert process.returncode == 143
    assert b"of 1000 prompts" in out, (out, notes)


@pytest.mark.parametrize(("signum", "code"), TOLD[:2])
def test_at_the_prompt_of_a_chat(specdec, main, signum, code):
    template = ["chat", "--main", str(main), "--threads", "1", "--ctx", "512"]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "specdec_cli", *template],
        env=specdec.environment,
        cwd=str(specdec.folder),
        timeout=20,
        dimensions=(24, 100),
    )
    child.expect("/help")
    child.expect(rb">.*\x1b\[\?25h")  # the editor waits
    time.sleep(0.2)
    child.kill(signum)
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.signalstatus) == (code, None)
    assert b"Traceback" not in child.before
    assert b"\x1b[?2004l" in child.before  # the terminal is as it was


def test_a_closed_terminal(specdec, main):
    """Writing fails from then on; the code is that of the hangup all the same."""
    arguments = [*specdec.command, "generate", "--main", main, *ENDLESS, "words"]
    first, *rest = map(str, arguments)
    child = pexpect.spawn(first, rest, env=specdec.environment, timeout=20)
    child.expect(rb"\w")
    child.ptyproc.delayafterclose = child.ptyproc.delayafterterminate = 2
    child.close(force=False)
    assert (child.exitstatus, child.signalstatus) == (129, None)
