"""Train a draft model, from start to end, for a tiny main model that is nearly a bigram table."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Text
from spec_local.training import candidates, draft_benchmark, pipeline, shards
from spec_local.training.export import write_draft
from spec_local.training.initial_weights import random_weights
from spec_local.training.model_shape import ModelShape
from spec_local.training.pipeline import CandidateResult, Generating, Stage, Training, run
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Journal, Recipe

PROMPT = "the of and to in is you that it he was for on are with"


@pytest.fixture(scope="module")
def main_path(tmp_path_factory, tiny_path):
    path = tmp_path_factory.mktemp("main") / "main.gguf"
    n = Model(tiny_path, weights=False).vocabulary.n_tokens
    shape = ModelShape(n, n_embd=64, n_layers=1, n_head=2, n_head_kv=2, head_dim=32, n_ff=128)
    weights = random_weights(shape, 1)
    weights["blk.0.attn_output.weight"] *= 0.1
    weights["blk.0.ffn_down.weight"] *= 12
    weights["token_embd.weight"] *= 4
    return write_draft(
        path, tiny_path, np.arange(n, dtype=np.uint32), shape, weights, kind="F16", provenance={}
    )


# Smaller models and fewer measurements; time advances with the calls of the main model.
QUICK = """
from itertools import count
from types import SimpleNamespace
from spec_local.training import candidates, draft_benchmark, pipeline, precision
ticks = count()
set(precision, "fastest_copy", lambda main, *_, **__: main)
set(pipeline, "N_PARALLEL", 16)
set(pipeline, "_EVALUATIONS", 6)
set(pipeline, "_MAX_DRAFT", 2)
set(candidates, "WIDTHS", {"tiny": (64, 2)})
set(pipeline, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
set(pipeline.distillation, "steps_per_second", lambda *_, **__: 20.0)
set(draft_benchmark, "run", lambda *_, **__: [])
"""


@pytest.fixture
def quick(monkeypatch):
    exec(QUICK, {"set": monkeypatch.setattr})


@pytest.fixture
def recipe(main_path, tmp_path):
    return Recipe(main=main_path, target=tmp_path / "draft.gguf", minutes=0.12, size="tiny", threads=1)


@pytest.fixture(scope="module")
def trained(main_path, tmp_path_factory):
    """Recipe, events and draft model of a whole run; no pruned candidate: it would be the main model."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = Recipe(main=main_path, target=folder / "draft.gguf", minutes=0.12, size="tiny", threads=1)
    events = []
    with pytest.MonkeyPatch.context() as patch:
        exec(QUICK, {"set": patch.setattr})
        patch.setattr(candidates, "PRUNED", {})
        return recipe, events, run(recipe, UserTexts(), events.append)


def journal_of(recipe):
    return json.loads((recipe.folder / "journal.json").read_text())


def documents_of(recipe):
    return [document for shard in shards.read(recipe.folder / "data") for document in shard.documents]


def ignore(event):
    pass


def acceptance(recipe):
    """Acceptance rate with one draft token per step at temperature 0, in answers to held-out prompts."""
    documents = [d for d in documents_of(recipe) if d.held_out]
    settings = GenerationSettings(
        SamplingSettings(temperature=0), max_tokens=30, proposer="draft", policy="fixed", draft_max=1
    )
    with Session.open(recipe.main, recipe.target, n_ctx=768, threads=1) as session:
        ends = [list(session.generate(d.tokens[: d.n_prompt].tolist(), settings))[-1] for d in documents[:8]]
    return sum(end.statistics.draft_n_accepted for end in ends) / sum(end.statistics.draft_n for end in ends)


def generate(main, draft=None):
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40)
    with Session.open(main, draft, n_ctx=256, threads=1) as session:
        events = [event for event in session.generate(PROMPT, settings) if isinstance(event, Text)]
    return [token for event in events for token in event.tokens]


def test_a_trained_draft_predicts_well_and_leaves_the_output_unchanged(trained, own_cache):
    recipe, events, draft = trained
    assert draft.path == recipe.target
    evaluations = [e.progress.evaluation for e in events if isinstance(e, Training) and e.progress.evaluation]
    assert draft.evaluation.overall.agreement > max(0.3, evaluations[0].overall.agreement + 0.2)
    assert acceptance(recipe) > 0.3
    assert generate(recipe.main, recipe.target) == generate(recipe.main)
    assert [e.name for e in events if isinstance(e, Stage)] == [
        "measuring",
        "generating training data",
        "selecting tokens",
        "selecting the model",
        "training",
        "exporting",
        "running the benchmark",
    ]
    left = [e.seconds_left for e in events if isinstance(e, Generating)]
    assert 0 < left[-1] < left[0] < 0.12 * 60
    assert [e.name for e in events if isinstance(e, CandidateResult)] == ["2 new layers"] == [draft.name]
    assert draft.n_generated == sum(len(d.top_ids) for d in documents_of(recipe))
    header = Model(recipe.target, weights=False)
    assert header._metadata("specdec.made_from") == draft.name
    assert header._metadata("specdec.tokens_generated") == str(draft.n_generated)


