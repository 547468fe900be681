"""The slash commands of a chat, through a pipe, and their errors."""

import json

import pytest

from specdec_cli import chat_view
from specdec_cli.chat_commands import COMMANDS

OPTIONS = ["--threads", "1", "--ctx", "512", "-n", "12", "--no-stats"]


@pytest.fixture
def chat(inside, main, tmp_path):
    """A function that sends lines to a chat and returns its answers (stdout) and notes (stderr)."""

    def run(*lines, options=(), model=main, code=0, env=None):
        typed = "".join(f"{line}\n" for line in lines)
        done = inside(
            "chat", "--main", model, *OPTIONS, *options, stdin=typed.encode(), cwd=tmp_path, env=env
        )
        assert done.returncode == code, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        return done.stdout, done.stderr.decode().splitlines()[1:]  # the first line is the banner

    return run


@pytest.fixture
def answer(inside, main):
    def generate(*arguments, options=OPTIONS[:-1]):
        return inside("generate", "--main", main, *options, *arguments).stdout

    return generate


def test_regen_replaces_the_answer(chat, answer):
    answers, _ = chat("hello", "/regen", "and now?", options=["--seed", "7"])
    first, second = answer("--seed", "7", "hello"), answer("--seed", "8", "hello")
    assert first != second
    assert answers.startswith(first + second)
    # The next answer follows the second answer, as in a chat that never had the first.
    alone, _ = chat("hello", "and now?", options=["--seed", "8"])
    regenerated, _ = chat("hello", "/regen", "/set seed 8", "and now?", options=["--seed", "7"])
    assert regenerated.removeprefix(first) == alone


def test_continue_goes_on_with_a_cut_answer(chat, answer):
    answers, notes = chat("/continue", "hello", "/continue", "/stats", options=["--seed", "7"])
    assert "there is no answer to continue" in notes[0]
    whole = answer("--seed", "7", "-n", "24", "hello")
    first = answer("--seed", "7", "hello")
    assert answers == first + whole.removeprefix(first[:-1])
    assert notes[-1].startswith("2 messages")


