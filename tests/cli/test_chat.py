"""specdec chat on a pseudo-terminal and through pipes."""

import signal
import stat
import subprocess

import pytest

from spec_local.llama.tiny import write_tiny_model

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
        "· lookup, policy adaptive ·",
        "context 512",
        "/help",
    ):
        assert part in banner
    for message in ("hello there", "and again"):
        (line,) = statistics_lines(person.say(message))
        assert "12 tokens in" in line
    assert "12 tokens in" in person.say("/stats")
    person.type("\x04")  # Ctrl-D
    assert person.leaves_with() == 0


def test_commands_and_no_statistics(terminal, main, draft):
    person = terminal("--main", main, "--draft", draft, "--policy", "fixed", "--no-stats", *SHORT)
    assert "· draft draft.gguf, policy fixed ·" in person.prompt()
    assert "there is no answer yet" in person.say("/stats")
    assert "/clear" in person.say("/help")
    assert "/fly is not a command" in person.say("/fly me to the moon")
    assert "there is no answer yet" in person.say("/stats")  # the model did not get it
    assert statistics_lines(person.say("hello")) == []
    shown = person.say("/stats")
    assert "accepted" in shown
    assert "proposers: draft" in shown
    assert "conversation cleared" in person.say("/clear")
    assert len(person.say("").strip()) < 4
    person.type("/exit\r")
    assert person.leaves_with() == 0


def wait_for_text(person):
    """Wait until a part of an answer is on the screen."""
    person.child.expect("[a-z ]{8}")


def start_endless_answer(person):
    """Enter a message and wait for its answer to start; costs are measured with an answer before it."""
    person.prompt()
    person.say("/set max-tokens 1")
    person.say("hello")
    person.say("/set max-tokens none")
    person.enter("tell me everything")
    wait_for_text(person)


def test_interrupting_an_answer(terminal, main):
    person = terminal("--main", main, *ENDLESS)
    start_endless_answer(person)
    person.type("\x03")
    seen = person.until("(stopped)")
    (line,) = statistics_lines(seen)
    assert "first token" in line
    person.prompt()
    # The chat continues, and the next answer can be stopped, too; Ctrl-C twice does not end the chat.
    person.enter("more")
    wait_for_text(person)
    person.type("\x03\x03")
    person.until("(stopped)")
    person.prompt()
    assert statistics_lines(person.say("/stats"))
    person.type("\x04")
    assert person.leaves_with() == 0


def test_what_is_typed_during_an_answer_is_the_next_message(terminal, main):
    person = terminal("--main", main, *ENDLESS)
    start_endless_answer(person)
    person.type("the next message")
    person.type("\x03")
    seen = person.until("(stopped)")
    assert "next message" not in seen
    assert "^C" not in seen
    person.prompt()
    assert "the next message" in person.until("the next message")
    person.type("\x03")
    person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0


def test_lines_fit_the_terminal(terminal, main):
    person = terminal("--main", main, "-v", *SHORT, "-n", "60", width=60)
    lines = person.prompt().splitlines()
    answer = person.say("hello")
    assert "60 tokens in" in " ".join(answer.split())
    lines += answer.splitlines() + person.say("/help").splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("/" in line for line in lines) > 10


