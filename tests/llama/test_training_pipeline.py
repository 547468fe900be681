"""Train a head, from start to end, for a tiny main model whose next token depends mostly on the last one."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama import graphs, runtime
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import material, measurement, shards
from spec_local.training.dataset import COVERAGE, Dataset
from spec_local.training.distillation import TrainingProgress
from spec_local.training.events import Generating, Stage
from spec_local.training.head_shape import layers_read
from spec_local.training.pipeline import run
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Journal, Recipe
from tests.llama.answers import tokens_of
from tests.quick_training import LIMITS, shorten
from tests.tiny_heads import N_EMBD, write_tiny_main

PROMPT = "the of and to in is you that it he was for on are with"
STAGES = ["measuring", "generating training data", "reading the training data", "fitting the start"]
STAGES += ["training", "exporting"]
BYTES_PER_TOKEN = 3 * 2 * N_EMBD


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf", end_scale=1.5)


@pytest.fixture
def quick(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture
def recipe(main_path, tmp_path):
    return Recipe(main=main_path, target=tmp_path / "head.gguf", minutes=0.12, threads=1)


@pytest.fixture(scope="module")
def trained(main_path, tmp_path_factory):
    """Recipe, events and head of a whole run."""
    recipe = Recipe(
        main=main_path, target=tmp_path_factory.mktemp("trained") / "head.gguf", minutes=0.12, threads=1
    )
    events = []
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
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
        SamplingSettings(temperature=0), max_tokens=48, proposer="draft", policy="fixed", draft_max=1
    )
    with Session.open(recipe.main, recipe.target, n_ctx=768, threads=1) as session:
        ends = [list(session.generate(d.tokens[: d.n_prompt].tolist(), settings))[-1] for d in documents]
    return sum(end.statistics.draft_n_accepted for end in ends) / sum(end.statistics.draft_n for end in ends)


def generate(main, draft=None):
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40)
    with Session.open(main, draft, n_ctx=256, threads=1) as session:
        return tokens_of(session.generate(PROMPT, settings))


def test_a_trained_head_is_accepted_as_predicted_and_leaves_the_output_unchanged(trained, own_cache):
    recipe, events, head = trained
    assert head.path == recipe.target
    assert [e.name for e in events if isinstance(e, Stage)] == STAGES
    evaluations = [e.evaluation for e in events if isinstance(e, TrainingProgress) and e.evaluation]
    assert head.evaluation.overall.agreement >= evaluations[0].overall.agreement
    assert head.evaluation.overall.acceptance > evaluations[0].overall.acceptance + 0.05
    assert head.evaluation.overall.agreement > 0.4
    assert acceptance(recipe) == pytest.approx(head.evaluation.overall.agreement, abs=0.15)
    assert generate(recipe.main, recipe.target) == generate(recipe.main)


def test_a_run_records_what_it_did(trained):
    recipe, events, head = trained
    generating = [e for e in events if isinstance(e, Generating)]
    assert 0 < generating[-1].seconds_left < generating[0].seconds_left < 0.12 * 60 * 0.6
    assert head.n_generated == sum(len(d.top_ids) for d in documents_of(recipe))
    steps = [e for e in events if isinstance(e, TrainingProgress)]
    assert 2 < len(steps) == steps[-1].n_steps <= 52  # 20 steps per second of 2.9 s, a tenth for evaluations
    assert head.n_trained == steps[-1].n_tokens
    assert [point["n_read"] for point in head.curve] == [s.n_tokens for s in steps if s.evaluation]
    assert len(head.curve) >= 6
    assert head.curve[-1]["overall"]["agreement"] == steps[-1].evaluation.overall.agreement
    assert head.n_drafted == Model(recipe.main, weights=False).vocabulary.n_tokens
    assert head.coverage == 1
    assert head.size == recipe.target.stat().st_size
    header = Model(recipe.target, weights=False)
    assert header.target_layers == tuple(layer + 1 for layer in layers_read(5)) == (2, 3, 4)
    assert header.text("specdec.tokens_generated") == str(head.n_generated)
    document = documents_of(recipe)[0]
    assert document.states.shape == (len(document.tokens) - 1, 3 * N_EMBD)


def test_a_finished_run_is_not_repeated_and_continues_with_more_minutes(quick, trained, tmp_path):
    finished, _, first = trained
    recipe = replace(finished, target=tmp_path / "head.gguf")
    shutil.copytree(finished.folder, recipe.folder)
    events = []
    second = run(recipe, UserTexts(), events.append)
    assert not [e for e in events if isinstance(e, (Generating, TrainingProgress))]
    assert (second.sha256, second.n_generated, second.n_trained, second.curve) == (
        first.sha256,
        first.n_generated,
        first.n_trained,
        first.curve,
    )
    events = []
    third = run(replace(recipe, minutes=0.16), UserTexts(), events.append)
    assert third.n_generated > first.n_generated
    assert next(e.step for e in events if isinstance(e, TrainingProgress)) == 1  # trained anew, on more data


def test_time_counts_once_its_data_is_saved(quick, recipe):
    seen = []

    def on_progress(event):
        if isinstance(event, Generating):
            seen.append(journal_of(recipe)["generation_seconds"])
            assert not list((recipe.folder / "data").glob("*.npz"))
            if event.seconds_left < 2:
                raise SystemExit

    with pytest.raises(SystemExit):
        run(recipe, UserTexts(), on_progress)
    assert len(seen) > 100
    assert max(seen) < 0.1  # the time that would count after a kill
    assert journal_of(recipe)["generation_seconds"] > 2  # a stop saves everything
    assert list((recipe.folder / "data").glob("*.npz"))


@pytest.mark.parametrize(
    ("limit", "field"),
    [({"tokens": 3000}, "n_tokens"), ({"max_bytes": 5000 * BYTES_PER_TOKEN}, "n_bytes")],
    ids=["tokens", "disk"],
)
def test_a_limit_of_the_data_ends_the_generation_once(quick, recipe, limit, field):
    """Dropping unfinished answers leaves less than the limit, which must not start the generation again."""
    recipe = replace(recipe, minutes=5, limits=replace(LIMITS, epochs=3), **limit)
    events = []

    def until_step_3(event):
        events.append(event)
        assert len(events) < 2000  # it would never end
        if isinstance(event, TrainingProgress) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, UserTexts(), until_step_3)
    progress = [e.progress for e in events if isinstance(e, Generating)]
    (most,) = limit.values()
    assert 0.9 * most < getattr(progress[-1], field) < most
    documents = documents_of(recipe)
    if field == "n_tokens":
        assert 0.8 * most < sum(len(d.top_ids) for d in documents) < most
    else:
        assert 0.7 * most < sum(d.states.nbytes for d in documents) < most
    assert journal_of(recipe)[field] >= most
    n = len(documents)
    events = []
    run(recipe, UserTexts(), events.append)
    assert not [e for e in events if isinstance(e, Generating)]
    assert "measuring" not in {e.name for e in events if isinstance(e, Stage)}
    assert len(documents_of(recipe)) == n
    if field == "n_tokens":  # as many steps as the data is worth
        last = [e for e in events if isinstance(e, TrainingProgress)][-1]
        n_train = sum(len(d.top_ids) for d in documents if not d.held_out)
        assert last.n_tokens == pytest.approx(3 * n_train, rel=0.15)
        assert last.n_steps == last.step


RUN = """
import os
import signal
import sys
from pathlib import Path
from spec_local.training import pipeline
from spec_local.training.distillation import TrainingProgress
from spec_local.training.events import Generating, Stage
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Recipe
from dataclasses import replace
from pytest import MonkeyPatch
from tests.quick_training import LIMITS, shorten
shorten(MonkeyPatch())
limits = replace(LIMITS, unsaved=0.0, shard=600)
recipe = Recipe(main=Path(sys.argv[1]), target=Path(sys.argv[2]), minutes=0.06, threads=1, limits=limits)
for stop in [*sys.argv[3:], ""]:
    if not (child := os.fork()):  # before any thread is started
        n = 0
        def on_progress(event):
            global n
            n += isinstance(event, Generating)
            step = event.step if isinstance(event, TrainingProgress) else 0
            name = event.name if isinstance(event, Stage) else type(event).__name__
            print(name, step, flush=True)
            if stop and stop in (name, f"call {n}", f"step {step}"):
                os.kill(os.getpid(), signal.SIGKILL)
        head = pipeline.run(recipe, UserTexts(), on_progress)
        print(f"agreement {head.evaluation.overall.agreement}", flush=True)
        os._exit(0)
    print(f"run {os.waitpid(child, 0)[1]}", flush=True)
