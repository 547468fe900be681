"""Data generation: recorded distributions and states, sampling, self-generated prompts, and resuming."""

import gc
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from spec_local import bfloat16
from spec_local.chat.template import ChatTemplate
from spec_local.core.calls import run
from spec_local.errors import ModelError
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import generation, shards
from spec_local.training.generation import DataGenerator, DataOptions, top_logprobs
from spec_local.training.prompts import TrainingPrompt, UserTexts, is_held_out
from spec_local.training.recipe import SELF_GENERATED, prompt_source

WORDS = [
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "with"),
    *("as", "his", "they"),
]
LAYERS = (0,)


def ask(i, passages):
    return TrainingPrompt(f"kind {i % 3}", " ".join(WORDS[i % 7 : i % 7 + 4 + i % 5]), i % 4 == 0)


def half_generated(i, passages):
    """Leave every other prompt to the main model."""
    return TrainingPrompt("own", "" if i % 2 else "the of and", False)


def generator(model, folder, next_prompt=ask, **options):
    """Uses one thread: with more, tiny models are not faster, and much slower on a busy machine."""
    options = DataOptions(**{"layers": LAYERS, "n_ctx": 256, "threads": 1} | options)
    return DataGenerator(model, folder, next_prompt, options)


def run_calls(n, model, folder, next_prompt=ask, **options):
    """A run that is stopped after some calls of the main model."""
    running = generator(model, folder, next_prompt, **options).run()
    for _ in range(n):
        next(running)
    running.close()


def produce(model, folder, n_tokens, **options):
    running = generator(model, folder, n_parallel=5, max_tokens=24, **options).run()
    last = next(progress for progress in running if progress.n_tokens >= n_tokens)
    running.close()
    return last


def documents(folder):
    return [document for shard in shards.read(folder) for document in shard.documents]


def check_states(make_context, model, document, layers=LAYERS):
    """Of all tokens but the last, as of a plain evaluation of them all."""
    tokens = document.tokens.tolist()
    context = make_context(model, n_ctx=1024, max_tokens=1024, hidden=HiddenStates(layers))
    run(context.call(tokens, n_logits=1))
    expected = context.states(range(len(tokens) - 1))
    assert document.states.shape == expected.shape
    np.testing.assert_allclose(bfloat16.decode(document.states), expected, atol=0.05, rtol=2**-6)


def check_candidates(make_context, model, document):
    """Of each token of the answer, as of a plain evaluation of them all."""
    n = len(document.tokens) - document.n_prompt
    assert document.top_ids.shape == document.top_logprobs.shape == (n, shards.TOP_K)
    context = make_context(model, n_ctx=1024, max_tokens=1024, max_logits=400)
    logits = run(context.call(document.tokens.tolist(), n_logits=n + 1))[:n].astype(float)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    kept = np.take_along_axis(logprobs, document.top_ids.astype(int), axis=1)
    np.testing.assert_allclose(document.top_logprobs, kept, atol=0.1)
    np.testing.assert_allclose(kept[:, 0], logprobs.max(axis=1), atol=0.1)
    assert (np.diff(document.top_logprobs, axis=1) <= 0).all()


def test_recorded_states_are_the_main_models(folder, make_context, tmp_path):
    """Of prompts and answers, and of several layers in their order."""
    model = Model(write_tiny_model(folder / "deep.gguf", n_layers=4))
    last = produce(model, tmp_path, 200, layers=(0, 2, 1))
    docs = documents(tmp_path)
    for doc in docs:
        check_states(make_context, model, doc, (0, 2, 1))
    n_bytes = sum(doc.states.nbytes for doc in docs)
    assert n_bytes <= last.n_bytes <= n_bytes + 5 * 256 * docs[0].states[0].nbytes
    again = next(generator(model, tmp_path, n_parallel=1, max_tokens=24, layers=(0, 2, 1)).run())
    assert again.n_bytes == pytest.approx(n_bytes, rel=0.05)


def test_recorded_candidates_are_the_main_models_distribution(tiny_model, make_context, tmp_path):
    produce(tiny_model, tmp_path, 400)
    docs = documents(tmp_path)
    assert sum(len(d.top_ids) for d in docs) >= 400 - 5 * 16  # very short unfinished answers are dropped
    assert {d.temperature for d in docs} == {0.0, 0.5, np.float32(0.9).item()}
    assert {d.category for d in docs} == {"kind 0", "kind 1", "kind 2"}
    for doc in docs[:12]:
        check_candidates(make_context, tiny_model, doc)
        answer = doc.tokens[doc.n_prompt :]
        assert 0 < len(answer) <= 24
        assert all(token in row for token, row in zip(answer, doc.top_ids, strict=True))
        if doc.temperature == 0:
            assert (answer == doc.top_ids[:, 0]).all()


