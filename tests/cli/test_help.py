"""Test --help and --version: fast, and at any width; and command lines that no command understands."""

import re
import subprocess
import sys

import pytest
import typer

import spec_local
from spec_local.bench import prompts
from specdec_cli import settings
from specdec_cli.app import app


def all_commands(command, words=()):
    """Yield the words of a command and of those below it, and whether it is a group of them."""
    below = getattr(command, "commands", {})
    yield words, bool(below)
    for name, each in below.items():
        yield from all_commands(each, (*words, name))


COMMANDS = dict(all_commands(typer.main.get_command(app)))


EVERYDAY = ["main", "draft", "ctx", "no-spec", "temp", "max-tokens", "seed", "json-schema"]
LONG = ["run", "chat", "generate", "serve", "bench"]


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(("specdec", *words)))
def test_help(inside, command, width):
    done = inside(*command, "--help", env={"COLUMNS": str(width)})
    assert done.returncode == 0
    page = done.stdout.decode()
    assert max(map(len, page.splitlines())) <= width
    assert "\x1b" not in page
    if not COMMANDS[command]:
        examples = page.partition("Example")[2].partition("╭")[0]
        assert " ".join(("specdec", *command)) in " ".join(examples.split())


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(("specdec", *words)))
def test_help_cuts_nothing(inside, command, width):
    below = typer.main.get_command(app)
    for word in command:
        below = below.commands[word]
    pages = [inside(*command, each, env={"COLUMNS": str(width)}) for each in ("--help", "--help-all")]
    page = pages[-1 if pages[-1].returncode == 0 else 0].stdout.decode()
    assert max(map(len, page.splitlines())) <= width
    assert "…" not in page.replace("HOST:PORT,…", "")
    assert "[[" not in page
    words = set(re.findall(r"[^\s,│]+", page))
    for param in (each for each in below.params if not getattr(each, "hidden", False)):
        opts = [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else [param.metavar]
        assert {word for opt in opts if opt for word in opt.split()} <= words
    assert set(getattr(below, "commands", ())) <= words
    if width == 80:
        lines = {line.strip() for line in page.splitlines()}
        examples = [line.strip() for line in (below.help or "").splitlines() if line.startswith("  ")]
        assert set(examples) <= lines


@pytest.mark.parametrize("command", ["generate", "draft train"])
def test_help_imports_nothing_slow(specdec, command):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['specdec', *{command.split()!r}, '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'llama_cpp', 'huggingface_hub', 'prompt_toolkit', 'numpy', 'gguf', 'jinja2', 'pydantic'}\n"
        "slow |= {'PIL', 'matplotlib', 'psutil', 'rich.progress', 'torch', 'spec_local.training'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=specdec.environment, capture_output=True, check=True)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("generate", [*EVERYDAY, "prompt", "file", "image", "system", "json"]),
        ("chat", [*EVERYDAY, "image", "system"]),
        ("run", [*EVERYDAY, "prompt", "image", "system"]),
    ],
)
def test_help_begins_with_what_people_need_and_ends_with_speculation(inside, command, first):
    page = inside(command, "--help-all").stdout.decode()
    panels = re.findall("╭─ (.*?) ─", page)
    assert panels[-1] == "Speculation"
    options = page.partition("╭─ Options")[2].partition("╰")[0]
    assert re.findall("│ --([a-z-]+)", options)[: len(first)] == first
    assert "<bool>" not in page


@pytest.mark.parametrize(("width", "most"), [(100, 45), (80, 60)])
@pytest.mark.parametrize("command", LONG)
def test_help_fits_on_a_screen(inside, command, width, most):
    page = inside(command, "--help", env={"COLUMNS": str(width)}).stdout.decode()
    assert len(page.splitlines()) <= most
    assert set(re.findall("╭─ (.*?) ─", page)) == {"Arguments", "Options"}


@pytest.mark.parametrize("command", LONG)
def test_help_all_shows_every_option(inside, command):
    page = inside(command, "--help-all").stdout.decode()
    names = set(re.findall("│ (--[a-z-]+)", page))
    every = {opt for param in typer.main.get_command(app).commands[command].params for opt in param.opts[:1]}
    assert {name for name in every if name.startswith("--")} <= names
    assert {"--help", "--help-all"} <= names
    number = int(re.search("Show all ([0-9]+) options", page)[1])
    assert number == len(names - {"--help", "--help-all"})
    shared = re.findall("╭─ (.*?) ─", page)[-4:]
    assert shared == ["Sampling", "Machine", "General", "Speculation"]


