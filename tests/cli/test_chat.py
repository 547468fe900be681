"""specdec chat on a pseudo-terminal and through pipes."""

import base64
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from spec_local.llama.tiny import CHAT_TEMPLATE, write_tiny_model
from spec_local.system.files import saving
from specdec_cli.chat_view import ChatView
from tests.scripted_model import write_scripted_model, write_thinking_model

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

SHORT = ["--temp", "0", "--threads", "1", "--ctx", "512", "-n", "12"]
ENDLESS = ["--temp", "0", "--threads", "1", "--ctx", "100000"]


def statistics_lines(screen):
    """The lines of statistics after answers."""
    return [line for line in screen.splitlines() if "tokens/s" in line]


def test_a_conversation(terminal, main):
    person = terminal("--main", main, "-v", *SHORT)
    banner = person.prompt()
    build = "llama.cpp (llama-cpp-python "
    for part in (
        build,
        "· 1 thread ·",
        "main main.gguf",
        "· suffix lookup, policy adaptive ·",
        "context 512",
        "/help",
    ):
        assert part in banner
    for message in ("hello there", "and again", "/continue"):
        seen = person.say(message)
        (line,) = statistics_lines(seen)
        assert "12 tokens in" in line
        assert "cut at 12 tokens: /continue" in seen
    assert "12 tokens in" in person.say("/stats")
    assert len(person.say("").strip()) < 4
    person.type("\x04")  # Ctrl-D
    assert person.leaves_with() == 0


def start_endless_answer(person):
    """Enter a message and wait for its answer to start; costs are measured with an answer before it."""
    person.prompt()
    person.say("/set max-tokens 1")
    person.say("hello")
    person.say("/set max-tokens none")
    person.enter("tell me everything")
    person.until_answer()


def test_interrupting_an_answer(terminal, main):
    """The chat continues; what is typed during an answer is the next message."""
    person = terminal("--main", main, *ENDLESS)
    start_endless_answer(person)
    person.type("the next message\x03")
    seen = person.until("(stopped)")
    (line,) = statistics_lines(seen)
    assert re.search(r"\d tokens in \d+\.\d s", line)
    assert "next message" not in seen
    assert "^C" not in seen
    assert "the next message" in person.prompt()
    person.type("\x03")
    person.prompt()
    person.enter("more")
    person.until_answer()
    person.type("\x03\x03")  # pressed twice, it does not end the chat
    person.until("(stopped)")
    person.prompt()
    person.enter("/continue")
    person.until_answer()
    person.type("\x03")
    person.until("(stopped)")
    person.prompt()
    assert statistics_lines(person.say("/stats"))
    person.type("\x04")
    assert person.leaves_with() == 0


def test_an_answer_that_was_cut_within_code_continues_with_code(terminal, tmp_path):
    script = ["Here:\n```py", "\nx = *1*", "\ny = *2*", "\n```\nThat *is* it."]
    model = write_scripted_model(tmp_path / "code.gguf", CHAT_TEMPLATE, "<0x0A>", script)
    person = terminal("--main", model, *SHORT, "-n", 2, "--markdown")
    person.prompt()
    assert "x = *1*" in person.say("hello")
    person.say("/set max-tokens 9")
    seen = person.say("/continue")
    assert "y = *2*" in seen
    assert "That is it." in seen


