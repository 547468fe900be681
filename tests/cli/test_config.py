"""Test option values from the command line, the environment, the config file and defaults, in this order."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import typer

from specdec_cli import settings
from specdec_cli.app import app

SMALL = {"SPECDEC_THREADS": "1", "SPECDEC_CTX": "256"}


@pytest.fixture
def configured(inside, tmp_path):
    """Write the user's config file; return the command, which reads it."""
    run = type(inside)(
        tmp_path, inside.environment | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": f"{tmp_path}/config"}
    )

    def configured(text, name="config/specdec/config.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return run

    return configured


def shown(inside, *arguments, env=None, code=0):
    """Return the output of config show, as option -> (value, source)."""
    done = inside("config", "show", "--all", *arguments, env=env)
    assert done.returncode == code, done
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    return {row[0]: tuple(row[1:]) for row in rows}


def test_precedence_of_sources(configured, main):
    """Observed by the number of tokens in the answer."""
    n = lambda done: json.loads(done.stdout)["timings"]["predicted_n"]  # noqa: E731
    run = configured(f"max-tokens = 2\nmain = {json.dumps(str(main))}\njson = true\n")
    assert n(run("generate", "x", env=SMALL)) == 2
    assert n(run("generate", "x", env=SMALL | {"SPECDEC_MAX_TOKENS": "3"})) == 3
    assert n(run("generate", "x", "-n", 4, env=SMALL | {"SPECDEC_MAX_TOKENS": "3"})) == 4
    configured(f"max-tokens = 2\nmain = {json.dumps(str(main))}\njson = true\n[generate]\nmax-tokens = 5\n")
    assert n(run("generate", "x", env=SMALL)) == 5
    assert n(run("generate", "x", env=SMALL | {"SPECDEC_MAX_TOKENS": "3"})) == 3
    done = run("generate", "x", "-n", 1, env=SMALL | {"SPECDEC_JSON": "0"})  # a flag that the file sets
    assert not done.stdout.startswith(b"{")


def test_show_prints_the_source_of_each_value(configured):
    run = configured('top-k = 3\nstop = ["a b", "c"]\nno-spec = true\n\n[chat]\ntemp = 1\n"top-k" = 4\n')
    path = run.folder / "config/specdec/config.toml"
    assert run("config", "path").stdout.decode() == f"{path}\n"
    rows = shown(run, "generate", env={"SPECDEC_TOP_P": "0.5"})
    assert rows["top-k"] == ("3", f"{path}:1")
    assert rows["stop"] == ("'a b', 'c'", f"{path}:2")
    assert rows["no-spec"] == ("true", f"{path}:3")
    assert rows["top-p"] == ("0.5", "SPECDEC_TOP_P")
    assert rows["temp"] == ("-", "default")
    assert rows["seed"] == ("-", "default")
    rows = shown(run, "chat", env={"SPECDEC_TEMP": "0.25"})
    assert rows["top-k"] == ("4", f"{path}:7")
    assert rows["temp"] == ("0.25", "SPECDEC_TEMP")
    rows = shown(run)
    assert rows["top-k"] == ("3", f"{path}:1")
    assert rows["chat.top-k"] == ("4", f"{path}:7")
    assert rows["chat.temp"] == ("1", f"{path}:6")
    assert rows["bench.temp"] == ("0.0", "default")
    assert rows["offline"] == ("false", "default")  # of models pull
    assert run("config", "show", "fly").returncode == 2


def test_every_option_of_every_command_can_be_set_in_the_environment(inside, monkeypatch):
    """By the name of its flag; the value of a repeatable option is one element, or a JSON array."""
    monkeypatch.delenv("SPECDEC_KERNELS", raising=False)  # kernels.use sets it for child processes
    root = typer.main.get_command(app)
    names = {key for _, command in settings.runnable(root) for key in settings.options(command)}
    assert {"main", "draft", "top-k", "stop", "json", "verbose", "type", "threads", "no-color"} <= names
    assert not {"help", "version", "config"} & names
    for name, command in settings.runnable(root):
        ctx = typer.Context(command)
        for key, option in settings.options(command).items():
            assert option.value_from_envvar(ctx) is None, (name, key)
            with monkeypatch.context() as patch:
                patch.setenv(settings.variable(key), "1")
                assert option.value_from_envvar(ctx) in ("1", ["1"]), (name, key)
    done = shown(
        inside, "generate", env={"SPECDEC_STOP": "two words\n", "SPECDEC_LOGIT_BIAS": '["1=2", "3=4"]'}
    )
    assert done["stop"] == ("'two words\\n'", "SPECDEC_STOP")
    assert done["logit-bias"] == ("'1=2', '3=4'", "SPECDEC_LOGIT_BIAS")
    assert shown(inside, "tune", env={"SPECDEC_THREADS": "3"})["threads"] == ("'3'", "SPECDEC_THREADS")
    assert shown(inside, "generate", env={"SPECDEC_TOP_K": ""})["top-k"] == ("-", "default")


def test_show_leaves_out_defaults(configured):
    run = configured("top-k = 3\n[chat]\ntemp = 1\n")
    path = run.folder / "config/specdec/config.toml"
    done = run("config", "show", env={"SPECDEC_SEED": "5"})
    lines = {f"top-k\t3\t{path}:1", f"chat.temp\t1\t{path}:3", "seed\t5\tSPECDEC_SEED"}
    assert set(done.stdout.decode().splitlines()) == lines
    done = configured("")("config", "show")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"no option is set" in done.stderr


def test_set_and_unset(configured):
    run = configured("# mine\ntop-k = 3 # few\n\n[chat]\ntemp = 1\n")
    path = run.folder / "config/specdec/config.toml"
    for arguments in (
        ("top-k", 5),
        ("no-spec", "true"),
        ("chat.temp", "0.5"),
        ("stop", "END", "a b"),
        ("models-pull.offline", "true"),
        ("seed", "7"),
    ):
        done = run("config", "set", *arguments)
        assert (done.returncode, done.stdout) == (0, b""), done
    assert run("config", "unset", "seed").returncode == 0
    text = path.read_text()
    assert text.startswith("# mine\ntop-k = 5 # few\n")
    assert text.endswith("\n")
    assert tomllib.loads(text) == {
        "top-k": 5,
        "no-spec": True,
        "stop": ["END", "a b"],
        "chat": {"temp": 0.5},
        "models-pull": {"offline": True},
    }
    assert run("config", "unset", "chat.temp").returncode == 0
    assert "chat" not in tomllib.loads(path.read_text())


def test_set_creates_the_file_and_keeps_paths_valid(fresh_inside, main):
    folder = fresh_inside.folder
    (folder / "m.gguf").symlink_to(main)
    values = {"main": "m.gguf", "draft": "starter-draft", "plot": "x.png", "gpu-layers": "-1"}
    for name, value in values.items():
        assert fresh_inside("config", "set", name, value).returncode == 0, name
    path = Path(fresh_inside("config", "path").stdout.decode().strip())
    assert tomllib.loads(path.read_text()) == {
        "main": str(folder / "m.gguf"),
        "draft": "starter-draft",
        "plot": str(folder / "x.png"),
        "gpu-layers": -1,
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("top-k", "many"), "top-k: input should be a valid integer"),
        (("proposer", "magic"), "proposer: 'magic' is not one of"),
        (("foo", "3"), "there is no option foo: see specdec config show --all"),
        (("chat.tmp", "3"), "there is no option chat.tmp (did you mean chat.temp?)"),
        (("topk", "3"), "there is no option topk (did you mean top-k?)"),
        (("chta.top-k", "3"), "there is no command chta (did you mean chat?)"),
        (("chat.offline", "true"), "there is no option chat.offline"),
        (("top-k", "3", "4"), "top-k takes one value"),
    ],
)
def test_set_changes_nothing_if_it_fails(configured, arguments, why):
    run = configured("temp = 1\n")
    assert why in run.one_line(run("config", "set", *arguments), 2)
    assert (run.folder / "config/specdec/config.toml").read_text() == "temp = 1\n"
    assert "top-k is not set" in run.one_line(run("config", "unset", "top-k"), 2)
    configured("tempo = 1\n")  # a broken file
    assert "there is no such option" in run.one_line(run("config", "set", "temp", "1"), 1)


