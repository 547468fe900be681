"""specdec run: a chat on a terminal, otherwise one answer."""

import os
from pathlib import Path

import pytest

SHORT = ("-n", 8, "-t", 1, "-c", 512, "--temp", 0)


def test_an_argument_or_a_pipe_gets_one_answer(inside, main):
    expected = inside("generate", "hello there", "--main", main, *SHORT)
    assert expected.returncode == 0
    assert expected.stdout
    assert inside("run", main, "hello there", *SHORT).stdout == expected.stdout
    assert inside("run", main, *SHORT, stdin=b"hello there").stdout == expected.stdout


def test_the_argument_overrides_the_option(inside, main):
    done = inside("run", "absent.gguf", "hello there", "-m", main, *SHORT)
    assert b"absent.gguf" in done.stderr


def test_a_terminal_gets_a_chat(terminal, main):
    person = terminal(main, *SHORT, "--system", "Be brief.", command="run")
    assert "main main.gguf" in person.prompt()
    assert "8 tokens in" in person.say("hello there")
    person.type("/exit\r")
    assert person.leaves_with() == 0


def test_a_prompt_on_a_terminal_gets_one_answer(inside, main):
    code, screen = inside.on_terminal("run", main, "hello there", *SHORT)
    assert code == 0
    assert "main main.gguf" not in screen


def test_a_single_argument_that_can_be_no_model_is_the_prompt(inside, main, draft, tmp_path, monkeypatch):
    monkeypatch.setitem(inside.environment, "SPECDEC_MAIN", str(main))
    expected = inside("generate", "Why is the sky blue?", *SHORT)
    assert expected.stdout
    assert inside("run", "Why is the sky blue?", *SHORT).stdout == expected.stdout
    assert inside("run", "2+2=?", *SHORT).returncode == 0
    assert inside("run", "你好", *SHORT).returncode == 0
    for model in ("absent", "my model.gguf", "user/repo:Q4_0", "folder/file"):
        assert inside("run", model, *SHORT).returncode != 0
    (tmp_path / "a b").write_bytes(Path(draft).read_bytes())  # a file is no prompt, whatever its name
    found = inside("run", tmp_path / "a b", *SHORT, stdin=b"Why is the sky blue?").stdout
    assert found == inside("run", draft, "Why is the sky blue?", *SHORT).stdout != expected.stdout


def test_a_prompt_of_one_word_needs_a_model_before_it(inside, main):
    line = inside.one_line(inside("run", "hello", *SHORT), 2)
    assert "there is no model or file 'hello'" in line
    assert line.endswith(
        "if it is a prompt, type specdec run -p hello, or a model before it: specdec run MODEL hello"
    )
    expected = inside("run", main, "hello", *SHORT).stdout
    assert expected
    assert inside("run", "-m", main, "-p", "hello", *SHORT).stdout == expected
    assert "prompt" not in inside.one_line(inside("run", "folder/file", *SHORT), 2)
    for command in ("run", "generate"):
        line = inside.one_line(inside(command, "hello", "it's me", *SHORT), 2)
        assert line.endswith(f"""; if both are the prompt, type specdec {command} 'hello it'"'"'s me'""")
        assert "prompt" not in inside.one_line(inside(command, "folder/file", "there", *SHORT), 2)
        assert "prompt" not in inside.one_line(inside(command, "coder-7b", "there", *SHORT), 1)


def test_generate_takes_the_model_as_an_argument_too(inside, main):
    expected = inside("generate", "--main", main, "hello there", *SHORT)
    assert expected.returncode == 0
    assert inside("generate", main, "hello there", *SHORT).stdout == expected.stdout
    assert inside("generate", main, "-p", "hello there", *SHORT).stdout == expected.stdout
    (inside.folder / "one.txt").write_text("hello there")
    (answer,) = inside.objects(inside("generate", main, "--input", "one.txt", *SHORT))
    assert answer["content"] + "\n" == expected.stdout.decode(errors="replace")
    line = inside.one_line(inside("generate", main, "hello there", "-p", "hello", *SHORT), 2)
    assert "given twice" in line


def test_in_generate_an_only_argument_that_is_a_model_is_the_model(
    inside, main, draft, monkeypatch, terminal
):
    """Wherever its prompt comes from; the starter, which is not there, would be an error."""
    expected = inside("generate", "--main", main, "hello there", *SHORT).stdout
    assert expected
    (inside.folder / "one.txt").write_text("hello there")
    assert inside("generate", main, *SHORT, stdin=b"hello there").stdout == expected
    assert inside("generate", "main.gguf", "--file", "one.txt", *SHORT).stdout == expected
    assert inside("generate", main, "-v", *SHORT, stdin=b"hello there").stdout == expected
    gap = inside("generate", main, "--suffix", "x", *SHORT, stdin=b"hello there")
    assert "main.gguf has no fill-in-the-middle tokens" in inside.one_line(gap, 1)
    assert "absent.gguf does not exist" in inside.one_line(inside("generate", "absent.gguf", stdin=b"hi"), 1)
    for name in ("coder-7b", "qwen3-4b", "user/repo:Q4_0"):
        assert "has not been downloaded" in inside.one_line(inside("generate", name, stdin=b"hi"), 1)
    assert "there is no prompt" in inside.one_line(inside("generate", main, *SHORT), 2)
    on_terminal = terminal(main, command="generate").rest()
    assert on_terminal == "specdec: there is no prompt: give one, pipe text in, or chat with specdec run\r\n"
    # What names no model is the prompt.
    monkeypatch.setitem(inside.environment, "SPECDEC_MAIN", str(draft))
    (inside.folder / "tests").mkdir(exist_ok=True)
    for words in ("hello", "hello there", "tests", "2+2=?", "code"):
        expected = inside("generate", "-p", words, *SHORT).stdout
        assert expected
        assert inside("generate", words, *SHORT).stdout == expected
    (answer,) = inside.objects(inside("generate", main, "--input", "one.txt", *SHORT))
    assert answer["model"] == "main.gguf"


@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_mistyped_model_is_no_prompt(inside, command):
    for word in ("codr-7b", "qwen3:4b"):
        line = inside.one_line(inside(command, word, stdin=b"hi"), 2)
        assert f"there is no model or file '{word}': similar names are" in line
        assert f"if it is a prompt, type specdec {command} -p {word}" in line


@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_text_file_is_no_model(inside, command):
    (inside.folder / "notes.txt").write_text("hello there")
    line = inside.one_line(inside(command, "notes.txt", *SHORT), 2)
    assert line == (
        "specdec: notes.txt is not a model file: if its text is the prompt, "
        "type specdec generate --file notes.txt"
    )


def test_chat_takes_both_models_as_arguments(inside, main, draft):
    done = inside("chat", main, draft, *SHORT, stdin=b"hello\n")
    assert done.returncode == 0
    assert b"draft draft.gguf" in done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU masks")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU only")
def test_a_cpu_mask_decides_the_number_of_threads(inside, main):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        done = inside("run", main, "hello", "-n", 1, "-c", 512, "-v")
        doctor = inside("doctor")
    finally:
        os.sched_setaffinity(0, before)
    assert b" 1 thread (taskset or a cpuset allows 1 of " in done.stderr
    assert b"threads: 1 (taskset or a cpuset allows 1 of " in doctor.stdout
