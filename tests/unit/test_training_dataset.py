"""Batches of documents, the tokens that a head drafts, and the samples of the regression."""

import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.errors import InvalidRequest
from spec_local.training import shards
from spec_local.training.dataset import Dataset, batches, select_tokens
from spec_local.training.shards import Shard
from tests.training_data import EMBEDDINGS, N_VOCAB, WIDTH, chain, document


def read(folder, documents, n_drafted=N_VOCAB, **options):
    shards.write(folder, 0, Shard(documents, 1))
    return Dataset(folder, N_VOCAB, (n_drafted,), **options)


def varied(n, seed=0):
    """Documents of different lengths; the first token is the document's number."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        length = int(rng.integers(2, 60))
        tokens = [i, *rng.integers(0, N_VOCAB, length - 1).tolist()]
        yield document(tokens, int(rng.integers(1, length)))


def test_a_batch_predicts_the_tokens_of_answers_from_the_states_before(tmp_path):
    long = document([1, 2, 3, 4, 5], 2, top=[{3: 0.5, 7: 0.25}, {4: 0.9}, {5: 0.5, 9: 0.4}])
    short = document([6, 7, 8], 1, held_out=True)
    data = read(tmp_path, [long, short])
    batch = data.batch([long, short])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert batch.windows.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.documents.tolist() == [0, 0, 0, 1, 1]
    predicted_at = batch.windows.ravel()[batch.positions]
    assert batch.tokens[batch.documents, predicted_at + 1].tolist() == [3, 4, 5, 7, 8]
    states = bfloat16.decode(batch.states)
    assert not states[:, 0].any()
    np.testing.assert_array_equal(batch.states[0, 1:], long.states)  # at position i: of token i - 1
    np.testing.assert_array_equal(batch.states[1, 1:3], short.states)
    assert not batch.states[1, 3:].any()
    assert batch.top_ids[:3, 0].tolist() == [3, 4, 5]
    assert batch.top_ids[0, 1] == 7
    assert batch.top_probs[0, :2] == pytest.approx([0.5, 0.25], rel=1e-3)
    assert batch.top_probs.dtype == np.float32


def test_windows_begin_before_the_answers(tmp_path):
    documents = [document([*range(1, 10)], 6), document([*range(1, 7)], 2, held_out=True)]
    batch = read(tmp_path, documents).batch(documents)
    # The first answer follows token 5; its window begins two positions before. Padding repeats the last one.
    assert batch.windows.tolist() == [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]
    assert batch.windows.ravel()[batch.positions].tolist() == [5, 6, 7, 1, 2, 3, 4]


def test_candidates_that_cannot_be_drafted_have_no_probability(tmp_path):
    top = [{3: 0.5, 7: 0.25, 2: 0.2}, {7: 0.9}, {2: 1.0}]
    train = document([1, 2, 3, 7, 2], 2, top=top)
    held_out = document([1, 3, 7], 1, held_out=True, top=[{3: 0.8}, {9: 0.7, 7: 0.3}])
    data = read(tmp_path, [train, held_out], n_drafted=2)
    assert data.drafted.tolist() == [2, 7]  # expected 1.2 and 1.15 times
    batch = data.batch([train])
    assert batch.top_probs[:, :3] == pytest.approx(
        np.array([[0, 0.25, 0.2], [0.9, 0, 0], [1, 0, 0]]), abs=2e-3
    )
    assert batch.top_ids[0, 1:3].tolist() == [1, 0]
    assert batch.top_ids[1:, 0].tolist() == [1, 0]
    assert data.coverage == 0.0
    assert read(tmp_path, [train, held_out], n_drafted=3).coverage == 0.5
    assert data.n_generated == 5


def test_every_document_is_in_one_batch():
    documents = list(varied(200))
    for rng in (None, np.random.default_rng(2)):
        made = list(batches(documents, 256, rng))
        numbers = [int(each.tokens[0]) for part in made for each in part]
        assert sorted(numbers) == list(range(200))
        sizes = [len(part) * max(len(each.tokens) for each in part) for part in made]
        assert max(sizes) <= 256
        assert sum(sizes) < 1.2 * sum(len(each.tokens) for each in documents)
    assert [len(part) for part in batches(documents[:5], 1)] == [1] * 5  # too long, but not lost


def test_the_rng_orders_the_batches():
    documents = list(varied(100))

    def order(seed):
        return [
            [int(each.tokens[0]) for each in part]
            for part in batches(documents, 256, np.random.default_rng(seed))
        ]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert {frozenset(part) for part in order(1)} != {frozenset(part) for part in order(2)}


def test_samples_are_aligned(tmp_path):
    """States that tell the position and the document show which token each row is from."""
    documents = []
    for i, (n, n_prompt) in enumerate([(6, 3), (2, 1), (4, 1), (5, 4)]):
        states = np.zeros((n - 1, 3 * WIDTH))
        states[:, 0] = states[:, -WIDTH] = 10 * i + np.arange(n - 1)
        documents.append(document([(5 * i + j) % N_VOCAB for j in range(n)], n_prompt, states=states))
    data = read(tmp_path, [*documents, document([1, 2], 1, held_out=True)])
    samples = data.samples(10**6, EMBEDDINGS, np.random.default_rng(0))
    # From the last token of the prompt on, if a state precedes it, to the last token with a state.
    expected = {(0, 2), (0, 3), (0, 4), (2, 1), (2, 2), (3, 3)}
    found = set()
    embeddings = bfloat16.decode(EMBEDDINGS)
    tokens = zip(samples.embeddings_before, samples.embeddings, samples.embeddings_after, strict=True)
    for before, around, after in zip(samples.states, tokens, samples.targets, strict=True):
        i, j = divmod(int(after[0]), 10)
        assert before[0] == 10 * i + j - 1
        np.testing.assert_array_equal(around, embeddings[(5 * i + np.arange(j - 1, j + 2)) % N_VOCAB])
        found.add((i, j))
    assert found == expected
    assert samples.states.shape == (6, 3 * WIDTH)
    assert samples.embeddings.shape == samples.targets.shape == (6, WIDTH)


def test_a_sample_is_no_larger_than_asked_for(tmp_path):
    data = read(tmp_path, list(chain(50, 1)), n_sample=100)
    assert 100 <= len(data.samples(100, EMBEDDINGS, np.random.default_rng(0)).states) < 130
    n = [len(document.top_ids) for document in data.held_out_sample]
    assert sum(n[:-1]) <= 100 <= sum(n)
    assert (len(data.train), len(data.held_out)) == (40, 10)


@pytest.mark.parametrize("held_out", [False, True])
def test_too_little_data_is_refused(tmp_path, held_out):
    with pytest.raises(InvalidRequest, match="too little training data: give more `minutes` or `tokens` to"):
        Dataset(tmp_path, N_VOCAB, (5,))
    with pytest.raises(InvalidRequest, match="too little training data"):
        read(tmp_path, [document([1, 2], 1, held_out=held_out)])


def test_frequent_tokens_are_drafted_and_then_those_with_small_ids():
    counts = np.array([0, 3.5, 0, 0, 9.0, 0.1])
    assert select_tokens(counts, 2).tolist() == [1, 4]
    assert select_tokens(counts, 5).tolist() == [0, 1, 2, 4, 5]
    assert select_tokens(counts, 10).tolist() == list(range(6))


def own(n, held_out=1):
    """The user's answers, whose first token is 20 or more."""
    for i in range(n):
        yield document([20, *([i % 4] * 9)], 2, category="your answers", held_out=i >= n - held_out)