def test_sampled_tokens_follow_the_distribution(tiny_model, tmp_path, monkeypatch):
    """Chi-square test of first tokens at temperature 0.9, over 16 candidates."""
    monkeypatch.setattr(type(tiny_model), "chat_template", None)  # for short prompts
    options = {"n_parallel": 64, "max_tokens": 1}
    run_calls(60, tiny_model, tmp_path, lambda i, _: TrainingPrompt("x", "the", False), **options)
    docs = [d for d in documents(tmp_path) if d.temperature > 0.8]
    weights = np.exp(docs[0].top_logprobs[0].astype(float) / 0.9)
    expected = weights / weights.sum() * len(docs)
    found = np.bincount([int(np.flatnonzero(d.top_ids[0] == d.tokens[-1])[0]) for d in docs], minlength=16)
    assert len(docs) >= 900
    assert ((found - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom: one in 10,000


def test_unfinished_answers_are_saved_unless_very_short(tiny_model, tmp_path):
    run_calls(15, tiny_model, tmp_path, n_parallel=3, max_tokens=200)
    assert documents(tmp_path) == []
    run_calls(40, tiny_model, tmp_path, n_parallel=3, max_tokens=200)
    assert [len(d.top_ids) for d in documents(tmp_path)] == [40, 40, 40]


def test_an_answer_that_loops_is_stopped(tiny_model, tmp_path, monkeypatch):
    data_generator = generator(tiny_model, tmp_path, n_parallel=1, max_tokens=200)
    for period in (1, 3, 32):
        text = [*range(100, 117), *(list(range(200, 200 + period)) * 60)][:199]
        ends = [n for n in range(1, len(text) + 1) if data_generator._is_over(text[:n])]
        assert ends
        assert 17 + 4 * period <= ends[0] < 17 + 4 * period + 16
    assert not any(data_generator._is_over([*range(200, 200 + n)]) for n in range(1, 200))


def test_answers_become_passages_for_prompts(tiny_model, tmp_path):
    seen, numbers = [], []

    def record(i, passages):
        numbers.append(i)
        seen.append(list(passages))
        return ask(i, passages)

    run_calls(260, tiny_model, tmp_path, record, n_parallel=4, max_tokens=120)
    answers = [d.tokens[d.n_prompt :].tolist() for d in documents(tmp_path) if not d.held_out]
    texts = [b"".join(map(tiny_model.vocabulary.piece, tokens)) for tokens in answers]
    assert seen[-1]
    assert set(seen[-1]) <= {text.decode("utf-8", "replace").strip() for text in texts}
    n = len(seen)
    run_calls(1, tiny_model, tmp_path, record, n_parallel=4, max_tokens=120)
    assert seen[n]  # after a restart, too, which goes on with the next prompt
    assert numbers[n] == numbers[n - 1] + 1


def test_long_prompts_are_skipped(tiny_model, tmp_path):
    def long_prompts(i, passages):
        return TrainingPrompt("x", "the " * (1 if i % 2 else 400), False)

    run_calls(25, tiny_model, tmp_path, long_prompts, n_parallel=4, max_tokens=20)
    assert all(d.n_prompt < 100 for d in documents(tmp_path))
    assert documents(tmp_path)


def test_the_main_model_generates_prompts(folder, make_context, tmp_path):
    model = Model(write_tiny_model(folder / "ending.gguf", end_scale=1.8))

    running = generator(model, tmp_path, half_generated, n_parallel=8, n_ctx=640, max_tokens=300).run()
    next(progress for progress in running if progress.n_documents >= 30)
    running.close()
    around = str(ChatTemplate(model).render([{"role": "user", "content": "@"}])).split("@")
    head = model.vocabulary.tokenize(around[0], add_special=True, parse_special=True)
    rest = model.vocabulary.continuation(around[1])
    given = model.vocabulary.tokenize("the of and".join(around), add_special=True, parse_special=True)
    own = [d for d in documents(tmp_path) if d.tokens[: d.n_prompt].tolist() != given]
    assert len(own) >= 5
    assert max(len(d.tokens) for d in documents(tmp_path)) <= 640  # there is room for answers
    for doc in own[:5]:
        prompt = doc.tokens[: doc.n_prompt].tolist()
        assert prompt[: len(head)] == head
        assert prompt[-len(rest) :] == rest
        question = prompt[len(head) : -len(rest)]
        assert 4 <= len(question) <= 256
        words = b"".join(map(model.vocabulary.piece, question)).decode("utf-8", "replace").strip()
        assert doc.held_out == is_held_out(words)
        assert not any(map(model.vocabulary.is_end, question))
        check_candidates(make_context, model, doc)
        check_states(make_context, model, doc)


def test_a_template_that_leaves_no_room_is_refused(tiny_model, tmp_path):
    with pytest.raises(ModelError, match=r"the chat template .* leaves too little of 256 for an answer"):
        generator(tiny_model, tmp_path, n_parallel=1, max_tokens=256)


def test_every_kind_of_prompt_is_answered_at_every_temperature(tiny_model, tmp_path):
    own = UserTexts(
        prompts=[TrainingPrompt("mine", "the of and", False), TrainingPrompt("mine", "is that it", True)]
    )
    asked = prompt_source(3, own)

    def short(i, passages):
        question = asked(i, passages)
        return (
            question if question.category == "mine" else TrainingPrompt(question.category, "to in is", False)
        )

    running = generator(tiny_model, tmp_path, short, n_parallel=16, max_tokens=4).run()
    next(progress for progress in running if progress.n_documents >= 400)
    running.close()
    found = {(d.category == SELF_GENERATED, d.temperature) for d in documents(tmp_path)}
    assert len(found) == 2 * 3


def test_a_deleted_shard_leaves_the_others_unchanged(tiny_model, tmp_path):
    produce(tiny_model, tmp_path, 500, shard_tokens=100)
    _, second, *_ = paths = sorted(tmp_path.glob("*.npz"))
    second.unlink()
    before = {path: path.read_bytes() for path in paths if path != second}
    produce(tiny_model, tmp_path, 800, shard_tokens=100)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(list(tmp_path.glob("*.npz"))) > len(before)


def test_finished_answers_are_saved_soon(tiny_model, tmp_path):
    running = generator(tiny_model, tmp_path, n_parallel=2, max_tokens=8, shard_seconds=0.0).run()
    n_shards = [next(running).n_shards for _ in range(30)]
    assert n_shards[0] == 0
    assert n_shards[-1] == len(list(tmp_path.glob("*.npz"))) > 1
    running.close()


@pytest.mark.parametrize("part", ["states", "top_ids", "top_logprobs"])
def test_an_interrupt_within_a_token_keeps_all_parts_aligned(
    tiny_model, make_context, tmp_path, monkeypatch, part
):
    class Interrupted(list):
        def append(self, row):
            super().append(row)
            if len(self) == 20:
                raise KeyboardInterrupt

    running = generator(tiny_model, tmp_path, n_parallel=2, max_tokens=40).run()
    next(running)
    sequence = next(o for o in gc.get_objects() if isinstance(o, generation._Sequence) and len(o.tokens) == 1)
    setattr(sequence, part, Interrupted(getattr(sequence, part)))
    with pytest.raises(KeyboardInterrupt):
        for _ in running:
            pass
    docs = documents(tmp_path)
    assert sorted(len(d.top_ids) for d in docs) == sorted(len(d.tokens) - d.n_prompt for d in docs)
    assert all(
        token in row for d in docs for token, row in zip(d.tokens[d.n_prompt :], d.top_ids, strict=True)
    )
    for doc in docs:
        check_states(make_context, tiny_model, doc)


def test_without_a_template_no_prompts_are_generated(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tiny_model), "chat_template", None)
    asked = itertools.cycle([TrainingPrompt("own", "", False), TrainingPrompt("x", "the of", False)])
    running = generator(tiny_model, tmp_path, lambda *_: next(asked), n_parallel=3, max_tokens=20).run()
    next(progress for progress in running if progress.n_documents >= 6)
    running.close()
    assert {d.category for d in documents(tmp_path)} == {"x"}


@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 4), st.integers(16, 1500)), elements=st.floats(-50, 50, width=32)
    )
)
def test_top_logprobs_match_a_full_sort(logits):
    ids, logprobs = top_logprobs(logits.copy(), 16)  # which is overwritten
    exact = logits.astype(float)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, -np.sort(-exact, axis=1)[:, :16], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(exact, ids.astype(int), axis=1), logprobs, atol=1e-4)
    assert all(len(set(row)) == 16 for row in ids.tolist())
