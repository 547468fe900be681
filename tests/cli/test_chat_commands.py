"""The slash commands of a chat, through a pipe: what they do, and what they say of wrong ones."""

import json

import pytest

OPTIONS = ["--threads", "1", "--ctx", "512", "-n", "12", "--no-stats"]


@pytest.fixture
def chat(inside, main, tmp_path):
    """Answers on stdout and notes of a chat that hears these lines."""

    def run(*lines, options=(), model=main, code=0):
        said = "".join(f"{line}\n" for line in lines)
        done = inside("chat", "--main", model, *OPTIONS, *options, stdin=said.encode(), cwd=tmp_path)
        assert done.returncode == code, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        return done.stdout, done.stderr.decode().splitlines()[1:]  # the first line is the greeting

    return run


@pytest.fixture
def answer(inside, main):
    def generate(*arguments, options=OPTIONS[:-1]):
        return inside("generate", "--main", main, *options, *arguments).stdout + b"\n"

    return generate


def test_regen_draws_another_answer_and_replaces_the_first(chat, answer):
    said, _ = chat("hello", "/regen", "and now?", options=["--seed", "7"])
    first, second = answer("--seed", "7", "hello"), answer("--seed", "8", "hello")
    assert first != second
    assert said.startswith(first + second)
    # What is said later follows the second answer: it is what a chat would say that never heard the first.
    alone, _ = chat("hello", "and now?", options=["--seed", "8"])
    redone, _ = chat("hello", "/regen", "/set seed 8", "and now?", options=["--seed", "7"])
    assert redone.removeprefix(first) == alone


def test_regen_at_temperature_0_says_the_same(chat, answer):
    said, _ = chat("hello", "/regen", options=["--temp", "0"])
    assert said == answer("--temp", "0", "hello") * 2


