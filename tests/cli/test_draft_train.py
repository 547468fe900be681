"""specdec draft train: output, files, stopping and resuming, errors."""

import importlib.util
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest

from spec_local.bench.figures import Estimate, VariantFigures
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import data_stage, pipeline
from spec_local.training.evaluation import Evaluation, Score
from spec_local.training.events import Generating, GenerationRate, Stage, Training
from spec_local.training.generation import GenerationProgress
from spec_local.training.measurement import Gain
from spec_local.training.pipeline import TrainedHead
from spec_local.training.recipe import Recipe
from specdec_cli import draft_train, draft_view
from tests.cli.conftest import FIRST_USE
from tests.llama.test_training_pipeline import QUICK, STAGES
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

SHORT = ["--minutes", 0.06, "--threads", 1]

HALF = Score(2000, 0.5, 0.4567)
EVALUATION = Evaluation(HALF, {"maths": HALF, "code editing": Score(12345, 1.0, 1.0)}, [0.75, 0.5, 0.254])


@pytest.fixture
def quick(monkeypatch):
    exec(QUICK, {"set": monkeypatch.setattr})


@pytest.fixture
def instant(quick, monkeypatch):
    """Training is skipped; its three evaluations show n_steps in their numbers of tokens."""

    def train(start, shape, main, dataset, hyperparameters, *, on_progress, **_):
        for step in (1, 2, 3):
            n_read = 1000 * step + hyperparameters.n_steps
            on_progress(pipeline.TrainingProgress(step, 3, n_read, 2.0, 0.0, EVALUATION, 0.5))
        return pipeline.Result(start, 3, EVALUATION, 3, 3000)

    monkeypatch.setattr(pipeline.distillation, "train", train)
    monkeypatch.setattr(pipeline, "write_head", lambda path, *_, **__: path.write_bytes(b"GGUF"))


@pytest.fixture(scope="module")
def short_main(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("short") / "main.gguf", end_scale=1.5)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out" / "head.gguf"


@pytest.fixture
def training(target):
    return target.with_name("head.gguf.training")


def lines_of(done):
    """Without what is printed at the first use of a model only."""
    return [line for line in done.stderr.decode().splitlines() if not FIRST_USE.match(line)]


def test_a_head_is_trained(quick, inside, short_main, target, training, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"category": "pets", "name": "a", "text": "What is a bird?"}\n')
    (tmp_path / "picture.bin").write_bytes(b"\xff\0\xfe")
    picture = tmp_path / "curve.png"
    texts = ["--text", tmp_path / "prompts.jsonl", "--text", tmp_path / "picture.bin"]
    command = ["draft", "train", short_main, "-o", target, *SHORT, "--disk", 1]
    done = inside(*command, *texts, "--plot", picture)
    assert done.returncode == 0, done
    assert done.stdout == f"{target}\n".encode()
    lines = lines_of(done)
    assert lines[:3] == [
        f"training data: at most 1.0 GB in {training}, 0.4 MB for 1,000 tokens of prompts and answers "
        "(2,604,166 tokens)",
        f"skipped, not UTF-8 text: {tmp_path / 'picture.bin'}",
        "your texts: 1 prompts, 0 passages",
    ]
    assert [line for line in lines if line in STAGES] == STAGES
    assert [line.split("  ")[0] for line in lines[-8:]].count("all tokens") == 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    options = ["--threads", 1, "-n", 4, "--temp", 0]
    plain = inside("generate", "--main", short_main, "--draft", "none", *options, "x")
    drafted = inside("generate", "--main", short_main, "--draft", target, *options, "x")
    assert plain.returncode == drafted.returncode == 0, drafted
    assert drafted.stdout == plain.stdout != b""

    before = target.read_bytes()
    again = inside(*command, *texts)
    assert again.returncode == 0
    assert target.read_bytes() == before
    # The checkpoint is kept, so that no step is repeated.
    assert not re.search(rb"^(generating training data|training: .*)$", again.stderr, re.MULTILINE)
    assert "started with another seed" in lines_of(inside(*command, "--seed", 1))[-1]


