"""The user's answers and those to the built-in prompts, read by the main model for training."""

import shutil

import numpy as np
import pytest

from spec_local.bench import prompts as bench_prompts
from spec_local.datastore.answer_store import KeptAnswer
from spec_local.errors import InvalidRequest
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import shards
from spec_local.training.material import answers_to_built_in
from spec_local.training.own_answers import answer_again, read_again, usable
from spec_local.training.recipe import RunLimits
from tests.llama.test_training_generation import check_candidates, check_states

LAYERS = (0, 2, 1)
SHORT = RunLimits(own_shard=60, answer=8)  # a shard for two answers


def answer(number, n_prompt=20, n=12, seed=None):
    tokens = np.random.default_rng(number if seed is None else seed).integers(3, 400, n_prompt + n)
    return KeptAnswer(number, 0.0, 0.5 * (number % 2), n_prompt, tokens.astype(np.int32))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(write_tiny_model(tmp_path_factory.mktemp("model") / "deep.gguf", n_layers=4))


def read(answers, model, folder, **options):
    folder.mkdir(exist_ok=True)
    return read_again(answers, model, folder, layers=LAYERS, threads=1, **options)


def test_answers_are_read_as_the_main_model_reads_them(model, make_context, tmp_path):
    answers = [answer(1), answer(4, 1, 30), answer(5, 200, 90), answer(9, 64, 64)]
    documents = read(answers, model, tmp_path / "own")
    for kept, document in zip(answers, documents, strict=True):
        assert document.tokens.tolist() == kept.tokens.tolist()
        assert (document.n_prompt, document.temperature) == (kept.n_prompt, kept.temperature)
        assert document.category == "your answers"
        check_states(make_context, model, document, LAYERS)
        check_candidates(make_context, model, document)


def test_the_states_of_long_prompts_are_cut_but_all_of_it_is_read(model, tmp_path):
    """Also where the beginning is in the cache, from the answer before."""
    answers = [answer(i, 150, 20, seed=7) for i in (1, 2)]
    whole = read(answers[:1], model, tmp_path / "whole")[0]
    for cut in read(answers, model, tmp_path / "cut", limits=RunLimits(own_prompt=30, own_answer=15)):
        assert cut.n_prompt == 30
        assert cut.tokens.tolist() == whole.tokens[120:165].tolist()
        assert cut.states.shape == whole.states[120:164].shape
        near = np.abs(cut.states.astype(int) - whole.states[120:164]) <= 4  # of bfloat16's last bits
        assert near.mean() > 0.99
        np.testing.assert_allclose(cut.top_logprobs, whole.top_logprobs[:15], atol=0.1)


def test_the_last_tenth_is_held_out(model, tmp_path):
    documents = read([answer(i) for i in range(1, 26)], model, tmp_path / "own")
    assert [document.held_out for document in documents] == [False] * 23 + [True] * 2


class Killed(BaseException):
    pass


def test_a_killed_run_reads_little_again(model, tmp_path):
    answers, seen = [answer(i) for i in range(1, 8)], []

    def kill(done, total):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        read(answers, model, tmp_path / "own", limits=SHORT, on_progress=kill)
    documents = read(
        answers, model, tmp_path / "own", limits=SHORT, on_progress=lambda *each: seen.append(each)
    )
    assert seen == [(4, 7), (5, 7), (6, 7)]
    assert [d.tokens.tolist() for d in documents] == [a.tokens.tolist() for a in answers]
    # An answer is no longer kept: what was read of it must not remain.
    documents = read(answers[1:], model, tmp_path / "own")
    assert [d.tokens.tolist() for d in documents] == [a.tokens.tolist() for a in answers[1:]]
    (tmp_path / "own" / "00001.npz").write_bytes(b"damaged")
    assert len(read(answers, model, tmp_path / "own")) == 7


