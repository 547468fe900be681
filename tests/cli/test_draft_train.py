"""specdec draft train: output, files, stopping and resuming, errors."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from spec_local.bench.figures import Estimate, VariantFigures
from spec_local.datastore.answer_store import answer_store_of
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import pipeline
from spec_local.training.distillation import TrainingProgress
from spec_local.training.evaluation import Evaluation, Score
from spec_local.training.events import Generating, GenerationRate, Stage
from spec_local.training.generation import GenerationProgress
from spec_local.training.measurement import HeadGain
from spec_local.training.pipeline import LearnedAnswers, MeasuredHead, TrainedHead
from spec_local.training.recipe import Recipe
from specdec_cli import draft_train, draft_view
from specdec_cli.progress import LINE_INTERVAL
from tests.cli.conftest import FIRST_USE
from tests.failing_calls import full_disk
from tests.llama.test_training_pipeline import STAGES
from tests.quick_training import shorten
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

SHORT = ["--minutes", 0.03, "--threads", 1]

HALF = Score(2000, 0.5, 0.4567)
EVALUATION = Evaluation(HALF, {"maths": HALF, "code editing": Score(12345, 1.0, 1.0)}, [0.75, 0.5, 0.254])


@pytest.fixture
def quick(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture
def instant(quick, monkeypatch):
    """TrainingProgress is skipped; its three evaluations show n_steps in their numbers of tokens."""

    def train(training, *, on_progress, **_):
        for step in (1, 2, 3):
            n_read = 1000 * step + training.hyperparameters.n_steps
            on_progress(pipeline.TrainingProgress(step, 3, n_read, 2.0, 0.0, EVALUATION, 0.5))
        return pipeline.Result(training.best, 3, EVALUATION, 3, 3000)

    monkeypatch.setattr(pipeline.distillation, "train", train)
    monkeypatch.setattr(pipeline, "export_head", lambda path, *_, **__: path.write_bytes(b"GGUF"))


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
    texts = ["--from", tmp_path / "prompts.jsonl", "--from", tmp_path / "picture.bin"]
    command = ["draft", "train", short_main, "-o", target, *SHORT, "--disk", 1]
    done = inside(*command, *texts, "--plot", picture)
    assert done.returncode == 0, done
    assert done.stdout == f"{target}\n".encode()
    lines = lines_of(done)
    assert lines[:3] == [
        f"training data: at most 1.0 GB in {training}, 0.4 MB for 1,000 tokens of prompts and answers "
        "(2,604,166 tokens)",
        f"skipped, not UTF-8 text: {tmp_path / 'picture.bin'}",
        "your texts: 1 prompt, 0 passages",
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


@pytest.fixture
def planned(inside, short_main, monkeypatch):
    """Return the recipe that the command would run, and its exit code: a function of its other arguments."""

    def planned(*arguments, model=short_main, **kwargs):
        recipes = []

        def run(recipe, *_):
            recipes.append(recipe)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "run", run)
            done = inside("draft", "train", *([model] if model else []), *arguments, **kwargs)
        (recipe,) = recipes
        return recipe, done.returncode

    return planned


def test_the_recipe(planned, short_main, target, training, tmp_path, monkeypatch):
    """The head is written beside a file; for a name in the current folder. Half of the disk is left free."""
    assert planned()[0].target == short_main.with_name("main-head.gguf")
    assert planned("--tokens", 2000)[0].tokens == 2000
    assert planned("--main", short_main, model=None)[0].main == short_main
    assert planned("--main", "absent.gguf")[0].main == short_main  # the argument overrides the option
    with monkeypatch.context() as patch:
        patch.setattr(draft_train, "resolve", lambda name: short_main)
        assert planned(model="starter", cwd=tmp_path)[0].target == Path("main-head.gguf")

    def max_bytes(free, *arguments):
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
        return planned("-o", target, *arguments)[0].max_bytes

    assert max_bytes(7 * 10**9) == 3.5e9
    assert max_bytes(7 * 10**9, "--disk", 0.5) == 0.5e9
    assert max_bytes(10**12) == 20e9
    (training / "data").mkdir(parents=True)  # an earlier run's data counts as free: the limit stays the same
    (training / "data" / "00000.states").write_bytes(bytes(1_000_000))
    assert max_bytes(7 * 10**9) == 3.5e9 + 500_000


def test_an_existing_file_is_kept_without_force(inside, planned, short_main, target):
    target.parent.mkdir()
    target.write_text("mine")
    done = inside("draft", "train", short_main, "-o", target, *SHORT)
    assert "exists: give another --output" in inside.one_line(done, 2)
    recipe, code = planned("-o", target, *SHORT, "--force")
    assert (recipe.target, code) == (target, 130)
    assert target.read_text() == "mine"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A folder with files that are no main models."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "file").write_text("no model")
    write_tiny_eagle(folder / "eagle.gguf")
    write_tiny_model(folder / "shallow.gguf", n_layers=4)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ("MAIN --minutes 0", 2, "--minutes 0 is not a positive number: give"),
        ("MAIN --minutes nan", 2, "--minutes nan is not a positive number"),
        ("MAIN --disk 0", 2, "--disk 0 is not a positive number"),
        ("MAIN --disk 0.001", 2, "1.0 MB of disk space are too little for training data: free some, or"),
        ("MAIN --minutes 5 --tokens 1000", 2, "--minutes and --tokens exclude each other: give"),
        ("MAIN --from nowhere", 2, "nowhere does not exist: check the path"),
        ("MAIN --plot .", 2, "is not a regular file: give another path for the plot"),
        ("MAIN -o MAIN --force", 2, "is the source model itself"),
        ("MAIN -o .", 2, "is a folder: give the path of a file"),
        ("MAIN -o file/head.gguf", 1, "cannot be written (Not a directory): fix that"),
        ("absent.gguf", 1, "absent.gguf does not exist: check the path"),
        ("file", 1, "file is not a GGUF file"),
        ("eagle.gguf", 1, "eagle.gguf is a head: give the model that it is for"),
        ("shallow.gguf", 1, "a model with 4 layers has too few for a head: at least 5 are needed"),
    ],
)
def test_invalid_arguments_and_models_are_refused_at_once(
    inside, short_main, faulty, target, arguments, code, why
):
    before = {*faulty.iterdir()}
    words = [short_main if word == "MAIN" else word for word in arguments.split()]
    output = [] if "-o" in words else ["-o", target]
    done = inside("draft", "train", *words, *output, cwd=faulty)
    assert (done.returncode, done.stdout) == (code, b"")
    (line,) = [line for line in lines_of(done) if not line.startswith("training data: at most ")]
    assert line.startswith("specdec: ")
    assert why in line
    assert {*faulty.iterdir()} == before
    assert not target.parent.exists()


@pytest.mark.skipif(pipeline.distillation.torch.cuda.is_available(), reason="there is one")
def test_an_unavailable_device(inside, short_main, target):
    error = inside.one_line(inside("draft", "train", short_main, "-o", target, "--torch-device", "cuda"), 2)
    assert error.startswith("specdec: PyTorch cannot use 'cuda' here (")
    assert error.endswith(": give --torch-device cpu")


@pytest.mark.parametrize(
    ("missing", "arguments", "why"),
    [
        ("torch", [], f"training a head needs PyTorch: run {sys.executable} -m pip install 'torch>=2.4'"),
        ("matplotlib", ["--plot", "x.png"], f"run {sys.executable} -m pip install 'matplotlib>=3.8'"),
    ],
    ids=["torch", "matplotlib"],
)
def test_without_the_extras(inside, monkeypatch, missing, arguments, why):
    """They are reported before anything else is checked."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    error = inside.one_line(inside("draft", "train", "absent.gguf", *arguments), 1)
    assert error.endswith(why)