"""


def test_steps_are_planned_anew_until_there_is_a_checkpoint(quick, recipe):
    """The data is enough for both runs, and the first one is stopped before it saves a step."""

    def until_training(event):
        if isinstance(event, TrainingProgress):
            raise KeyboardInterrupt

    recipe = replace(recipe, tokens=3000)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, UserTexts(), until_training)
    most = journal_of(recipe)["hyperparameters"]["n_steps"]
    shorter = replace(recipe, tokens=None, minutes=1e-3)
    events = []
    run(shorter, UserTexts(), events.append)
    steps = [event for event in events if isinstance(event, TrainingProgress)]
    assert not [event for event in events if isinstance(event, Generating)]
    assert steps[0].step == 1
    assert steps[0].n_steps == journal_of(recipe)["hyperparameters"]["n_steps"] < most


def test_a_run_that_is_killed_in_every_stage_resumes(recipe, own_cache):
    stops = ["call 20", "call 150", "fitting the start", "step 11", "exporting"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(recipe.main), str(recipe.target), *stops],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    *runs, end = [part.splitlines() for part in done.stdout.split("run ")]
    codes = [int(lines[0]) for lines in [*runs[1:], end]]
    assert codes == [9] * len(stops) + [0], done.stderr
    lines = [runs[0], *(each[1:] for each in runs[1:])]
    calls = [sum(line.startswith("Generating") for line in each) for each in lines]
    # Nothing was on the disk at the first kill, and most of the data at the second one.
    assert calls[:2] == [20, 150]
    assert 50 < calls[2] < 150 < 200 < 150 + calls[2] < 250
    assert not any(calls[3:])
    steps = [[int(line.split()[1]) for line in each if line.startswith("TrainingProgress")] for each in lines]
    assert not any(steps[:3])
    assert steps[3] == list(range(1, 12))
    assert 10 <= steps[4][0] <= 12  # the checkpoint is written before or after the progress is shown
    assert not steps[5]  # finished
    assert lines[-1][-1].startswith("agreement ")
    assert float(lines[-1][-1].split()[1]) > 0.4
    assert [path.name for path in recipe.target.parent.glob("head*") if path.is_file()] == ["head.gguf"]


def test_a_partial_copy_that_a_kill_left_is_deleted_before_copies_are_measured(quick, recipe):
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "main-BF16.gguf").write_bytes(b"GGUF")
    left = []

    def stop(event):
        if event == Stage("measuring"):
            left.extend(recipe.folder.glob("*.gguf"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, UserTexts(), stop)
    assert left == []


def test_concurrent_runs_and_other_main_models_are_refused(quick, recipe):
    def run_again(event):
        with pytest.raises(InvalidRequest, match="another run is using"):
            run(recipe, UserTexts(), ignore)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, UserTexts(), run_again)
    Journal({"main": "x", "seed": 0}).save(recipe)
    with pytest.raises(InvalidRequest, match="started with another main: use the same"):
        run(recipe, UserTexts(), ignore)
    (recipe.folder / "journal.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"journal.json is damaged .* delete it"):
        run(recipe, UserTexts(), ignore)


def test_the_least_vocabulary_that_covers_enough_is_drafted(trained):
    recipe, _, _ = trained
    n_vocab, sizes = Model(recipe.main, weights=False).vocabulary.n_tokens, (5, 300, 400, 500, 600)
    chosen = Dataset(recipe.folder / "data", n_vocab, sizes)
    n = len(chosen.drafted)
    assert chosen.coverage >= COVERAGE
    assert n in sizes[1:]
    for fewer in (size for size in sizes if size < n):
        found = Dataset(recipe.folder / "data", n_vocab, (fewer,))  # as asked for
        assert len(found.drafted) == fewer
        assert found.coverage < COVERAGE
    assert Dataset(recipe.folder / "data", n_vocab, (10**6,)).coverage == 1


@pytest.mark.parametrize("why", ["llama.cpp returned 0 of 8 states", "they are not finite"])
def test_main_models_whose_states_cannot_be_used_are_refused_at_once(recipe, monkeypatch, why):
    assert material.check(recipe) == BYTES_PER_TOKEN
    if "finite" in why:
        monkeypatch.setattr(np, "isfinite", lambda x: np.zeros(x.shape, bool))
    else:
        monkeypatch.setattr(graphs, "layer_output", lambda model: "other")
    with pytest.raises(ModelError, match=rf"states of main.gguf cannot be used \({why}"):
        material.check(recipe)
    assert not recipe.folder.exists()


def test_too_little_disk_space_is_refused_at_once(recipe):
    with pytest.raises(InvalidRequest, match="disk space are too little") as error:
        material.check(replace(recipe, max_bytes=1000 * BYTES_PER_TOKEN))
    wanted = float(str(error.value).split("`disk=")[1].split("`")[0])
    material.check(replace(recipe, max_bytes=round(wanted * 1e9)))


def test_a_head_is_measured(main_path, trained, own_cache, monkeypatch):
    recipe, _, _ = trained
    lib, threads, freed = runtime.library(), set(), []
    create, free = lib.llama_init_from_model, lib.llama_model_free
    with monkeypatch.context() as patch:
        patch.setattr(
            lib,
            "llama_init_from_model",
            lambda model, params: threads.add(params.n_threads) or create(model, params),
        )
        patch.setattr(lib, "llama_model_free", lambda model: freed.append(model) or free(model))
        calls = measurement.measure_calls(main_path, recipe.target, threads=3)
    usual = lib.llama_context_default_params().n_threads  # of contexts that only build a graph
    assert threads - {usual} == {3}
    assert len(freed) >= 2  # the main model and the head
    gain = measurement.expected_gain(calls, [0.7, 0.6])
    assert 0 < gain.cost < 5
    assert 1 <= gain.n_draft <= 7
    assert 0 < gain.speedup < 4
    fixed, adaptive = measurement.benchmark(main_path, recipe.target, threads=1, max_tokens=24)
    assert (fixed.name, adaptive.name) == measurement.VARIANTS
    assert 1 <= fixed.speedup.n == adaptive.speedup.n <= 8
    assert len(fixed.tested_at) == 3
    assert 0.3 < fixed.acceptance <= 1
    assert measurement.benchmark(main_path, recipe.target, threads=1, n_ctx=16) == []


@pytest.mark.slow
def test_a_recurrent_main_model(quick, tmp_path, own_cache):
    """Its next token depends on all tokens, so that a head learns little of it in a second."""
    main = write_tiny_model(tmp_path / "main.gguf", architecture="mamba", n_layers=5, end_scale=1.5)
    recipe = Recipe(main=main, target=tmp_path / "head.gguf", minutes=0.04, threads=1)
    assert material.check(recipe) == BYTES_PER_TOKEN
    head = run(recipe, UserTexts(), ignore)
    assert head.evaluation.overall.n > 20
    assert generate(main, recipe.target) == generate(main)
