"""`--prompt-cache` and `specdec cache`: prompts that another process has read."""

import json
import os
import re
import signal
import time

import pytest

from spec_local.llama.tiny import write_tiny_model
from specdec_cli.options import cache_limit
from tests.cli.conftest import BUILT, Specdec
from tests.server.conftest import Server
from tests.waiting import wait_until

TEXT = "the words of many other people and more of them " * 40
OPTIONS = ["--draft", "none", "--threads", 1, "--ctx", 2048, "--temp", 0]
TINY = [*OPTIONS, "-n", 6]


@pytest.fixture
def apart(isolated):
    """Each command in a process of its own."""
    return Specdec(isolated.folder, isolated.environment)


@pytest.fixture
def serve(apart):
    """Start a server; it is killed at the latest after the test."""
    started = []

    def serve(*arguments):
        started.append(Server(apart, *arguments))
        return started[-1]

    yield serve
    for server in started:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def recurrent(home):
    return write_tiny_model(
        home / "mamba.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 17, architecture="mamba"
    )


def files(command):
    return sorted(command.folder.glob("cache/specdec/prompts/*/*.prompt"))


def answer(command, main, *more, text=TEXT, env=None):
    """Text of an answer, tokens of the prompt that were cached, and those that were read."""
    done = command("generate", "--main", main, *TINY, *more, "--json", "--raw", stdin=text.encode(), env=env)
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout)
    timings = answered["timings"]
    return answered["content"], timings["cache_n"], timings["prompt_n"]


@pytest.mark.parametrize(("kind", "most"), [("main", 0), ("recurrent", 16)])
def test_another_process_does_not_read_a_prompt_again(main, recurrent, apart, kind, most):
    model = {"main": main, "recurrent": recurrent}[kind]
    text, n_cached, n_read = answer(apart, model)
    assert (n_cached, n_read > 300) == (0, True)
    again, n_cached, n_left = answer(apart, model)
    assert again == text
    assert n_left <= most
    assert n_cached + n_left == n_read
    assert answer(apart, model, "--prompt-cache", "off") == (text, 0, n_read)
    assert {path.stat().st_mode & 0o777 for path in files(apart)} == {0o600}


def test_a_prompt_with_the_same_beginning_is_read_from_there_on(isolated, main):
    _, _, n_read = answer(isolated, main)
    longer = TEXT + "and one is in the end of it"
    text, n_cached, n_left = answer(isolated, main, text=longer)
    assert n_cached >= n_read - 5
    assert 0 < n_left < 30
    assert answer(isolated, main, "--prompt-cache", "off", text=longer)[0] == text


@pytest.mark.parametrize("value", ["off", "0"])
def test_without_files_the_next_process_reads(isolated, main, value):
    first = answer(isolated, main, "--prompt-cache", value)
    assert first[1] == 0
    assert not files(isolated)
    assert answer(isolated, main, "--prompt-cache", value) == first
    assert not files(isolated)


def test_files_stay_within_the_limit(isolated, main):
    answer(isolated, main)
    before = sum(path.stat().st_size for path in files(isolated))
    limit = before * 2 // 3
    answer(isolated, main, "--prompt-cache", f"{limit // 1024}KiB", text="of other people " + TEXT)
    assert 0 < sum(path.stat().st_size for path in files(isolated)) <= limit


def test_the_config_file_and_the_environment(isolated, main, tmp_path):
    (tmp_path / "c.toml").write_text('prompt-cache = "off"\n')
    config = ["--config", tmp_path / "c.toml"]
    answer(isolated, main, *config)
    answer(isolated, main, env={"SPECDEC_PROMPT_CACHE": "0"})
    assert not files(isolated)
    answer(isolated, main, *config, env={"SPECDEC_PROMPT_CACHE": "10MB"})
    assert files(isolated)
    note = isolated("cache", "show", env={"SPECDEC_PROMPT_CACHE": "10MB"}).stderr
    assert b" of at most 10 MB in " in note
    (tmp_path / "c.toml").write_text("prompt-cache = 1\n")  # GiB
    assert b" of at most 1.1 GB in " in isolated("cache", "show", *config).stderr
    (tmp_path / "c.toml").write_text('prompt-cache = "much"\n')
    line = isolated.one_line(isolated("generate", "--main", main, *config, "x"), 1)
    assert "c.toml, line 1, prompt-cache: " in line
    assert "'much' is not a size: give one such as 2GiB" in line