def again(answers, model, folder, seconds=60.0, **options):
    return answer_again(answers, model, folder, layers=LAYERS, seconds=seconds, seed=5, threads=1, **options)


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("work", [read, again])
def test_nothing_is_written_once_the_folder_is_gone(model, tmp_path, work, at):
    """Clearing the answers deletes it, wherever a training is."""
    (tmp_path / "own").mkdir()
    answers, calls = [answer(i) for i in range(1, 8)], iter(range(1000))

    def delete(done, total):
        if next(calls) == at:
            shutil.rmtree(tmp_path / "own")

    with pytest.raises(FileNotFoundError):
        work(answers, model, tmp_path / "own", limits=SHORT, on_progress=delete)
    assert list(tmp_path.iterdir()) == []
    more = {"seconds": 60.0, "seed": 5} if work is again else {}
    write = answer_again if work is again else read_again
    with pytest.raises(FileNotFoundError):
        write(answers, model, tmp_path / "own" / "further", layers=LAYERS, threads=1, **more)
    assert list(tmp_path.iterdir()) == []


def test_the_same_prompts_are_answered_again(model, make_context, tmp_path):
    limits = RunLimits(own_prompt=60, answer=8)
    answers, seen = [answer(1), answer(2, 61), answer(5, 60)], []
    documents = again(
        answers, model, tmp_path / "again", limits=limits, on_progress=lambda *each: seen.append(each)
    )
    expected = sorted([answers[i].tokens[: answers[i].n_prompt].tolist() for i in (0, 2)] * 3)
    assert sorted(d.tokens[: d.n_prompt].tolist() for d in documents) == expected  # 61 tokens are too many
    assert seen[-1] == (6, 6)
    assert all(d.category == "your answers" and not d.held_out and d.temperature > 0 for d in documents)
    assert len({tuple(d.tokens.tolist()) for d in documents}) > 4  # not the same answer each time
    for document in documents:
        assert 0 < len(document.top_ids) <= 8
        check_states(make_context, model, document, LAYERS)
        check_candidates(make_context, model, document)
    # A run that is resumed keeps them, also where others were generated in the same time.
    answers += [answer(7)]
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()}
    assert len(again(answers, model, tmp_path / "again")) == len(documents)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()} == before
    assert again(answers[1:2], model, tmp_path / "none", limits=limits) == []


def test_answering_again_ends_in_time_with_the_latest_prompts(model, tmp_path):
    answers, ends = [answer(i) for i in range(1, 31)], iter([0, *range(900, 960), 1000])
    # The first call takes 900 s, as the process was suspended, and each of the others one.
    limits = RunLimits(n_parallel=4, answer=24)
    documents = again(answers, model, tmp_path / "again", limits=limits, clock=lambda: next(ends))
    assert list(ends) == [*range(931, 960), 1000]
    latest = [each.tokens[:20].tolist() for each in answers[-12:]]
    assert documents
    assert all(document.tokens[:20].tolist() in latest for document in documents)


def test_the_latest_answers_are_used():
    short, long, empty = answer(50, 5, 3), answer(51, 9000, 10), answer(52, 0, 40)
    answers = [*(answer(i) for i in range(1, 31)), short, long, empty]
    assert [each.number for each in usable(answers)] == list(range(1, 31))
    assert [each.number for each in usable(answers, RunLimits(own=20 * 32 + 10))] == list(range(11, 31))
    with pytest.raises(InvalidRequest, match="9 answers of this model are kept, too few to learn from"):
        usable([answer(i) for i in range(9)])


def test_the_built_in_prompts_are_answered_once(model, tmp_path):
    questions = [bench_prompts.Prompt("a", "1", "the of"), bench_prompts.Prompt("b", "2", "and to in is")]
    options = {"layers": LAYERS, "threads": 1, "questions": questions, "max_tokens": 5}
    seen = []
    folder = tmp_path / "built-in"
    documents = answers_to_built_in(model, folder, on_progress=lambda *each: seen.append(each), **options)
    assert sorted(d.category for d in documents) == ["a", "b"]
    assert {d.temperature for d in documents} == {0.0}
    assert all(d.held_out and len(d.top_ids) <= 5 for d in documents)
    assert seen[-1] == (2, 2)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = answers_to_built_in(model, folder, **options)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [d.tokens.tolist() for d in again] == [d.tokens.tolist() for d in documents]
    (folder / "complete").unlink()  # as after a kill
    assert len(answers_to_built_in(model, folder, **options)) == 2
    assert len(list(shards.read(folder))) == 1