def test_continuing_the_last_conversation(terminal, main, unmeasured):
    unmeasured.one_line(unmeasured("chat", "--main", main, "--continue"), 2)
    person = terminal("--main", main, *SHORT, specdec=unmeasured)
    person.prompt()
    person.say("hello there")
    person.say("and again")
    person.type("\x04")
    assert person.leaves_with() == 0
    (kept,) = unmeasured.folder.rglob("last-chat.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    person = terminal("--main", main, *SHORT, "-C", specdec=unmeasured)
    assert "loaded 4 messages" in person.prompt()
    assert "hello there" not in person.say("/undo")
    person.type("\x04")
    assert person.leaves_with() == 0
    piped = unmeasured("chat", "--main", main, *SHORT, stdin=b"other\n")  # not on a terminal: not kept
    assert piped.returncode == 0
    assert "and again" in kept.read_text()


def test_keys_at_the_prompt(terminal, main):
    """Ctrl-C gives a hint. Ctrl-Z suspends the program; here, without a shell, it does nothing."""
    person = terminal("--main", main, *SHORT)
    person.prompt()
    person.type("half a thought\x03")
    assert "/exit or press Ctrl-D" in person.until("to leave")
    person.prompt()
    seen = person.say("hel\x1alo")  # Ctrl-Z switches the editor off and on
    assert "hello" in seen
    assert "^Z" not in seen
    assert "12 tokens in" in person.prompt()


def test_triple_quotes_hold_a_message_of_several_lines(terminal, main, inside):
    person = terminal("--main", main, "--no-stats", *SHORT)
    person.prompt()
    seen = person.say('"""first line') + person.say("/help") + person.say('third"""')
    assert "list the commands" not in seen
    assert person.child.isalive()
    piped = inside("chat", "--main", main, "--no-stats", *SHORT, stdin=b'"""first line\n/help\nthird"""\n')
    generated = inside("generate", "--main", main, *SHORT, "first line\n/help\nthird")
    assert piped.stdout == generated.stdout + b"\n"


def test_history_is_private_and_persistent(terminal, main, unmeasured):
    """And keeps the lines of a message together: with Alt-Enter, and pasted."""
    person = terminal("--main", main, *SHORT, specdec=unmeasured)
    person.prompt()
    assert len(statistics_lines(person.say("one\x1b\rtwo"))) == 1
    assert len(statistics_lines(person.say("\x1b[200~three\nfour\nfive\x1b[201~"))) == 1
    person.type("\x04")
    assert person.leaves_with() == 0
    (history,) = unmeasured.folder.rglob("chat-history")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    lines = [line for line in history.read_text().splitlines() if line.startswith("+")]
    assert lines == ["+one", "+two", "+three", "+four", "+five"]
    again = terminal("--main", main, *SHORT, specdec=unmeasured)
    again.prompt()
    again.type("\x1b[A")  # arrow up
    again.until("three", "four", "five")


def test_a_state_folder_that_cannot_be_written(terminal, main, specdec):
    person = terminal("--main", main, *SHORT, env={"XDG_STATE_HOME": "/dev/null/state", "HOME": "/dev/null"})
    assert "the input history is not saved" in person.prompt()
    assert "12 tokens in" in person.say("hello")


def test_a_full_context_suggests_what_to_do(terminal, main):
    person = terminal("--main", main, "--temp", "0", "--threads", "1", "--ctx", "128")
    person.prompt()
    seen = person.say("hello")
    assert "context of 128 tokens is full" in seen
    assert "/clear" in seen
    assert "/clear starts a new conversation" in person.say("and now?")
    person.say("/clear")
    assert statistics_lines(person.say("hello"))


def test_from_a_pipe(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b"hello there\n\n/fly\nand again\n")
    assert done.returncode == 0
    first = inside("generate", "--main", main, *SHORT, "hello there").stdout
    assert done.stdout.startswith(first + b"\n")
    assert len(done.stdout) > len(first) + 12
    assert done.stdout.endswith(b"\n")
    notes = done.stderr.decode()
    assert notes.count("tokens/s") == 2
    assert "/fly is not a command" in notes
    assert "> " not in notes + done.stdout.decode("utf-8", "replace").splitlines()[0]


def test_from_a_pipe_without_statistics(inside, main):
    done = inside("chat", "--main", main, "--no-stats", *SHORT, stdin=b"hello there\n/exit\nnever\n")
    first = inside("generate", "--main", main, *SHORT, "hello there").stdout
    assert done.stdout == first + b"\n"


@pytest.mark.parametrize(
    ("arguments", "speculation"),
    [
        ([], "draft draft.gguf and lookup, policy adaptive"),
        (["--proposer", "draft"], "draft draft.gguf, policy adaptive"),
        (["--proposer", "lookup"], "lookup, policy adaptive"),
        (["--policy", "confidence"], "draft draft.gguf, policy confidence"),
        (["--policy", "off"], "no speculation"),
        (["--no-spec"], "no speculation"),
        (["--draft-max", "0"], "no speculation"),
    ],
    ids=str,
)
def test_the_banner_shows_the_proposers(inside, main, draft, arguments, speculation):
    done = inside("chat", "--main", main, "--draft", draft, *arguments, *SHORT)
    assert f" · {speculation} · " in done.stderr.decode()


def test_costs_are_measured_once_at_the_first_answer(unmeasured, main):
    for first in (True, False):
        done = unmeasured("chat", "--main", main, *SHORT, stdin=b"hello\nagain\n")
        assert done.returncode == 0
        lines = [line for line in done.stderr.decode().splitlines() if "measuring" in line]
        assert lines == ["measuring main.gguf (first use with these settings)"] * first


def test_system_message(inside, main):
    done = inside("chat", "--main", main, "--system", "Be brief.", *SHORT, stdin=b"hello\n/clear\nhello\n")
    first = inside("generate", "--main", main, "--system", "Be brief.", *SHORT, "hello").stdout
    assert done.stdout == (first + b"\n") * 2  # /clear keeps it


def test_a_pipe_that_ends_within_a_message(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b'"""first line\nsecond\n')
    assert done.returncode == 2
    assert b'ended within a message: close it with """' in done.stderr
    assert done.stdout == b""


def test_interrupting_a_command(monkeypatch, capsys):
    from specdec_cli import chat, chat_input

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_input, "interactive", lambda: True)
    chat._report_errors(interrupted)
    assert capsys.readouterr().err == "(stopped)\n"
    monkeypatch.setattr(chat_input, "interactive", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        chat._report_errors(interrupted)


def test_a_pipe_that_is_not_utf8(inside, main):
    done = inside("chat", "--main", main, *SHORT, stdin=b"fine\nGr\xf6\xdfe\n")
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_closed_streams(specdec, main):
    assert specdec.shell('"$@" <&-', "chat", "--main", main, *SHORT).returncode == 0
    assert "standard output is closed" in specdec.one_line(
        specdec.shell('"$@" >&-', "chat", "--main", main), 1
    )


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


def test_bad_options_and_files(inside, main, tmp_path):
    assert "temperature" in inside.one_line(inside("chat", "--temp", "-1"), 2)
    assert "does not exist" in inside.one_line(inside("chat", "--main", tmp_path / "absent.gguf"), 1)


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
    assert done.stderr.count(b"12 tokens in 12 steps") == 0
    assert plain.stderr.count(b"12 tokens in 12 steps") == 4


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