def test_statistics_say_what_was_cached(isolated, main):
    def statistics():
        done = isolated("generate", "--main", main, *TINY, "-v", "--raw", stdin=TEXT.encode())
        return done.stderr.decode().splitlines()[-1]

    assert "cached" not in statistics()
    assert " tokens cached, 0 read · " in statistics()


def test_a_saved_chat_is_not_read_again(isolated, main, tmp_path):
    def chat(*more, lines):
        done = isolated("chat", "--main", main, *TINY, *more, stdin="\n".join(lines).encode())
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr.decode()

    _, first = chat(lines=[TEXT, f"/save {tmp_path / 'c.json'}"])
    assert "cached" not in first
    load = ["--load", tmp_path / "c.json"]
    text, second = chat(*load, lines=["and more", "/stats"])
    [line] = [line for line in second.splitlines() if "tokens cached" in line]
    n_cached, n_read = map(int, re.search(r"(\d+) tokens cached, (\d+) read", line).groups())
    assert n_cached > 300 > 40 > n_read
    assert chat(*load, "--prompt-cache", "off", lines=["and more"])[0] == text


def test_show_and_clear(isolated, main, recurrent):
    for done in (isolated("cache", "show"), isolated("cache", "clear")):
        assert (done.returncode, done.stdout) == (0, b"")
        assert b"the prompt cache is empty" in done.stderr
    answer(isolated, main)
    answer(isolated, recurrent)
    n_bytes = sum(path.stat().st_size for path in files(isolated))
    done = isolated("cache", "show")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == ["mamba.gguf", "main.gguf"]
    assert sum(int(row[1]) for row in rows) == len(files(isolated))
    assert sum(int(row[2]) for row in rows) == n_bytes
    assert {row[3][:10] for row in rows} <= {time.strftime("%Y-%m-%d", time.localtime(t)) for t in days()}
    assert f" in {isolated.folder}/cache/specdec/prompts\n" in done.stderr.decode()
    code, screen = isolated.on_terminal("cache", "show")
    lines = isolated.plain(screen).splitlines()
    assert code == 0
    assert lines[0].split() == ["model", "files", "size", "last", "used"]
    assert [line.split()[0] for line in lines[1:3]] == ["mamba.gguf", "main.gguf"]
    refusal = isolated.one_line(isolated("cache", "clear"), 2)
    assert f"delete {len(files(isolated))} files" in refusal
    assert "--yes" in refusal
    assert len(files(isolated)) > 1
    other = isolated.folder / "cache/specdec/prompts/notes.txt"
    other.touch()
    done = isolated("cache", "clear", "--yes")
    assert (done.returncode, done.stderr) == (0, f"{n_bytes / 1e6:.1f} MB freed\n".encode())
    assert list(other.parent.iterdir()) == [other]  # it is not ours
    assert answer(isolated, main)[1] == 0


def days():
    """The test may run at midnight."""
    return time.time() - 60, time.time()


def test_names_in_the_folder_break_no_line(isolated, main):
    answer(isolated, main)
    [about] = isolated.folder.glob("cache/specdec/prompts/*/about.json")
    about.write_text('{"name": "a\\tb\\n\\u001b[31mc"}')
    [line] = isolated("cache", "show").stdout.decode().splitlines()
    assert len(line.split("\t")) == 4
    assert "\x1b[31m" not in isolated.on_terminal("cache", "show")[1]
    about.write_text("[")
    assert isolated("cache", "show").stdout.decode().split("\t")[0] == about.parent.name


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "folder"])
def test_damaged_files_do_no_harm(isolated, main, damage):
    text, _, n_read = answer(isolated, main)
    for path in files(isolated):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            path.write_bytes({"flipped": content, "cut": content[:-9], "empty": b""}[damage])
    assert answer(isolated, main) == (text, 0, n_read)
    assert isolated("cache", "show").returncode == 0
    assert isolated("cache", "clear", "--yes").returncode == 0
    if damage != "folder":
        answer(isolated, main)
        assert answer(isolated, main) == (text, n_read, 0)