def test_undo_takes_a_question_and_its_answer_back(chat):
    said, notes = chat("hello", "something else", "/undo", "again", options=["--temp", "0"])
    without, _ = chat("hello", "again", options=["--temp", "0"])
    assert notes == ["taken back: something else"]
    assert without.endswith(said[-len(without) // 2 :])
    nothing, notes = chat("hello", "/undo", "/undo", "/regen")
    assert "nothing to take back" in notes[1]
    assert "no answer" in notes[2]
    assert nothing.count(b"\n") >= 1


def test_system(chat, answer):
    said, notes = chat(
        "/system", "/system Be brief.", "hello", "/system none", "/clear", "hello", options=["--temp", "0"]
    )
    assert notes == [
        "system message: none",
        "system message: Be brief.",
        "system message: none",
        "the conversation is forgotten",
    ]
    assert said == answer("--temp", "0", "--system", "Be brief.", "hello") + answer("--temp", "0", "hello")


def test_set_shows_and_changes(chat, answer):
    said, notes = chat("/set temp 0", "/set max-tokens 5", "hello", "/set")
    assert notes[:2] == ["temp = 0", "max-tokens = 5"]
    assert said == answer("--temp", "0", "-n", "5", "hello")
    assert "top-k = 40" in notes
    assert "seed = none" in notes
    assert len(notes) > 12


WRONG = [
    ("/set temp hot", "temp is not 'hot': give a number"),
    ("/set temp nan", "temp is not 'nan'"),
    ("/set temp -1", "temperature is -1"),
    ("/set top-k 1.5", "top-k is not '1.5'"),
    ("/set tmep 1", "did you mean temp?"),
    ("/set stats maybe", "give on or off"),
    ("/set when-full never", "give stop or drop-oldest"),
    ("/set policy wild", "policy 'wild' is unknown"),
    ("/draft wild", "/draft wild is not understood"),
    ("/draft draft", "there is no draft model"),
    ("/stats", "nothing has been said yet"),
    ("/regen", "no answer"),
    ("/undo", "nothing to take back"),
    ("/undo twice", "/undo takes nothing after it"),
    ("/read", "which file?"),
    ("/read absent.txt", "absent.txt is no file"),
    ("/read /dev/zero", "/dev/zero is no file"),
    ("/load absent.json", "absent.json"),
    ("/save ~nobody-of-this-name/x", "~nobody-of-this-name/x: no home folder is known"),
    ("/save", "which file?"),
    ("/save absent/folder/\0x", "which file?"),
    ("/save --statex talk.json", "give /save [--state] FILE"),
    ("/save talk.json --state", "give /save [--state] FILE"),
    ("/save --state", "which file?"),
    ("/", "/ is no command"),
    ("/fly away", "/fly is no command"),
    ("/9j/4AAQ" + "A" * 5000, "/9j/4AAQ" + "A" * 51 + "… is no command"),
]


def test_what_makes_no_sense_is_told_and_the_chat_goes_on(chat):
    said, notes = chat(*(line for line, _ in WRONG), "/help")
    assert said == b""
    for (line, told), note in zip(WRONG, notes, strict=False):
        assert told in note, line
    assert notes[len(WRONG)].startswith("/help")


def test_every_command_is_in_the_help(chat):
    from specdec_cli.chat_commands import COMMANDS

    _, notes = chat("/help")
    for name in COMMANDS:
        assert any(note.startswith(f"{name} ") for note in notes)


def test_draft_turns_guesses_off_and_on(inside, main, draft):
    lines = b"/draft\n/draft off\nhello\n/stats\n/draft lookup\n/draft on\n"
    done = inside("chat", "--main", main, "--draft", draft, *OPTIONS, "--temp", "0", stdin=lines)
    notes = done.stderr.decode().splitlines()[1:]
    assert notes[0] == notes[-1] == "draft draft.gguf and lookup, policy adaptive"
    assert notes[1] == "no guesses"
    assert "12 tokens in 12 steps" in notes[2]
    assert notes[-2] == "lookup, policy adaptive"


def test_stats_tell_where_the_time_went(chat):
    _, notes = chat("hello", "/stats")
    assert "12 tokens in" in notes[0]
    assert any("main model" in note for note in notes)
    assert "2 messages, " in notes[-1]
    assert "of 512 tokens" in notes[-1]


def test_read_puts_a_file_before_the_next_message(chat, answer, tmp_path):
    (tmp_path / "a file.txt").write_text("first line\nสวัสดี 👋\n")
    said, notes = chat(
        '/read "a file.txt"', "what is it?", "/read a file.txt", "/clear", "hello", options=["--temp", "0"]
    )
    assert notes[0].startswith("a file.txt (35 bytes) goes before")
    whole = answer("--temp", "0", "first line\nสวัสดี 👋\n\nwhat is it?")
    assert said == whole + answer("--temp", "0", "hello")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    _, notes = chat("/read latin")
    assert "not UTF-8 (byte 3)" in notes[0]


def test_a_message_that_is_not_sent_leaves_all_as_it_was(chat, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 900)
    (tmp_path / "short.txt").write_text("some words")
    said, notes = chat("/read short.txt", "and " * 900, "what is it?", options=["--temp", "0"])
    whole, _ = chat("/read short.txt", "what is it?", options=["--temp", "0"])
    assert said == whole  # the file still goes before the next message
    assert "not sent" in notes[1]
    assert "and the context 512: shorten it" in notes[1]
    assert len(notes) == 2  # there is nothing that /clear could forget
    _, notes = chat("hello", "/read long.txt", "what?", "/clear", "what?", options=["--temp", "0"])
    assert "/clear starts anew" in notes[2]
    assert len(notes) == 4


def test_save_and_load(chat, tmp_path):
    whole, _ = chat("hello", "and again", options=["--temp", "0"])
    first, notes = chat(
        "/system Be brief.", "/system none", "hello", "/save talk.json", options=["--temp", "0"]
    )
    assert notes[-1] == "saved: 2 messages in talk.json"
    kept = json.loads((tmp_path / "talk.json").read_text())
    assert kept["messages"][0]["content"] == "hello"
    second, notes = chat("/load talk.json", "and again", options=["--temp", "0"])
    assert notes[0].startswith("loaded: 2 messages")
    assert first + second == whole
    third, _ = chat("and again", options=["--temp", "0", "--load", "talk.json"])
    assert third == second


def test_a_system_message_for_a_conversation_that_was_kept(chat):
    _, notes = chat("/system Be brief.", "hello", "/save talk.json", options=["--temp", "0"])
    _, notes = chat("/system", options=["--load", "talk.json"])
    assert notes[-1] == "system message: Be brief."
    _, notes = chat("/system", options=["--load", "talk.json", "--system", "Be long."])
    assert notes[-1] == "system message: Be long."


def test_what_was_read_is_kept_too(chat, tmp_path):
    whole, _ = chat("hello", "and again", options=["--temp", "0"])
    first, notes = chat("hello", "/save --state talk.json", options=["--temp", "0"])
    assert "talk.json.state (" in notes[-1]
    second, notes = chat("/load talk.json", "and again", "/stats", options=["--temp", "0"])
    assert "tokens of them read already" in notes[0]
    assert first + second == whole
    (tmp_path / "talk.json.state").write_bytes(b"rubbish" * 100)
    third, notes = chat("/load talk.json", "and again", options=["--temp", "0"])
    assert "is no saved state" in notes[0]
    assert third == second


def test_a_full_context_that_forgets(chat):
    lines = [f"question number {i} of many" for i in range(8)]
    said, notes = chat(*lines, options=["--ctx", "128", "--temp", "0", "--when-full", "drop-oldest"])
    assert said.count(b"\n") >= 8
    assert any("the oldest" in note for note in notes)
    assert not any("is full:" in note for note in notes)
    _, notes = chat(*lines, options=["--ctx", "128", "--temp", "0"])
    assert any("/set when-full drop-oldest" in note for note in notes)


def test_an_answer_goes_on_when_the_context_is_full(chat):
    lines = ["a question of some length", "and one more"]
    said, notes = chat(
        *lines,
        options=["--ctx", "128", "-n", "150", "--temp", "0", "--when-full", "drop-oldest", "--system", "x"],
    )
    assert any("the oldest 2 messages" in note for note in notes)
    assert notes[-1].startswith(
        "the context of 128 tokens is full"
    )  # one question and its answer are too much
    assert said.count(b"\n") >= 2


def test_what_was_forgotten_is_not_told_in_the_middle_of_an_answer(specdec, main):
    options = ["--ctx", "220", "-n", "5", "--temp", "0", "--when-full", "drop-oldest", "--no-stats"]
    script = 'printf "one\n/set max-tokens 200\ntwo\n" | "$@" 2>&1'
    done = specdec.shell(script, "chat", "--main", main, *options)
    _, told, answered = done.stdout.partition(b"max-tokens = 200\n")
    assert told
    assert answered.endswith(b"\n(the context was full: the oldest 2 messages are forgotten)\n")
    assert len(answered) > 400


def test_a_slash_in_a_message(chat, answer):
    said, notes = chat(" /usr/bin holds what?", '"""/usr/bin holds what?"""', options=["--temp", "0"])
    assert notes == []
    assert said.startswith(answer("--temp", "0", " /usr/bin holds what?"))