INVALID = [
    ("topk = 3", "line 1, topk: there is no such option (did you mean top-k?)"),
    ("\n[generat]\ntemp = 1", "line 2, generat: there is no such command (did you mean generate?)"),
    ("[chat]\nas-json = 1", "line 2, chat.as-json: chat has no such option"),
    (
        "[models-pull]\nofline = true",
        "line 2, models-pull.ofline: models pull has no such option (did you mean offline?)",
    ),
    ("top-k = 'many'", "line 1, top-k: input should be a valid integer"),
    ("device = 'a GPU'", "line 1, device: 'a GPU' is unknown: give auto, gpu, cpu, or a name that specdec"),
    ("top-k = [1, 2]", "line 1, top-k: takes one value, not a list"),
    ("stop = [['a']]", "line 1, stop: takes a value"),
    ("top-k = {a = 1}", "line 1, top-k: there is no such command"),
    ("[generate]\nstop = {a = 1}", "line 2, generate.stop: takes a value"),
    ("no-spec = 'perhaps'", "line 1, no-spec: input should be a valid boolean"),
    (
        "proposer = 'magic'",
        "line 1, proposer: 'magic' is not one of 'auto', 'draft', 'suffix', 'lookup', 'recycling', 'none'",
    ),
    ("version = true", "line 1, version: there is no such option"),
    ("temp = 1\ntemp = 2", "line 2, cannot overwrite a value"),
    ("temp", "line 1, Expected '=' after a key in a key/value pair"),
    ("x = " + "[" * 5000, "its values are nested too deeply"),
]


@pytest.mark.parametrize(("text", "error"), INVALID, ids=lambda text: text[:40])
def test_an_error_in_a_file_is_one_line_with_its_place(inside, tmp_path, text, error):
    path = tmp_path / "c.toml"
    path.write_text(text)
    line = inside.one_line(inside("generate", "x", "--config", path), 1)
    assert line.lower().startswith(f"specdec: {path}, {error}".lower())
    assert line.endswith("correct it")