@pytest.mark.parametrize(
    ("options", "script", "seen"),
    [
        ([], ["One.\nThe wind is souther", "n, and war", "mer."], "\r\nThe wind is southern, and warmer."),
        (
            ["--no-wrap"],
            ["The wind is souther", "n, and war", "mer."],
            "\r\nThe wind is southern, and warmer.",
        ),
        (["--markdown"], ["One.\n\nThe *wind* is souther", "n."], "\r\nThe wind is southern."),
        (["--show-drafts"], ["One.\nThe wind is souther", "n."], "\r\nThe wind is southern."),
        ([], ["Here:\n```py\nx = some_", "value" * 60, "\n```"], "\nx = some_" + "value" * 60 + "\r\n```"),
        ([], ["many words " * 40 + "souther", "n."], "\r\n" + "words " + "many words " * 13 + "southern."),
    ],
)
def test_an_answer_that_was_cut_within_a_word_goes_on_in_its_line(terminal, tmp_path, options, script, seen):
    """Also in a later chat."""
    model = write_scripted_model(tmp_path / "cut.gguf", CHAT_TEMPLATE, "<0x0A>", script)
    person = terminal("--main", model, *SHORT, "-n", 1, *options, width=400)
    person.prompt()
    person.say("hello")
    person.type("/exit\r")
    assert person.leaves_with() == 0
    person = terminal("--continue", *SHORT, *options, width=160)
    person.prompt()
    shown = "\r\n" + person.say("/continue")
    assert seen in re.sub("(?<=many|ords)\r\n(?=many|words|sou)", " ", shown)


def test_reasoning_that_was_cut_within_a_word_goes_on_in_its_line(terminal, tmp_path):
    model = write_thinking_model(tmp_path / "thinking.gguf", "both markers")
    person = terminal("--main", model, *SHORT, "-n", 3)
    person.prompt()
    person.say("hello")
    person.say("/set max-tokens none")
    assert "what?\r\n\r\nThe sky" in (shown := person.say("/continue")), shown


def test_editing_a_message(terminal, main):
    """Ctrl-C gives a hint. Ctrl-Z suspends the program; here, without a shell, it does nothing."""
    person = terminal("--main", main, "--temp", "0", "--threads", "1", "--ctx", "100000", "-n", "4")
    person.prompt()
    person.type("half a thought\x03")
    assert "/exit or press Ctrl-D" in person.until("to leave")
    person.prompt()
    seen = person.say("hel\x1alo")  # Ctrl-Z switches the editor off and on
    assert "hello" in seen
    assert "^Z" not in seen
    assert "4 tokens in" in person.prompt()
    pasted = "\n".join(f"{i:05} " + "words and more words " * 4 for i in range(570))
    assert len(pasted) > 50_000
    person.type(f"\x1b[200~{pasted}\x1b[201~")
    person.enter("")
    assert "4 tokens in" in person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0


def test_the_conversation_and_the_history_are_kept(terminal, main, draft, unmeasured):
    """Privately. Messages of several lines, by Alt-Enter or pasted, stay together."""
    unmeasured.one_line(unmeasured("chat", "--main", main, "--continue"), 2)
    person = terminal("--main", main, *SHORT, specdec=unmeasured)
    person.prompt()
    assert len(statistics_lines(person.say("one\x1b\rtwo"))) == 1
    assert len(statistics_lines(person.say("\x1b[200~three\nfour\nfive\x1b[201~"))) == 1
    person.type("\x04")
    assert person.leaves_with() == 0
    (kept,) = unmeasured.folder.rglob("last-chat.json")
    (history,) = unmeasured.folder.rglob("chat-history")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept, history)] == [0o600, 0o600]
    lines = [line for line in history.read_text().splitlines() if line.startswith("+")]
    assert lines == ["+one", "+two", "+three", "+four", "+five"]
    person = terminal(*SHORT, "-C", specdec=unmeasured)
    begun = person.prompt()
    assert "main main.gguf" in begun  # its own model
    assert "loaded 4 messages" in begun
    assert "one" not in person.say("/undo")
    person.type("\x1b[A\x1b[A")  # arrow up
    person.until("three", "four", "five")
    person.type("\x03")
    person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0
    other = unmeasured("chat", "--main", draft, *SHORT, "-C")
    assert b"this conversation was with main.gguf; draft.gguf goes on with it: give" in other.stderr
    piped = unmeasured("chat", "--main", main, *SHORT, stdin=b"other\n")  # not on a terminal: not kept
    assert piped.returncode == 0
    assert "one" in kept.read_text()
    assert "other" not in kept.read_text()