def test_undo_removes_a_message_and_its_answer(chat):
    answers, notes = chat("hello", "something else", "/undo", "again", options=["--temp", "0"])
    without, _ = chat("hello", "again", options=["--temp", "0"])
    assert notes == ["removed: something else"]
    assert without.endswith(answers[-len(without) // 2 :])
    nothing, notes = chat("hello", "/undo", "/undo", "/regen")
    assert "nothing to undo" in notes[1]
    assert "no answer" in notes[2]
    assert nothing.count(b"\n") >= 1


def test_system(chat, answer):
    answers, notes = chat(
        "/system", "/system Be brief.", "hello", "/system none", "/clear", "hello", options=["--temp", "0"]
    )
    assert notes == [
        "system message: none",
        "system message: Be brief.",
        "system message: none",
        "conversation cleared",
    ]
    assert answers == answer("--temp", "0", "--system", "Be brief.", "hello") + answer("--temp", "0", "hello")


def test_set_shows_and_changes(chat, answer):
    answers, notes = chat("/set temp 0", "/set max-tokens 5", "hello", "/set")
    assert notes[:2] == ["temp = 0", "max-tokens = 5"]
    assert answers == answer("--temp", "0", "-n", "5", "hello")
    assert "top-k = 40" in notes
    assert "seed = none" in notes
    assert "draft-max = auto" in notes
    assert len(notes) > 12


def test_values_that_are_not_numbers_are_set_as_they_are_shown(chat):
    seeds, lengths = ("5", "none"), ("3", "auto", "none")
    _, notes = chat(*(f"/set seed {each}" for each in seeds), *(f"/set draft-max {each}" for each in lengths))
    assert notes[:4] == ["seed = 5", "seed = none", "draft-max = 3", "draft-max = auto"]
    assert notes[4].endswith("draft-max 'none' is invalid: give an integer, or auto")


INVALID = [
    ("/set temp hot", "temp 'hot' is invalid: give a number"),
    ("/set temp nan", "temp 'nan' is invalid"),
    ("/set temp -1", "temperature is -1"),
    ("/set top-k 1.5", "top-k '1.5' is invalid"),
    ("/set tmep 1", "did you mean temp?"),
    ("/set stats maybe", "give on or off"),
    ("/set when-full never", "give stop or drop-oldest"),
    ("/set policy wild", "policy 'wild' is unknown"),
    ("/draft wild", "/draft wild is unknown"),
    ("/draft draft", "there is no draft model"),
    ("/stats", "there is no answer yet"),
    ("/copy", "there is no answer yet"),
    ("/model absent.gguf", "absent.gguf"),
    ("/model 'a", "open quotation mark"),
    ("/model a b c", "more than two models"),
    ("/set ctx 0", "give a number of tokens"),
    ("/regen", "no answer"),
    ("/undo", "nothing to undo"),
    ("/undo twice", "/undo takes no arguments"),
    ("/read", "the file name is missing"),
    ("/read absent.txt", "absent.txt does not exist"),
    ("/read /dev/zero", "/dev/zero is not a file"),
    ("/load absent.json", "absent.json"),
    ("/save ~nobody-of-this-name/x", "~nobody-of-this-name/x: no home directory is known"),
    ("/save", "the file name is missing"),
    ("/save absent/folder/\0x", "the file name is missing"),
    ("/save --states chat.json", "/save has no option --states: give /save FILE"),
    ("/save a --model", "/save has no option --model: give /save FILE"),
    ("/", "/ is not a command"),
    ("/fly away", "/fly is not a command"),
    ("/9j/4AAQ" + "A" * 5000, "/9j/4AAQ" + "A" * 51 + "… is not a command"),
]


def test_errors_do_not_end_the_chat(chat):
    answers, notes = chat(*(line for line, _ in INVALID), "/help")
    assert answers == b""
    for (line, error), note in zip(INVALID, notes, strict=False):
        assert error in note, line
    assert notes[len(INVALID)].startswith("/help")
    assert all(any(note.startswith(f"{name} ") for note in notes[len(INVALID) :]) for name in COMMANDS)


def test_model_and_ctx_keep_the_conversation(inside, chat, draft, main):
    whole, _ = chat("hello", "and again", options=["--temp", "0"])
    answers, notes = chat(
        "hello", "/set ctx 300", f"/model {main}", "and again", "/model", "/stats", options=["--temp", "0"]
    )
    assert answers == whole
    assert notes[0] == "ctx = 300"
    assert "main main.gguf" in notes[1]
    assert notes[1] == notes[2]
    assert "of 300 tokens" in notes[-1]
    answers, notes = chat(
        "hello",
        f"/model '{draft}' {main}",
        "/undo",
        "hello",
        "/model x.gguf",
        "/model",
        options=["--temp", "0"],
    )
    assert "main draft.gguf · draft main.gguf" in notes[-1]
    assert "removed: hello" in notes
    assert "x.gguf does not exist" in notes[-2]
    other = inside("generate", "--main", draft, *OPTIONS[:-1], "--temp", "0", "hello").stdout
    assert answers.endswith(other)


def test_copy_uses_the_clipboard_of_the_desktop(chat, tmp_path):
    program = tmp_path / "bin/xclip"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/used\ncat > {tmp_path}/copied\n')
    program.chmod(0o755)
    saved = tmp_path / "chat.json"
    content = "So:\n\n```python\nprint(1)\n\n```\nor\n~~~\n```\n~~~\n"
    message = {"role": "assistant", "content": content}
    file = {"format": "specdec conversation", "version": 1, "model": "main.gguf"}
    question = {"role": "user", "content": "How?"}
    saved.write_text(json.dumps({**file, "messages": [question, message]}))
    desktop = {"DISPLAY": ":9", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": ""}
    copied = []
    for command in ("/copy", "/copy 1", "/copy 2", "/copy 3"):
        environment = {"PATH": f"{program.parent}:/bin", **desktop}
        _, notes = chat(command, options=["--load", saved], env=environment)
        copied.append((tmp_path / "copied").read_text())
    assert copied[:3] == [content, "print(1)\n", "```"]
    assert "has 2 blocks of code" in notes[-1]
    assert (tmp_path / "used").read_text() == "-selection clipboard\n"
    _, notes = chat("/copy", options=["--load", saved], env={"PATH": "/nowhere", "DISPLAY": ""})
    assert "there is no clipboard" in notes[-1]


def test_draft_changes_the_proposer(inside, main, draft):
    lines = b"/draft\n/draft off\nhello\n/stats\n/draft lookup\n/draft on\n"
    done = inside("chat", "--main", main, "--draft", draft, *OPTIONS, "--temp", "0", stdin=lines)
    notes = done.stderr.decode().splitlines()[1:]
    assert notes[0] == notes[-1] == "draft draft.gguf and suffix lookup, policy adaptive"
    assert notes[1] == "no speculation"
    assert "12 tokens in 12 steps" in notes[2]
    assert notes[-2] == "prompt lookup, policy adaptive"


def test_stats_show_where_the_time_went(chat):
    _, notes = chat("hello", "/stats")
    assert "12 tokens in" in notes[0]
    assert any("main model" in note for note in notes)
    assert "2 messages, " in notes[-1]
    assert "of 512 tokens" in notes[-1]


def test_read_sends_a_file_before_the_next_message(chat, answer, tmp_path):
    (tmp_path / "a file.txt").write_text("first line\nสวัสดี 👋\n")
    answers, notes = chat(
        '/read "a file.txt"', "what is it?", "/read a file.txt", "/clear", "hello", options=["--temp", "0"]
    )
    assert notes[0].startswith("a file.txt (35 bytes) will be sent before")
    whole = answer("--temp", "0", "first line\nสวัสดี 👋\n\nwhat is it?")
    assert answers == whole + answer("--temp", "0", "hello")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    _, notes = chat("/read latin")
    assert "not UTF-8 (byte 3)" in notes[0]


def test_a_message_that_is_not_sent_changes_nothing(chat, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 900)
    (tmp_path / "short.txt").write_text("some words")
    answers, notes = chat("/read short.txt", "and " * 900, "what is it?", options=["--temp", "0"])
    whole, _ = chat("/read short.txt", "what is it?", options=["--temp", "0"])
    assert answers == whole  # the file still precedes the next message
    assert "not sent" in notes[1]
    assert "but the context only 512: shorten it" in notes[1]
    assert len(notes) == 2  # there are no messages that /clear could remove
    _, notes = chat("hello", "/read long.txt", "what?", "/clear", "what?", options=["--temp", "0"])
    assert "/clear starts a new conversation" in notes[2]
    assert "the text of /read was discarded" in notes[3]
    assert len(notes) == 5


def test_a_file_that_is_too_large_is_not_sent_again(chat, answer, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 900)
    answers, notes = chat("/read long.txt", "what?", "hello", options=["--temp", "0"])
    assert [("not sent" in note, "discarded" in note) for note in notes[1:]] == [(True, False), (False, True)]
    assert answers == answer("--temp", "0", "hello")


def test_a_byte_order_mark_hides_no_command(chat, answer):
    answers, notes = chat("\ufeff/system none", "\ufeffhello", options=["--temp", "0"])
    assert notes == ["system message: none"]
    assert answers == answer("--temp", "0", "hello")


def test_save_and_load(chat, tmp_path):
    whole, _ = chat("hello", "and again", options=["--temp", "0"])
    first, notes = chat(
        "/system Be brief.", "/system none", "hello", "/save chat.json", options=["--temp", "0"]
    )
    assert notes[-1] == "saved 2 messages to chat.json"
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["messages"][0]["content"] == "hello"
    second, notes = chat("/load chat.json", "and again", options=["--temp", "0"])
    assert notes[0].startswith("loaded 2 messages")
    assert first + second == whole
    third, _ = chat("and again", options=["--temp", "0", "--load", "chat.json"])
    assert third == second


def test_save_makes_no_folder_and_replaces_no_other_file(chat, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    names = ["no/such/a.json", "folder", "new/", '"new/"', "notes.txt", "/dev/null"]
    _, notes = chat("hello", *(f"/save {name}" for name in names))
    assert notes == [
        "specdec: there is no folder no/such: make it first, or give another path",
        "specdec: folder is a folder: give the name of a file",
        *["specdec: new is a folder: give the name of a file"] * 2,
        "specdec: notes.txt exists and is not a saved conversation: give another path",
        "specdec: /dev/null is not a regular file: give another path",
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] in "fn") == ["folder", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    _, notes = chat("hello", "/save a b.json", "more", "/save 'a b.json'", "/save a\\ b.json")
    assert [line.split(" to ")[0] for line in notes] == [f"saved {n} messages" for n in (2, 4, 4)]
    assert (tmp_path / "a b.json").exists()


def test_files_that_cannot_be_read(chat, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "folder").mkdir()
    _, notes = chat(
        *(f"/{command} {name}" for command in ("read", "load") for name in ("no", "folder", "latin"))
    )
    assert [note.split(":", 1)[1].strip() for note in notes] == [
        "no does not exist: give the path of a text file",
        "folder is not a file: give the path of a text file",
        "latin is not UTF-8 (byte 3): convert it first, for example with iconv",
        "no does not exist: check the path",
        "folder is not a regular file: give another path",
        "latin is not UTF-8 (byte 3): convert it first, for example with iconv",
    ]
    _, notes = chat("/read ~/nothing.txt", "/read a\\ b", "/read", "/load ''")
    assert "/nothing.txt does not exist" in notes[0]
    assert "a b does not exist" in notes[1]
    assert notes[2] == "specdec: the file name is missing: give it after the command"


def test_the_system_option_replaces_that_of_a_loaded_conversation(chat):
    _, notes = chat("/system Be brief.", "hello", "/save chat.json", options=["--temp", "0"])
    _, notes = chat("/system", options=["--load", "chat.json"])
    assert notes[-1] == "system message: Be brief."
    _, notes = chat("/system", options=["--load", "chat.json", "--system", "Be long."])
    assert notes[-1] == "system message: Be long."


def test_a_full_context_drops_the_oldest_messages(chat):
    lines = [f"question number {i} of many" for i in range(8)]
    answers, notes = chat(*lines, options=["--ctx", "128", "--temp", "0", "--when-full", "drop-oldest"])
    assert answers.count(b"\n") >= 8
    assert any("the oldest" in note for note in notes)
    assert not any("is full:" in note for note in notes)
    _, notes = chat(*lines, options=["--ctx", "128", "--temp", "0"])
    assert any("/set when-full drop-oldest" in note for note in notes)


@pytest.mark.parametrize(("n", "words"), [(1, "oldest message was"), (2, "oldest 2 messages were")])
def test_dropped_messages_are_counted(n, words):
    assert chat_view._dropped(n) == f"(the context was full: the {words} dropped)"


def test_dropped_messages_are_reported_after_the_answer(inside, main):
    options = ["--threads", "1", "--ctx", "220", "-n", "5", "--temp", "0", "--when-full", "drop-oldest"]
    typed = b"one\n/set max-tokens 200\ntwo\n"
    done = inside("chat", "--main", main, "--no-stats", *options, stdin=typed, merged=True)
    _, setting, answered = done.stdout.partition(b"max-tokens = 200\n")
    assert setting
    assert answered.endswith(b"\n(the context was full: the oldest 2 messages were dropped)\n")
    assert len(answered) > 400


def test_a_slash_in_a_message(chat, answer):
    answers, notes = chat(" /usr/bin holds what?", '"""/usr/bin holds what?"""', options=["--temp", "0"])
    assert notes == []
    assert answers.startswith(answer("--temp", "0", " /usr/bin holds what?"))