def test_a_number_of_tokens(quick, inside, short_main, target, training):
    done = inside("draft", "train", short_main, "-o", target, "--tokens", 2000, "--threads", 1)
    assert done.returncode == 0, done
    found = json.loads((training / "journal.json").read_text())
    assert 2000 <= found["n_tokens"] < 2100


def test_an_existing_file_is_kept_without_force(quick, inside, short_main, target, monkeypatch):
    target.parent.mkdir()
    target.write_text("mine")
    command = ["draft", "train", short_main, "-o", target, *SHORT]
    assert "exists: give another --output" in inside.one_line(inside(*command), 2)
    recipes = []
    monkeypatch.setattr(pipeline, "run", lambda recipe, *_: recipes.append(recipe) or stop())
    assert inside(*command, "--force").returncode == 130
    assert [recipe.target for recipe in recipes] == [target]
    assert target.read_text() == "mine"


def stop():
    raise KeyboardInterrupt


def test_default_output(inside, short_main, tmp_path, monkeypatch):
    """Beside a file; for a name in the current folder."""
    recipes = []
    monkeypatch.setattr(pipeline, "run", lambda recipe, *_: recipes.append(recipe) or stop())
    inside("draft", "train", short_main)
    monkeypatch.setattr(draft_train, "resolve", lambda name: short_main)
    inside("draft", "train", "starter", cwd=tmp_path)
    assert [r.target for r in recipes] == [short_main.with_name("main-head.gguf"), Path("main-head.gguf")]


def test_a_run_that_was_too_short_can_be_resumed(instant, inside, short_main, target, training):
    done = inside("draft", "train", short_main, "-o", target, "--minutes", 1e-6)
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("specdec: too little training data: give more")
    assert not target.exists()
    assert inside("draft", "train", short_main, "-o", target, *SHORT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["MAIN", "--minutes", "0"], 2, "--minutes 0 is not a positive number: give"),
        (["MAIN", "--minutes", "nan"], 2, "--minutes nan is not a positive number"),
        (["MAIN", "--minutes", "inf"], 2, "--minutes inf is not a positive number"),
        (["MAIN", "--minutes", "-1"], 2, "--minutes -1 is not a positive number"),
        (["MAIN", "--disk", "0"], 2, "--disk 0 is not a positive number"),
        (
            ["MAIN", "--disk", "0.001"],
            2,
            "1.0 MB of disk space are too little for training data: free some, or",
        ),
        (
            ["MAIN", "--minutes", "5", "--tokens", "1000"],
            2,
            "--minutes and --tokens exclude each other: give",
        ),
        (["MAIN", "--text", "nowhere"], 2, "nowhere does not exist: check the path"),
        (["MAIN", "--plot", "."], 2, "is not a regular file: give another path for the plot"),
        (["MAIN", "-o", "MAIN", "--force"], 2, "is the source model itself"),
        (["MAIN", "-o", "."], 2, "is a folder: give the path of a file"),
        (["MAIN", "-o", "file/head.gguf"], 1, "cannot be written (Not a directory): fix that"),
        (["absent.gguf"], 1, "absent.gguf does not exist: check the path"),
        (["file"], 1, "file is not a GGUF file"),
        (["eagle.gguf"], 1, "eagle.gguf is a head: give the model that it is for"),
        (["shallow.gguf"], 1, "a model with 4 layers has too few for a head: at least 5 are needed"),
    ],
)
def test_invalid_arguments_and_models_are_refused_at_once(
    inside, short_main, target, tmp_path, arguments, code, why
):
    (tmp_path / "file").write_text("no model")
    write_tiny_eagle(tmp_path / "eagle.gguf")
    write_tiny_model(tmp_path / "shallow.gguf", n_layers=4)
    before = {*tmp_path.iterdir()}
    arguments = [short_main if argument == "MAIN" else argument for argument in arguments]
    output = [] if "-o" in arguments else ["-o", target]
    done = inside("draft", "train", *arguments, *output, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, b"")
    (line,) = [line for line in lines_of(done) if not line.startswith("training data: at most ")]
    assert line.startswith("specdec: ")
    assert why in line
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("arguments", [[], ["x", "--tokens", "999"], ["x", "--seed", "-1"]], ids=str)
def test_wrong_usage(inside, arguments):
    done = inside("draft", "train", *arguments)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(pipeline.distillation.torch.cuda.is_available(), reason="there is one")