@pytest.mark.parametrize("text", ["topk = 3", "temp ="], ids=["unknown option", "no TOML"])
def test_help_and_config_work_with_a_broken_file(configured, text):
    run = configured(text)
    help_ = run("generate", "--help")
    for done in (help_, run("config", "path")):
        assert (done.returncode, done.stderr) == (0, b"")
    assert b"0.8)" in help_.stdout
    done = run("config", "show", "--all")
    assert done.returncode == 1
    assert b"correct it" in done.stderr
    assert b"frequency-penalty\t0.0\tdefault" in done.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [("absent", "No such file"), (".", "not a regular file"), ("binary", "is UTF-16")],
)
def test_files_that_cannot_be_read(inside, tmp_path, name, why):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert why in inside.one_line(inside("generate", "x", "--config", tmp_path / name), 1)
    assert inside("generate", "x", env={"SPECDEC_CONFIG": str(tmp_path / name)}).returncode == 1


def test_a_file_as_notepad_saves_it(configured):
    """With a byte order mark, which is gone after a change, and line ends of Windows."""
    run = configured("\ufefftop-k = 2\r\n[chat]\r\ntemp = 0.5\r\n")
    assert shown(run, "generate")["top-k"][0] == "2"
    assert run("config", "set", "top-k", 3).returncode == 0
    assert shown(run, "generate")["top-k"][0] == "3"
    assert shown(run, "chat")["temp"][0] == "0.5"


def test_selecting_another_file(configured):
    run = configured("top-k = 1")
    configured("top-k = 2", "second.toml")
    configured("top-k = 3", "third.toml")
    named = {"SPECDEC_CONFIG": "second.toml"}
    assert shown(run, "generate")["top-k"][0] == "1"
    assert shown(run, "generate", env=named)["top-k"] == ("2", "second.toml:1")
    assert shown(run, "generate", "--config", "third.toml", env=named)["top-k"] == ("3", "third.toml:1")
    assert shown(run, "generate", "--config", "/dev/null")["top-k"] == ("-", "default")
    assert run("config", "path", env=named).stdout == b"second.toml\n"


def test_unknown_and_invalid_variables(inside):
    done = inside("config", "show", env={"SPECDEC_TOPK": "3", "SPECDEC_OFFLINE": "1"})
    warnings = done.stderr.decode().splitlines()
    assert warnings == ["specdec: SPECDEC_TOPK is not an option and is ignored (did you mean SPECDEC_TOP_K?)"]
    line = inside.one_line(inside("generate", "x", env={"SPECDEC_TOP_K": "x"}), 2)
    assert line.startswith("specdec: SPECDEC_TOP_K: input should be a valid integer")
    line = inside.one_line(inside("generate", "x", "--top-k", "y", env={"SPECDEC_TOP_K": "x"}), 2)
    assert line.startswith("specdec: invalid value for '--top-k'")


def test_paths_are_relative_to_the_file(configured, main):
    run = configured(
        'main = "m.gguf"\nprompts = "p.txt"\nfile = ["~/a", "-", "/b"]\nplot = "../x.png"\n', "here/c.toml"
    )
    (run.folder / "here/m.gguf").symlink_to(main)
    rows = shown(run, "--config", "here/c.toml")
    here = run.folder / "here"
    assert rows["main"][0] == str(here / "m.gguf")
    assert rows["prompts"][0] == str(here / "p.txt")
    assert rows["plot"][0] == str(here / "../x.png")
    assert rows["file"][0] == f"'{run.folder}/a', '-', '/b'"
    run = configured('main = "starter"', "here/c.toml")  # a name is not a path
    assert shown(run, "--config", "here/c.toml")["main"][0] == "starter"
    run = configured('main = "~no-such-user/m.gguf"\nsystem = "m.gguf"', "here/c.toml")
    assert shown(run, "--config", "here/c.toml")["system"][0] == "m.gguf"


def test_no_color(inside, main, tmp_path):
    """It works before and after the command, in the environment and in the file."""
    folder = {"XDG_CONFIG_HOME": f"{tmp_path}/config"}

    def colours(*arguments, **env):
        code, screen = inside.on_terminal(*arguments, env=SMALL | folder | env)
        assert code == 0
        # Help may still be bold; notes must not even be dim.
        dim = "" if "--help" in arguments else "2|"
        return bool(re.search(rf"\x1b\[(\d+;)*({dim}3\d|9\d)m", screen))

    generate = ["generate", "-vn", "1", "x", "--main", main]
    assert colours("doctor", "--help")
    assert not colours("--no-color", "doctor", "--help")
    assert colours(*generate)
    assert not colours(*generate, "--no-color")
    assert not colours(*generate, SPECDEC_NO_COLOR="1")
    (tmp_path / "config/specdec").mkdir(parents=True)
    (tmp_path / "config/specdec/config.toml").write_text("no-color = true")
    assert not colours(*generate)
