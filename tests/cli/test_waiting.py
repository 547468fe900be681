"""The line that says what a command is waiting for."""

import contextlib
import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from spec_local.session import Text
from specdec_cli import answer_view, chat_input, render, terminal, waiting

TIMER = threading.Timer
SMALL = ["--threads", 1, "--ctx", 4096, "-n", 3, "--temp", 0]
DRAWN = re.compile("\x1b7\x1b\\[\\?7l(.*?)\x1b\\[\\?7h\x1b8")


class Screen(io.StringIO):
    """What a terminal shows of appended text and of lines that are drawn and erased."""

    def isatty(self):
        return True

    def fileno(self):
        return 1

    @property
    def lines(self):
        """All lines that have been drawn, without styles."""
        return [re.sub("\x1b\\[[0-9;]*m", "", line) for line in DRAWN.findall(self.getvalue())]

    @property
    def shown(self):
        """What is on the screen now."""
        text = ""
        drawn = ""
        for part in re.split("(\x1b7.*?\x1b8|\x1b\\[J)", re.sub("\x1b\\[[0-9;]*m", "", self.getvalue())):
            if part == "\x1b[J":
                drawn = ""
            elif part.startswith("\x1b7"):
                assert not drawn  # otherwise, the longer of two would stay
                drawn = DRAWN.match(part)[1]
            else:
                assert not (part and drawn)  # text over the line
                text += part
        return text + drawn


@pytest.fixture
def screen(monkeypatch):
    """A terminal, on which lines appear at once. Streams of modules: pytest replaces those of sys itself."""
    stream = Screen()
    streams = SimpleNamespace(stdout=terminal.Screen(stream), stderr=terminal.Screen(stream))
    for module in (waiting, render, terminal, answer_view):
        monkeypatch.setattr(module, "sys", streams)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(threading, "Timer", lambda _, begin: TIMER(0.0, begin))
    return stream


def wait_for(screen, text):
    end = time.monotonic() + 10
    while text not in screen.shown:
        assert time.monotonic() < end, screen.getvalue()
        time.sleep(0.001)


def test_it_is_below_all_output_and_gone_at_the_end(screen):
    with waiting.line("loading a.gguf …"):
        wait_for(screen, "loading")
        render.note("checking a.gguf")
        assert screen.shown == "checking a.gguf\nloading a.gguf …"
        render.answer("The")
        waiting.sys.stdout.write(" answer")
        waiting.sys.stderr.write("llama.cpp\n")
        assert screen.shown == "checking a.gguf\nThe answerllama.cpp\nloading a.gguf …"
        with waiting.line("reading 1 of 2 tokens"):
            wait_for(screen, "reading")
            assert screen.shown.endswith("\nreading 1 of 2 tokens")
        waiting.say("")
        assert screen.shown.endswith("llama.cpp\n")
        waiting.say("more")
        with waiting.hidden():
            render.answer("x")
            assert screen.shown.endswith("\nx")
        assert screen.shown.endswith("\nxmore")
    assert screen.shown == "checking a.gguf\nThe answerllama.cpp\nx"
    waiting.say("nothing")
    assert screen.shown.endswith("\nx")


def test_it_is_gone_after_ctrl_c(screen):
    with contextlib.suppress(KeyboardInterrupt), waiting.line("loading a.gguf …"):
        wait_for(screen, "loading")
        raise KeyboardInterrupt
    assert screen.shown == ""


def test_what_ends_soon_shows_nothing(screen, monkeypatch):
    timers = []

    class Timer(TIMER):
        def start(self):
            timers.append(self)

    monkeypatch.setattr(threading, "Timer", Timer)
    with waiting.line("loading a.gguf …"):
        waiting.say("loading b.gguf …")
    (timer,) = timers
    assert timer.interval == 0.5
    timer.function()  # as if it had come when the block ended
    assert screen.getvalue() == ""


@pytest.mark.parametrize("case", ["pipe", "dumb", "closed"])
def test_nothing_is_shown_where_it_could_not_be_removed(screen, monkeypatch, case):
    if case == "pipe":
        screen.isatty = lambda: False
    elif case == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        waiting.sys.stderr = None
    with waiting.line("loading a.gguf …"):
        time.sleep(0.02)
        waiting.say("loading b.gguf …")
    assert screen.getvalue() == ""