def test_an_unavailable_device(inside, short_main, target):
    error = inside.one_line(inside("draft", "train", short_main, "-o", target, "--device", "cuda"), 2)
    assert error.startswith("specdec: PyTorch cannot use 'cuda' here (")
    assert error.endswith(": give --device cpu")


def test_without_the_extras(inside, short_main, target, monkeypatch):
    """They are reported before anything else is checked."""
    found = importlib.util.find_spec
    for missing, arguments in [("torch", []), ("matplotlib", ["--plot", "x.png"])]:
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda name, m=missing: None if name == m else found(name)
            )
            error = inside.one_line(inside("draft", "train", "absent.gguf", *arguments), 1)
        assert re.search(r"needs (PyTorch|matplotlib): run pip install 'spec-local\[(train|plot)\]'$", error)


def test_help_names_the_extra(inside):
    """Square brackets are markup in help texts, and must be escaped."""
    assert b"pip install 'spec-local[train]'" in inside("draft", "train", "--help").stdout


def test_help_imports_nothing_slow(specdec):
    script = (
        "import runpy, sys\n"
        "sys.argv = ['specdec', 'draft', 'train', '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'torch', 'llama_cpp', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", script], env=specdec.environment, capture_output=True, check=True)


SITE = """
import sys
if 'train' in sys.orig_argv:
    from spec_local.training import precision
    precision.fastest_copy = lambda main, *_, **__: main
"""


def test_ctrl_c_on_a_terminal(specdec, instant, inside, short_main, target, training, tmp_path):
    command = ["draft", "train", short_main, "-o", target, "--threads", 1]
    child = pexpect.spawn(
        specdec.command[0],
        [*specdec.command[1:], *map(str, command), "--minutes", "5"],
        env=specdec.environment | specdec.sabotaged(tmp_path / "site", SITE),
        dimensions=(24, 80),
        timeout=40,
        encoding="utf-8",
    )
    child.expect(r"generated [\d,]+ tokens, [\d,]+ tokens/s, [\d.]+ MB · 2:\d\d left, 4:\d\d in all")
    child.expect(r"generated \d,\d+ tokens")
    child.sendintr()
    child.expect(r"stopped: run the same command again to resume from ([^\r]*)\r\n")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    kept = json.loads((training / "journal.json").read_text())
    assert kept["generation_seconds"] > 0
    assert list((training / "data").glob("*.npz"))
    resumed = inside(*command, "--minutes", kept["generation_seconds"] / 60 / 0.6 + 0.01)
    assert resumed.returncode == 0, resumed
    trained = re.search(r"^trained .* from ([\d,]+) generated tokens$", resumed.stderr.decode(), re.MULTILINE)
    assert int(trained[1].replace(",", "")) > 1000


def test_sigterm_saves_the_training_data(quick, inside, short_main, target, training, monkeypatch):
    real = draft_view._Lines.__call__

    def terminated(self, event):
        if isinstance(event, Generating) and event.progress.n_tokens > 300:
            signal.raise_signal(signal.SIGTERM)
        return real(self, event)

    monkeypatch.setattr(draft_view._Lines, "__call__", terminated)
    done = inside("draft", "train", short_main, "-o", target, *SHORT)
    assert done.returncode == 143
    assert (
        done.stderr.decode().splitlines()[-1]
        == f"stopped: run the same command again to resume from {training}"
    )
    assert list((training / "data").glob("*.npz"))


