"""The command as a person runs it: a real process, with folders of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pexpect
import pytest
from typer.testing import CliRunner

from spec_local.llama.tiny import write_tiny_model
from specdec_cli.app import app

FIRST_USE = re.compile(r"(checking|measuring) .* \(first use")
COMMAND = [sys.executable, "-m", "specdec_cli"]

# Whoever runs the tests under nohup ignores it, and their children would, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Specdec:
    """Runs the command, and helps to judge what came of it."""

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
        """Run a line of sh in which "$@" is the command."""
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
        """Read a process's stderr up to a line that holds a text; one that does not say it is killed."""
        late = threading.Timer(timeout, process.kill)
        late.start()
        try:
            said = [b""]
            while text not in said[-1]:
                said.append(process.stderr.readline())
                assert said[-1], (text, said)
        finally:
            late.cancel()

    @staticmethod
    def sabotaged(folder, sitecustomize):
        """An environment in which every Python starts with these lines."""
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(sitecustomize)
        return {"PYTHONPATH": str(folder)}

    @staticmethod
    def one_line(done, code):
        """The one line of a failure: said on stderr, nothing on stdout, no traceback."""
        assert done.returncode == code, done
        assert done.stdout == b""
        lines = done.stderr.decode().splitlines()
        lines = [line for line in lines if not FIRST_USE.match(line)]
        assert len(lines) == 1, done.stderr.decode()
        assert lines[0].startswith("specdec: ")
        return lines[0]

    @staticmethod
    def plain(screen):
        """What a terminal shows, without its escape sequences."""
        return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-Z]?)", "", screen)


class Inside(Specdec):
    """The same within this process: many times as fast, where nothing is the process's own."""

    def __call__(self, *arguments, stdin=b"", env=None, cwd=None):
        with (
            mock.patch.dict(os.environ, self.environment | (env or {}), clear=True),
            contextlib.chdir(cwd or self.folder),
        ):
            done = CliRunner().invoke(app, list(map(str, arguments)), input=stdin, prog_name="specdec")
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def folders(home):
    """An environment in which nothing of the user's is touched or seen."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SPECDEC_", "PYTHON", "NO_"))}
    own = {"HOME": str(home), "TERM": "xterm", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1"}
    own["OMP_WAIT_POLICY"] = "passive"  # or the tests are slow on a machine that does something else too
    for kind in ("config", "cache", "data", "state"):
        own[f"XDG_{kind.upper()}_HOME"] = str(home / kind)
    return kept | own


SMALL = ["--threads", 1, "--ctx", 256, "-n", 1]

# A runner in the background ignores Ctrl-C, and what it starts would inherit that.
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
def main(home, specdec):
    """A model that never ends its answer, checked and measured. F32: batches and single tokens agree closely."""
    path = write_tiny_model(home / "main.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17)
    assert specdec("generate", "--main", path, *SMALL, "x").returncode == 0
    return path


@pytest.fixture(scope="session")
def draft(home, specdec, main):
    """A draft that often agrees with main; already checked, and measured as one."""
    path = write_tiny_model(home / "draft.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17, noise=0.1)
    assert specdec("generate", "--main", main, "--draft", path, *SMALL, "x").returncode == 0
    return path


@pytest.fixture
def fresh(tmp_path):
    """The command on a machine where nothing has been done yet."""
    return Specdec(tmp_path, folders(tmp_path))


class Terminal:
    """A person at a terminal; what the program shows is read without its escape sequences."""

    def __init__(self, specdec, *arguments, env=None):
        self.specdec = specdec
        self.child = pexpect.spawn(
            specdec.command[0],
            [*specdec.command[1:], "chat", *map(str, arguments)],
            env=specdec.environment | (env or {}),
            cwd=str(specdec.folder),
            timeout=20,
            dimensions=(40, 160),
            encoding="utf-8",
            codec_errors="replace",
        )

    def until(self, *what):
        """What came before each of these texts, and they themselves."""
        seen = ""
        for text in what:
            self.child.expect_exact(text)
            seen += self.child.before + text
        return self.specdec.plain(seen)

    def prompt(self):
        """Wait until the editor reads keys: it then switches bracketed paste on."""
        return self.until("\x1b[?2004h", "\x1b[?25h")

    def type(self, text):
        self.child.send(text)

    def say(self, text):
        """A message, and all that comes until the next prompt."""
        self.enter(text)
        return self.prompt()

    def enter(self, text):
        """A message; the editor then switches bracketed paste off."""
        self.type(text + "\r")
        self.until("\x1b[?2004l")

    def leaves_with(self):
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def terminal(specdec):
    opened = []

    def open_terminal(*arguments, specdec=specdec, env=None):
        opened.append(Terminal(specdec, *arguments, env=env))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.child.close(force=True)
