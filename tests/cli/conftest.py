"""Fixtures that run the command in a process, with its own folders."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import huggingface_hub
import pexpect
import pytest
import typer
from huggingface_hub import constants

from spec_local.llama import runtime
from spec_local.llama.tiny import write_tiny_model
from spec_local.models import catalog
from specdec_cli import __main__
from specdec_cli.app import app

CUT = re.compile(rb"^cut at \d+ tokens?: for the rest, give a larger -n, or leave it out\n", re.MULTILINE)
FIRST_USE = re.compile(r"(checking|measuring) .* \(first use")
COMMAND = [sys.executable, "-m", "specdec_cli"]
BUILT = typer.main.get_command(app)  # once: it takes longer than most commands

# Under nohup it is ignored, also by child processes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Specdec:
    """Runs the command, and checks its result."""

    command = COMMAND
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments, stdin=b"", env=None, cwd=None, timeout=60):
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env=self.environment | (env or {}),
            cwd=cwd or self.folder,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments, env=None, **kwargs):
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment | (env or {}),
            cwd=self.folder,
            **kwargs,
        )

    def shell(self, script, *arguments):
        """Run a line of sh, with the command as "$@"."""
        return subprocess.run(
            ["sh", "-c", script, "sh", *COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            cwd=self.folder,
            timeout=60,
            check=False,
        )

    @staticmethod
    def wait_for(process, text, timeout=30):
        """Return the first line of a process's stderr with a text; kill the process after a timeout."""
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            lines = [b""]
            while text not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], (text, lines)
            return lines[-1]
        finally:
            timer.cancel()

    @staticmethod
    def sabotaged(folder, sitecustomize):
        """Return an environment in which every Python process first runs these lines."""
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(sitecustomize)
        return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)}

    @staticmethod
    def one_line(done, code):
        """Return the one line of a failure on stderr; check the exit code, and that stdout is empty."""
        assert done.returncode == code, done
        assert done.stdout == b""
        lines = done.stderr.decode().splitlines()
        lines = [line for line in lines if not FIRST_USE.match(line)]
        assert len(lines) == 1, done.stderr.decode()
        assert lines[0].startswith("specdec: ")
        return lines[0]

    @staticmethod
    def notes(done):
        """Return stderr without the note that -n cut the answer."""
        return CUT.sub(b"", done.stderr)

    @staticmethod
    def objects(done):
        """Return the objects of JSON Lines on stdout."""
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    @staticmethod
    def plain(screen):
        """Return a terminal's output without escape sequences and lines of `waiting`."""
        screen = re.sub("\x1b7.*?\x1b8", "", screen)
        return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-Z]?)", "", screen)


class Inside(Specdec):
    """Runs the command in this process, which is much faster."""

    def __call__(self, *arguments, stdin=b"", env=None, cwd=None, merged=False):
        """merged: standard error is written to standard output."""
        stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdout = os.fdopen(os.dup(out.fileno()), "w", encoding="utf-8")
            stderr = os.fdopen(os.dup(err.fileno()), "w", encoding="utf-8", errors="backslashreplace")
            streams = mock.patch.multiple(
                sys, stdin=stdin, stdout=stdout, stderr=stdout if merged else stderr
            )
            with stdout, stderr, streams, self._in_place(env, cwd), pytest.raises(SystemExit) as end:
                BUILT(list(map(str, arguments)), prog_name="specdec")
            written = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(arguments, end.value.code, *written)

    def on_terminal(self, *arguments, env=None, width=160, waiting_s=60.0):
        """Run the command on a pseudo-terminal; return its exit code and everything that it showed.

        waiting_s: seconds after which it says what it is waiting for.
        """
        delay = mock.patch.object(
            threading, "Timer", lambda _, *run, timer=threading.Timer: timer(waiting_s, *run)
        )
        words = mock.patch.object(sys, "argv", ["specdec", *map(str, arguments)])
        with (
            self._in_place(env),
            pseudo_terminal(width) as shown,
            words,
            delay,
            pytest.raises(SystemExit) as end,
        ):
            __main__.main()
        return end.value.code, shown[0]

    @contextlib.contextmanager
    def _in_place(self, env=None, cwd=None):
        """Give this process what a new one would begin with."""
        environment = self.environment | (env or {})
        url, cache = environment.get("HF_ENDPOINT", "https://huggingface.co"), environment["XDG_CACHE_HOME"]
        hub = mock.patch.multiple(
            constants,
            ENDPOINT=url,
            HUGGINGFACE_CO_URL_TEMPLATE=url + "/{repo_id}/resolve/{revision}/{filename}",
            HF_HUB_CACHE=environment.get("HF_HUB_CACHE", f"{cache}/huggingface/hub"),
            HF_TOKEN_PATH=f"{cache}/huggingface/token",
            HF_HUB_OFFLINE=environment.get("HF_HUB_OFFLINE") == "1",
        )
        catalog._catalog.cache_clear()
        runtime.set_verbose(False)
        variables = mock.patch.dict(os.environ, environment, clear=True)
        try:
            with variables, contextlib.chdir(cwd or self.folder), hub:
                yield
        finally:
            catalog._catalog.cache_clear()
            huggingface_hub.close_session()