def read_with_own(tmp_path, n_others, n_own, n_drafted=N_VOCAB):
    others = [document([i % 19, *([5] * 9)], 2, held_out=i % 5 == 0) for i in range(n_others)]
    shards.write(tmp_path, 0, Shard(others, 1))
    return Dataset(tmp_path, N_VOCAB, (n_drafted,), list(own(n_own)))


def test_an_epoch_has_all_of_the_users_answers_and_as_many_others(tmp_path):
    data = read_with_own(tmp_path, 100, 11)
    assert (len(data.train), len(data.own), len(data.held_out)) == (80, 10, 21)
    seen = []
    for number in range(8):
        epoch = data.epoch(number, seed=3)
        assert [each for each in epoch if each.tokens[0] == 20] == data.own
        seen += [id(each) for each in epoch if each.tokens[0] != 20]
        assert len(epoch) == 20
    assert sorted(seen) == sorted(id(each) for each in data.train)  # the others have all had their turn
    first = [[id(each) for each in data.epoch(number, seed=3)] for number in (0, 8)]
    assert first[0] == [id(each) for each in data.epoch(0, seed=3)]
    assert first[0] != first[1]


@pytest.mark.parametrize(("n_others", "n_own", "expected"), [(100, 2, 7), (10, 41, 8)])
def test_the_share_of_others_has_limits(tmp_path, n_others, n_own, expected):
    """At least a twelfth of them beside few answers, and all of them beside many."""
    epoch = read_with_own(tmp_path, n_others, n_own).epoch(0, seed=0)
    assert sum(each.tokens[0] != 20 for each in epoch) == expected


def test_the_users_tokens_are_drafted_even_if_others_are_more_frequent(tmp_path):
    data = read_with_own(tmp_path, 100, 11, n_drafted=5)
    assert data.drafted.tolist() == [0, 1, 2, 3, 5]
    assert data.coverage == 1
    assert data.n_generated == 800  # without the user's


def test_tokens_to_draft_can_be_changed(tmp_path):
    data = read_with_own(tmp_path, 10, 11)
    data.draft(np.array([1, 5]), N_VOCAB)
    batch = data.batch(data.own[:2])
    assert batch.top_probs[:8].max() == 0  # token 0
    assert set(batch.top_ids[8:, 0].tolist()) == {0}
    assert batch.top_probs[8:, 0] == pytest.approx(1, abs=1e-2)


def test_without_answers_of_the_user_an_epoch_is_all(tmp_path):
    data = read(tmp_path, list(chain(50, 1)))
    assert list(data.epoch(3, seed=1)) == data.train
