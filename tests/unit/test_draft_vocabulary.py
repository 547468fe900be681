"""The part of the vocabulary that a draft model drafts."""

import numpy as np
import pytest

from spec_local.llama.draft_vocabulary import TILE, DraftVocabulary, usual_first


def tiles_of(tokens):
    """These tokens, and all others of their tiles."""
    return {other for t in tokens for other in range(t // TILE * TILE, t // TILE * TILE + TILE)}


def test_the_first_tokens_some_others_and_those_of_the_text_can_be_drafted():
    vocabulary = DraftVocabulary(1000, 100, others=[999])
    assert set(vocabulary.tokens.tolist()) == tiles_of([*range(100), 999]) & set(range(1000))
    vocabulary.read([500, 3, 801])
    assert set(vocabulary.tokens.tolist()) == tiles_of([*range(100), 500, 801, 999]) & set(range(1000))
    assert (np.diff(vocabulary.tokens) > 0).all()
    assert vocabulary.tiles.tolist() == sorted({token // TILE for token in vocabulary.tokens.tolist()})
    vocabulary.restart()
    assert not {500, 801} & set(vocabulary.tokens.tolist())


@pytest.mark.parametrize("n_first", [1, TILE, 99, 100])
def test_no_token_beyond_the_vocabulary_can_be_drafted(n_first):
    vocabulary = DraftVocabulary(100, n_first)
    vocabulary.read([99])
    assert vocabulary.tokens.max() == 99


@pytest.mark.parametrize("n_first", [0, 101])
def test_a_part_that_does_not_exist_is_refused(n_first):
    with pytest.raises(ValueError, match="give 1 to 100"):
        DraftVocabulary(100, n_first)


@pytest.mark.parametrize("n", [1, 20])  # tokens of a call
def test_while_many_of_the_last_tokens_were_missing_all_can_be_drafted(n):
    vocabulary = DraftVocabulary(100_000, 1000)
    foreign = iter(range(1000, 100_000, TILE))
    for _ in range(20 // n):
        vocabulary.read([next(foreign) for _ in range(n)])
    assert vocabulary.tokens is vocabulary.tiles is None
    vocabulary.read([5] * 200)
    assert vocabulary.tokens is not None


def test_a_rare_token_now_and_then_does_not_matter():
    vocabulary = DraftVocabulary(100_000, 1000)
    for token in range(1000, 100_000, 100 * TILE):
        vocabulary.read([token, *[5] * 49])
        assert vocabulary.tokens is not None


@pytest.mark.parametrize(
    ("n_vocab", "n_first"),
    [(32_768, None), (49_151, None), (49_152, 16_384), (98_303, 16_384), (98_304, 49_152), (262_144, 49_152)],
)
def test_the_usual_part_depends_on_the_size_of_the_vocabulary(n_vocab, n_first):
    assert usual_first(n_vocab) == n_first
