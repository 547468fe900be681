"""What is asked, and what of a run is remembered."""

from pathlib import Path

import pytest

from spec_local.errors import InvalidRequest
from spec_local.training.questions import FromFiles, Question, question
from spec_local.training.recipe import MAINS, Journal, Recipe, asking, journal

WRITTEN = [f"A text of main's, number {i}. " * 12 for i in range(5)]


@pytest.fixture
def recipe(tmp_path):
    main = tmp_path / "main.gguf"
    main.write_bytes(b"GGUF")
    return Recipe(main=main, target=tmp_path / "draft.gguf")


def test_without_files_half_are_built_in_and_half_are_mains_own():
    asked = [asking(3, FromFiles())(i, WRITTEN) for i in range(400)]
    built_in = [each for each in asked if each.text]
    assert built_in == [question(3, i, WRITTEN) for i in range(200)]
    mains = [each for each in asked if not each.text]
    assert {each.category for each in mains} == {MAINS}
    assert not any(each.held_out for each in mains)  # before they are asked


def test_ones_own_questions_are_every_fourth_until_each_was_asked_four_times():
    own = [Question("mine", f"What is {i}?", False) for i in range(3)]
    asked = [asking(3, FromFiles(questions=own))(i, ()) for i in range(100)]
    mine = [i for i, each in enumerate(asked) if each in own]
    assert mine == list(range(0, 48, 4))
    assert [asked[i].text for i in mine] == [each.text for each in own] * 4


def test_ones_own_texts_are_asked_about():
    passages = [
        f"Passage {i} tells of hedgehogs and of what they do at night in gardens. " * 4 for i in range(9)
    ]
    ask = asking(3, FromFiles(passages=passages))
    about = [ask(i, WRITTEN).text for i in range(400)]
    mine = sum("hedgehogs" in text for text in about)
    mains = sum("A text of main's" in text for text in about)
    assert mine > 20
    assert mains > 20
    none_of_mains = [asking(3, FromFiles(passages=passages))(i, ()).text for i in range(200)]
    assert sum("hedgehogs" in text for text in none_of_mains) > 5


def test_a_journal_is_read_back_and_belongs_to_one_recipe(recipe):
    with journal(recipe) as log:
        assert log == Journal(log.order)
        log.spent["writing"] = 12.5
        log.plan = {"n_steps": 3}
        log.save(recipe)
        with pytest.raises(InvalidRequest, match="another run is at work"), journal(recipe):
            pass
    with journal(recipe) as log:
        assert (log.spent, log.plan) == ({"writing": 12.5}, {"n_steps": 3})
    for changed, what in (({"size": "tiny"}, "size"), ({"seed": 4}, "seed")):
        other = Recipe(main=recipe.main, target=recipe.target, **changed)
        with pytest.raises(InvalidRequest, match=f"begun with another {what}: give the same"), journal(other):
            pass
    Path(recipe.main).write_bytes(b"GGUF2")
    with pytest.raises(InvalidRequest, match="begun with another main"), journal(recipe):
        pass
    (recipe.folder / "journal.json").write_text('{"no": 1}')
    with pytest.raises(InvalidRequest, match=r"is damaged .* delete it"), journal(recipe):
        pass
