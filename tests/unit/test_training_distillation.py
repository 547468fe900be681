"""Training on the output of a Markov chain: convergence, resuming from checkpoints, and evaluation."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_local.errors import InvalidRequest
from spec_local.training import distillation, network
from spec_local.training.corpus import TokenMap, build
from spec_local.training.distillation import Hyperparameters, steps_per_second, train
from spec_local.training.evaluation import Predictions, predict, summarize
from spec_local.training.initial_weights import random_weights
from spec_local.training.model_shape import ModelShape
from spec_local.training.shards import TOP_K, Document

N_MAIN, N_KEPT = 24, 20
SHAPE = ModelShape(n_vocab=N_KEPT, n_embd=32, n_layers=1, n_head=2, n_head_kv=1, head_dim=16, n_ff=64)
HYPERPARAMETERS = Hyperparameters(
    n_steps=30, batch_tokens=400, learning_rate=1e-2, warmup_steps=5, eval_every=10, patience=100
)


def documents(n, seed):
    """Documents from a chain in which the next token depends on the last two."""
    p = np.random.default_rng(0).dirichlet(np.full(N_MAIN, 0.05), (N_MAIN, 2))
    p = 0.98 * p + 0.02 / N_MAIN
    rng = np.random.default_rng(seed)
    for i in range(n):
        tokens = rng.integers(0, N_MAIN, 2).tolist()
        rows = []
        while len(tokens) < 30:
            rows.append(p[tokens[-1], tokens[-2] % 2])
            tokens.append(int(rng.choice(N_MAIN, p=rows[-1])))
        top = np.argsort(-np.array(rows), axis=1)[:, :TOP_K]
        logprobs = np.log(np.take_along_axis(np.array(rows), top, 1)).astype(np.float16)
        kind = ("even", "odd")[i % 2]
        yield Document(np.array(tokens, np.uint32), 2, kind, 1.0, False, top.astype(np.uint32), logprobs)


@pytest.fixture(scope="module")
def corpora():
    spellings = [(i,) for i in range(N_KEPT)] + [(0, 1), (2, 3), (1,), (5, 6, 7)]
    token_map = TokenMap(spellings, np.arange(N_KEPT), N_KEPT)
    return build(documents(150, 1), token_map), build(documents(30, 2), token_map)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """With several threads, sums vary with the order of the addends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_training_converges_to_the_main_models_distribution(corpora):
    corpus, held_out = corpora
    best = (held_out.top_probs[:, 0] > 0).mean()  # tokens that the draft lacks cannot be predicted
    seen = []
    hyperparameters = replace(HYPERPARAMETERS, n_steps=150, eval_every=50)
    outcome = train(random_weights(SHAPE), SHAPE, corpus, held_out, hyperparameters, on_progress=seen.append)
    evaluations = [progress.evaluation for progress in seen if progress.evaluation]
    assert len(evaluations) == 4  # of the initial weights, and three more
    assert evaluations[0].overall.agreement < 0.2
    assert outcome.evaluation.overall.agreement > 0.75 * best
    assert outcome.evaluation.overall.acceptance > evaluations[0].overall.acceptance + 0.4
    assert seen[-1].loss < seen[5].loss - 0.5
    assert [progress.step for progress in seen] == list(range(1, 151))
    assert seen[-1].seconds_left == 0
    assert seen[-1].n_tokens == outcome.n_tokens
    assert (outcome.weights.keys(), outcome.n_steps) == (random_weights(SHAPE).keys(), 150)
    again = {name: torch.tensor(value) for name, value in outcome.weights.items()}
    assert summarize(held_out, predict(again, SHAPE, held_out)) == outcome.evaluation


class Killed(BaseException):
    pass


def killed_at(step):
    def on_progress(progress):
        if progress.step == step:
            raise Killed

    return on_progress


@pytest.fixture(scope="module")
def whole(corpora):
    """The result of a run that was not killed."""
    return train(random_weights(SHAPE), SHAPE, *corpora, HYPERPARAMETERS)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[7], [10, 22], [29]])
def test_a_killed_run_resumes_with_identical_results(corpora, whole, tmp_path, monkeypatch, steps):
    monkeypatch.setattr(distillation, "_SAVE_EVERY", 0.0)
    start, path = random_weights(SHAPE), tmp_path / "run.pt"
    for step in steps:
        with pytest.raises(Killed):
            train(start, SHAPE, *corpora, HYPERPARAMETERS, checkpoint=path, on_progress=killed_at(step))
    rest = []
    outcome = train(start, SHAPE, *corpora, HYPERPARAMETERS, checkpoint=path, on_progress=rest.append)
    assert rest[0].step == steps[-1] + 1
    assert outcome.evaluation == whole.evaluation
    assert (outcome.step, outcome.n_steps, outcome.n_tokens) == (whole.step, whole.n_steps, whole.n_tokens)
    assert all((outcome.weights[name] == whole.weights[name]).all() for name in whole.weights)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_finished_run_is_not_repeated(corpora, tmp_path):
    start, path, seen = random_weights(SHAPE), tmp_path / "run.pt", []
    hyperparameters = replace(HYPERPARAMETERS, n_steps=5)
    first = train(start, SHAPE, *corpora, hyperparameters, checkpoint=path)
    second = train(start, SHAPE, *corpora, hyperparameters, checkpoint=path, on_progress=seen.append)
    assert seen == []
    assert second.evaluation == first.evaluation


