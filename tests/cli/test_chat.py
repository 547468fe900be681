"""specdec chat: on a terminal, through a pseudo-terminal; and off one."""

import signal
import stat
import subprocess
import time

import pytest

from spec_local.llama.tiny import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

SHORT = ["--temp", "0", "--threads", "1", "--ctx", "512", "-n", "12"]
ENDLESS = ["--temp", "0", "--threads", "1", "--ctx", "100000"]


def figures(screen):
    """The line of statistics after an answer."""
    return [line for line in screen.splitlines() if "tokens/s" in line]


def test_a_conversation(terminal, main):
    person = terminal("--main", main, "-v", *SHORT)
    greeting = person.prompt()
    build = "llama.cpp (llama-cpp-python "
    for part in (
        build,
        "· 1 thread ·",
        "main main.gguf",
        "· lookup, policy adaptive ·",
        "context 512",
        "/help",
    ):
        assert part in greeting
    for message in ("hello there", "and again"):
        (line,) = figures(person.say(message))
        assert "12 tokens in" in line
    assert "12 tokens in" in person.say("/stats")
    person.type("\x04")  # Ctrl-D
    assert person.leaves_with() == 0


def test_draft_and_silence(terminal, main, draft):
    person = terminal("--main", main, "--draft", draft, "--policy", "fixed", "--no-stats", *SHORT)
    assert "· draft draft.gguf, policy fixed ·" in person.prompt()
    assert figures(person.say("hello")) == []
    figures_of_it = person.say("/stats")
    assert "accepted" in figures_of_it
    assert "guessed by draft" in figures_of_it
    person.type("/exit\r")
    assert person.leaves_with() == 0


def test_commands(terminal, main):
    person = terminal("--main", main, "--no-stats", *SHORT)
    person.prompt()
    assert "nothing has been said yet" in person.say("/stats")
    assert "/clear" in person.say("/help")
    said = person.say("/fly me to the moon")
    assert "/fly is no command" in said
    assert "nothing has been said yet" in person.say("/stats")  # the model has not seen it
    person.say("hello")
    assert "forgotten" in person.say("/clear")
    assert len(person.say("").strip()) < 4


def test_interrupting_an_answer(terminal, main):
    person = terminal("--main", main, *ENDLESS)
    person.prompt()
    person.enter("tell me everything")
    time.sleep(0.7)
    person.type("\x03")
    seen = person.until("(stopped)")
    (line,) = figures(seen)
    assert "first token" in line
    person.prompt()
    # It goes on, and with what was said: the second answer can be stopped too.
    person.enter("more")
    time.sleep(0.3)
    person.type("\x03")
    person.until("(stopped)")
    person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0


def test_interrupting_twice_does_not_end_the_chat(terminal, main):
    person = terminal("--main", main, *ENDLESS)
    person.prompt()
    person.enter("tell me everything")
    time.sleep(0.7)
    person.type("\x03\x03")
    person.prompt()
    assert " 12 tokens" not in person.say("/stats")
    person.type("\x04")
    assert person.leaves_with() == 0


def test_interrupting_the_prompt_gives_a_hint(terminal, main):
    person = terminal("--main", main, *SHORT)
    person.prompt()
    person.type("half a thought\x03")
    assert "/exit or Ctrl-D" in person.until("Ctrl-D")
    person.prompt()
    assert "12 tokens in" in person.say("whole")


def test_ctrl_z_is_no_character(terminal, main):
    """It suspends; here, where no shell waits, it does nothing."""
    person = terminal("--main", main, *SHORT)
    person.prompt()
    seen = person.say("hel\x1alo")
    assert "hello" in seen
    assert "^Z" not in seen