def test_a_partial_copy_that_a_kill_left_is_deleted(
    instant, inside, short_main, target, training, monkeypatch
):
    training.mkdir(parents=True)
    (training / "main-BF16.gguf").write_bytes(b"GGUF")
    asked = []

    def fastest_copy(main, folder, **_):
        assert not list(folder.glob("*.gguf"))
        asked.append(main)
        return main

    monkeypatch.setattr(data_stage.precision, "fastest_copy", fastest_copy)
    assert inside("draft", "train", short_main, "-o", target, *SHORT).returncode == 0
    assert asked == [short_main]


def test_the_curve_has_each_evaluation_of_the_last_training_once(
    instant, inside, short_main, target, training, monkeypatch
):
    command = ["draft", "train", short_main, "-o", target, *SHORT]
    for _ in range(2):
        assert inside(*command).returncode == 0
        n_first = curve(training)
    monkeypatch.setattr(pipeline.distillation, "steps_per_second", lambda *_, **__: 30.0)
    assert inside(*command, "--minutes", 0.08).returncode == 0
    assert curve(training) != n_first


def curve(training):
    """Tokens read at the first of three evaluations."""
    read = [point["n_read"] for point in json.loads((training / "journal.json").read_text())["curve"]]
    assert [n - read[0] for n in read] == [0, 1000, 2000]
    return read[0]


def test_a_full_disk_is_one_line(quick, inside, short_main, target, training):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        done = inside("draft", "train", short_main, "-o", target, *SHORT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(
        f"specdec: {training} cannot be written (File too large): fix that and run the same"
    )


def test_half_of_the_disk_is_left_free(target, training, monkeypatch):
    """Space that an earlier run has written counts as free, and the limit thus stays the same."""
    monkeypatch.setattr(draft_train.shutil, "disk_usage", lambda folder: SimpleNamespace(free=7_000_000))
    assert draft_train._max_bytes(None, training) == 3_500_000
    (training / "data").mkdir(parents=True)
    (training / "data" / "00000.states").write_bytes(bytes(1_000_000))
    assert draft_train._max_bytes(None, training) == 4_000_000
    assert draft_train._max_bytes(0.5, training) == 500_000_000
    monkeypatch.setattr(draft_train.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**12))
    assert draft_train._max_bytes(None, training) == 20 * 10**9


def test_without_a_terminal_lines_are_printed_now_and_then(inside, capsys, monkeypatch, target):
    now = [1000.0]
    monkeypatch.setattr(draft_view.time, "monotonic", lambda: now[0])
    with draft_view.progress(Recipe(main=target, target=target, minutes=100)) as on_progress:
        for event in (
            Stage("measuring"),
            GenerationRate("main", 10),
            GenerationRate("BF16", 2000),
            Stage("generating training data"),
            *(Generating(GenerationProgress(1234 + i, 56.7, 8, 0, 10**8), 3600 - i) for i in range(100)),
        ):
            on_progress(event)
            now[0] += isinstance(event, Generating)
    assert capsys.readouterr().err.splitlines() == [
        "measuring",
        "the main model generates 10 tokens/s",
        "a BF16 copy of it generates 2,000 tokens/s",
        "generating training data",
        *(
            f"generated {1234 + i:,} tokens, 57 tokens/s, 100 MB · {left} left, {total} in all"
            for i, left, total in (
                (31, "59:29", "1:39:29"),
                (62, "58:58", "1:38:58"),
                (93, "58:27", "1:38:27"),
            )
        ),
    ]


def test_lines(target):
    line = draft_view._Lines(Recipe(main=target, target=target, tokens=10**6))
    generating = Generating(GenerationProgress(1234, 56.7, 8, 0, 2_000_000), 3601)
    assert line(generating) == ("generated 1,234 tokens, 57 tokens/s, 2.0 MB · 1:00:01 left", False)
    progress = pipeline.TrainingProgress(7, 20, 9000, 2.345, 65, None, -1.0)
    expected = "training: step 7 of 20, loss 2.35, accepted {} · 1:05 left"
    assert line(Training(progress)) == (expected.format("0.0%"), False)
    assert line(Training(replace(progress, best_agreement=0.25))) == (expected.format("25.0%"), False)