def test_a_folder_that_cannot_be_written_does_no_harm(isolated, main):
    expected = answer(isolated, main, "--prompt-cache", "off")
    place = isolated.folder / "cache/specdec/prompts"
    place.write_text("not a folder")
    assert answer(isolated, main) == expected
    assert place.read_text() == "not a folder"
    assert isolated("cache", "show").returncode == isolated("cache", "clear").returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can write everywhere")
def test_a_folder_that_is_read_only_is_still_read(isolated, main):
    text, _, n_read = answer(isolated, main)
    place = files(isolated)[0].parent
    place.chmod(0o500)
    try:
        assert answer(isolated, main) == (text, n_read, 0)
        done = isolated("generate", "--main", main, *TINY, "--raw", stdin=("people " + TEXT).encode())
        assert done.returncode == 0
        assert b"check its permissions" in done.stderr
        line = isolated.one_line(isolated("cache", "clear", "--yes"), 1)
        assert "could be deleted: check its permissions" in line
    finally:
        place.chmod(0o700)


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        ("off", "off"), ("0", 0), ("2", 2 << 30), ("1.5", 3 << 29), ("2GiB", 2 << 30), ("2gib", 2 << 30),
        ("10GB", 10**10), ("500MiB", 500 << 20), ("500 MB", 5 * 10**8), ("4G", 4 << 30), ("1TiB", 1 << 40),
        ("64KiB", 1 << 16), (".5", 1 << 29),
    ],
)  # fmt: skip
def test_sizes(value, n_bytes):
    assert cache_limit(value) == n_bytes


@pytest.mark.parametrize(
    "value", ["much", "-1", "", "2XB", "GiB", "1e9", "nan", "inf", "٣", "2GiBs", "9" * 400, "Off", "0x1"]
)
@pytest.mark.parametrize("command", ["run", "chat", "generate", "serve"])
def test_wrong_sizes(inside, main, command, value):
    line = inside.one_line(inside(command, "--main", main, f"--prompt-cache={value}"), 2)
    assert f"{value!r} is not a size: give one such as 2GiB or 500MiB, 0 (in memory only), or off" in line


def test_what_measures_has_no_option_and_leaves_nothing(isolated, main, tmp_path):
    measuring = {name for name, command in BUILT.commands.items() if not has_option(command)}
    assert {"bench", "tune", "worker"} <= measuring
    (tmp_path / "prompts.txt").write_text(TEXT.strip() + "\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--tokens", 4, "--runs", 1, "--proposer", "lookup"]
    env = {"SPECDEC_PROMPT_CACHE": "1GiB"}
    for _ in range(2):
        done = isolated("bench", "--main", main, "--threads", 1, "--ctx", 2048, *arguments, env=env)
        assert done.returncode == 0, done.stderr
        assert b"SPECDEC_PROMPT_CACHE" not in done.stderr
    assert not files(isolated)


def has_option(command):
    return any("--prompt-cache" in param.opts for param in command.params)


def test_a_server_does_not_mind_a_clear(main, apart, serve):
    arguments = [main, "--draft", "none", "--parallel", 2, "--ctx", 2048]

    def asked(server, text):
        answered = server.chat(text, max_tokens=6)
        usage = answered["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answered["choices"][0]["message"]["content"], usage["prompt_tokens"] - n_cached

    server = serve(*arguments)
    text, n_read = asked(server, TEXT)
    assert n_read > 300
    wait_until(lambda: files(apart))
    assert b" freed" in apart("cache", "clear", "--yes").stderr
    assert asked(server, TEXT) == (text, 1)  # from memory
    other, n_read = asked(server, "people and " + TEXT)
    assert n_read > 300
    wait_until(lambda: files(apart))
    assert server.stop()[0] == 0
    server = serve(*arguments)
    assert asked(server, "people and " + TEXT) == (other, 1)
    assert server.stop()[0] == 0