def test_it_has_no_style_without_colour(screen, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with waiting.line("loading a.gguf …"):
        wait_for(screen, "loading")
    assert screen.getvalue() == "\x1b7\x1b[?7lloading a.gguf …\x1b[?7h\x1b8\x1b[J"


def test_markdown_shows_the_end_of_a_block_that_it_has_not_rendered(screen):
    with waiting.line("preparing the answer …"):
        wait_for(screen, "preparing")
        view = answer_view.MarkdownView()
        for text in ("Some *wor", "ds*\n", "and\tmore", ".\n\nThe e", "nd"):
            view.show(Text(text))
        view.end(".")
        assert screen.shown.split() == ["Some", "words", "and", "more.", "The", "end."]
    assert list(dict.fromkeys(screen.lines))[1:] == [
        "Some *wor",
        "Some *words*",
        "and     more",
        "The e",
        "The end",
    ]


LONG = "many words " * 200


@pytest.fixture
def at_once(inside):
    """Run a command on a terminal, with lines that appear at once; return them, and what else was shown."""

    def run(*arguments):
        code, seen = inside.on_terminal(*arguments, waiting_s=0.0)
        assert code == 0, seen
        screen = Screen()
        screen.write(seen.replace("\r\n", "\n"))
        return screen.lines, screen.shown

    return run


@pytest.mark.parametrize(
    "options", [[], ["--answers", 2], ["--json"], ["--json", "--answers", 2], ["--jsonl"]], ids=str
)
def test_loading_and_reading(inside, at_once, main, draft, options):
    words = ["generate", "--main", main, "--draft", draft, "--proposer", "draft", "--policy", "fixed", *SMALL]
    lines, shown = at_once(*words, "--prompt-cache", "off", *options, LONG)
    assert lines[0] == "loading main.gguf and draft.gguf …"
    read = [line for line in lines if line.startswith("reading ")]
    numbers = [tuple(map(int, re.findall(r"[0-9]+", line.replace(",", "")))) for line in read]
    assert len(numbers) > 3
    assert {total for _, total in numbers} == {numbers[-1][0] + 1}
    assert sorted(numbers) == numbers
    assert any(line.startswith("the draft model is reading: ") for line in lines) == (
        "--answers" not in options
    )
    assert any(line.startswith("generating: ") for line in lines) == ("--json" in options)
    assert "reading" not in shown
    done = inside(*words, *options, LONG)
    if "--json" not in options and "--jsonl" not in options:
        shown = re.sub("measuring.*\n", "", shown)
        assert shown.startswith(done.stdout.decode("utf-8", "replace").rstrip("\n"))
    assert b"reading" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_batch_on_the_terminal(at_once, main, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    lines, shown = at_once("generate", "--main", main, *SMALL, "--input", tmp_path / "prompts.txt")
    assert lines[-2:] == ["answering: 1 of 2", "answering: 2 of 2"]
    assert shown.count('"content"') == 2
    lines, shown = at_once(
        *("generate", "--main", main, *SMALL),
        *("--input", tmp_path / "prompts.txt", "--output", tmp_path / "out.jsonl"),
    )
    assert "answering" in shown  # a bar
    assert {line.split()[0] for line in lines} == {"loading"}


def test_a_chat(terminal, specdec, main, tmp_path):
    env = specdec.sabotaged(tmp_path / "site", "from specdec_cli import waiting; waiting._DELAY_S = 0.0")
    person = terminal("--main", main, *SMALL, env=env)
    person.child.logfile_read = log = io.StringIO()
    person.prompt()
    person.say(LONG)
    person.say("/set max-tokens none")
    person.enter(LONG)
    person.child.expect_exact("reading ")
    person.type("\x03")
    person.until("(stopped", "\n")
    person.prompt()
    assert "reading 0 of " in log.getvalue()
    n = log.getvalue().count("loading main.gguf …")
    person.say("/set ctx 2048")
    assert log.getvalue().count("loading main.gguf …") > n > 0


def test_a_chat_in_a_pipe_says_that_it_reads_standard_input(screen, monkeypatch):
    class Slow:
        def readline(self):
            wait_for(screen, "waiting for a line of standard input")
            return b"hi\n"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=Slow()))
    assert chat_input._line() == "hi"
    assert screen.shown == ""
