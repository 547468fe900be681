"""Main's texts as a draft reads them: where it is asked, what for, and that nothing is lost on the way to a batch."""

import numpy as np
import pytest

from spec_local.errors import InvalidRequest
from spec_local.training import corpus as texts
from spec_local.training.corpus import Reader, batches, build, targets
from spec_local.training.shards import TOP, Document

# Main has 8 tokens. The draft knows 2, 3, 5 and 7 as 0 to 3, spells 4 and 6, and reads 1 as main's 3, but cannot say it.
SPELLINGS = [(0,), (1,), (0,), (1,), (2, 3, 2), (2,), (3, 3), (3,)]
KEPT = np.array([2, 3, 5, 7])


@pytest.fixture
def reader():
    return Reader(SPELLINGS, KEPT, 4)


def document(tokens, n_prompt, category="chat", top=None):
    n = len(tokens) - n_prompt
    top_ids, chances = np.zeros((n, TOP), np.uint32), np.full((n, TOP), 1e-6)
    for row, candidates in enumerate(top or [{token: 1.0} for token in tokens[n_prompt:]]):
        top_ids[row, : len(candidates)] = list(candidates)
        chances[row, : len(candidates)] = list(candidates.values())
    logprobs = np.log(chances).astype(np.float16)
    return Document(np.array(tokens, np.uint32), n_prompt, category, 1.0, False, top_ids, logprobs)


def many(n, rng, category="chat"):
    for _ in range(n):
        tokens = rng.integers(0, 8, rng.integers(3, 60)).tolist()
        yield document(tokens, int(rng.integers(1, len(tokens))), category)


def test_a_guess_is_asked_for_where_a_token_of_mains_ends(reader):
    corpus = build([document([4, 5, 6, 3, 4, 7], 2)], reader)
    assert corpus.ids.tolist() == [2, 3, 2, 2, 3, 3, 1, 2, 3, 2, 3]
    assert corpus.places.tolist() == [3, 5, 6, 9]  # after 5, 6, 3 and 4
    assert corpus.said.tolist() == [-1, 1, -1, 3]


def test_only_what_the_draft_can_say_is_wanted_of_it(reader):
    top = [{6: 0.5, 7: 0.25, 3: 0.125, 1: 0.1}, {1: 0.9, 4: 0.05}, {5: 0.75, 2: 0.25}]
    corpus = build([document([2, 7, 6, 5], 1, top=top)], reader)
    assert corpus.top[:, :4].tolist() == [[0, 3, 1, 0], [0, 0, 0, 0], [2, 0, 0, 0]]
    assert corpus.chances[:, :4] == pytest.approx(
        np.array([[0, 0.25, 0.125, 0], [0, 0, 0, 0], [0.75, 0.25, 0, 0]]), abs=1e-3
    )
    (batch,) = batches(corpus, 100)
    ids, shares = targets(corpus, batch, said=0.0, prompts=0.0)
    shares *= 2  # of three places, nothing is wanted at one
    assert shares.sum(1) == pytest.approx([1, 0, 1], abs=1e-6)
    assert ids[0, 1:3].tolist() == [3, 1]
    assert shares[0, 1:3] == pytest.approx([2 / 3, 1 / 3], abs=1e-3)
    ids, shares = targets(corpus, batch, said=0.25, prompts=0.0)
    shares *= 0.25 * 2 + 0.75 * 2
    assert (ids[0, TOP], ids[2, TOP]) == (3, 2)
    assert shares[:, TOP] == pytest.approx(
        [0.25, 0, 0.25]
    )  # 6 is spelled: that it was said is nothing to learn


def test_a_prompt_is_learned_on_the_side(reader):
    corpus = build([document([2, 4, 5, 7, 3], 3)], reader)
    (batch,) = batches(corpus, 100)
    assert batch.tokens.tolist() == [[0, 2, 3, 2, 2, 3, 1]]
    assert batch.asides.tolist() == [0, 1, 2, 3]
    assert batch.following.tolist() == [2, 3, 2, 2]
    assert batch.places.tolist() == [4, 5]
    ids, shares = targets(corpus, batch, said=0.0, prompts=0.5)
    assert ids[2:, TOP].tolist() == [2, 3, 2, 2]
    assert shares[2:, TOP] / shares[0].sum() == pytest.approx(0.5)
    assert shares.sum() == pytest.approx(1)


def test_every_target_comes_once_an_epoch(reader):
    corpus = build(many(300, np.random.default_rng(1)), reader)
    for rng in (None, np.random.default_rng(2)):
        made = list(batches(corpus, 256, rng))
        numbers = np.concatenate([batch.numbers for batch in made])
        assert sorted(numbers.tolist()) == list(range(len(corpus.places)))
        assert max(batch.tokens.size for batch in made) <= 256
        assert sum(batch.n_tokens for batch in made) == len(corpus.ids)
        assert sum(batch.tokens.size for batch in made) < 1.15 * len(corpus.ids)
        for batch in made:
            assert (batch.tokens.ravel()[batch.places] == corpus.ids[corpus.places[batch.numbers]]).all()


def test_the_dice_order_the_batches(reader):
    corpus = build(many(100, np.random.default_rng(1)), reader)

    def order(seed):
        return [batch.numbers.tolist() for batch in batches(corpus, 256, np.random.default_rng(seed))]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_long_text_is_read_in_rows_that_overlap(reader, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST", 16)
    long = document([2, 3, 5, 7] * 15, 3)
    corpus = build([document([2, 3], 1), long, document([2, 3], 1)], reader)
    made = list(batches(corpus, 1))
    assert sorted(n for batch in made for n in batch.numbers.tolist()) == list(range(59))
    for batch in made:
        assert batch.tokens.shape[1] <= 16
        assert (batch.tokens.ravel()[batch.places] == corpus.ids[corpus.places[batch.numbers]]).all()
        if batch.numbers[0] > 14 and batch.tokens.size > 2:
            assert batch.places.min() >= 7  # half a row has been read before a guess is asked for


def test_of_each_text_its_category_is_known(reader):
    corpus = build([document([2, 3], 1, "a"), document([2, 3, 5], 1, "b"), document([2, 7], 1, "a")], reader)
    assert [corpus.categories[kind] for kind in corpus.kinds] == ["a", "b", "a"]
    assert corpus.first.tolist() == [0, 1, 3, 4]


def test_texts_without_an_answer_are_nothing_to_learn_from(reader):
    with pytest.raises(InvalidRequest, match="write for longer"):
        build([document([2, 3], 2), document([2, 3], 0)], reader)


def test_numbers_are_as_small_as_the_vocabulary_allows():
    for n_vocab, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        corpus = build([document([2, 4], 1)], Reader(SPELLINGS, KEPT, n_vocab))
        assert corpus.ids.dtype == corpus.top.dtype == dtype