def test_where_little_would_be_hidden_help_shows_all(inside):
    short, full = (inside("doctor", option).stdout for option in ("--help", "--help-all"))
    assert b"--no-color" in short
    assert b"--help-all" not in short
    assert short == full


def test_without_a_command_it_shows_help(inside):
    done = inside()
    assert b"generate" in done.stdout + done.stderr


def test_version(specdec):
    done = specdec("--version")
    version = f"specdec {spec_local.__version__}\n".encode()
    assert (done.returncode, done.stdout, done.stderr) == (0, version, b"")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("fly", "no such command 'fly': see specdec --help"),
        ("rn", "no such command 'rn': did you mean 'run'?"),
        ("models pul", "no such command 'pul': did you mean 'pull'?"),
        ("coder.gguf", "no such command 'coder.gguf': did you mean specdec run 'coder.gguf'?"),
        ("generate --zzz", "no such option --zzz: see specdec generate --help"),
        ("chat --draft-maxx 3", "no such option --draft-maxx: did you mean --draft-max?"),  # --help hides it
        ("run --json", "no such option --json: specdec generate has it"),
        ("run --yes", "no such option --yes: specdec models rm and specdec draft quantize have it"),
        ("--temp 1 run", "no such option --temp: give it after a command, as in specdec run --temp"),
        ("run --foo", "no such option --foo: see specdec run --help"),
        ("run --temperature 1", "no such option --temperature: use --temp"),
        ("list", "no such command 'list': did you mean specdec models list?"),
        ("version", "no such command 'version': did you mean specdec --version?"),
        ("config list", "no such command 'list': did you mean specdec config show?"),
        ("generate a b c", "got unexpected extra argument(s) (c): put the prompt in quotes"),
        ("tune a b c", "got unexpected extra argument(s) (c): see specdec tune --help"),
        ("generate --top-k x", "invalid value for '--top-k': Input should be a valid integer: see"),
        ("generate --main", "option '--main' requires an argument: see specdec generate --help"),
        ("draft train", "the main model is missing: give it as an argument, or with --main"),
        ("datastore add", "missing argument '[MAIN] FILES': see specdec datastore add --help"),
    ],
)
def test_usage_errors(inside, arguments, why):
    assert inside.one_line(inside(*arguments.split()), 2).startswith(f"specdec: {why}")


OF_OTHERS = [
    ("chat", "temperature", "use {temp}"),
    ("bench", "n-predict", "use {max-tokens}"),
    ("tune", "n-gpu-layers", "use {gpu-layers}"),
]


@pytest.mark.parametrize(("command", "name", "instead"), OF_OTHERS)
def test_names_of_other_programs(inside, command, name, instead):
    """As an option, in the environment, in the config file, and for config set."""

    def spelled(spell):
        return re.sub("{(.*)}", lambda found: spell(found[1]), instead)

    line = inside.one_line(inside(*command.split(), f"--{name}", "x"), 2)
    assert line.startswith(f"specdec: no such option --{name}: {spelled('--{}'.format)}")
    variable = settings.variable(name)
    warning = inside("models", "list", env={variable: "1"}).stderr.decode()
    assert f"{variable} is not an option and is ignored ({spelled(settings.variable)}" in warning
    table = command.replace(" ", "-")
    (inside.folder / "other.toml").write_text(f"[{table}]\n{name} = 1\n")
    line = inside.one_line(inside(*command.split(), "--config", "other.toml"), 1)
    assert f"no such option ({spelled(str)}" in line
    line = inside.one_line(inside("config", "set", f"{table}.{name}", "1"), 2)
    assert f"there is no option {table}.{name} ({spelled(f'{table}.{{}}'.format)}" in line


def test_names_of_other_programs_do_not_exist():
    """Otherwise a hint would hide an option."""
    known = dict(settings.runnable(typer.main.get_command(app)))
    for command, name, _ in OF_OTHERS:
        assert name not in settings.options(known[command.replace(" ", "-")])


def test_a_prompt_in_place_of_a_command(inside):
    line = inside.one_line(inside("Why is the sky blue?"), 2)
    assert line.endswith("did you mean specdec run 'Why is the sky blue?'?")


def test_help_of_bench_lists_the_categories(inside):
    page = " ".join(re.sub("[│╭╰─╮╯]", "", inside("bench", "--help").stdout.decode()).split())
    assert ", ".join(dict.fromkeys(prompt.category for prompt in prompts.load())) in page
