"""Conversion of documents to the draft model's tokens and soft targets, and batching."""

import numpy as np
import pytest

from spec_local.errors import InvalidRequest
from spec_local.training import corpus as corpora
from spec_local.training.corpus import TokenMap, batches, build, targets
from spec_local.training.shards import TOP_K, Document

# The main model has 8 tokens. The draft model has 2, 3, 5 and 7 as 0 to 3, and reads the others as these.
SPELLINGS = [(0,), (1,), (0,), (1,), (2, 3, 2), (2,), (3, 3), (3,)]
KEPT = np.array([2, 3, 5, 7])


@pytest.fixture
def token_map():
    return TokenMap(SPELLINGS, KEPT, 4)


def document(tokens, n_prompt, category="chat", top=None):
    n = len(tokens) - n_prompt
    top_ids, chances = np.zeros((n, TOP_K), np.uint32), np.full((n, TOP_K), 1e-6)
    for row, candidates in enumerate(top or [{token: 1.0} for token in tokens[n_prompt:]]):
        top_ids[row, : len(candidates)] = list(candidates)
        chances[row, : len(candidates)] = list(candidates.values())
    logprobs = np.log(chances).astype(np.float16)
    return Document(np.array(tokens, np.uint32), n_prompt, category, 1.0, False, top_ids, logprobs)


def many(n, rng, category="chat"):
    for _ in range(n):
        tokens = rng.integers(0, 8, rng.integers(3, 60)).tolist()
        yield document(tokens, int(rng.integers(1, len(tokens))), category)


def test_targets_follow_whole_tokens_of_the_main_model(token_map):
    corpus = build([document([4, 5, 6, 3, 4, 7], 2)], token_map)
    assert corpus.ids.tolist() == [2, 3, 2, 2, 3, 3, 1, 2, 3, 2, 3]
    assert corpus.positions.tolist() == [3, 5, 6, 9]  # after 5, 6, 3 and 4
    assert corpus.next_tokens.tolist() == [-1, 1, -1, 3]


def test_targets_are_renormalized_over_the_draft_models_tokens(token_map):
    top = [{6: 0.5, 7: 0.25, 3: 0.125, 1: 0.1}, {1: 0.9, 4: 0.05}, {5: 0.75, 2: 0.25}]
    corpus = build([document([2, 7, 6, 5], 1, top=top)], token_map)
    assert corpus.top_ids[:, :4].tolist() == [[0, 3, 1, 0], [0, 0, 0, 0], [2, 0, 0, 0]]
    assert corpus.top_probs[:, :4] == pytest.approx(
        np.array([[0, 0.25, 0.125, 0], [0, 0, 0, 0], [0.75, 0.25, 0, 0]]), abs=1e-3
    )
    (batch,) = batches(corpus, 100)
    ids, weights = targets(corpus, batch, token_weight=0.0, prompt_weight=0.0)
    weights *= 2  # one of three positions has no target
    assert weights.sum(1) == pytest.approx([1, 0, 1], abs=1e-6)
    assert ids[0, 1:3].tolist() == [3, 1]
    assert weights[0, 1:3] == pytest.approx([2 / 3, 1 / 3], abs=1e-3)
    ids, weights = targets(corpus, batch, token_weight=0.25, prompt_weight=0.0)
    weights *= 0.25 * 2 + 0.75 * 2
    assert (ids[0, TOP_K], ids[2, TOP_K]) == (3, 2)
    assert weights[:, TOP_K] == pytest.approx([0.25, 0, 0.25])  # the draft model lacks 6, the sampled token


def test_prompt_tokens_are_targets_of_lower_weight(token_map):
    corpus = build([document([2, 4, 5, 7, 3], 3)], token_map)
    (batch,) = batches(corpus, 100)
    assert batch.tokens.tolist() == [[0, 2, 3, 2, 2, 3, 1]]
    assert batch.prompt_positions.tolist() == [0, 1, 2, 3]
    assert batch.prompt_targets.tolist() == [2, 3, 2, 2]
    assert batch.positions.tolist() == [4, 5]
    ids, weights = targets(corpus, batch, token_weight=0.0, prompt_weight=0.5)
    assert ids[2:, TOP_K].tolist() == [2, 3, 2, 2]
    assert weights[2:, TOP_K] / weights[0].sum() == pytest.approx(0.5)
    assert weights.sum() == pytest.approx(1)


def test_an_epoch_has_every_target_once(token_map):
    corpus = build(many(300, np.random.default_rng(1)), token_map)
    for rng in (None, np.random.default_rng(2)):
        made = list(batches(corpus, 256, rng))
        numbers = np.concatenate([batch.targets for batch in made])
        assert sorted(numbers.tolist()) == list(range(len(corpus.positions)))
        assert max(batch.tokens.size for batch in made) <= 256
        assert sum(batch.n_tokens for batch in made) == len(corpus.ids)
        assert sum(batch.tokens.size for batch in made) < 1.15 * len(corpus.ids)
        for batch in made:
            assert (
                batch.tokens.ravel()[batch.positions] == corpus.ids[corpus.positions[batch.targets]]
            ).all()


def test_the_rng_orders_the_batches(token_map):
    corpus = build(many(100, np.random.default_rng(1)), token_map)

    def order(seed):
        return [batch.targets.tolist() for batch in batches(corpus, 256, np.random.default_rng(seed))]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_long_texts_become_overlapping_rows(token_map, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_ROW", 16)
    long = document([2, 3, 5, 7] * 15, 3)
    corpus = build([document([2, 3], 1), long, document([2, 3], 1)], token_map)
    made = list(batches(corpus, 1))
    assert sorted(n for batch in made for n in batch.targets.tolist()) == list(range(59))
    for batch in made:
        assert batch.tokens.shape[1] <= 16
        assert (batch.tokens.ravel()[batch.positions] == corpus.ids[corpus.positions[batch.targets]]).all()
        if batch.targets[0] > 14 and batch.tokens.size > 2:
            assert batch.positions.min() >= 7  # half a row of context precedes the first target


def test_texts_have_categories(token_map):
    corpus = build(
        [document([2, 3], 1, "a"), document([2, 3, 5], 1, "b"), document([2, 7], 1, "a")], token_map
    )
    assert [corpus.categories[kind] for kind in corpus.text_categories] == ["a", "b", "a"]
    assert corpus.first_targets.tolist() == [0, 1, 3, 4]


def test_texts_without_a_prompt_or_answer_are_refused(token_map):
    with pytest.raises(InvalidRequest, match="there is no training data yet"):
        build([document([2, 3], 2), document([2, 3], 0)], token_map)


def test_ids_use_the_smallest_type():
    for n_vocab, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        corpus = build([document([2, 4], 1)], TokenMap(SPELLINGS, KEPT, n_vocab))
        assert corpus.ids.dtype == corpus.top_ids.dtype == dtype
