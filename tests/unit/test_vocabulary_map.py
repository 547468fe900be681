"""Draft models with a different vocabulary: shared tokens, conversions, and an exact output distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.fake import FakeModel, enumerate_outcomes
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.decoding import decode
from spec_local.engine.events import Step
from spec_local.errors import ContextOverflow, InvalidRequest, VocabularyMismatch
from spec_local.proposers.base import Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import BestFirst, Chain, Drawn
from spec_local.proposers.string_level import StringLevelDraft
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.verifiers import VERIFIERS


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


@settings(deadline=None, max_examples=200)
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
                assert shared.evaluate(more, 1).tolist() == [expected(model, vocabulary_map, text)]
            case "rows":
                more = data.draw(tokens)
                n = data.draw(st.integers(0, len(more)))
                rows = shared.evaluate(more, n).tolist()
                text += more
                ends = range(len(text) - n + 1, len(text) + 1)
                assert rows == [expected(model, vocabulary_map, text[:end]) for end in ends]
            case "tree" if text and shared.max_tokens > 3:
                nodes = data.draw(tokens)
                parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(nodes))]
                paths = []
                for token, parent in zip(nodes, parents, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                rows = shared.decode_tree(nodes, parents).tolist()
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
    shared.evaluate([2, 2, 2], 0)
    assert shared.n_ctx == 5  # room for two more tokens of one each
    with pytest.raises(ContextOverflow):
        shared.evaluate([2, 2], 1)
    assert list(shared.cached) == [2, 2, 2]
    shared.evaluate([0, 0], 1)
    with pytest.raises(InvalidRequest, match="truncate"):
        shared.truncate(6)
    with pytest.raises(InvalidRequest, match="parent"):
        shared.decode_tree([0], [3])


SAMPLING = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SHAPES = {
    "drawn, token": (lambda: Chain("drawn"), "token"),
    "drawn, block": (lambda: Chain("drawn"), "block"),
    "coupled": (lambda: Chain("coupled"), "exact-match"),
    "greedy": (lambda: Chain("greedy"), "exact-match"),
    "tree, traversal": (lambda: Drawn("without replacement", 3, 2), "traversal"),
    "best first": (lambda: BestFirst(3), "exact-match"),
    "string level": (lambda: Chain("coupled"), "exact-match"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_output_has_exactly_the_main_distribution(name):
    """Enumerate all outcomes, including main model tokens that cannot be drafted."""
    shape, verifier = SHAPES[name]
    main = FakeModel(MAIN.n_tokens, 0, scale=1.0)
    sampler = Sampler(SAMPLING)
    prompt, n = [2, 0], 2

    def answer(rng):
        main.truncate(0)
        model, draft = intersection(scale=1.0)
        proposer = DraftModel(draft, sampler, shape(), n_vocab=MAIN.n_tokens)
        if name == "string level":
            proposer = StringLevelDraft(model, sampler, shape(), VocabularyMap(MAIN, DRAFT))
        output = []
        for event in decode(
            main, prompt, sampler=sampler, rng=rng, proposer=proposer,
            verifier=VERIFIERS[verifier], draft_max=2, max_tokens=n,
        ):  # fmt: skip
            if isinstance(event, Step):
                output += event.tokens
        return tuple(output)

    found = enumerate_outcomes(answer)

    def main_probability(text):
        rows = [sampler.distribution(main.logits([*prompt, *text[:i]])).probs for i in range(n)]
        return float(np.prod([row[token] for row, token in zip(rows, text, strict=True)]))

    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert len(found) == MAIN.n_tokens**n
    for text, probability in found.items():
        assert probability == pytest.approx(main_probability(text), abs=1e-12)


def test_a_draft_model_drafts_nothing_if_its_longer_history_does_not_fit():
    main, sampler = FakeModel(MAIN.n_tokens, 0), Sampler(SAMPLING)
    _, draft = intersection(n_ctx=40)
    proposer = DraftModel(draft, sampler, Chain("coupled"), n_vocab=MAIN.n_tokens)
    n_drafted = []
    for event in decode(
        main, [2] * 30, sampler=sampler, rng=SeededRng(1), proposer=proposer,
        verifier=VERIFIERS["exact-match"], draft_max=4, max_tokens=30,
    ):  # fmt: skip
        if isinstance(event, Step):
            n_drafted.append(len(event.proposal.tokens))
    assert not any(n_drafted)


TEXTS = st.lists(st.sampled_from("abc"), max_size=12).map("".join)


@settings(deadline=None, max_examples=200)
@given(TEXTS, TEXTS)
def test_drafts_are_tokenized_as_the_main_model_does(before, text):
    vocabulary_map = VocabularyMap(MAIN, DRAFT)
    history, drafted = MAIN.tokenize(before), DRAFT.tokenize(text)
    found = vocabulary_map.to_main(history, drafted)
    assert "".join(MAIN.piece(token).decode() for token in found) == text
    whole = MAIN.tokenize(before + text)
    if whole[: len(history)] == history:
        assert found == whole[len(history) :]
    # Tokens do not extend across a control token; the end token is converted.
    assert vocabulary_map.to_main([*history, 4], drafted) == MAIN.tokenize(text)
    assert vocabulary_map.to_main(history, [*drafted, 0]) == [*found, 4]


class OneText(FakeModel):
    """Generates one text, whatever tokens its beginning consists of."""

    def __init__(self, vocabulary, text, **limits):
        super().__init__(vocabulary.n_tokens, **limits)
        self._vocabulary, self._text = vocabulary, text

    def logits(self, history):
        known = b"".join(self._vocabulary.piece(token) for token in history).decode()
        left = self._text[len(known) :] if self._text.startswith(known) else ""
        row = np.zeros(self.n_vocab, np.float32)
        row[self._vocabulary.tokenize(left)[0] if left else 0] = 9.0
        return row


def test_string_level_drafts_are_accepted_although_tokens_differ():
    """The main model has no token "ba", the draft model no "ab": shared tokens are often wrong here."""
    text = "abcbaabbacabab" * 4
    greedy = Sampler(SamplingSettings(temperature=0))
    counts = {}
    for how in ("token level", "string level"):
        main, model = OneText(MAIN, text, n_ctx=128), OneText(DRAFT, text, n_ctx=128)
        proposer = StringLevelDraft(model, greedy, Chain("coupled"), VocabularyMap(MAIN, DRAFT))
        if how == "token level":
            draft = IntersectionModel(model, VocabularyMap(MAIN, DRAFT), MAIN.n_tokens)
            proposer = DraftModel(draft, greedy, Chain("coupled"), n_vocab=MAIN.n_tokens)
        history, tested, accepted = [0], 0, 0
        for event in decode(
            main, history, sampler=greedy, rng=SeededRng(0), proposer=proposer,
            verifier=VERIFIERS["exact-match"], draft_max=4, max_tokens=30,
        ):  # fmt: skip
            if isinstance(event, Step):
                history = [*history, *event.tokens]
                tested += len(event.proposal.tokens)
                accepted += event.n_accepted
        assert text.startswith("".join(MAIN.piece(token).decode() for token in history))
        counts[how] = accepted / tested
    assert counts["string level"] > 0.9
    assert counts["string level"] > counts["token level"]


def test_a_policy_observes_string_level_drafts_in_main_model_tokens():
    """So that they can be compared with the output."""
    text = "abcbaabbacabab" * 4
    greedy, model = Sampler(SamplingSettings(temperature=0)), OneText(DRAFT, text)
    proposer = StringLevelDraft(model, greedy, Chain("coupled"), VocabularyMap(MAIN, DRAFT))
    proposal = run(proposer.propose([0], Limit(4, 4, 1), SeededRng(0)))
    assert proposer.drafted([]) == proposal.tokens == [1, 3, 1, 0]
