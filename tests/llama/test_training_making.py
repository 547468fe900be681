"""From a main to its draft, whole: on a tiny main whose next token follows from the last one, so that it can be learned."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Text
from spec_local.training import making, shards
from spec_local.training.cutting import from_scratch
from spec_local.training.export import write_draft
from spec_local.training.making import Learning, Raced, Stage, Writing, make
from spec_local.training.model_shape import ModelShape
from spec_local.training.questions import FromFiles
from spec_local.training.recipe import Recipe

PROMPT = "the of and to in is you that it he was for on are with"


@pytest.fixture(scope="module")
def main_path(tmp_path_factory, tiny_path):
    """Nearly a table of which token follows which."""
    path = tmp_path_factory.mktemp("main") / "main.gguf"
    n = Model(tiny_path, weights=False).vocabulary.n_tokens
    shape = ModelShape(n, n_embd=64, n_layers=1, n_head=2, n_head_kv=2, head_dim=32, n_ff=128)
    weights = from_scratch(shape, 1)
    weights["blk.0.attn_output.weight"] *= 0.1
    weights["blk.0.ffn_down.weight"] *= 12
    weights["token_embd.weight"] *= 4
    return write_draft(
        path, tiny_path, np.arange(n, dtype=np.uint32), shape, weights, kind="F16", provenance={}
    )


# What takes seconds and is tested elsewhere; and time goes by with the calls of main, whatever else the machine does.
QUICK = """
from itertools import count
from types import SimpleNamespace
from spec_local.training import making, precision
ticks = count()
set(precision, "quickest", lambda main, *_, **__: main)
set(making, "N_TEXTS", 16)
set(making, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
set(making.distil, "pace", lambda *_, **__: 20.0)
set(making.trial, "run", lambda *_, **__: [])
"""


@pytest.fixture
def quick(monkeypatch):
    exec(QUICK, {"set": monkeypatch.setattr})


@pytest.fixture
def recipe(main_path, tmp_path):
    return Recipe(main=main_path, target=tmp_path / "draft.gguf", minutes=0.12, size="tiny", threads=2)


def accepted(recipe):
    """Share of one guess a step that stands, at temperature 0, in answers to questions held out."""
    documents = [d for shard in shards.read(recipe.folder / "data") for d in shard.documents if d.held_out]
    settings = GenerationSettings(
        SamplingSettings(temperature=0), max_tokens=30, proposer="draft", policy="fixed", draft_max=1
    )
    with Session.open(recipe.main, recipe.target, n_ctx=768) as session:
        ends = [list(session.generate(d.tokens[: d.n_prompt].tolist(), settings))[-1] for d in documents[:8]]
    return sum(end.statistics.draft_n_accepted for end in ends) / sum(end.statistics.draft_n for end in ends)


def text(main, draft=None):
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40)
    with Session.open(main, draft, n_ctx=256) as session:
        return [
            t for event in session.generate(PROMPT, settings) if isinstance(event, Text) for t in event.tokens
        ]


def test_a_draft_learns_to_guess_and_changes_nothing(quick, recipe, own_cache, monkeypatch):
    def refuse(*_):
        raise ModelError("not this one: train one from scratch")

    monkeypatch.setattr(making, "from_main", refuse)  # a layer of this main would be main itself
    events = []
    made = make(recipe, FromFiles(), events.append)
    assert made.path == recipe.target
    measured = [e.progress.measured for e in events if isinstance(e, Learning) and e.progress.measured]
    assert made.figures.all.agreement > max(0.3, measured[0].all.agreement + 0.2)
    assert accepted(recipe) > 0.3
    assert text(recipe.main, recipe.target) == text(recipe.main)
    stages = [e.name for e in events if isinstance(e, Stage)]
    assert stages == [
        "measuring",
        "writing",
        "choosing tokens",
        "choosing the model",
        "learning",
        "exporting",
        "answering the benchmark's prompts",
    ]
    left = [e.seconds_left for e in events if isinstance(e, Writing)]
    assert 0 < left[-1] < left[0] < 0.12 * 60
    assert [e.name for e in events if isinstance(e, Raced)] == ["2 new layers"] == [made.name]
    assert made.n_written == sum(
        len(d.top_ids) for s in shards.read(recipe.folder / "data") for d in s.documents
    )
    facts = Model(recipe.target, weights=False)
    assert facts._metadata("specdec.made_from") == made.name
    assert facts._metadata("specdec.tokens_written") == str(made.n_written)


def test_a_finished_run_is_finished_at_once_and_goes_on_with_more_minutes(quick, recipe, own_cache):
    first = make(recipe, FromFiles(), lambda event: None)
    events = []
    second = make(recipe, FromFiles(), events.append)
    assert not [e for e in events if isinstance(e, (Writing, Raced, Learning))]
    assert (second.sha256, second.n_written, second.n_learned) == (
        first.sha256,
        first.n_written,
        first.n_learned,
    )
    longer = Recipe(main=recipe.main, target=recipe.target, minutes=0.16, size="tiny", threads=2)
    events = []
    third = make(longer, FromFiles(), events.append)
    assert third.n_written > first.n_written
    assert [e for e in events if isinstance(e, Raced)]  # a short run's choice is not kept


def test_time_counts_when_what_it_brought_is_kept(quick, recipe):
    seen = []

    def told(event):
        if isinstance(event, Writing):
            seen.append(json.loads((recipe.folder / "journal.json").read_text())["spent"]["writing"])
            assert not list((recipe.folder / "data").glob("*.npz"))
            if event.seconds_left < 1.5:
                raise SystemExit

    with pytest.raises(SystemExit):
        make(recipe, FromFiles(), told)
    assert len(seen) > 100
    assert max(seen) < 0.1  # as a kill would leave it
    assert (
        json.loads((recipe.folder / "journal.json").read_text())["spent"]["writing"] > 2
    )  # a stop keeps all
    assert list((recipe.folder / "data").glob("*.npz"))


RUN = (
    """
import sys
import time
from pathlib import Path
from spec_local.training.questions import FromFiles
from spec_local.training.recipe import Recipe
set = setattr
"""
    + QUICK
    + """
making.distil._SAVE_EVERY = 0.1
def told(event):
    progress = getattr(event, "progress", None)
    if progress and progress.n_steps > 10:
        time.sleep(0.05)
    print(type(event).__name__, progress.step if progress else "", flush=True)
making.make(Recipe(main=Path(sys.argv[1]), target=Path(sys.argv[2]), minutes=0.12, size="tiny", threads=2), FromFiles(), told)
"""
)


def test_a_run_that_was_killed_goes_on(recipe, own_cache):
    def run(until):
        """Kill it at the first line that is so; whether it came to that."""
        lines = []
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(recipe.main), str(recipe.target)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            for line in child.stdout:
                lines.append(line.split())
                if until(lines[-1], lines):
                    os.kill(child.pid, signal.SIGKILL)
                    break
        return lines

    run(lambda line, lines: len(lines) > 20 and line[0] == "Writing")
    run(lambda line, lines: line[0] == "Raced")
    third = run(lambda line, lines: line[0] == "Learning" and int(line[1]) == 4)
    assert "Writing" not in {line[0] for line in third}
    fourth = run(lambda *_: False)
    assert not [line for line in fourth if line[0] in ("Writing", "Raced")]
    steps = [int(line[1]) for line in fourth if line[0] == "Learning"]
    assert steps[0] > 1
    assert recipe.target.exists()
    assert accepted(recipe) > 0.3


def test_two_at_once_and_another_main_are_refused(quick, recipe, tiny_path, monkeypatch):
    def meanwhile(*_, **__):
        with pytest.raises(InvalidRequest, match="another run is at work"):
            make(recipe, FromFiles(), lambda event: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(making, "_write", meanwhile)
        with pytest.raises(KeyboardInterrupt):
            make(recipe, FromFiles(), lambda event: None)
    making.Journal({"main": "x", "size": "tiny", "seed": 0}).save(recipe)
    with pytest.raises(InvalidRequest, match="begun with another main: give the same"):
        make(recipe, FromFiles(), lambda event: None)
    (recipe.folder / "journal.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"journal.json is damaged .* delete it"):
        make(recipe, FromFiles(), lambda event: None)


def test_what_cannot_be_trained_is_refused_at_once(recipe, recurrent_path, tmp_path):
    making.check(recipe)
    with pytest.raises(ModelError, match="is a recurrent model"):
        making.check(Recipe(main=recurrent_path, target=recipe.target))
    if not making.distil.torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match=r"PyTorch cannot use 'cuda' here .* give --device cpu"):
            making.check(Recipe(main=recipe.main, target=recipe.target, device="cuda"))


def test_a_main_of_another_architecture_gets_a_new_model(quick, tmp_path, own_cache):
    main = write_tiny_model(tmp_path / "gemma.gguf", architecture="gemma3")
    recipe = Recipe(main=main, target=tmp_path / "draft.gguf", minutes=0.05, size="tiny", threads=2)
    events = []
    made = make(recipe, FromFiles(), events.append)
    assert [e.name for e in events if isinstance(e, Raced)] == ["2 new layers"] == [made.name]
    assert json.loads((recipe.folder / "journal.json").read_text())["chosen"] == made.name


def test_a_draft_is_tried_on_the_benchmarks_prompts(tiny_path, tiny_draft_path, own_cache, monkeypatch):
    monkeypatch.setattr(making.trial, "_TOKENS", 24)
    fixed, adaptive = making.trial.run(tiny_path, tiny_draft_path, threads=1)
    assert (fixed.name, adaptive.name) == making.trial.VARIANTS
    assert 1 <= fixed.speedup.n == adaptive.speedup.n <= 8
    assert len(fixed.tested_at) == 3
    assert 0.3 < fixed.acceptance < 1
    monkeypatch.setattr(making.trial, "_N_CTX", 16)
    assert making.trial.run(tiny_path, tiny_draft_path, threads=1) == []
