"""Draft models with a different vocabulary: shared tokens, conversions, and an exact output distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.sampling import Sampler
from spec_local.errors import ContextOverflow, InvalidRequest, VocabularyMismatch
from spec_local.llama.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst, Drawn
from spec_local.testing import FakeModel, enumerate_outcomes
from tests.exact import assert_main_distribution
from tests.proposers import ChangingVocabulary
from tests.unfiltered import unfiltered
from tests.unit.generation import generate


class Toy:
    """A vocabulary with these pieces; names in angle brackets are control tokens."""

    def __init__(self, *pieces, bos=-1, eos=-1, eot=-1, add_bos=False):
        self.n_tokens = len(pieces)
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.bos, self.eos, self.eot, self.add_bos = bos, eos, eot, add_bos

    def piece(self, token):
        return b"" if self._is_control(token) else self._pieces[token]

    def text(self, token):
        return self._pieces[token]

    def _is_control(self, token):
        return self._pieces[token].startswith(b"<") and len(self._pieces[token]) > 1

    def tokenize(self, text):
        """Greedy longest match; bytes that no piece begins with are dropped."""
        left, tokens = text.encode("utf-8", "surrogateescape"), []
        while left:
            fitting = [t for t in range(self.n_tokens) if self.piece(t) and left.startswith(self.piece(t))]
            tokens += [max(fitting, key=lambda t: len(self.piece(t)))] if fitting else []
            left = left[len(self.piece(tokens[-1])) if fitting else 1 :]
        return tokens


MAIN = Toy("a", "b", "ab", "c", "<end>", eos=4)
DRAFT = Toy("<stop>", "c", "b", "a", "ba", "d", eos=0)


def test_shared_tokens():
    vocabulary_map = VocabularyMap(MAIN, DRAFT)
    assert vocabulary_map.main_ids.tolist() == [0, 1, 3, 4]
    assert vocabulary_map.draft_ids.tolist() == [3, 2, 1, 0]
    assert vocabulary_map.share == 0.8
    assert [vocabulary_map.to_draft(token) for token in range(5)] == [(3,), (2,), (3, 2), (1,), (0,)]


def test_control_tokens_by_role_and_name():
    main = Toy("x", "<|im_start|>", "<|im_end|>", "<pad>", "<odd>", eos=2, eot=2)
    draft = Toy(
        "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "x", bos=0, eos=1, eot=3, add_bos=True
    )
    vocabulary_map = VocabularyMap(main, draft)
    shared = dict(zip(vocabulary_map.main_ids.tolist(), vocabulary_map.draft_ids.tolist(), strict=True))
    assert shared == {0: 5, 1: 2, 2: 3, 3: 4}
    assert vocabulary_map.to_draft(0, is_first=True) == (0, 5)
    assert vocabulary_map.to_draft(0) == (5,)
    assert vocabulary_map.to_draft(4) == (0,)  # none of the bytes of its name is a token of the draft model


def test_of_several_tokens_with_the_same_bytes_the_last_is_shared():
    assert VocabularyMap(Toy("a"), Toy(b"a", "b", "a")).draft_ids.tolist() == [2]


def test_bytes_that_are_not_utf_8():
    whole = "é".encode()
    vocabulary_map = VocabularyMap(Toy(whole[:1], whole[1:], whole), Toy(whole[1:], whole[:1]))
    assert [vocabulary_map.to_draft(token) for token in range(3)] == [(1,), (0,), (1, 0)]


def test_parts_of_characters_are_converted_byte_by_byte():
    class Replacing(Toy):
        def tokenize(self, text):  # like BPE tokenizers: invalid bytes become U+FFFD
            raw = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return super().tokenize(raw)

    main = Toy("é", "x", b"\xe2\x82", b"\xe2\x83")
    draft = Replacing("x", "\ufffd", b"\xe2", b"\x82", "é")
    assert VocabularyMap(main, draft).to_draft(2) == (2, 3)
    assert set(VocabularyMap(main, draft).to_draft(3)) == {1}  # one of its bytes has no token


def test_vocabularies_without_shared_tokens():
    with pytest.raises(VocabularyMismatch, match="no token in common"):
        VocabularyMap(Toy("a", "<x>"), Toy("b", "<y>"))


def intersection(seed=1, main=MAIN, draft=DRAFT, **limits):
    model = FakeModel(draft.n_tokens, seed, **limits)
    return model, IntersectionModel(model, VocabularyMap(main, draft), main.n_tokens)


def expected(model, vocabulary_map, history):
    """Return the draft model's logits after main model tokens, in the main model's columns."""
    converted = [t for i, token in enumerate(history) for t in vocabulary_map.to_draft(token, i == 0)]
    row = np.full(MAIN.n_tokens, -np.inf, np.float32)
    row[vocabulary_map.main_ids] = model.logits(converted)[vocabulary_map.draft_ids]
    return row.tolist()


@settings(max_examples=80)
@given(st.data())
def test_the_intersection_model_is_a_language_model(data):
    """Any sequence of calls gives the logits of a fresh draft model."""
    tokens = st.lists(st.integers(0, 4), min_size=1, max_size=4)
    model, shared = intersection(n_ctx=64, max_tokens=data.draw(st.sampled_from([1, 3, 32])))
    vocabulary_map, text = VocabularyMap(MAIN, DRAFT), []
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["evaluate", "rows", "tree", "truncate", "outside"])):
            case "evaluate":
                text += (more := data.draw(tokens))
                assert run(shared.call(more, n_logits=1)).tolist() == [expected(model, vocabulary_map, text)]
            case "rows":
                more = data.draw(tokens)
                n = data.draw(st.integers(0, len(more)))
                rows = run(shared.call(more, n_logits=n)).tolist()
                text += more
                ends = range(len(text) - n + 1, len(text) + 1)
                assert rows == [expected(model, vocabulary_map, text[:end]) for end in ends]
            case "tree" if text and shared.limits.max_tokens > 3:
                nodes = data.draw(tokens)
                parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(nodes))]
                paths = []
                for token, parent in zip(nodes, parents, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                rows = run(shared.call(nodes, parents)).tolist()
                assert rows == [expected(model, vocabulary_map, text + path) for path in paths]
                kept = data.draw(st.integers(-1, len(nodes) - 1))
                path = []
                while kept >= 0:
                    path, kept = [kept, *path], parents[kept]
                shared.commit(path)
                text += [nodes[node] for node in path]
            case "truncate":
                del text[data.draw(st.integers(0, len(text))) :]
                shared.truncate(len(text))
            case "outside":  # benchmarks truncate the draft model itself
                model.truncate(0)
                text = []
        assert list(shared.cached) == text
        converted = [t for i, token in enumerate(text) for t in vocabulary_map.to_draft(token, i == 0)]
        assert list(model.cached) == converted


def test_limits():
    _, shared = intersection(n_ctx=8)
    run(shared.call([2, 2, 2], n_logits=0))
    assert shared.limits.n_ctx == 5  # room for two more tokens of one each
    with pytest.raises(ContextOverflow):
        run(shared.call([2, 2], n_logits=1))
    assert list(shared.cached) == [2, 2, 2]
    run(shared.call([0, 0], n_logits=1))
    with pytest.raises(InvalidRequest, match="truncate"):
        shared.truncate(6)
    with pytest.raises(InvalidRequest, match="parent"):
        run(shared.call([0], [3]))


SHAPES = {
    "drawn, token": (lambda: Chain("drawn"), "token"),
    "drawn, block": (lambda: Chain("drawn"), "block"),
    "coupled": (lambda: Chain("coupled"), "exact-match"),
    "greedy": (lambda: Chain("greedy"), "exact-match"),
    "tree, traversal": (lambda: Drawn("without replacement", 3, 2), "traversal"),
    "best first": (lambda: BestFirst(3), "exact-match"),
}


@pytest.mark.parametrize("vocabulary", [None, ChangingVocabulary], ids=["whole", "changing"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_output_has_exactly_the_main_distribution(name, vocabulary):
    """Enumerate all outcomes, including main model tokens that cannot be drafted."""
    (shape, rule), how, prompt = SHAPES[name], unfiltered(), [2, 0]

    def main():
        return FakeModel(MAIN.n_tokens, 0, scale=1.0)

    def answer(rng):
        part = vocabulary and vocabulary(DRAFT.n_tokens)
        _, draft = intersection(scale=1.0, draft_vocabulary=part)
        proposer = DraftModel(draft, Sampler(how), shape(), n_vocab=MAIN.n_tokens)
        return tuple(generate(main(), prompt, proposer, how, rng, rule, draft_max=2, max_tokens=2)[0])

    assert_main_distribution(enumerate_outcomes(answer), main(), Sampler(how), prompt, n=2)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_rows_from_several_calls_have_logits_or_minus_infinity(max_tokens):
    """Each call of the draft model computes another part; its logits of other tokens are NaN."""
    part = ChangingVocabulary(DRAFT.n_tokens)
    _, draft = intersection(draft_vocabulary=part, max_tokens=max_tokens)
    for _ in range(DRAFT.n_tokens + 1):
        logits = run(draft.call([0, 2, 1], n_logits=3))  # "ab" is two tokens of the draft model
        assert not np.isnan(logits).any()
        shared = (
            VocabularyMap(MAIN, DRAFT).main_ids
            if draft.limits.draft_tokens is None
            else draft.limits.draft_tokens
        )
        assert np.isfinite(logits[-1]).nonzero()[0].tolist() == shared.tolist()


def test_a_draft_model_drafts_nothing_if_its_longer_history_does_not_fit():
    how, (_, draft) = unfiltered(), intersection(n_ctx=40)
    proposer = DraftModel(draft, Sampler(how), Chain("coupled"), n_vocab=MAIN.n_tokens)
    main = FakeModel(MAIN.n_tokens, 0)
    _, end = generate(main, [2] * 30, proposer, how, rule="exact-match", draft_max=4, max_tokens=30)
    assert end.statistics.draft_n == 0