def test_triple_quotes_hold_a_message_of_several_lines(terminal, main, specdec):
    person = terminal("--main", main, "--no-stats", *SHORT)
    person.prompt()
    seen = person.say('"""first line') + person.say("/help") + person.say('third"""')
    assert "this list" not in seen
    assert person.child.isalive()
    piped = specdec("chat", "--main", main, "--no-stats", *SHORT, stdin=b'"""first line\n/help\nthird"""\n')
    generated = specdec("generate", "--main", main, *SHORT, "first line\n/help\nthird")
    assert piped.stdout == generated.stdout + b"\n"


def test_alt_enter_and_paste_keep_lines_together(terminal, main, fresh):
    person = terminal("--main", main, *SHORT, specdec=fresh)
    person.prompt()
    assert len(figures(person.say("one\x1b\rtwo"))) == 1
    assert len(figures(person.say("\x1b[200~three\nfour\nfive\x1b[201~"))) == 1
    (history,) = fresh.folder.rglob("chat-history")
    lines = [line for line in history.read_text().splitlines() if line.startswith("+")]
    assert lines == ["+one", "+two", "+three", "+four", "+five"]


def test_history_is_private_and_kept(terminal, main, fresh):
    person = terminal("--main", main, *SHORT, specdec=fresh)
    person.prompt()
    person.say("a secret question")
    person.type("\x04")
    assert person.leaves_with() == 0
    (history,) = (f for f in fresh.folder.rglob("chat-history"))
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "a secret question" in history.read_text()
    again = terminal("--main", main, *SHORT, specdec=fresh)
    again.prompt()
    again.type("\x1b[A")  # arrow up
    again.until("a secret question")


def test_a_state_folder_that_cannot_be_written(terminal, main, specdec):
    person = terminal("--main", main, *SHORT, env={"XDG_STATE_HOME": "/dev/null/state", "HOME": "/dev/null"})
    assert "not remembered" in person.prompt()
    assert "12 tokens in" in person.say("hello")


def test_a_full_context_offers_a_way_on(terminal, main):
    person = terminal("--main", main, "--temp", "0", "--threads", "1", "--ctx", "128")
    person.prompt()
    said = person.say("hello")
    assert "context of 128 tokens is full" in said
    assert "/clear" in said
    assert "/clear starts anew" in person.say("and now?")
    person.say("/clear")
    assert figures(person.say("hello"))


def test_resizing_the_window_does_no_harm(terminal, main):
    person = terminal("--main", main, *SHORT)
    person.prompt()
    person.child.setwinsize(20, 40)
    person.prompt()
    assert "12 tokens in" in person.say("hello")


def test_from_a_pipe(specdec, main):
    done = specdec("chat", "--main", main, *SHORT, stdin=b"hello there\n\n/fly\nand again\n")
    assert done.returncode == 0
    first = specdec("generate", "--main", main, *SHORT, "hello there").stdout
    assert done.stdout.startswith(first + b"\n")
    assert len(done.stdout) > len(first) + 12
    assert done.stdout.endswith(b"\n")
    notes = done.stderr.decode()
    assert notes.count("tokens/s") == 2
    assert "/fly is no command" in notes
    assert "> " not in notes + done.stdout.decode("utf-8", "replace").splitlines()[0]


def test_from_a_pipe_without_statistics(specdec, main):
    done = specdec("chat", "--main", main, "--no-stats", *SHORT, stdin=b"hello there\n/exit\nnever\n")
    first = specdec("generate", "--main", main, *SHORT, "hello there").stdout
    assert done.stdout == first + b"\n"


@pytest.mark.parametrize(
    ("arguments", "guesses"),
    [
        ([], "draft draft.gguf and lookup, policy adaptive"),
        (["--proposer", "draft"], "draft draft.gguf, policy adaptive"),
        (["--proposer", "lookup"], "lookup, policy adaptive"),
        (["--policy", "confidence"], "draft draft.gguf, policy confidence"),
        (["--policy", "off"], "no guesses"),
        (["--no-spec"], "no guesses"),
        (["--draft-max", "0"], "no guesses"),
    ],
    ids=str,
)
def test_the_greeting_says_who_guesses(inside, main, draft, arguments, guesses):
    done = inside("chat", "--main", main, "--draft", draft, *arguments, *SHORT)
    assert f" · {guesses} · " in done.stderr.decode()


