"""What is typed or pasted while a chat on a pseudo-terminal is busy, and pastes of several lines."""

import json
import sys

import pexpect
import pytest
from prompt_toolkit.history import FileHistory

from specdec_cli import typed_ahead

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

OPTIONS = ["--temp", "0", "--threads", "1", "--ctx", "100000", "-n", "4"]
LINES = ["first", "\tif (a > b):  # indented", "/help", "", "é 日本 🎉", "last"]


def bracketed(text):
    return f"\x1b[200~{text}\x1b[201~"


def unmarked(text):
    """A paste in a terminal that does not mark it: as typed."""
    return text.replace("\n", "\r")


@pytest.fixture
def chat(terminal, main):
    person = terminal("--main", main, *OPTIONS)
    person.prompt()
    person.say("hello")
    return person


@pytest.fixture
def questions(chat, tmp_path):
    """Return the messages that the user has sent after the first one."""

    def questions():
        chat.say(f"/save {tmp_path}/chat.json")
        messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
        return [message["content"] for message in messages if message["role"] == "user"][1:]

    return questions


def start_answer(chat):
    """Start an answer that does not end."""
    chat.say("/set max-tokens none")
    chat.enter("go on")
    chat.until_answer()


def stop(chat):
    """Stop it; return what is shown up to the end of the next prompt."""
    chat.type("\x03")
    chat.until("(stopped)")
    return chat.prompt()


@pytest.mark.parametrize("paste", [bracketed, unmarked])
@pytest.mark.parametrize("lines", [LINES, [f"line {i} " * 8 for i in range(100)]])
def test_a_paste_during_an_answer_is_the_beginning_of_the_next_message(chat, home, paste, lines):
    """Also one that is longer than what a terminal holds; Ctrl-C stops the answer as always."""
    start_answer(chat)
    chat.type("Look:x\x7f ")
    chat.type(paste("\n".join(lines)) + "\n")
    assert lines[-1][-5:] in stop(chat)
    chat.type("!\x03")
    chat.until("to leave")
    history = FileHistory(str(home / "state/specdec/chat-history"))
    assert next(iter(history.load_history_strings())) == "Look: " + "\n".join(lines) + "!"


def test_a_paste_while_the_answer_ends(chat, questions):
    """Also its rest, which comes later; a command in it is not run."""
    chat.say("/set max-tokens 200")
    lines = [*(f"line {i}" for i in range(700)), "/exit"]
    chat.child.delaybeforesend = None  # the answer takes a fifth of a second
    chat.enter("go on")
    chat.until_answer()
    chat.type("\r".join(lines) + "\r")
    chat.child.delaybeforesend = 0.05
    chat.until("tokens in")
    if "/exit" not in chat.prompt():
        chat.until("/exit")
    chat.type("!")
    chat.until("!")
    chat.enter("")
    chat.until("tokens in")
    chat.prompt()
    assert questions() == ["go on", "\n".join(lines) + "!"]


def test_an_unmarked_paste_at_the_prompt(chat, questions):
    """Also where 1,024 keys, which are read at once, end with a line."""
    lines = [*(f"line {i}" for i in range(700)), "/exit"]
    chat.type("\r".join(lines) + "\r")
    chat.until("tokens in")
    chat.prompt()
    assert questions() == ["\n".join(lines)]


def test_what_is_typed_while_the_model_loads(terminal, main):
    person = terminal("--main", main, *OPTIONS)
    person.type("one\rtwo\r")
    seen = person.prompt()
    assert seen.endswith("two")
    assert "tokens in" in person.say(".")
    person.type("/exit\r")
    assert person.leaves_with() == 0


@pytest.mark.parametrize("paste", [bracketed, unmarked])
@pytest.mark.parametrize(
    "text", ['"""Docstring."""\ndef f(): ...', '"""\nopen', "/* C */\nint x;", "a\n\n/exit"]
)
def test_a_paste_is_one_message_whatever_it_contains(chat, questions, paste, text):
    chat.type(paste(text))
    chat.say("")
    assert questions() == [text]


def test_three_quotes_begin_a_message_of_several_lines(chat, questions):
    chat.type('"""one\r')
    chat.until("\x1b[0m.")
    chat.type("/help\r")
    chat.type("\x04")
    assert 'ends with """; Ctrl-C discards it' in chat.until("discards it")
    chat.say('two"""')
    assert questions() == ["one\n/help\ntwo"]


def test_a_message_that_is_discarded_is_in_the_history(chat, questions):
    chat.type('"""one\r')
    chat.until("\x1b[0m.")
    chat.type("two")
    chat.type("\x03")
    assert "the up arrow brings the message back" in chat.until("to leave")
    chat.prompt()
    chat.type("\x1b[A")
    chat.say('"""')
    assert questions() == ["one\ntwo"]


@pytest.mark.parametrize(
    ("received", "text", "is_pasted"),
    [
        (b"abc\x7f\x08d\r", "ad", False),
        (b"one two\x17three\n\nx\x15y\x1b[D\x1b[1;5C\x1bOA\x1bb\x00", "one three\n\ny", False),
        (b"a\x1b\rb\t\xff\x04", "a\nb\t\ufffd", False),
        (b"a\x1b[200~b\x7f\r\nc\x1b[201~d", "ab\x7f\ncd", True),
        (b"\x1b[200~open", "open", True),
        (b"", "", False),
    ],
)
def test_keys(received, text, is_pasted):
    typed_ahead._received.extend(received)
    assert typed_ahead.take() == (text, is_pasted)
    assert typed_ahead.take() == ("", False)


def test_a_megabyte():
    """From its keys to the text, in a process with a terminal of its own."""
    script = "; ".join(
        [
            "import sys",
            "from specdec_cli import typed_ahead as t",
            "c = t.collecting()",
            "c.__enter__()",
            "print('ready', flush=True)",
            "import time",
            "[time.sleep(.01) for _ in iter(lambda: t._received.endswith(b'!'), True)]",
            "c.__exit__(None, None, None)",
            "print(len(t.take()[0]))",
        ]
    )
    child = pexpect.spawn(sys.executable, ["-c", script], timeout=20, echo=True)
    child.delaybeforesend = None
    child.expect_exact("ready")
    for _ in range(1000):
        child.send("0123456789" * 100)
    child.send("!")
    assert "0123" not in child.read().decode().strip()
    assert child.before.split()[-1] == b"1000001"


def test_ctrl_d_during_an_answer_leaves_the_chat_after_it(chat):
    start_answer(chat)
    chat.type("\x04\x03")
    chat.until("(stopped)")
    assert chat.leaves_with() == 0
