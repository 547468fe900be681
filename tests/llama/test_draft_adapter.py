"""llama-cpp-python's own `Llama` with guesses of ours: it says the same, in fewer calls."""

import gc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import Llama

from spec_local.errors import InvalidRequest, ModelError, ModelFileError
from spec_local.llama.tiny import write_tiny_model
from spec_local.llama_cpp_python import GGUFDraft, LookupDraft
from spec_local.lookups.base import Candidates
from spec_local.proposers.vocabulary_map import IntersectionModel

PROMPT = b"the of and to in is you that " * 4


class Knows:
    """A lookup that has read the answer before, and is wrong at every n-th place."""

    name = "knows"
    needs_logits = False

    def __init__(self, text=(), wrong_at=10**9, confidence=1.0):
        self.text, self.wrong_at, self.confidence = list(text), wrong_at, confidence
        self.histories = []

    def find(self, history, limit):
        self.histories.append(history)
        start = len(history)
        tokens = [
            t + (start + i) % self.wrong_at // (self.wrong_at - 1) for i, t in enumerate(self.text[start:])
        ]
        tokens = tokens[: limit.depth]
        return Candidates(tokens, range(-1, len(tokens) - 1), [self.confidence] * len(tokens))


@pytest.fixture(scope="module")
def say(tiny_path):
    """Tokens that `Llama` says with a draft, and how many tokens each of its calls had."""

    def run(draft=None, n=100, temperature=0.0, prompt=PROMPT, n_ctx=256, path=tiny_path):
        llama = Llama(
            str(path),
            draft_model=draft,
            logits_all=True,
            n_ctx=n_ctx,
            n_threads=1,
            n_threads_batch=1,
            seed=3,
            verbose=False,
        )
        calls, decode = [], llama._ctx.decode

        def counted(batch):
            calls.append(batch.batch.n_tokens)
            decode(batch)

        llama._ctx.decode = counted
        tokens = llama.tokenize(prompt)
        said = list(islice(llama.generate(list(tokens), temp=temperature, top_k=0, top_p=1.0), n))
        llama.close()
        return [*tokens, *said], calls

    return run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lookup_says_the_same_in_fewer_calls(say, temperature):
    """Llama draws once a token, with guesses and without: so a seed says the same."""
    text, calls = say(temperature=temperature)
    assert len(calls) == 100
    for wrong_at, most in [(10**9, 11), (4, 40), (2, 60)]:
        found, fewer = say(LookupDraft(Knows(text, wrong_at)), temperature=temperature)
        assert found == text
        assert len(fewer) <= most


def test_a_draft_model_says_the_same_in_fewer_calls(say, tiny_path, tiny_draft_path):
    text, calls = say()
    with GGUFDraft(tiny_path, tiny_path, p_min=0, threads=1) as draft:
        found, fewer = say(draft)
        assert found == text
        assert len(fewer) <= 1 + len(calls) / 5  # four guesses and a token of main's own
        again, _ = say(draft, prompt=b"an other text")  # and of another answer it knows what is said there
        assert again == say(prompt=b"an other text")[0]
    with GGUFDraft(tiny_draft_path, tiny_path, n=8, p_min=0, threads=1) as draft:
        found, fewer = say(draft)
        assert found == text
        assert len(fewer) < 0.6 * len(calls)


def test_a_draft_that_is_not_sure_guesses_less(say, tiny_path, tiny_draft_path):
    drafted = []
    for p_min in (0.0, 0.5):
        with GGUFDraft(tiny_draft_path, tiny_path, p_min=p_min, threads=1) as draft:
            _, calls = say(draft)
            drafted.append(sum(calls))
    assert drafted[0] > 1.2 * drafted[1]


def test_a_draft_of_another_vocabulary(say, tiny_path, folder):
    other = write_tiny_model(folder / "other.gguf", extra_tokens=[f"<{i}>" for i in range(300)])
    with GGUFDraft(other, tiny_path, p_min=0, threads=1) as draft:
        assert isinstance(draft._draft.model, IntersectionModel)
        found, calls = say(draft)
    assert found == say()[0]
    assert len(calls) < 50


def test_a_text_beyond_the_drafts_context_gets_no_guesses(say, tiny_path):
    with GGUFDraft(tiny_path, tiny_path, p_min=0, n_ctx=60, threads=1) as draft:
        text, calls = say(draft)
        assert text == say()[0]
        assert calls[1] == 5
        assert calls[-70:] == [1] * 70  # of the 74 tokens after the 60th


def test_no_guess_is_beyond_mains_array(say):
    """Llama's own ends at n_ctx, while llama.cpp rounds that up: it would take more, and then raise ValueError."""
    text, _ = say(n_ctx=64, n=64 - 34)
    assert len(text) == 64
    found, calls = say(LookupDraft(Knows([*text, *[9] * 20])), n_ctx=64, n=64 - 34)
    assert found == text
    assert len(calls) < 10


def test_a_copy_ends_where_it_is_not_likely_to_stand():
    known = Knows(range(30), confidence=0.9)
    for p_min, n in [(0.0, 10), (0.5, 6), (0.9, 1), (0.95, 0), (1.0, 0)]:
        found = LookupDraft(known, p_min=p_min)(np.arange(3, dtype=np.intc))
        assert found.tolist() == list(range(3, 3 + n))  # 0.9 ** 6 > 0.5 > 0.9 ** 7
        assert found.dtype == np.intc


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12))
def test_a_lookup_hears_of_a_growing_text_as_of_one_list(texts):
    """And of any other as of another, though Llama writes all of them into one array."""
    known, buffer, before = Knows(), np.zeros(20, np.intc), []
    draft = LookupDraft(known)
    for text in texts:
        buffer[: len(text)] = text
        buffer[len(text) :] = 7
        assert draft(buffer[: len(text)]).tolist() == []
        if text:
            history = known.histories[-1]
            assert history == text
            if before and len(known.histories) > 1:
                has_grown = text[: len(before)] == before
                assert (history is known.histories[-2]) == has_grown
        before = text


@pytest.mark.parametrize("n", [0, -1, 65])
def test_numbers_out_of_range(n):
    with pytest.raises(InvalidRequest, match="draft tokens"):
        LookupDraft(Knows(), n=n)
    for p_min in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match="p_min"):
            LookupDraft(Knows(), p_min=p_min)


def test_files_that_cannot_be_used(tiny_path, recurrent_path, tmp_path, own_cache):
    (tmp_path / "no.gguf").write_bytes(b"no")
    for draft, main in [(tmp_path / "no.gguf", tiny_path), (tiny_path, tmp_path / "none.gguf")]:
        with pytest.raises(ModelFileError):
            GGUFDraft(draft, main)
    with pytest.raises(ModelError, match="recurrent"):
        GGUFDraft(recurrent_path, tiny_path)


def test_what_it_holds_lives_until_it_is_closed(tiny_path):
    draft = GGUFDraft(tiny_path, tiny_path, p_min=0, threads=1)
    gc.collect()
    vocabularies = [draft._main, draft._draft.model.model]
    assert all(model.close.alive for model in vocabularies)
    assert len(draft(np.arange(5, 12, dtype=np.intc))) == 4
    draft.close()
    draft.close()
    assert not any(model.close.alive for model in vocabularies)
    with pytest.raises(InvalidRequest, match="closed"):
        draft(np.arange(5, 13, dtype=np.intc))
