"""Drafts of another vocabulary: what is shared, how they read main's text, and that what is said stays exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.fake import FakeModel, enumerate_outcomes
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.decoding import decode
from spec_local.engine.events import Step
from spec_local.errors import ContextOverflow, InvalidRequest, VocabularyMismatch
from spec_local.proposers import BestFirst, Chain, DraftModel, Drawn, StringLevelDraft
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.verifiers import VERIFIERS


class Toy:
    """A vocabulary of these pieces; names in angle brackets are control tokens."""

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
        """The longest piece first; what no piece begins is left out."""
        left, tokens = text.encode("utf-8", "surrogateescape"), []
        while left:
            fitting = [t for t in range(self.n_tokens) if self.piece(t) and left.startswith(self.piece(t))]
            tokens += [max(fitting, key=lambda t: len(self.piece(t)))] if fitting else []
            left = left[len(self.piece(tokens[-1])) if fitting else 1 :]
        return tokens


MAIN = Toy("a", "b", "ab", "c", "<end>", eos=4)
DRAFT = Toy("<stop>", "c", "b", "a", "ba", "d", eos=0)


def test_what_is_shared():
    translation = VocabularyMap(MAIN, DRAFT)
    assert translation.mains.tolist() == [0, 1, 3, 4]
    assert translation.drafts.tolist() == [3, 2, 1, 0]
    assert translation.share == 0.8
    assert [translation.read(token) for token in range(5)] == [(3,), (2,), (3, 2), (1,), (0,)]


def test_control_tokens_by_role_and_name():
    main = Toy("x", "<|im_start|>", "<|im_end|>", "<pad>", "<odd>", eos=2, eot=2)
    draft = Toy(
        "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "x", bos=0, eos=1, eot=3, add_bos=True
    )
    translation = VocabularyMap(main, draft)
    shared = dict(zip(translation.mains.tolist(), translation.drafts.tolist(), strict=True))
    assert shared == {0: 5, 1: 2, 2: 3, 3: 4}
    assert translation.read(0, is_first=True) == (0, 5)
    assert translation.read(0) == (5,)
    assert translation.read(4) == (0,)  # the draft has no letter of its name


def test_of_equal_spellings_the_last():
    assert VocabularyMap(Toy("a"), Toy(b"a", "b", "a")).drafts.tolist() == [2]


def test_bytes_that_are_no_text():
    whole = "é".encode()
    translation = VocabularyMap(Toy(whole[:1], whole[1:], whole), Toy(whole[1:], whole[:1]))
    assert [translation.read(token) for token in range(3)] == [(1,), (0,), (1, 0)]


def test_parts_of_characters_are_spelled_by_their_bytes():
    class Careful(Toy):
        def tokenize(self, text):  # as BPE: what is no text becomes the sign for that
            raw = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return super().tokenize(raw)

    main = Toy("é", "x", b"\xe2\x82", b"\xe2\x83")
    draft = Careful("x", "\ufffd", b"\xe2", b"\x82", "é")
    assert VocabularyMap(main, draft).read(2) == (2, 3)
    assert set(VocabularyMap(main, draft).read(3)) == {1}  # one of its bytes has no token


def test_nothing_in_common():
    with pytest.raises(VocabularyMismatch, match="no token in common"):
        VocabularyMap(Toy("a", "<x>"), Toy("b", "<y>"))


def translated(seed=1, main=MAIN, draft=DRAFT, **limits):
    model = FakeModel(draft.n_tokens, seed, **limits)
    return model, IntersectionModel(model, VocabularyMap(main, draft), main.n_tokens)


def expected(model, translation, text):
    """What the draft says after main's text, in main's columns."""
    spelled = [t for i, token in enumerate(text) for t in translation.read(token, i == 0)]
    row = np.full(MAIN.n_tokens, -np.inf, np.float32)
    row[translation.mains] = model.logits(spelled)[translation.drafts]
    return row.tolist()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_it_is_a_language_model_like_any_other(data):
    """Any calls, against what the draft says of the same text from nothing."""
    tokens = st.lists(st.integers(0, 4), min_size=1, max_size=4)
    model, ours = translated(n_ctx=64, max_tokens=data.draw(st.sampled_from([1, 3, 32])))
    translation, text = VocabularyMap(MAIN, DRAFT), []
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["evaluate", "rows", "grow", "trim", "outside"])):
            case "evaluate":
                text += (more := data.draw(tokens))
                assert ours.evaluate(more, 1).tolist() == [expected(model, translation, text)]
            case "rows":
                more = data.draw(tokens)
                n = data.draw(st.integers(0, len(more)))
                rows = ours.evaluate(more, n).tolist()
                text += more
                ends = range(len(text) - n + 1, len(text) + 1)
                assert rows == [expected(model, translation, text[:end]) for end in ends]
            case "grow" if text and ours.max_tokens > 3:
                nodes = data.draw(tokens)
                parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(nodes))]
                paths = []
                for token, parent in zip(nodes, parents, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                rows = ours.decode_tree(nodes, parents).tolist()
                assert rows == [expected(model, translation, text + path) for path in paths]
                kept = data.draw(st.integers(-1, len(nodes) - 1))
                path = []
                while kept >= 0:
                    path, kept = [kept, *path], parents[kept]
                ours.commit(path)
                text += [nodes[node] for node in path]
            case "trim":
                del text[data.draw(st.integers(0, len(text))) :]
                ours.truncate(len(text))
            case "outside":  # as a benchmark does
                model.truncate(0)
                text = []
        assert list(ours.cached) == text
        spelled = [t for i, token in enumerate(text) for t in translation.read(token, i == 0)]
        assert list(model.cached) == spelled


def test_limits():
    _, ours = translated(n_ctx=8)
    ours.evaluate([2, 2, 2], 0)
    assert ours.n_ctx == 5  # two tokens more of one each
    with pytest.raises(ContextOverflow):
        ours.evaluate([2, 2], 1)
    assert list(ours.cached) == [2, 2, 2]
    ours.evaluate([0, 0], 1)
    with pytest.raises(InvalidRequest, match="trim"):
        ours.truncate(6)
    with pytest.raises(InvalidRequest, match="parent"):
        ours.decode_tree([0], [3])


SAMPLING = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SHAPES = {
    "drawn, token": (lambda: Chain("drawn"), "token"),
    "drawn, block": (lambda: Chain("drawn"), "block"),
    "coupled": (lambda: Chain("coupled"), "exact-match"),
    "greedy": (lambda: Chain("greedy"), "exact-match"),
    "tree, traversal": (lambda: Drawn("without replacement", 3, 2), "traversal"),
    "best first": (lambda: BestFirst(3), "exact-match"),
    "text": (lambda: Chain("coupled"), "exact-match"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_said_has_exactly_mains_distribution(name):
    """Every branch of the loop's randomness, with main's tokens that the draft cannot guess among them."""
    shape, verifier = SHAPES[name]
    main = FakeModel(MAIN.n_tokens, 0, scale=1.0)
    sampler = Sampler(SAMPLING)
    prompt, n = [2, 0], 2

    def run(rng):
        main.truncate(0)
        model, draft = translated(scale=1.0)
        proposer = DraftModel(draft, sampler, shape(), n_vocab=MAIN.n_tokens)
        if name == "text":
            proposer = StringLevelDraft(model, sampler, shape(), VocabularyMap(MAIN, DRAFT))
        said = []
        for event in decode(
            main, prompt, sampler=sampler, rng=rng, proposer=proposer,
            verifier=VERIFIERS[verifier], draft_max=2, max_tokens=n,
        ):  # fmt: skip
            if isinstance(event, Step):
                said += event.tokens
        return tuple(said)

    found = enumerate_outcomes(run)

    def chance(text):
        rows = [sampler.distribution(main.logits([*prompt, *text[:i]])).probs for i in range(n)]
        return float(np.prod([row[token] for row, token in zip(rows, text, strict=True)]))

    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert len(found) == MAIN.n_tokens**n
    for text, probability in found.items():
        assert probability == pytest.approx(chance(text), abs=1e-12)


def test_a_draft_that_has_no_room_for_its_longer_text_says_nothing():
    main, sampler = FakeModel(MAIN.n_tokens, 0), Sampler(SAMPLING)
    _, draft = translated(n_ctx=40)
    proposer = DraftModel(draft, sampler, Chain("coupled"), n_vocab=MAIN.n_tokens)
    n_guessed = []
    for event in decode(
        main, [2] * 30, sampler=sampler, rng=SeededRng(1), proposer=proposer,
        verifier=VERIFIERS["exact-match"], draft_max=4, max_tokens=30,
    ):  # fmt: skip
        if isinstance(event, Step):
            n_guessed.append(len(event.proposal.tokens))
    assert not any(n_guessed)


TEXTS = st.lists(st.sampled_from("abc"), max_size=12).map("".join)


@settings(deadline=None, max_examples=200)
@given(TEXTS, TEXTS)
def test_what_the_draft_says_is_spelled_as_main_would(before, said):
    translation = VocabularyMap(MAIN, DRAFT)
    known, drafted = MAIN.tokenize(before), DRAFT.tokenize(said)
    found = translation.respell(known, drafted)
    assert "".join(MAIN.piece(token).decode() for token in found) == said
    whole = MAIN.tokenize(before + said)
    if whole[: len(known)] == known:
        assert found == whole[len(known) :]
    assert translation.respell([*known, 4], drafted) == MAIN.tokenize(said)  # a control token is a border
    assert translation.respell(known, [*drafted, 0]) == [*found, 4]  # and the draft's end is main's


class Says(FakeModel):
    """Says one text for certain, whatever tokens it is spelled in so far."""

    def __init__(self, vocabulary, text, **limits):
        super().__init__(vocabulary.n_tokens, **limits)
        self._vocabulary, self._said = vocabulary, text

    def logits(self, history):
        said = b"".join(self._vocabulary.piece(token) for token in history).decode()
        left = self._said[len(said) :] if self._said.startswith(said) else ""
        row = np.zeros(self.n_vocab, np.float32)
        row[self._vocabulary.tokenize(left)[0] if left else 0] = 9.0
        return row


def test_one_that_thinks_alike_is_wholly_accepted_whatever_its_tokens():
    """Main has no "ba", and the draft no "ab"; tokens that both have would often be wrong here."""
    text = "abcbaabbacabab" * 4
    greedy = Sampler(SamplingSettings(temperature=0))
    counts = {}
    for how in ("tokens", "text"):
        main, model = Says(MAIN, text, n_ctx=128), Says(DRAFT, text, n_ctx=128)
        proposer = StringLevelDraft(model, greedy, Chain("coupled"), VocabularyMap(MAIN, DRAFT))
        if how == "tokens":
            draft = IntersectionModel(model, VocabularyMap(MAIN, DRAFT), MAIN.n_tokens)
            proposer = DraftModel(draft, greedy, Chain("coupled"), n_vocab=MAIN.n_tokens)
        said, tested, accepted = [0], 0, 0
        for event in decode(
            main, said, sampler=greedy, rng=SeededRng(0), proposer=proposer,
            verifier=VERIFIERS["exact-match"], draft_max=4, max_tokens=30,
        ):  # fmt: skip
            if isinstance(event, Step):
                said = [*said, *event.tokens]
                tested += len(event.proposal.tokens)
                accepted += event.n_accepted
        assert text.startswith("".join(MAIN.piece(token).decode() for token in said))
        counts[how] = accepted / tested
    assert counts["text"] > 0.9
    assert counts["text"] > counts["tokens"]
