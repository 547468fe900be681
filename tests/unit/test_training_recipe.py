"""The order of prompts, and the journal of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from spec_local.errors import InvalidRequest
from spec_local.training.prompts import TrainingPrompt, UserTexts, synthetic_prompt
from spec_local.training.recipe import SELF_GENERATED, Journal, Recipe, open_journal, prompt_source

ANSWERS = [f"An answer of the main model, number {i}. " * 12 for i in range(5)]


@pytest.fixture
def recipe(tmp_path):
    main = tmp_path / "main.gguf"
    main.write_bytes(b"GGUF")
    return Recipe(main=main, target=tmp_path / "head.gguf")


def test_a_quarter_of_the_prompts_are_self_generated_and_the_others_synthetic():
    prompts = [prompt_source(3, UserTexts())(i, ANSWERS) for i in range(400)]
    synthetic = [each for each in prompts if each.text]
    assert synthetic == [synthetic_prompt(3, i, ANSWERS) for i in range(300)]
    self_generated = [each for each in prompts if not each.text]
    assert {each.category for each in self_generated} == {SELF_GENERATED}
    assert not any(each.held_out for each in self_generated)  # before they are generated


def test_every_fourth_prompt_is_the_users_until_each_was_used_four_times():
    users = [TrainingPrompt("mine", f"What is {i}?", False) for i in range(3)]
    prompts = [prompt_source(3, UserTexts(prompts=users))(i, ()) for i in range(100)]
    mine = [i for i, each in enumerate(prompts) if each in users]
    assert mine == list(range(0, 48, 4))
    assert [prompts[i].text for i in mine] == [each.text for each in users] * 4


def test_user_passages_alternate_with_answers():
    passages = [
        f"Passage {i} tells of hedgehogs and of what they do at night in gardens. " * 4 for i in range(9)
    ]
    ask = prompt_source(3, UserTexts(passages=passages))
    about = [ask(i, ANSWERS).text for i in range(400)]
    mine = sum("hedgehogs" in text for text in about)
    self_generated = sum("An answer of the main model" in text for text in about)
    assert mine > 20
    assert self_generated > 20
    none_of_self_generated = [prompt_source(3, UserTexts(passages=passages))(i, ()).text for i in range(200)]
    assert sum("hedgehogs" in text for text in none_of_self_generated) > 5


def test_the_time_is_divided_unless_a_number_of_tokens_is_given(recipe):
    timed = replace(recipe, minutes=10)
    assert (timed.generation_seconds, timed.training_seconds) == pytest.approx((360, 240))
    counted = replace(recipe, minutes=10, tokens=5000)
    assert counted.generation_seconds == counted.training_seconds == float("inf")


def test_a_journal_is_reloaded_by_the_same_recipe_only(recipe):
    with open_journal(recipe) as log:
        assert log == Journal(log.settings)
        log.generation_seconds = 12.5
        log.hyperparameters = {"n_steps": 3}
        log.save(recipe)
        with pytest.raises(InvalidRequest, match="another run is using"), open_journal(recipe):
            pass
    with open_journal(recipe) as log:
        assert (log.generation_seconds, log.hyperparameters) == (12.5, {"n_steps": 3})
    other = replace(recipe, seed=4)
    with pytest.raises(InvalidRequest, match="started with another seed: use the same"), open_journal(other):
        pass
    with open_journal(replace(recipe, minutes=5, tokens=1000, max_bytes=10**6, threads=2)):
        pass  # these may change
    Path(recipe.main).write_bytes(b"GGUF2")
    with pytest.raises(InvalidRequest, match="started with another main"), open_journal(recipe):
        pass
    (recipe.folder / "journal.json").write_text('{"no": 1}')
    with pytest.raises(InvalidRequest, match=r"is damaged .* delete it"), open_journal(recipe):
        pass