def test_a_state_folder_that_cannot_be_written(terminal, main):
    person = terminal("--main", main, *SHORT, env={"XDG_STATE_HOME": "/dev/null/state", "HOME": "/dev/null"})
    assert "the input history is not saved" in person.prompt()
    assert "12 tokens in" in person.say("hello")


def test_a_full_context_suggests_what_to_do(inside, main):
    small = ["--temp", "0", "--threads", "1", "--ctx", "128"]
    done = inside("chat", "--main", main, *small, stdin=b"hello\nand now?\n/clear\nhello\n")
    notes = done.stderr.decode().splitlines()[1:]
    suggestions = [i for i, line in enumerate(notes) if "/clear" in line]
    assert "context of 128 tokens is full" in notes[suggestions[0]]
    assert "/clear starts a new conversation" in notes[suggestions[1]]
    assert len([line for line in notes if "tokens/s" in line]) == 2


def test_from_a_pipe(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b"hello there\n\n/fly\nand again\n")
    assert done.returncode == 0
    first = inside("generate", "--main", main, *SHORT, "hello there").stdout
    assert done.stdout.startswith(first)
    assert len(done.stdout) > len(first) + 12
    assert done.stdout.endswith(b"\n")
    notes = done.stderr.decode()
    assert notes.count("tokens/s") == 2
    assert "/fly is not a command" in notes
    assert "> " not in notes + done.stdout.decode("utf-8", "replace").splitlines()[0]
    done = inside("chat", "--main", main, "--no-stats", *SHORT, stdin=b"hello there\n/exit\nnever\n")
    assert done.stdout == first
    assert len(done.stderr.splitlines()) == 1  # the banner


def test_triple_quotes_hold_a_message_of_several_lines(inside, main):
    quoted = b'"""first line\n/help\nthird"""\n'
    piped = inside("chat", "--main", main, "--no-stats", *SHORT, stdin=quoted)
    generated = inside("generate", "--main", main, *SHORT, "first line\n/help\nthird")
    assert piped.stdout == generated.stdout


@pytest.mark.parametrize(
    ("arguments", "speculation"),
    [
        ([], "draft draft.gguf and suffix lookup, policy adaptive"),
        (["--proposer", "lookup"], "prompt lookup, policy adaptive"),
        (["--policy", "confidence"], "draft draft.gguf, policy confidence"),
        (["--draft-max", "0"], "no speculation"),
    ],
    ids=["adaptive", "lookup", "confidence", "no speculation"],
)
def test_the_banner_shows_the_proposers(inside, main, draft, arguments, speculation):
    done = inside("chat", "--main", main, "--draft", draft, *arguments, *SHORT)
    assert f" · {speculation} · " in done.stderr.decode()


def test_costs_are_measured_while_the_user_types(terminal, unmeasured, main):
    person = terminal("--main", main, *SHORT, specdec=unmeasured)
    person.prompt()
    time.sleep(2)
    assert "measuring" not in person.say("hello")
    person.enter("/exit")
    person.leaves_with()
    (path,) = unmeasured.folder.rglob("costs/*.json")
    assert not json.loads(path.read_text())["estimates"]


def test_system_message(inside, main):
    done = inside("chat", "--main", main, "--system", "Be brief.", *SHORT, stdin=b"hello\n/clear\nhello\n")
    first = inside("generate", "--main", main, "--system", "Be brief.", *SHORT, "hello").stdout
    assert done.stdout == first * 2  # /clear keeps it


def test_a_pipe_that_ends_within_a_message(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b'"""first line\nsecond\n')
    assert done.returncode == 2
    assert b'ended within a message: close it with """' in done.stderr
    assert done.stdout == b""


def test_interrupting_a_command(monkeypatch, capsys):
    from specdec_cli import chat

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    chat._report_errors(interrupted)
    assert capsys.readouterr().err == "(stopped)\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    with pytest.raises(KeyboardInterrupt):
        chat._report_errors(interrupted)


def test_a_pipe_that_is_not_utf8(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b"fine\nGr\xf6\xdfe\n")
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_closed_standard_input(specdec, main):
    assert specdec.shell('"$@" <&-', "chat", "--main", main, *SHORT).returncode == 0