def test_the_report(tmp_path):
    recipe = Recipe(main=Path("my main.gguf"), target=tmp_path / "head.gguf")
    recipe.folder.mkdir()
    (recipe.folder / "shard").write_bytes(bytes(2_500_000))
    tried = VariantFigures(
        name="3 draft tokens",
        speedup=Estimate(0.954, 0.9, 1.0, 8),
        by_category={},
        with_prompt=Estimate(0.96, 0.9, 1.0, 8),
        tokens_per_second=50.0,
        first_token_s=0.1,
        tokens_per_step=1.5,
        draft_n=3000,
        draft_n_accepted=1200,
        tested_at=[1000, 1000, 1000],
        accepted_at=[600, 400, 200],
        steps_by={},
        profile={},
        theory=None,
        achieved=None,
        differences=[],
    )
    head = TrainedHead(
        path=recipe.target,
        n_generated=1000,
        n_trained=3000,
        n_drafted=6144,
        coverage=0.987,
        evaluation=EVALUATION,
        gain=Gain(0.0512, 3, 1.432),
        benchmark=[tried, replace(tried, name="adaptive", draft_n=0, draft_n_accepted=0)],
        size=2_345_678,
        sha256="",
        curve=[],
    )
    lines = draft_view.report(head, recipe)
    bench = shlex.join(["specdec", "bench", "--main", "my main.gguf", "--draft", str(recipe.target)])
    assert lines[:9] == [
        "head      2.3 MB, drafts 6,144 tokens (98.7% of the main model's output)",
        "trained   on 3,000 tokens, from 1,000 generated tokens",
        "cost      a call takes 0.051 times as long as one of the main model",
        "accepted  75%, 50%, 25% of the first, second and third draft token, if those before it were",
        "expected  1.43 times plain decoding, with 3 draft tokens per step",
        "benchmark 3 draft tokens: 0.95 times plain decoding on 8 prompts, accepted 1,200 of 3,000 draft "
        "tokens (40%; by position 60%, 40%, 20%)",
        "benchmark adaptive: 0.95 times plain decoding on 8 prompts, no draft tokens verified",
        "verdict   it makes little difference on this machine: train longer, or measure more prompts with "
        + bench,
        f"files     {recipe.folder} (2.5 MB): needed only to continue the training",
    ]
    assert lines[9] == ""
    table = lines[10:]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[-3:] for line in table[1:]] == [
        ["50.0%", "45.7%", "2,000"],
        ["50.0%", "45.7%", "2,000"],
        ["100.0%", "100.0%", "12,345"],
    ]
    assert [line.split("  ")[0] for line in table[1:]] == ["all tokens", "maths", "code editing"]
    tune = shlex.join(["specdec", "tune", "my main.gguf", str(recipe.target)])
    pays = f"verdict   it pays on this machine; for a longer measurement, run {bench}"
    slow = f"verdict   it does not pay on this machine: train longer, or see the costs with {tune}"

    def measured(low, high):
        """The verdict if the last variant, the adaptive policy, was measured so."""
        variant = replace(tried, name="adaptive", speedup=Estimate((low + high) / 2, low, high, 8))
        return draft_view.report(replace(head, benchmark=[tried, variant]), recipe)[7]

    assert measured(1.01, 1.2) == pays  # whatever is expected
    assert measured(0.8, 0.99) == slow
    assert measured(0.99, 1.2) == lines[7]
    expected = [
        draft_view.report(replace(head, benchmark=[], gain=Gain(0.5, 1, speedup)), recipe)
        for speedup in (1.2, 0.81)
    ]
    assert expected[0][4] == "expected  1.20 times plain decoding, with 1 draft token per step"
    assert [report[5] for report in expected] == [pays, slow]