@contextlib.contextmanager
def pseudo_terminal(width):
    """Replace the standard streams by a terminal; yields a list that has its whole output after the block.

    Nothing can be typed, and its Ctrl-C ends nothing: use the fixture `terminal` for that.
    """
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (40, width))
    shown, parts = [], []

    def read():
        with contextlib.suppress(OSError):  # all copies of the other end are closed
            while part := os.read(master, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    sys.stdout.flush()
    before = [os.dup(number) for number in range(3)]
    try:
        for number in range(3):
            os.dup2(slave, number)
        os.close(slave)
        with (
            open(0, closefd=False) as stdin,
            open(1, "w", encoding="utf-8", closefd=False) as stdout,
            open(2, "w", encoding="utf-8", closefd=False) as stderr,
            mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr),
        ):
            yield shown
    finally:
        for number, kept in enumerate(before):
            os.dup2(kept, number)
            os.close(kept)
        reader.join()
        os.close(master)
        shown.append(b"".join(parts).decode("utf-8", "surrogateescape"))


def folders(home):
    """Return an environment with all folders below `home`, and without the user's settings."""
    removed = ("XDG_", "SPECDEC_", "PYTHON", "NO_")
    kept = {k: v for k, v in os.environ.items() if k == "PYTHONPATH" or not k.startswith(removed)}
    own = {"HOME": str(home), "TERM": "xterm", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1"}
    own["OMP_WAIT_POLICY"] = "passive"  # active waiting is slow on a busy machine
    for kind in ("config", "cache", "data", "state"):
        own[f"XDG_{kind.upper()}_HOME"] = str(home / kind)
    return kept | own


SMALL = ["--threads", 1, "--ctx", 256, "-n", 1]

# A test runner in the background ignores Ctrl-C, also in child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def specdec(home):
    return Specdec(home, folders(home))


@pytest.fixture(scope="session")
def inside(home):
    return Inside(home, folders(home))


@pytest.fixture(scope="session")
def main(home, inside):
    """A main model that never ends its answer, checked and measured; F32, so that batches are accurate."""
    path = write_tiny_model(home / "main.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17)
    assert inside("generate", "--main", path, *SMALL, "x").returncode == 0
    return path


@pytest.fixture(scope="session")
def draft(home, inside, main):
    """A draft model that often agrees with the main model, already checked and measured."""
    path = write_tiny_model(home / "draft.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17, noise=0.1)
    assert inside("generate", "--main", main, "--draft", path, *SMALL, "x").returncode == 0
    return path


@pytest.fixture
def isolated(home, tmp_path):
    """The command with the measurements of the other tests; datastore, heads and prompts of its own."""
    own = tmp_path / "cache"
    (own / "specdec").mkdir(parents=True)
    for entry in (home / "cache/specdec").glob("*"):
        if entry.name not in ("texts", "prompts"):
            (own / "specdec" / entry.name).symlink_to(entry)
    more = {"XDG_CACHE_HOME": str(own), "XDG_DATA_HOME": str(tmp_path / "data")}
    return Inside(tmp_path, folders(home) | more)


@pytest.fixture
def fresh(tmp_path):
    """The command with empty folders, as on a new machine."""
    return Specdec(tmp_path, folders(tmp_path))


@pytest.fixture
def fresh_inside(tmp_path):
    """The same in this process."""
    return Inside(tmp_path, folders(tmp_path))


@pytest.fixture
def unmeasured(fresh_inside, home, draft):
    """The same with both models already checked, which takes a second each, but without measured costs."""
    known = fresh_inside.folder / "cache/specdec/checked-models"
    shutil.copytree(home / "cache/specdec/checked-models", known)
    return fresh_inside


class Terminal:
    """A command on a pseudo-terminal, whose output is read without escape sequences."""

    def __init__(self, specdec, *arguments, command="chat", env=None, width=160):
        self.specdec = specdec
        self.child = pexpect.spawn(
            specdec.command[0],
            [*specdec.command[1:], command, *map(str, arguments)],
            env=specdec.environment | (env or {}),
            cwd=str(specdec.folder),
            timeout=20,
            dimensions=(40, width),
            encoding="utf-8",
            codec_errors="replace",
        )

    def until(self, *what):
        """Wait for each of these texts; return the output up to the last one."""
        seen = ""
        for text in what:
            self.child.expect_exact(text)
            seen += self.child.before + text
        return self.specdec.plain(seen)

    def prompt(self):
        """Wait until the editor reads keys, which it shows by switching bracketed paste on."""
        return self.until("\x1b[?2004h", "\x1b[?25h")

    def until_answer(self):
        """Wait for a part of an answer; a line that says what is being waited for begins with a style."""
        self.child.expect(r"(?<!\x1b\[2m)(?<![a-z ])[a-z ]{8}")

    def type(self, text):
        self.child.send(text)

    def say(self, text):
        """Send a message; return the output up to the next prompt."""
        self.enter(text)
        return self.prompt()

    def enter(self, text):
        """Send a message; the editor then switches bracketed paste off."""
        self.type(text + "\r")
        self.until("\x1b[?2004l")

    def rest(self):
        """Return the output up to the end of the process."""
        self.child.expect(pexpect.EOF)
        return self.specdec.plain(self.child.before)

    def leaves_with(self):
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus

    def end(self):
        """Kill the process; after the end of its output, `close` waits for it, on a busy machine, too."""
        if not self.child.closed:
            self.child.kill(signal.SIGKILL)
            self.leaves_with()


@pytest.fixture
def terminal(specdec):
    opened = []

    def open_terminal(*arguments, specdec=specdec, **options):
        opened.append(Terminal(specdec, *arguments, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.end()