def test_costs_are_measured_at_the_first_answer_and_once(fresh, main):
    for first in (True, False):
        done = fresh("chat", "--main", main, *SHORT, stdin=b"hello\nagain\n")
        assert done.returncode == 0
        lines = [line for line in done.stderr.decode().splitlines() if "measuring" in line]
        assert lines == ["measuring main.gguf (first use with these settings)"] * first


def test_system_message(specdec, main):
    done = specdec("chat", "--main", main, "--system", "Be brief.", *SHORT, stdin=b"hello\n/clear\nhello\n")
    first = specdec("generate", "--main", main, "--system", "Be brief.", *SHORT, "hello").stdout
    assert done.stdout == (first + b"\n") * 2  # /clear keeps it


def test_a_pipe_that_ends_within_a_message(specdec, main):
    done = specdec("chat", "--main", main, *SHORT, stdin=b'"""first line\nsecond\n')
    assert done.returncode == 2
    assert b'ended within a message: close it with """' in done.stderr
    assert done.stdout == b""


def test_interrupting_a_command_says_so(monkeypatch, capsys):
    from specdec_cli import chat, chat_input

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_input, "by_hand", lambda: True)
    chat._noted(interrupted)
    assert capsys.readouterr().err == "(stopped)\n"
    monkeypatch.setattr(chat_input, "by_hand", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        chat._noted(interrupted)


def test_pipe_that_is_no_utf8(specdec, main):
    done = specdec("chat", "--main", main, *SHORT, stdin=b"fine\nGr\xf6\xdfe\n")
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_closed_streams(specdec, main):
    assert specdec.shell('"$@" <&-', "chat", "--main", main, *SHORT).returncode == 0
    assert "standard output is closed" in specdec.one_line(
        specdec.shell('"$@" >&-', "chat", "--main", main), 1
    )


def test_a_reader_that_has_seen_enough(specdec, main):
    script = 'yes hello | "$@" | head -c 20'
    done = specdec.shell(script, "chat", "--main", main, "--no-stats", *SHORT)
    assert len(done.stdout) == 20
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1  # the greeting


def test_interrupt_off_a_terminal_ends_the_chat(specdec, main):
    with specdec.start("chat", "--main", main, *ENDLESS) as nothing:
        assert nothing.wait(timeout=20) == 0
        nothing.communicate()

    with subprocess.Popen(
        [*specdec.command, "chat", "--main", str(main), *ENDLESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    ) as process:
        process.stdin.write(b"hello\nand again\n")
        process.stdin.flush()
        begun = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130
    assert len(begun + out) > 5
    assert b"Traceback" not in err


def test_bad_options_and_files(specdec, main, tmp_path):
    assert "temperature" in specdec.one_line(specdec("chat", "--temp", "-1"), 2)
    assert "does not exist" in specdec.one_line(specdec("chat", "--main", tmp_path / "absent.gguf"), 1)


def test_a_recurrent_model_guesses_nothing(specdec, tmp_path):
    path = write_tiny_model(tmp_path / "mamba.gguf", n_layers=1, architecture="mamba")
    done = specdec("chat", "--main", path, *SHORT, stdin=b"hello\nagain\n")
    assert done.returncode == 0, done.stderr
    assert b"no guesses" in done.stderr
    assert done.stderr.count(b"12 tokens in 12 steps") == 2


def test_interrupt_before_anything_has_begun(fresh, main, tmp_path):
    """Ctrl-C while Python still imports is not worth a traceback."""
    env = fresh.sabotaged(
        tmp_path / "slow",
        "import sys, threading, os, signal\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'specdec_cli.chat':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n",
    )
    done = fresh("chat", "--main", main, env=env)
    assert done.returncode == 130
    assert done.stdout + done.stderr == b""
