"""Calls that compute only the output rows of tokens that may be drafted."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.core.sequence import Limits
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.limit_drafts import limit_drafts
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.llama.quantize import quantize
from spec_local.policies.base import DraftReading
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests.tiny_architectures import write_tiny
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_mtp import write_tiny_mtp

N_FIRST = 48
TEXT = [5, 300, 9, 7, 250, 3, 30]


@pytest.fixture(autouse=True)
def with_kernels(tiny_model):
    if not kernels.installed():
        pytest.skip(f"specdec's kernels are not used: {kernels.status().reason}")


@pytest.fixture(params=["F16", "Q8_0", "Q4_0"])
def model(request, tiny_path, tmp_path):
    path = tmp_path / "model.gguf"
    quantize(tiny_path, path, request.param)
    model = Model(path)
    yield model
    model.close()


def limited(row, n_first=N_FIRST):
    row.limit(DraftVocabulary(row.limits.n_vocab, n_first))
    return row


@pytest.mark.parametrize("threads", [1, 2])
def test_the_logits_of_chosen_tokens_are_those_of_the_whole_call(model, make_context, threads):
    whole, part = make_context(model, threads=threads), limited(make_context(model, threads=threads))
    chosen = set()
    for token in TEXT:
        expected, found = run(whole.call([token], n_logits=1))[0], run(part.call([token], n_logits=1))[0]
        tokens = part.limits.draft_tokens
        assert (found[tokens] == expected[tokens]).all()
        assert token in tokens
        assert chosen <= set(tokens.tolist())
        chosen = set(tokens.tolist())
        others = np.setdiff1d(np.arange(part.limits.n_vocab), tokens)
        assert not (found[others] == expected[others]).any()  # they were not computed
    assert N_FIRST < len(chosen) < part.limits.n_vocab / 2


def test_rows_that_share_a_call_compute_the_tokens_of_all(model):
    texts = ([300, 5, 6], [250, 7, 8])
    rows, alone = (
        open_sequences(model, 2, n_ctx=64, max_tokens=16, max_logits=8, threads=1) for _ in range(2)
    )
    for row, text in zip(rows, texts, strict=True):
        run(limited(row).call(text[:2], n_logits=0))
    shared = rows[0].context.decode(
        [row.call(text[2:], [-1], 1) for row, text in zip(rows, texts, strict=True)]
    )
    for i, text in enumerate(texts):
        expected, tokens = run(alone[i].call(text, n_logits=1))[0], rows[i].limits.draft_tokens
        assert (shared[i][0][tokens] == expected[tokens]).all()
    assert set(rows[0].limits.draft_tokens.tolist()) != set(rows[1].limits.draft_tokens.tolist())
    rows[0].close()
    alone[0].close()


def test_calls_of_other_rows_are_whole(model, make_context):
    """The main model may share the output matrix; a call that fails must not leave a choice behind."""
    draft, main, expected = limited(make_context(model)), make_context(model), make_context(model)
    for token in TEXT:
        run(draft.call([token], n_logits=1))
        with pytest.raises(Exception, match="vocabulary"):
            run(draft.call([draft.limits.n_vocab], n_logits=1))
        assert (run(main.call([token], n_logits=1)) == run(expected.call([token], n_logits=1))).all()


def test_tokens_of_another_text_are_forgotten(model, make_context):
    row, drafted = limited(make_context(model)), []
    for text in (TEXT, [20, 21]):
        row.truncate(0)
        for token in text:
            run(row.call([token], n_logits=1))
        drafted.append(300 in row.limits.draft_tokens)
    assert drafted == [True, False]


def test_tokens_of_the_part_of_a_prompt_that_is_not_read_can_be_drafted(model, make_context):
    row = limited(make_context(model))
    draft = DraftModel(
        row, Sampler(SamplingSettings(temperature=0)), Chain("greedy"), n_vocab=row.limits.n_vocab
    )
    run(row.call([20] * 30, n_logits=0))  # of another text, which is forgotten
    run(draft.prefill([*TEXT, *[20] * 10], DraftReading(9, 8)))
    assert list(row.cached) == [TEXT[0], *[20] * 7]
    assert 300 in row.limits.draft_tokens


def test_small_vocabularies_and_rows_without_kernels_are_left_whole(tiny_model, make_context):
    row = make_context(tiny_model)
    limit_drafts(row, tiny_model.vocabulary)
    assert row.limits.draft_tokens is None
    limit_drafts(row, tiny_model.vocabulary, "all")
    assert row.limits.draft_tokens is None
    kernels.use("off")
    limit_drafts(row, tiny_model.vocabulary, N_FIRST)
    kernels.use("auto")
    assert row.limits.draft_tokens is None
    limit_drafts(row, tiny_model.vocabulary, N_FIRST)
    assert len(row.limits.draft_tokens) < row.limits.n_vocab


@pytest.mark.parametrize(("n_vocab", "n_first"), [(60_000, 16_384), (150_000, 49_152)])
def test_the_usual_part_of_a_large_vocabulary_is_drafted(tiny_model, n_vocab, n_first):
    found = []
    sequence = SimpleNamespace(
        can_be_limited=True, limits=Limits(n_vocab, 8, 8, 8), model=tiny_model, limit=found.append
    )
    limit_drafts(sequence, tiny_model.vocabulary)
    assert [each.n_first for each in found] == [n_first]


@pytest.fixture(scope="module")
def files(folder, tiny_path, tiny_draft_path):
    return {
        "draft model": (tiny_path, tiny_draft_path),
        "eagle": (
            write_tiny_main(folder / "limit-m.gguf"),
            write_tiny_eagle(folder / "limit-head.gguf", n_draft_vocab=None),
        ),
        "mtp": (write_tiny(folder / "limit-own.gguf", "qwen35", n_mtp=1), None),
        "chained": (write_tiny_mtp(folder / "limit-three.gguf", "step35", n_mtp=3), None),
    }


@pytest.mark.usefixtures("unchecked", "own_cache")
@pytest.mark.parametrize("kind", ["draft model", "eagle", "mtp", "chained"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_gives_the_same_text_with_any_part_of_the_vocabulary(files, kind, temperature):
    sampling = SamplingSettings(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    settings = GenerationSettings(
        sampling, seed=3, max_tokens=40, policy="fixed", proposer="draft", draft_max=3
    )
    texts, accepted = {}, {}
    for part in ("all", N_FIRST):
        with Session.open(*files[kind], n_ctx=256, threads=1, draft_vocab=part) as session:
            assert (session.draft.limits.draft_tokens is None) == (part == "all")
            events = list(session.generate("The water of the", settings))
            texts[part] = "".join(event.text for event in events if hasattr(event, "text"))
            accepted[part] = events[-1].statistics.draft_n
            plain = "".join(
                e.text
                for e in session.generate("The water of the", replace(settings, policy="off"))
                if hasattr(e, "text")
            )
    assert texts["all"] == texts[N_FIRST] == plain
    assert accepted[N_FIRST] > 0