def test_a_finished_run_is_not_repeated_and_continues_with_more_minutes(quick, trained, tmp_path):
    finished, _, first = trained
    recipe = replace(finished, target=tmp_path / "draft.gguf")
    shutil.copytree(finished.folder, recipe.folder)
    events = []
    second = run(recipe, UserTexts(), events.append)
    assert not [e for e in events if isinstance(e, (Generating, CandidateResult, Training))]
    assert (second.sha256, second.n_generated, second.n_trained) == (
        first.sha256,
        first.n_generated,
        first.n_trained,
    )
    events = []
    third = run(replace(recipe, minutes=0.16), UserTexts(), events.append)
    assert third.n_generated > first.n_generated
    assert [e for e in events if isinstance(e, CandidateResult)]  # selected anew, on more data


def test_time_counts_once_its_data_is_saved(quick, recipe):
    seen = []

    def on_progress(event):
        if isinstance(event, Generating):
            seen.append(journal_of(recipe)["generation_seconds"])
            assert not list((recipe.folder / "data").glob("*.npz"))
            if event.seconds_left < 1.5:
                raise SystemExit

    with pytest.raises(SystemExit):
        run(recipe, UserTexts(), on_progress)
    assert len(seen) > 100
    assert max(seen) < 0.1  # the time that would count after a kill
    assert journal_of(recipe)["generation_seconds"] > 2  # a stop saves everything
    assert list((recipe.folder / "data").glob("*.npz"))


RUN = (
    """
import sys
import time
from pathlib import Path
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Recipe
set = setattr
"""
    + QUICK
    + """
pipeline.distillation._SAVE_EVERY = 0.1
def on_progress(event):
    progress = event.progress if isinstance(event, pipeline.Training) else None
    if progress and progress.n_steps > 10:
        time.sleep(0.05)
    print(type(event).__name__, progress.step if progress else "", flush=True)
recipe = Recipe(main=Path(sys.argv[1]), target=Path(sys.argv[2]), minutes=0.06, size="tiny", threads=1)
pipeline.run(recipe, UserTexts(), on_progress)
"""
)


def test_a_killed_run_resumes(recipe, own_cache):
    def run_until(stop):
        """Kill the run at the first line for which `stop` is true; return all lines."""
        lines = []
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(recipe.main), str(recipe.target)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            for line in child.stdout:
                lines.append(line.split())
                if stop(lines[-1], lines):
                    os.kill(child.pid, signal.SIGKILL)
                    break
        return lines

    run_until(lambda line, lines: len(lines) > 20 and line[0] == "Generating")
    run_until(lambda line, lines: line[0] == "CandidateResult")
    third = run_until(lambda line, lines: line[0] == "Training" and int(line[1]) == 4)
    assert "Generating" not in {line[0] for line in third}
    fourth = run_until(lambda *_: False)
    assert not [line for line in fourth if line[0] in ("Generating", "CandidateResult")]
    steps = [int(line[1]) for line in fourth if line[0] == "Training"]
    assert steps[0] > 1
    assert recipe.target.exists()
    assert acceptance(recipe) > 0.3


def test_concurrent_runs_and_other_main_models_are_refused(quick, recipe, monkeypatch):
    def run_again(*_, **__):
        with pytest.raises(InvalidRequest, match="another run is using"):
            run(recipe, UserTexts(), ignore)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline._Pipeline, "_generate", run_again)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, UserTexts(), ignore)
    Journal({"main": "x", "size": "tiny", "seed": 0}).save(recipe)
    with pytest.raises(InvalidRequest, match="started with another main: use the same"):
        run(recipe, UserTexts(), ignore)
    (recipe.folder / "journal.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"journal.json is damaged .* delete it"):
        run(recipe, UserTexts(), ignore)


def test_unsupported_devices_are_rejected_at_once(recipe, recurrent_path):
    for main in (recipe.main, recurrent_path):
        pipeline.check(replace(recipe, main=main))
    if not pipeline.distillation.torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match=r"PyTorch cannot use 'cuda' here .* give --device cpu"):
            pipeline.check(replace(recipe, device="cuda"))


def test_a_main_model_that_cannot_be_pruned_gets_a_new_draft(quick, tmp_path, own_cache):
    main = write_tiny_model(tmp_path / "gemma.gguf", architecture="gemma3")
    recipe = Recipe(main=main, target=tmp_path / "draft.gguf", minutes=0.05, size="tiny", threads=1)
    events = []
    draft = run(recipe, UserTexts(), events.append)
    assert [e.name for e in events if isinstance(e, CandidateResult)] == ["2 new layers"] == [draft.name]
    assert journal_of(recipe)["selected"] == draft.name


def test_a_draft_model_is_run_on_the_benchmark(tiny_path, tiny_draft_path, own_cache, monkeypatch):
    monkeypatch.setattr(draft_benchmark, "_MAX_TOKENS", 24)
    fixed, adaptive = draft_benchmark.run(tiny_path, tiny_draft_path, threads=1)
    assert (fixed.name, adaptive.name) == draft_benchmark.VARIANTS
    assert 1 <= fixed.speedup.n == adaptive.speedup.n <= 8
    assert len(fixed.tested_at) == 3
    assert 0.3 < fixed.acceptance < 1
    monkeypatch.setattr(draft_benchmark, "_N_CTX", 16)
    assert draft_benchmark.run(tiny_path, tiny_draft_path, threads=1) == []
