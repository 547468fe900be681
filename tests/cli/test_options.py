"""Test option values: valid ones give an answer, invalid ones a one-line error."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import spec_local
import specdec_cli.app
from specdec_cli import commands, names
from specdec_cli.app import app
from specdec_cli.settings import options, runnable


@pytest.fixture
def invoke(inside, main):
    """Generate a short answer with options."""

    def invoke(*arguments):
        defaults = {"--threads": "1", "--ctx": "64", "-n": "6"}
        words = [w for option, value in defaults.items() if option not in arguments for w in (option, value)]
        words += map(str, arguments)
        return inside("generate", "--main", main, *words, "--raw", "some words")

    return invoke


UNKNOWN = "~no-such-user/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--main", UNKNOWN),
        ("models", "check", "{main}", UNKNOWN),
        ("config", "path", "--config", UNKNOWN),
        ("draft", "quantize", "{main}", "-o", UNKNOWN),
    ],
    ids=lambda words: words[0],
)
def test_home_folder_of_an_unknown_user(inside, main, tmp_path, arguments):
    line = inside.one_line(inside(*(word.format(main=main) for word in arguments), cwd=tmp_path), 2)
    assert line.startswith(f"specdec: {UNKNOWN}: no home directory is known for ~no-such-user")
    assert not list(tmp_path.iterdir())


INVALID = [
    ("--temp", "-1"),
    ("--temp", "warm"),
    ("--top-k", "1.5"),
    ("--top-p", "nan"),
    ("--min-p", "2"),
    ("--repeat-penalty", "0"),
    ("--frequency-penalty", "nan"),
    ("--presence-penalty", "-inf"),
    ("--repeat-last-n", "-1"),
    ("--logit-bias", "1"),
    ("--logit-bias", "a=1"),
    ("--logit-bias", "1=b"),
    ("--logit-bias", "1=nan"),
    ("--logit-bias", "100000=1"),
    ("--logit-bias", "9" * 30 + "=1"),
    ("--seed", "-2"),
    ("-n", "-2"),
    ("--ctx", "0"),
    ("--threads", "0"),
    ("--threads", "513"),
    ("--draft-max", "65"),
    ("--draft-max", "1.5"),
    ("--draft-p-min", "1.1"),
    ("--policy", "best"),
    ("--shape", "star"),
    ("--proposer", "oracle"),
    ("--proposer", "draft"),
    ("--verifier", "none"),
    ("--cache-type", "f8"),
    ("--device", "gpu"),
    ("--device", "a GPU"),
    ("--draft-device", "vulkan7"),
    ("--no-such-option", "1"),
]


@pytest.mark.parametrize(("option", "value"), INVALID, ids=[f"{o}={v}" for o, v in INVALID])
def test_invalid_value(invoke, option, value):
    done = invoke(option, value)
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr
    error = done.stderr.decode().strip()
    assert error.startswith("specdec: ")
    assert "\n" not in error
    advice = ("give", "use", "did you mean --")
    assert any(word in error for word in advice) or error.endswith(": see specdec generate --help")


VALID = [
    ["--temp", "0"],
    ["--temp", "100"],
    ["--temp", "1e-9"],
    ["--top-k", "1"],
    ["--top-p", "0"],
    ["--min-p", "1"],
    ["--repeat-penalty", "1000", "--repeat-last-n", "2147483647"],
    ["--frequency-penalty", "-100", "--presence-penalty", "100"],
    ["--logit-bias", "0=-inf", "--logit-bias", "7=1e30"],
    ["--seed", "9" * 40],
    ["--seed", "-1"],
    ["-n", "0"],
    ["--ctx", "9" * 20, "-n", "2"],
    ["--gpu-layers", "9" * 20],
    ["--device", "cpu", "--gpu-layers", "0"],
    ["--device", "CPU", "--draft-device", "cpu"],
    ["--device", "auto", "--gpu-layers", "0"],
    ["--draft-max", "0"],
    ["--draft-max", "64"],
    ["--draft-p-min", "0", "--policy", "confidence"],
    ["--draft-p-min", "1", "--policy", "confidence"],
    ["--shape", "auto"],
    ["--shape", "auto", "--policy", "off"],
    ["--stop", ""],
    ["--cache-type", "q8_0"],
    ["--cache-type", "q4_0"],
]


NO_EFFECT = [
    (["--tree-nodes", "4"], "--tree-nodes has no effect here: use --shape tree"),
    (["--beam-width", "4", "--shape", "auto"], "--beam-width has no effect here: use --shape beam"),
    (["--draft-p-min", "0.5"], "--draft-p-min has no effect here: use --policy confidence"),
    (["--shape", "tree"], "--shape tree has no effect without a draft model"),
    (["--shape", "tree", "--proposer", "lookup"], "--shape has no effect here: use --proposer auto"),
    (["--draft-max", "4", "--proposer", "none"], "--draft-max has no effect here: use a --proposer"),
]


@pytest.mark.parametrize(("arguments", "why"), NO_EFFECT, ids=lambda value: value[0])
def test_an_option_without_effect_is_an_error(inside, invoke, monkeypatch, arguments, why):
    assert inside.one_line(invoke(*arguments), 2).startswith(f"specdec: {why}")
    if "without a draft" not in why:
        assert invoke(*arguments, "--no-spec").returncode == 0  # to compare
        option, value, *others = arguments
        monkeypatch.setenv(f"SPECDEC_{option[2:].replace('-', '_').upper()}", value)
        assert invoke(*others).returncode == 0  # a default, which need not apply


@pytest.mark.parametrize("command", ["generate", "run", "chat", "bench", "tune", "serve"])
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device", "metal"], "--device metal cannot be used, as the installed llama.cpp finds no GPU"),
        (["--device", "cpu", "--gpu-layers", "20"], "--device cpu contradicts --gpu-layers 20: remove one"),
    ],
    ids=["metal", "cpu"],
)
def test_a_device_that_cannot_be_used(inside, main, command, arguments, why):
    prompt = ["x"] if command in ("generate", "run") else []
    models = ["--main", main] if command in ("generate", "serve") else [main]
    done = inside(command, *models, *arguments, *prompt)
    if command == "serve" and "metal" in arguments:  # only the process that loads the model knows
        assert done.stderr.decode().splitlines()[-1].startswith(f"specdec: {why}")
        return
    assert inside.one_line(done, 2).startswith(f"specdec: {why}")


def test_the_device_can_be_set_in_the_environment_and_the_config_file(inside, main, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('device = "cpu"\n')
    for env, more in (({"SPECDEC_DEVICE": "cpu"}, []), ({}, ["--config", config])):
        done = inside("generate", "--main", main, "--gpu-layers", 20, *more, "x", env=env)
        assert "--device cpu contradicts --gpu-layers 20" in inside.one_line(done, 2)


@pytest.mark.parametrize("policy", ["fixed", "confidence"])
def test_shape_auto_needs_the_adaptive_policy(inside, invoke, policy):
    why = f"shape auto needs policy adaptive: with {policy} give chain or tree"
    assert why in inside.one_line(invoke("--shape", "auto", "--policy", policy), 2)


@pytest.mark.parametrize("arguments", VALID, ids=" ".join)
def test_valid_value(invoke, arguments):
    done = invoke(*arguments)
    assert done.returncode == 0, done.stderr
    assert (done.stdout == b"") == (arguments == ["-n", "0"])


NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(-2, 3).map(str),
    st.floats().map(repr),
    st.floats(0, 1).map(repr),
    st.sampled_from(["", "-0", "1e-30", "1e400", "0x10", "1_000", "٣", "--", "-", "NaN"]),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5),
)
OPTIONS = [
    "--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--frequency-penalty",
    "--presence-penalty", "--repeat-last-n", "--logit-bias", "--seed", "--stop", "--ctx", "--threads",
    "--gpu-layers", "--cache-type", "--proposer", "--verifier", "--draft-max", "--draft-p-min", "--policy",
]  # fmt: skip


def _number(text):
    try:
        return float(text)
    except ValueError:
        return -1.0


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(OPTIONS), NUMBERS), min_size=1, max_size=3, unique_by=lambda c: c[0]
    ),
    bias=st.lists(
        st.tuples(
            st.integers(-3, 900),
            st.floats(-1e30, 1e30) | st.sampled_from([float("-inf"), float("inf"), float("nan")]),
        ),
        max_size=2,
    ),
    with_draft=st.booleans(),
    policy=st.sampled_from(["adaptive", "fixed", "confidence"]),
)
@example(chosen=[("--temp", "1e-30")], bias=[], with_draft=True, policy="fixed")
def test_any_value_gives_an_answer_or_an_error(invoke, draft, chosen, bias, with_draft, policy):
    # Many threads only take time. Very small temperatures are tested in test_sampling.
    chosen = [(o, v) for o, v in chosen if o != "--threads" or _number(v) < 3 or _number(v) > 512]
    chosen = [(o, v) for o, v in chosen if o != "--temp" or not 0 < _number(v) < 1e-30]
    arguments = [f"{option}={value}" for option, value in chosen]
    arguments += [f"--logit-bias={token}={value!r}" for token, value in bias]
    arguments = ["--policy", policy, *arguments]  # the last of two takes precedence
    done = invoke(*arguments, *(["--draft", draft] if with_draft else []))
    assert done.returncode in (0, 1, 2)
    if done.returncode:
        assert done.stdout == b""
        assert done.stderr.strip()


def test_an_invalid_value_is_reported_before_a_model_is_loaded():
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from specdec_cli.app import app\n"
        "done = CliRunner().invoke(app, ['generate', '--temp', '-1', '--main', 'absent.gguf', 'x'])\n"
        "assert 'temperature' in done.stderr, done.stderr\n"
        "assert 'llama_cpp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdin=subprocess.DEVNULL)


def test_each_command_runs_a_body_that_takes_its_options():
    """Its name is a string, which type checkers do not see."""
    added = [
        call.args[2:]
        for call in ast.walk(ast.parse(inspect.getsource(specdec_cli.app)))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("commands.add")
    ]
    assert len(added) == 28
    for fields, body in added:
        kind = eval(ast.unparse(fields), vars(specdec_cli.app))
        assert typing.get_type_hints(commands.body_of(body.value))["options"] is kind


def test_defaults_need_no_conversion():
    """So that starting takes less time, they are used as they are: see `specdec_cli.commands`."""
    root = typer.main.get_command(app)
    for _, command in runnable(root):
        context = typer.Context(command)
        for param in command.params:
            if not param.required and param.default is not None:
                converted = param.get_runtime_param().coerce(param.default, param=param, ctx=context)
                assert (converted, type(converted)) == (param.default, type(param.default))


def _texts(tree):
    """Yield the strings of a module that are no documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_the_library_names_settings_and_the_command_its_options():
    """Only the server's messages name options, of `specdec serve`: nothing else starts it.

    Those of the conversion name settings of a head's config.json.
    """
    settings = set()
    for file in Path(spec_local.__file__).parent.rglob("*.py"):
        if not {"server", "conversion"} & set(file.parts):
            for text in _texts(ast.parse(file.read_text(encoding="utf-8"))):
                settings.update(re.findall(r"`(\w+)(?:=[^`]*)?`", text))
                own = re.sub(r"specdec (doctor|generate|draft convert \S+) --[a-z]+", "", text)
                assert not re.search("[ (]--(?!outfile|mtp)[a-z]", own), text
    known = {key for _, command in runnable(typer.main.get_command(app)) for key in options(command)}
    for setting in settings:
        option = names.with_options(f"`{setting}`")
        assert option.removeprefix("--") in known, setting
    assert (
        names.with_options("give a `kind`, `draft=none` or `foo`") == "give a --type, --draft none or `foo`"
    )
