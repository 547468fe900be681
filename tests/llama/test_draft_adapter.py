"""llama-cpp-python's `Llama` with our draft models: the same output in fewer calls."""

import gc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import Llama

from spec_local.errors import InvalidRequest, ModelFileError
from spec_local.llama.tiny import write_tiny_model
from spec_local.llama_cpp_python import GGUFDraft, LookupDraft
from spec_local.lookups.base import Candidates
from spec_local.proposers.vocabulary_map import IntersectionModel

PROMPT = b"the of and to in is you that " * 4


class KnownText:
    """A lookup that drafts from the expected output, with a wrong token at every n-th position."""

    name = "known text"
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
def generate(tiny_path):
    """A function that returns the output of `Llama`, and the number of tokens of each call."""

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
        output = list(islice(llama.generate(list(tokens), temp=temperature, top_k=0, top_p=1.0), n))
        llama.close()
        return [*tokens, *output], calls

    return run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lookup_gives_the_same_output_in_fewer_calls(generate, temperature):
    """`Llama` samples once per token, with or without a draft, so a seed gives the same output."""
    text, calls = generate(temperature=temperature)
    assert len(calls) == 100
    for wrong_at, most in [(10**9, 11), (4, 40), (2, 60)]:
        found, fewer = generate(LookupDraft(KnownText(text, wrong_at)), temperature=temperature)
        assert found == text
        assert len(fewer) <= most


def test_a_draft_model_gives_the_same_output_in_fewer_calls(generate, tiny_path, tiny_draft_path):
    text, calls = generate()
    with GGUFDraft(tiny_path, tiny_path, p_min=0, threads=1) as draft:
        found, fewer = generate(draft)
        assert found == text
        assert len(fewer) <= 1 + len(calls) / 5  # four draft tokens and one sampled token
        again, _ = generate(draft, prompt=b"another prompt")  # a new history
        assert again == generate(prompt=b"another prompt")[0]
    with GGUFDraft(tiny_draft_path, tiny_path, n=8, p_min=0, threads=1) as draft:
        found, fewer = generate(draft)
        assert found == text
        assert len(fewer) < 0.6 * len(calls)


def test_p_min_shortens_drafts(generate, tiny_path, tiny_draft_path):
    drafted = []
    for p_min in (0.0, 0.5):
        with GGUFDraft(tiny_draft_path, tiny_path, p_min=p_min, threads=1) as draft:
            _, calls = generate(draft)
            drafted.append(sum(calls))
    assert drafted[0] > 1.2 * drafted[1]


def test_a_draft_model_with_another_vocabulary(generate, tiny_path, folder):
    other = write_tiny_model(folder / "other.gguf", extra_tokens=[f"<{i}>" for i in range(300)])
    with GGUFDraft(other, tiny_path, p_min=0, threads=1) as draft:
        assert isinstance(draft._draft.model, IntersectionModel)
        found, calls = generate(draft)
    assert found == generate()[0]
    assert len(calls) < 50


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(generate, tiny_path):
    with GGUFDraft(tiny_path, tiny_path, p_min=0, n_ctx=60, threads=1) as draft:
        text, calls = generate(draft)
        assert text == generate()[0]
        assert calls[1] == 5
        assert calls[-70:] == [1] * 70  # of the 74 tokens after the 60th


def test_drafts_end_with_the_array_of_llama(generate):
    """It ends at n_ctx, which llama.cpp rounds up: with more tokens, `Llama` raises ValueError."""
    text, _ = generate(n_ctx=64, n=64 - 34)
    assert len(text) == 64
    found, calls = generate(LookupDraft(KnownText([*text, *[9] * 20])), n_ctx=64, n=64 - 34)
    assert found == text
    assert len(calls) < 10


def test_a_lookup_draft_ends_where_acceptance_is_unlikely():
    known = KnownText(range(30), confidence=0.9)
    for p_min, n in [(0.0, 10), (0.5, 6), (0.9, 1), (0.95, 0), (1.0, 0)]:
        found = LookupDraft(known, p_min=p_min)(np.arange(3, dtype=np.intc))
        assert found.tolist() == list(range(3, 3 + n))  # 0.9 ** 6 > 0.5 > 0.9 ** 7
        assert found.dtype == np.intc


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12))
def test_a_growing_history_is_passed_as_the_same_list(texts):
    """Another history is passed as another list, although `Llama` writes all of them into one array."""
    known, buffer, before = KnownText(), np.zeros(20, np.intc), []
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
        LookupDraft(KnownText(), n=n)
    for p_min in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match="p_min"):
            LookupDraft(KnownText(), p_min=p_min)


def test_invalid_files(tiny_path, tmp_path, own_cache):
    (tmp_path / "no.gguf").write_bytes(b"no")
    for draft, main in [(tmp_path / "no.gguf", tiny_path), (tiny_path, tmp_path / "none.gguf")]:
        with pytest.raises(ModelFileError):
            GGUFDraft(draft, main)


def test_closing_frees_the_models(tiny_path):
    draft = GGUFDraft(tiny_path, tiny_path, p_min=0, threads=1)
    gc.collect()
    vocabularies = [draft._main, draft._draft.model.model]
    assert all(model.is_open for model in vocabularies)
    assert len(draft(np.arange(5, 12, dtype=np.intc))) == 4
    draft.close()
    draft.close()
    assert not any(model.is_open for model in vocabularies)
    with pytest.raises(InvalidRequest, match="closed"):
        draft(np.arange(5, 13, dtype=np.intc))
