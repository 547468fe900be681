"""specdec run: a chat on a terminal, otherwise one answer."""

from pathlib import Path

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


def test_generate_takes_the_model_as_an_argument_too(inside, main):
    expected = inside("generate", "--main", main, "hello there", *SHORT)
    assert expected.returncode == 0
    assert inside("generate", main, "hello there", *SHORT).stdout == expected.stdout
    assert inside("generate", main, "-p", "hello there", *SHORT).stdout == expected.stdout
    (inside.folder / "one.txt").write_text("hello there")
    (answer,) = inside.objects(inside("generate", main, "--input", "one.txt", *SHORT))
    assert answer["content"] == expected.stdout.decode(errors="replace")
    line = inside.one_line(inside("generate", main, "hello there", "-p", "hello", *SHORT), 2)
    assert "given twice" in line
