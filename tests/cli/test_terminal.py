"""Test that texts of models, files and servers cannot control a pseudo-terminal, and are exact elsewhere."""

import io
import json
import os
from unittest import mock

import gguf
import pytest

from spec_local.llama.tiny import write_tiny_model
from tests import hostile
from tests.hub_server import HubServer

PLAIN = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "400"}
SMALL = ["--threads", 1, "--ctx", 2048, "--temp", 0]
TEXT = hostile.ALL + "\x00 é ๛\n"


@pytest.fixture
def on_terminal(inside):
    """Run a command on a terminal; return its exit code, and everything that the terminal received."""

    def on_terminal(*arguments, env=None, specdec=inside):
        code, seen = specdec.on_terminal(*arguments, env=PLAIN | (env or {}))
        return code, seen.replace("\r\n", "\n")  # the terminal's driver adds the \r

    return on_terminal


def check(seen, *, prose=False):
    """Check that no control character has come out, but the other characters of the hostile text have."""
    assert hostile.forbidden(seen, prose=prose) == [], seen
    assert "\\u001b[31m" in seen
    assert "[red]x[" in seen


@pytest.fixture
def grammar(tmp_path):
    """The options that make any model answer with the hostile text, as several tokens for one character."""
    escaped = "".join(f"\\U{ord(char):08x}" for char in TEXT)
    (tmp_path / "text.gbnf").write_text(f'root ::= "{escaped}"')
    return ["--grammar-file", tmp_path / "text.gbnf", "--raw", "hello"]


def test_an_answer(inside, on_terminal, main, grammar):
    command = ["generate", "--main", main, *SMALL, *grammar]
    assert inside(*command).stdout == TEXT.encode()  # exact in a pipe
    code, seen = on_terminal(*command)
    assert code == 0, seen
    check(seen, prose=True)
    assert "seen\ngone" in seen
    assert "é ๛\n" in seen


def test_an_answer_as_json(on_terminal, main, grammar, tmp_path):
    command = ["generate", "--main", main, *SMALL, *grammar]
    code, seen = on_terminal(*command, "--json")
    assert code == 0, seen
    check(seen, prose=True)
    assert json.loads(seen)["content"] == TEXT
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    code, seen = on_terminal(*command[:-1], "--input", tmp_path / "prompts.jsonl")
    assert code == 0, seen
    check(seen, prose=True)
    assert json.loads(seen.splitlines()[0])["content"] == TEXT


def test_an_answer_with_marked_draft_tokens(on_terminal, main, draft, grammar):
    options = ["--draft", draft, "--show-drafts", "--policy", "fixed", "--shape", "tree"]
    code, seen = on_terminal("generate", "--main", main, *SMALL, *options, *grammar)
    assert code == 0, seen
    assert hostile.forbidden(seen, prose=True) == []
    assert "rejected: “" in seen


@pytest.fixture
def hostile_file(tmp_path):
    """A model whose metadata, tokens and template are hostile."""
    refusal = f"{{{{ raise_exception({json.dumps(hostile.ALL)}) }}}}"

    def add_name(writer, name, find=gguf.GGUFWriter.add_name):
        find(writer, hostile.ALL)
        writer.add_author(hostile.ALL)

    path = tmp_path / f"{hostile.NAME[:100]}.gguf"
    options = {"extra_tokens": [hostile.ALL], "chat_template": refusal}
    with mock.patch.object(gguf.GGUFWriter, "add_name", add_name):
        return write_tiny_model(path, n_layers=1, tensor_type="F32", **options)


def test_a_hostile_model(on_terminal, hostile_file):
    code, seen = on_terminal("generate", "--main", hostile_file, *SMALL, "hello")
    assert code in (1, 2)
    check(seen)  # the error of its template
    command = ["generate", "--main", hostile_file, *SMALL, "-n", 3, "-vv", "--raw", "hello"]
    code, seen = on_terminal(*command)  # with llama.cpp's log
    assert code == 0, seen
    check(seen)
    assert "general.author" in seen
    check(on_terminal("models", "check", hostile_file, hostile_file)[1])


def test_a_model_of_an_unknown_architecture(on_terminal, tmp_path):
    name = hostile.NAME[:60]
    path = write_tiny_model(tmp_path / "main.gguf", n_layers=1, architecture=name)
    code, seen = on_terminal("generate", "--main", path, "hello")
    assert code == 1
    check(seen)


def test_files_with_hostile_names(inside, on_terminal, main, tmp_path):
    (tmp_path / hostile.NAME).write_bytes(b"\xff")
    (tmp_path / "good.txt").write_text("words and more words " * 20)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, seen = on_terminal("datastore", "add", main, tmp_path, env=env)
    assert code == 0, seen
    check(seen)
    folder = tmp_path / f"home{hostile.NAME}"
    folder.mkdir()
    environment = {"XDG_CACHE_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    for command in (["config", "path"], ["datastore", "add", main, tmp_path], ["datastore", "show"]):
        code, seen = on_terminal(*command, env=environment)
        assert code == 0
        check(seen)
    exact = inside("config", "path", env=environment).stdout
    assert exact.startswith(os.fsencode(folder))


def test_a_path_that_is_not_utf8_is_exact_in_a_pipe(specdec, on_terminal, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x9b")
    env = {"SPECDEC_CONFIG": name}
    done = specdec("config", "path", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, os.fsencode(name) + b"\n", b"")
    code, seen = on_terminal("config", "path", env=env)
    assert (code, seen) == (0, f"{tmp_path}/\\udcff\\udc9b\n")


def test_a_hostile_hub(on_terminal, fresh_inside, tmp_path):
    with HubServer() as server:  # Q5_0 is missing; the error lists what is there
        server.put("a/b", {f"{hostile.NAME}-Q4_0.gguf": b"GGUF", "c-Q8_0.gguf": b"GGUF"})
        for quant in ("Q4_0", "Q5_0"):
            env = server.environment(tmp_path)
            code, seen = on_terminal("models", "pull", f"a/b:{quant}", env=env, specdec=fresh_inside)
            assert hostile.forbidden(seen) == [], seen
            assert code in (0, 1, 2)


def test_a_chat(terminal, main, tmp_path):
    messages = [{"role": role, "content": hostile.ALL} for role in ("system", "user", "assistant")]
    content = {"format": "specdec conversation", "version": 1, "model": hostile.ALL, "messages": messages}
    (tmp_path / "saved.json").write_text(json.dumps(content))
    (tmp_path / hostile.NAME).write_text(hostile.ALL)
    arguments = ["--main", main, "--load", tmp_path / "saved.json", "--no-stats", *SMALL, "-n", 3]
    person = terminal(*arguments, env=PLAIN | {"TERM": "xterm"})
    person.child.logfile_read = log = io.StringIO()
    person.prompt()
    person.say("/system")
    person.say("/fly \u009b31m\u202e")
    person.type(f"/read {tmp_path}/[red]\t")  # completes the hostile name
    person.until("gone")
    person.type("\r")
    person.prompt()
    person.type("\x04")
    assert person.leaves_with() == 0
    shown = hostile.STYLES.sub("", log.getvalue())
    assert hostile.forbidden(shown, prose=True) == [], shown
    for part in ("\x1b[31mred", "\x1b[2J\x1b[H", "n\x08"):
        assert part not in log.getvalue()
    assert shown.count("[red]x[") >= 3