def test_a_closed_pipe_ends_the_chat(specdec, main):
    script = 'yes hello | "$@" | head -c 20'
    done = specdec.shell(script, "chat", "--main", main, "--no-stats", *SHORT)
    assert len(done.stdout) == 20
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1  # the banner


def test_interrupt_off_a_terminal_ends_the_chat(specdec, main):
    with subprocess.Popen(
        [*specdec.command, "chat", "--main", str(main), *ENDLESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    ) as process:
        process.stdin.write(b"hello\nand again\n")
        process.stdin.flush()
        start = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130
    assert len(start + out) > 5
    assert b"Traceback" not in err


def test_a_recurrent_model_speculates(inside, tmp_path):
    """With undo and regen, which go back to a checkpoint or evaluate the conversation again."""
    paths = [
        write_tiny_model(tmp_path / f"{i}.gguf", architecture="mamba", tensor_type="F32") for i in range(2)
    ]
    lines = b"hello\n/regen\nagain\n/undo\nagain\n"
    arguments = ["--main", paths[0], *SHORT, "--temp", 0, "--policy", "fixed"]
    done = inside("chat", *arguments, "--draft", paths[1], stdin=lines)
    assert done.returncode == 0, done.stderr
    plain = inside("chat", "--main", paths[0], *SHORT, "--temp", 0, "--no-spec", stdin=lines)
    assert done.stdout == plain.stdout
    assert done.stderr.count(b" of 12 tokens drafted") == 4
    assert plain.stderr.count(b"12 tokens in ") == 4
    assert b"drafted" not in plain.stderr


def test_interrupt_during_imports(specdec, tmp_path):
    """Ctrl-C while Python imports modules prints no traceback."""
    env = specdec.sabotaged(
        tmp_path / "slow",
        "import sys, threading, os, signal\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'specdec_cli.chat':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n",
    )
    done = specdec("chat", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_many_turns_take_no_more_memory(specdec, main, draft):
    """With a draft model, trees, and a context that is often full; the prompt cache may grow."""
    arguments = ["--main", main, "--draft", draft, "--shape", "auto", "--threads", 1, "--ctx", 256, "-n", 8]
    arguments += ["--when-full", "drop-oldest", "--no-stats", "--temp", 0.8, "--seed", 1]
    arguments += ["--prompt-cache", "off"]
    messages = ["tell me about number {}", "/regen", "/undo", "and {} more of that"]
    with subprocess.Popen(
        [*specdec.command, "chat", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    ) as process:
        memory = []
        for turn in range(160):
            process.stdin.write(f"{messages[turn % 4].format(turn)}\n/set stop XYZ{turn}\n".encode())
            process.stdin.flush()
            specdec.wait_for(process, b"stop = ")  # the turn before it is over
            memory.append(psutil.Process(process.pid).memory_info().rss)
        process.stdin.close()
        assert process.stdout.read().count(b"\n") >= 120  # all but /undo are answers
        process.stderr.read()
        assert process.wait(timeout=20) == 0
    warm, end = max(memory[40:60]), max(memory[-20:])
    assert end <= 1.02 * warm, [m >> 20 for m in memory[::20]]


def test_resizing_the_window(terminal, main):
    """At the prompt, and during an answer; lines fit the window."""
    arguments = ["--temp", "0", "--threads", "1", "--ctx", "4096", "-n", "60", "-v"]
    person = terminal("--main", main, *arguments, width=60)
    lines = person.prompt().splitlines()
    answer = person.say("hello")
    assert "60 tokens in" in " ".join(answer.split())
    lines += answer.splitlines() + person.say("/help").splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("/" in line for line in lines) > 10
    person.child.setwinsize(20, 40)
    person.prompt()
    for setting in ("markdown on", "max-tokens 300"):
        person.say(f"/set {setting}")
    person.enter("hello")
    for size in ((10, 20), (50, 200), (24, 80)):
        person.child.setwinsize(*size)
    assert "300 tokens in" in " ".join(person.prompt().split())
    assert "4 tokens in" in person.say("/set max-tokens 4") + person.say("again")


def test_tab_completes_commands_and_files(terminal, main, specdec):
    (specdec.folder / "notes-of-today.txt").write_text("hello")
    person = terminal("--main", main, "--threads", "1", "--ctx", "512", "-n", "4")
    person.prompt()
    for typed, completed in (("/rea\t", "d"), (" notes-of\t", "-today.txt"), ("\r", "will be sent before")):
        person.type(typed)
        seen = person.until(completed)
    assert "notes-of-today.txt (5 bytes)" in seen
    person.prompt()
    for typed, completed in (("/set whe\t", "n-full"), (" drop-oldest\r", "when-full = drop-oldest")):
        person.type(typed)
        person.until(completed)


def test_show_drafts_marks_draft_tokens_on_a_terminal_only(terminal, inside, main, draft):
    arguments = ["--main", main, "--draft", draft, "--policy", "fixed", "--temp", "0", "--threads", "1"]
    arguments += ["--ctx", "512", "-n", "40", "--show-drafts"]
    person = terminal(*arguments, "--no-stats")
    person.prompt()
    person.type("hello\r")
    person.until("green: accepted draft tokens", "\x1b[32m", "\x1b[0m")
    person.until("rejected: “", "more")
    person.prompt()
    piped = inside("chat", *arguments, stdin=b"hello\n")
    assert b"\x1b" not in piped.stdout


def test_a_conversation_is_kept_as_soon_as_the_disk_has_room(tmp_path, capfd):
    left, saved = [errno.ENOSPC, errno.ENOSPC, 0, errno.ENOSPC], []

    def save(path, with_paths):
        if code := left.pop(0):
            with saving(path):
                raise OSError(code, os.strerror(code))
        saved.append(path)

    view = ChatView(SimpleNamespace(save=save), None)
    view.kept = tmp_path / "chats/last.json"
    lines = []
    for _ in range(4):
        view._keep()
        lines.append(capfd.readouterr().err)
    assert [bool(line) for line in lines] == [True, False, False, True]
    assert "No space left on device): the disk is full, and nothing was lost; free some space" in lines[0]
    assert saved == [view.kept]


def test_a_message_larger_than_the_context_can_be_sent_with_a_larger_one(terminal, main):
    person = terminal("--main", main, *SHORT)
    person.prompt()
    person.say("hello")
    pasted = "\n".join(f"line {i}" for i in range(300))
    for answer in ("n\r", "\x03"):
        person.enter(f"\x1b[200~{pasted}\x1b[201~")
        person.until("tokens, and send it? [y/N]:")
        person.type(answer)
        person.prompt()
        assert "ctx = 512" in person.say("/set ctx")
    person.enter(f"\x1b[200~{pasted}\x1b[201~")
    size = int(re.search(r"context of (\d+) tokens", person.until("[y/N]:"))[1])
    person.type("y\r")
    assert "12 tokens in" in person.prompt()
    assert f"ctx = {size}" in person.say("/set ctx")
    assert "4 messages, " in person.say("/stats")


def test_copy_through_the_terminal(terminal, main):
    person = terminal("--main", main, *SHORT, env={"PATH": "/nowhere", "DISPLAY": ""})
    person.prompt()
    person.say("hello")
    person.enter("/copy")
    person.child.expect(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07")
    copied = base64.b64decode(person.child.match[1]).decode("utf-8", "replace")
    assert f"copied the last answer ({len(copied)} characters)" in person.prompt()


def test_a_label_is_apart_from_its_text_on_a_terminal(terminal, main):
    person = terminal("--main", main, *SHORT)
    person.prompt()
    assert "system message: You are brief." in person.say("/system You are brief.")


def test_help_fits_a_screen(terminal, main):
    person = terminal("--main", main, *SHORT, width=80)
    person.prompt()
    lines = person.say("/help").strip().splitlines()
    assert 13 < len(lines) <= 24
    assert max(map(len, lines)) <= 80
