"""Train a head further on the user's answers: what it keeps, what it learns, and what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.datastore import datastore
from spec_local.datastore.answer_store import AnswerStore, KeptAnswer
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.training import pipeline
from spec_local.training.distillation import TrainingProgress
from spec_local.training.events import Answering, Generating, Stage
from spec_local.training.pipeline import BUILT_IN, run
from spec_local.training.prompts import UserTexts
from spec_local.training.recipe import Recipe, general_data
from tests.llama.answers import tokens_of
from tests.llama.test_training_pipeline import generate, ignore
from tests.quick_training import LIMITS, shorten
from tests.tiny_heads import write_tiny_main

OWN = "your answers"


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf", end_scale=1.5)


@pytest.fixture(scope="module")
def general(main_path, tmp_path_factory):
    """Recipe of a head that was trained on general data."""
    target = tmp_path_factory.mktemp("general") / "head.gguf"
    recipe = Recipe(main=main_path, target=target, minutes=0.12, n_drafted=256, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        run(recipe, UserTexts(), ignore)
    return recipe


@pytest.fixture(scope="module")
def answers(main_path):
    """Answers of the main model to prompts that are all alike."""
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=24)
    found = []
    with Session.open(main_path, "none", n_ctx=256, threads=1) as session:
        tokenize = session.main.model.vocabulary.tokenize
        for i in range(30):
            prompt = tokenize(f"was for on are with as his they {i % 10} the of and", add_special=True)
            answer = tokens_of(session.generate(prompt, settings))
            if len(answer) >= 4:
                found.append(
                    KeptAnswer(3 * i + 1, 0.0, 0.0, len(prompt), np.array([*prompt, *answer], np.int32))
                )
    assert len(found) > 15
    return found


@pytest.fixture
def quick(monkeypatch):
    shorten(monkeypatch)


class Kept(list):
    """In place of an answer store."""

    def answers_to_copy(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return list(self)

    def end_copy(self, folder, head):
        shutil.rmtree(folder)


def learning(trained, folder, **changes):
    base = {"continued": trained.target, "learns": True, "general": general_data(trained.target)}
    return replace(trained, **{"target": folder / "learned.gguf", "n_drafted": None} | base | changes)


@pytest.mark.slow
def test_a_head_learns_from_the_users_answers(quick, general, answers, tmp_path, own_cache, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in general.target.parent.rglob("*")}
    recipe, events = learning(general, tmp_path), []
    head = run(recipe, UserTexts(), events.append, Kept(answers))
    assert not [e for e in events if isinstance(e, Generating)]
    assert {e.what for e in events if isinstance(e, Answering)} == {
        f"reading {OWN}",
        f"answering {BUILT_IN}",
        "answering your prompts again",
    }
    assert "fitting the start" not in [e.name for e in events if isinstance(e, Stage)]
    learned = head.learned
    assert (learned.n_answers, learned.last_answer) == (len(answers), answers[-1].number)
    assert learned.before.keys() == learned.after.keys() == {OWN, BUILT_IN}
    assert learned.after[OWN].overall.agreement >= learned.before[OWN].overall.agreement
    assert learned.after[OWN].overall.n == learned.before[OWN].overall.n > 10
    assert learned.after[BUILT_IN].overall.n > 40
    assert head.n_drafted >= 256
    used = {int(token) for answer in answers[:-1] for token in answer.tokens[answer.n_prompt :]}
    assert used <= set(Model(recipe.target, weights=False).draft_tokens.tolist())
    # Nothing of the answers remains but the head, and the head that was continued is as before.
    assert not (recipe.folder / "own").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert generate(recipe.main, recipe.target) == generate(recipe.main)
    # The next head goes on with the same general data.
    assert general_data(recipe.target) == general_data(general.target).absolute()

    measured = pipeline.measure(recipe, head, events.append)
    assert measured.rates == {OWN: (50.0, 50.0), BUILT_IN: (50.0, 50.0)}
    assert events[-1] == Stage("measuring the head")


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_answers_it_began_with(quick, general, answers, tmp_path):
    recipe = learning(general, tmp_path, limits=replace(LIMITS, unsaved=0.0))

    def kill(event):
        if isinstance(event, TrainingProgress) and event.step == 2:
            raise Killed

    with pytest.raises(Killed):
        run(recipe, UserTexts(), kill, Kept(answers[:-3]))
    events = []
    head = run(recipe, UserTexts(), events.append, Kept(answers))  # three have come in the meantime
    assert next(e.step for e in events if isinstance(e, TrainingProgress)) == 3
    assert head.learned.last_answer == answers[-4].number
    assert (
        json.loads((recipe.folder / "journal.json").read_text())["data"]["last_answer"] == answers[-4].number
    )


@pytest.mark.slow
def test_a_new_head_starts_from_general_data_and_the_users(quick, general, answers, tmp_path):
    recipe, events = learning(general, tmp_path, continued=None, general=None), []
    head = run(recipe, UserTexts(), events.append, Kept(answers))
    assert [e for e in events if isinstance(e, Generating)]
    assert head.learned.before == {}
    assert head.evaluation.by_category[OWN].n > 10
    assert general_data(recipe.target) == recipe.folder / "data"


def test_few_answers_and_foreign_heads_are_refused_before_any_work(general, answers, tmp_path):
    events = []
    with pytest.raises(InvalidRequest, match="3 answers of this model are kept, too few"):
        run(learning(general, tmp_path), UserTexts(), events.append, Kept(answers[:3]))
    with pytest.raises(ModelError, match="is not a head that specdec has trained"):
        run(learning(general, tmp_path, continued=general.main), UserTexts(), events.append, Kept(answers))
    assert events == []


def files_with(folder, answers):
    """The files below a folder that have the prompt of an answer, as tokens of any type."""
    prompts = [
        each.tokens[: each.n_prompt].astype(kind).tobytes() for each in answers for kind in ("<i4", "<i8")
    ]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(prompt in path.read_bytes() for prompt in prompts)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "n"),
    [(f"reading {OWN}", 5), ("answering your prompts again", 3), ("TrainingProgress", 2), ("evaluating", 1)],
)
def test_clearing_ends_a_training_at_any_stage_and_leaves_nothing(
    quick, general, answers, tmp_path, stage, n
):
    """At the n-th event of a stage."""
    store = AnswerStore(tmp_path / "texts" / "vocabulary" / "key.answers")
    for each in answers:
        store.add(each.tokens[: each.n_prompt].tolist(), each.tokens[each.n_prompt :].tolist(), 0.0)
    recipe = learning(general, tmp_path, limits=replace(LIMITS, unsaved=0.0, own_shard=60))
    events = []

    def clear(event):
        events.append(getattr(event, "name", None) or getattr(event, "what", None) or type(event).__name__)
        if events.count(stage) == n and events[-1] == stage:
            assert files_with(recipe.folder, answers)
            assert datastore.clear(store.path.parent).deleted == [recipe.own]

    with pytest.raises(pipeline.AnswersDeleted, match="were deleted, and nothing of them is left"):
        run(recipe, UserTexts(), clear, store)
    assert events.count(stage) == n
    assert not recipe.own.exists()
    assert not recipe.target.exists()
    assert not recipe.checkpoint.exists()
    assert files_with(tmp_path, answers) == []


@pytest.mark.slow
def test_a_head_is_trained_further_without_answers(quick, general, tmp_path):
    head = run(learning(general, tmp_path, learns=False), UserTexts(), ignore)
    assert head.learned is None
    assert head.path.exists()
