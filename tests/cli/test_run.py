"""specdec run: a chat on a terminal, otherwise one answer."""

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