SITE = """
import sys
if 'train' in sys.orig_argv:
    from spec_local.training import precision
    precision.fastest_copy = lambda main, *_, **__: main
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_ctrl_c_on_a_terminal(terminal, specdec, instant, inside, short_main, target, training, tmp_path):
    command = ["train", short_main, "-o", target, "--threads", 1]
    site = specdec.sabotaged(tmp_path / "site", SITE)
    person = terminal(*command, "--minutes", 5, command="draft", env=site, width=80)
    person.child.timeout = 40
    person.child.expect(r"generated [\d,]+ tokens, [\d,]+ tokens/s, [\d.]+ MB · 2:\d\d left, 4:\d\d in all")
    person.child.expect(r"generated \d,\d+ tokens")
    person.type("\x03")
    person.until("stopped: run the same command again to resume from ")
    assert person.leaves_with() == 130
    kept = json.loads((training / "journal.json").read_text())
    assert kept["generation_seconds"] > 0
    assert list((training / "data").glob("*.npz"))
    resumed = inside("draft", *command, "--minutes", kept["generation_seconds"] / 60 / 0.6 + 0.01)
    assert resumed.returncode == 0, resumed
    trained = re.search(r"^trained .* from ([\d,]+) generated tokens$", resumed.stderr.decode(), re.MULTILINE)
    assert int(trained[1].replace(",", "")) > 1000


def test_sigterm_saves_the_training_data(quick, inside, short_main, target, training, monkeypatch):
    progress = draft_view.progress

    @contextlib.contextmanager
    def terminated(recipe):
        with progress(recipe) as show:

            def on_progress(event):
                if isinstance(event, Generating) and event.progress.n_tokens > 300:
                    signal.raise_signal(signal.SIGTERM)
                show(event)

            yield on_progress

    monkeypatch.setattr(draft_view, "progress", terminated)
    done = inside("draft", "train", short_main, "-o", target, *SHORT)
    assert done.returncode == 143
    last = done.stderr.decode().splitlines()[-1]
    assert last == f"stopped: run the same command again to resume from {training}"
    assert list((training / "data").glob("*.npz"))


def test_a_full_disk_is_one_line(quick, inside, short_main, target, training):
    with full_disk(5000):  # also for children, which must not cut what Python compiles
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        done = inside("draft", "train", short_main, "-o", target, *SHORT, env=env)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(
        f"specdec: {training} cannot be written (File too large): fix that and run the same"
    )


def test_without_a_terminal_lines_are_printed_now_and_then(capsys, monkeypatch, target):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with draft_view.progress(Recipe(main=target, target=target, minutes=100)) as on_progress:
        for event in (
            GenerationRate("BF16", 2000),
            Stage("generating training data"),
            *(Generating(GenerationProgress(1234 + i, 56.7, 8, 0, 10**8), 3600 - i) for i in range(70)),
            Stage("training"),
            pipeline.TrainingProgress(7, 20, 9000, 2.345, 65, None, -1.0),
        ):
            now[0] += LINE_INTERVAL + 1 if isinstance(event, TrainingProgress) else 1
            on_progress(event)
    assert capsys.readouterr().err.splitlines() == [
        "a BF16 copy of it generates 2,000 tokens/s",
        "generating training data",
        "generated 1,264 tokens, 57 tokens/s, 100 MB · 59:30 left, 1:39:30 in all",
        "generated 1,295 tokens, 57 tokens/s, 100 MB · 58:59 left, 1:38:59 in all",
        "training",
        "training: step 7 of 20, loss 2.35, accepted 0.0% · 1:05 left",
    ]


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe(main=Path("my main.gguf"), target=tmp_path / "head.gguf")
    recipe.folder.mkdir()
    (recipe.folder / "shard").write_bytes(bytes(2_500_000))
    return recipe


def figures(low=0.9, high=1.0):
    return VariantFigures(
        name="3 draft tokens",
        speedup=Estimate((low + high) / 2, low, high, 8),
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
        saved_s={},
        plain_s=1.0,
        theory=None,
        achieved=None,
        theory_error=None,
        differences=[],
    )


def head(recipe, learned=None):
    return TrainedHead(
        path=recipe.target,
        n_generated=1000,
        n_trained=3000,
        n_drafted=6144,
        coverage=0.987,
        evaluation=EVALUATION,
        learned=learned,
        size=2_345_678,
        sha256="",
        curve=[],
    )


def measured(benchmark, speedup=1.432, rates=None):
    return MeasuredHead(HeadGain(0.0512, 1, speedup, 50.0), benchmark, rates or {})


def test_the_report(recipe):
    drafted = figures()
    plain = replace(drafted, name="adaptive", draft_n=0, draft_n_accepted=0)
    lines = draft_view.report(head(recipe), measured([drafted, plain]), recipe)
    for line, parts in zip(
        lines,
        [
            ("head", "2.3 MB", "6,144 tokens", "98.7%"),
            ("trained", "3,000 tokens", "1,000 generated tokens"),
            ("cost", "0.051 times"),
            ("accepted", "75%, 50%, 25%"),
            ("expected", "1.43 times", "1 draft token "),
            (
                "benchmark",
                "0.95 times",
                "8 prompts",
                "1,200 of 3,000 draft",
                "40%; by position 60%, 40%, 20%",
            ),
            ("benchmark", "adaptive: 0.95 times", "no draft tokens verified"),
            ("verdict", "specdec bench --main 'my main.gguf' --draft"),
            ("files", "2.5 MB"),
        ],
        strict=False,
    ):
        assert line.startswith(parts[0])
        assert all(part in line for part in parts), line
    table = lines[10:]
    assert len({len(line) for line in table}) == 1
    assert [re.split(" {2,}", line) for line in table[1:]] == [
        ["all tokens", "50.0%", "45.7%", "2,000"],
        ["maths", "50.0%", "45.7%", "2,000"],
        ["code editing", "100.0%", "100.0%", "12,345"],
    ]


@pytest.mark.parametrize(
    ("benchmark", "expected", "verdict"),
    [
        ([(1.01, 1.2)], 0.8, "it pays on this machine"),
        ([(0.8, 0.99)], 1.2, "it does not pay on this machine"),
        ([(1.01, 1.2), (0.99, 1.2)], 1.2, "it makes little difference on this machine"),
        ([], 1.2, "it pays on this machine"),
        ([], 0.81, "it does not pay on this machine"),
    ],
    ids=["pays", "does not pay", "last variant unclear", "expected to pay", "expected not to pay"],
)
def test_the_verdict_is_that_of_the_last_variant_measured(recipe, benchmark, expected, verdict):
    found = measured([figures(*bounds) for bounds in benchmark], expected)
    (line,) = [line for line in draft_view.report(head(recipe), found, recipe) if line.startswith("verdict")]
    assert verdict in line


def test_the_report_says_what_was_learned(recipe):
    better = replace(EVALUATION, overall=Score(2000, 0.625, 0.5))
    own, built_in = "your answers", "built-in prompts"
    learned = LearnedAnswers(60, 60, {own: EVALUATION, built_in: better}, {own: better, built_in: better})
    rates = {own: (21.04, 25.5), built_in: (20.0, 20.06)}
    lines = draft_view.report(head(recipe, learned), measured([], rates=rates), recipe)
    (first,) = [i for i, line in enumerate(lines) if line.startswith("learned")]
    assert "60 of your answers" in lines[first]
    assert [line.strip() for line in lines[first + 1 : first + 3]] == [
        "your answers: accepted 50.0% → 62.5% of the first draft tokens; expected 21.0 → 25.5 tokens/s",
        "built-in prompts: accepted 62.5% → 62.5% of the first draft tokens; expected 20.0 → 20.1 tokens/s",
    ]
    new = LearnedAnswers(60, 60, {}, {own: better})
    lines = draft_view.report(head(recipe, new), measured([], rates={own: (0.0, 25.5)}), recipe)
    assert any(
        line.endswith("accepted 62.5% of the first draft tokens; expected 25.5 tokens/s") for line in lines
    )


@pytest.fixture
def kept(short_main, inside):
    """A function that keeps so many answers to train on, as --learn does, in place of all others."""

    def keep(n):
        with mock.patch.dict(os.environ, inside.environment, clear=True):
            store = answer_store_of(short_main)
            store.path.unlink(missing_ok=True)
            for i in range(n):
                store.add([1, 300 + i, 301, 302], [310, 311, 312, 313, 314, 315], 0.0)

    return keep


def test_learning_from_kept_answers(planned, kept, short_main, target, tmp_path):
    kept(12)
    general = target.with_name("general.gguf.training") / "data"
    general.mkdir(parents=True)
    (general / "00000.npz").touch()
    head = target.with_name("general.gguf")
    head.touch()
    recipe, _ = planned("--continue", head, "--from", "datastore", "--minutes", 30)
    assert (recipe.continued, recipe.learns, recipe.general) == (head, True, general)
    assert recipe.target == target.with_name("general-learned.gguf")
    assert recipe.training_seconds == pytest.approx(0.7 * 30 * 60)
    recipe, _ = planned("--continue", recipe.target, "--from", "datastore", "--force")
    assert (recipe.target, recipe.general) == (target.with_name("general-learned.gguf"), None)
    recipe, _ = planned("--continue", head, "-o", target)
    assert (recipe.target, recipe.learns, recipe.general) == (target, False, general)
    # Prompts of the user's own need answers, and thereby new data.
    (tmp_path / "notes.txt").write_text("A note. " * 50)
    recipe, _ = planned("--continue", head, "--from", tmp_path / "notes.txt", "--from", "datastore")
    assert (recipe.learns, recipe.general) == (True, None)
    recipe, _ = planned("--from", "datastore")
    assert (recipe.target, recipe.continued) == (short_main.with_name("main-head.gguf"), None)


def test_too_few_kept_answers_are_refused_before_any_work(inside, kept, short_main, target):
    kept(3)
    done = inside("draft", "train", short_main, "-o", target, "--from", "datastore")
    assert done.returncode == 2
    assert b"answers of this model are kept, too few to learn from: use it with --learn" in done.stderr
    assert not target.parent.exists()