def test_the_checkpoint_of_another_run_is_refused(corpora, tmp_path):
    start, path = random_weights(SHAPE), tmp_path / "run.pt"
    corpus, held_out = corpora
    hyperparameters = replace(HYPERPARAMETERS, n_steps=2)
    train(start, SHAPE, corpus, held_out, hyperparameters, checkpoint=path)
    for change in (
        (random_weights(SHAPE, 1), corpus, held_out, hyperparameters),
        (start, held_out, held_out, hyperparameters),
        (start, corpus, corpus, hyperparameters),
        (start, corpus, held_out, replace(hyperparameters, learning_rate=1e-4)),
    ):
        with pytest.raises(InvalidRequest, match=r"run\.pt is from a run with other data or settings"):
            train(change[0], SHAPE, *change[1:], checkpoint=path)


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half"])
def test_a_damaged_checkpoint_is_refused(corpora, tmp_path, damage):
    path = tmp_path / "run.pt"
    hyperparameters = replace(HYPERPARAMETERS, n_steps=1)
    train(random_weights(SHAPE), SHAPE, *corpora, hyperparameters, checkpoint=path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "half" else damage)
    with pytest.raises(InvalidRequest, match=r"run\.pt is damaged: delete it"):
        train(random_weights(SHAPE), SHAPE, *corpora, hyperparameters, checkpoint=path)


def test_training_ends_early_without_improvement(corpora):
    hyperparameters = Hyperparameters(
        n_steps=100, batch_tokens=400, learning_rate=0.0, eval_every=5, patience=2, decay_share=0.5
    )
    seen = []
    outcome = train(random_weights(SHAPE), SHAPE, *corpora, hyperparameters, on_progress=seen.append)
    assert (outcome.n_steps, outcome.step) == (
        20,
        0,
    )  # two evaluations without an improvement, and as many steps of decay
    assert seen[-1].n_steps == 20


def test_the_best_weights_are_kept(corpora, whole):
    """The learning rate is so high that the initial weights remain the best."""
    corpus, held_out = corpora
    good = whole.weights
    outcome = train(
        good,
        SHAPE,
        corpus,
        held_out,
        Hyperparameters(n_steps=20, batch_tokens=400, learning_rate=1.0, warmup_steps=1),
    )
    assert outcome.step == 0
    assert all((outcome.weights[name] == good[name]).all() for name in good)


def test_the_learning_rate_warms_up_stays_and_decays():
    rates = [distillation._rate_factor(step, 10, 70, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:71] == [1.0] * 61
    assert (np.diff(rates[70:]) < 0).all()
    assert rates[-1] == pytest.approx(1 - math.sqrt(29 / 30))


def test_an_unavailable_device_is_refused(corpora):
    with pytest.raises(InvalidRequest, match=r"PyTorch cannot use 'abacus' here .*--device cpu"):
        train(random_weights(SHAPE), SHAPE, *corpora, HYPERPARAMETERS, device="abacus")
    with pytest.raises(InvalidRequest, match="--device cpu"):
        train(
            random_weights(SHAPE),
            SHAPE,
            *corpora,
            HYPERPARAMETERS,
            device="mps" if os.name != "posix" else "cuda:99",
        )


def test_training_speed_is_measured_without_changing_the_weights(corpora):
    start = random_weights(SHAPE)
    before = {name: value.copy() for name, value in start.items()}
    assert 1 < steps_per_second(start, SHAPE, corpora[0], HYPERPARAMETERS, seconds=0.2) < 1e4
    assert all((start[name] == before[name]).all() for name in start)


def test_evaluations_are_means_of_predictions(corpora):
    _, held_out = corpora
    n = len(held_out.positions)
    position = np.arange(n) % 28  # each answer has 28 tokens
    odd = np.arange(n) // 28 % 2 == 1
    agrees = (position < 8) | odd
    made = Predictions(
        agrees, np.where(odd, 0.75, 0.25).astype(np.float32), np.where(odd, 0.95, 0.4).astype(np.float32)
    )
    found = summarize(held_out, made)
    assert (found.overall.n, found.overall.acceptance) == (n, 0.5)
    assert found.by_category["odd"].agreement == 1
    assert found.by_category["even"].agreement == pytest.approx(8 / 28)
    assert found.by_category["even"].n == n // 2
    assert {start: score.n for start, score in found.by_position.items()} == {
        0: n * 8 // 28,
        8: n * 8 // 28,
        16: n * 12 // 28,
    }
    assert found.by_position[0].agreement == 1
    assert found.by_position[16].agreement == 0.5
    assert found.by_confidence == {
        0.3: (n, pytest.approx(agrees.mean())),
        0.5: (n // 2, 1.0),
        0.7: (n // 2, 1.0),
        0.9: (n // 2, 1.0),
    }


def test_predictions_match_logits_computed_one_text_at_a_time(corpora):
    _, held_out = corpora
    weights = {name: torch.tensor(value) for name, value in random_weights(SHAPE, 5).items()}
    made = predict(weights, SHAPE, held_out)
    for text in (0, 7):
        ids = torch.tensor(
            held_out.ids[held_out.text_starts[text] : held_out.text_starts[text + 1]].astype(np.int64)
        )
        logits = network.hidden_states(weights, SHAPE, ids[None])[0] @ weights["token_embd.weight"].T
        for number in range(held_out.first_targets[text], held_out.first_targets[text + 1]):
            q = torch.softmax(logits[held_out.positions[number] - held_out.text_starts[text]], -1).numpy()
            known = held_out.top_probs[number] > 0
            overlap = sum(
                min(float(p), q[token])
                for token, p in zip(
                    held_out.top_ids[number][known], held_out.top_probs[number][known], strict=True
                )
            )
            assert made.overlap[number] == pytest.approx(overlap, abs=1e-5)
            assert made.confidence[number] == pytest.approx(q.max(), abs=1e-5)
            assert made.agrees[number] == (known[0] and q.argmax() == held_out.top_ids[number, 0])
