"""Training on the output of a Markov chain: convergence, resuming from checkpoints, the best weights."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_local.errors import InvalidRequest
from spec_local.training import shards
from spec_local.training.dataset import Dataset
from spec_local.training.distillation import Hyperparameters, TrainingRun, steps_per_second, train
from spec_local.training.evaluation import Evaluation, Score
from spec_local.training.head_shape import HeadShape, tensor_shapes
from spec_local.training.main_weights import MainWeights
from spec_local.training.shards import Shard
from tests.training_data import EMBEDDINGS, N_VOCAB, OUTPUT, WIDTH, chain

N_DRAFTED = 20
SHAPE = HeadShape(n_embd=WIDTH, n_head=2, head_dim=8, n_ff=48)
HYPERPARAMETERS = Hyperparameters(
    n_steps=20, batch_tokens=400, learning_rate=1e-2, warmup_steps=5, eval_every=10, patience=100
)


def random_weights(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else rng.normal(0, size[1] ** -0.5, size).astype(np.float32)
        for name, size in tensor_shapes(SHAPE).items()
    }


def data_of(folder, n, seed, n_drafted=N_DRAFTED):
    shards.write(folder, 0, Shard(list(chain(n, seed)), n))
    data = Dataset(folder, N_VOCAB, (n_drafted,))
    return data, MainWeights(EMBEDDINGS, OUTPUT[data.drafted], np.ones(WIDTH, np.float32))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of(tmp_path_factory.mktemp("data"), 200, 1)


def run(data, hyperparameters=HYPERPARAMETERS, start=None, device="cpu", **options):
    dataset, main = data
    start = start or random_weights()
    return train(TrainingRun(start, SHAPE, main, dataset, hyperparameters, device=device), **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """With several threads, sums vary with the order of the addends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_training_converges_to_the_main_models_distribution(data):
    """The state shows the coin in time for the first draft token, which only that one can know."""
    dataset, _ = data
    seen = []
    hyperparameters = replace(HYPERPARAMETERS, n_steps=100, eval_every=50, learning_rate=2e-2)
    result = run(data, hyperparameters, on_progress=seen.append)
    evaluations = [progress.evaluation for progress in seen if progress.evaluation]
    assert len(evaluations) == 3  # of the initial weights, and two more
    assert evaluations[0].overall.agreement < 0.2
    first, second, third = result.evaluation.chain
    assert first > 0.85 * dataset.coverage
    assert result.evaluation.overall.agreement == pytest.approx(first, abs=0.05)
    assert result.evaluation.overall.acceptance > evaluations[0].overall.acceptance + 0.4
    for later in (second, third):
        assert 0.35 < later < 0.65
    assert seen[-1].loss < seen[5].loss - 0.5
    assert [progress.step for progress in seen] == list(range(1, 101))
    assert seen[-1].seconds_left == 0
    assert (seen[-1].n_tokens, seen[-1].best_agreement) == (
        result.n_tokens,
        max(evaluation.overall.agreement for evaluation in evaluations),
    )
    assert (result.weights.keys(), result.n_steps) == (random_weights().keys(), 100)


def test_the_first_loss_is_the_cross_entropy_of_renormalized_candidates(data):
    """Of weights that make every token equally likely."""
    dataset, main = data
    start = random_weights()
    start["output_norm.weight"][:] = 0
    seen = []
    run(data, replace(HYPERPARAMETERS, n_steps=1), start=start, on_progress=seen.append)
    assert dataset.coverage > 0.5
    # All candidates of a position weigh 1 together, or nothing if none can be drafted.
    assert seen[0].loss == pytest.approx(math.log(len(main.output)), rel=0.05)


class Killed(BaseException):
    pass


def killed_at(step):
    def on_progress(progress):
        if progress.step == step:
            raise Killed

    return on_progress


@pytest.fixture(scope="module")
def whole(data):
    """The result of a run that was not killed."""
    return run(data)


@pytest.mark.slow
def test_a_killed_run_resumes_with_identical_results(data, whole, tmp_path):
    path = tmp_path / "run.pt"
    for step in (10, 17):
        with pytest.raises(Killed):
            run(data, checkpoint=path, save_every=0.0, on_progress=killed_at(step))
    rest = []
    result = run(data, checkpoint=path, on_progress=rest.append)
    assert rest[0].step == 18
    assert result.evaluation == whole.evaluation
    assert (result.step, result.n_steps, result.n_tokens) == (whole.step, whole.n_steps, whole.n_tokens)
    assert all((result.weights[name] == whole.weights[name]).all() for name in whole.weights)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_finished_run_is_not_repeated(data, tmp_path):
    path, seen = tmp_path / "run.pt", []
    hyperparameters = replace(HYPERPARAMETERS, n_steps=5)
    first = run(data, hyperparameters, checkpoint=path)
    second = run(data, hyperparameters, checkpoint=path, on_progress=seen.append)
    assert seen == []
    assert second.evaluation == first.evaluation


def test_the_checkpoint_of_another_run_is_refused(data, tmp_path):
    path = tmp_path / "run.pt"
    hyperparameters = replace(HYPERPARAMETERS, n_steps=2)
    run(data, hyperparameters, checkpoint=path)
    (tmp_path / "other").mkdir()
    (tmp_path / "fewer").mkdir()
    for other, settings, start in (
        (data, hyperparameters, random_weights(1)),
        (data_of(tmp_path / "other", 200, 2), hyperparameters, None),
        (data_of(tmp_path / "fewer", 200, 1, N_DRAFTED - 1), hyperparameters, None),
        (data, replace(hyperparameters, learning_rate=1e-4), None),
    ):
        with pytest.raises(InvalidRequest, match=r"run\.pt is from a run with other data or settings"):
            run(other, settings, start, checkpoint=path)


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half"])
def test_a_damaged_checkpoint_is_refused(data, tmp_path, damage):
    path = tmp_path / "run.pt"
    hyperparameters = replace(HYPERPARAMETERS, n_steps=1)
    run(data, hyperparameters, checkpoint=path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "half" else damage)
    with pytest.raises(InvalidRequest, match=r"run\.pt is damaged: delete it"):
        run(data, hyperparameters, checkpoint=path)


def test_training_ends_early_without_improvement(data):
    hyperparameters = Hyperparameters(
        n_steps=100, batch_tokens=400, learning_rate=0.0, eval_every=5, patience=2, decay_share=0.5
    )
    seen = []
    result = run(data, hyperparameters, on_progress=seen.append)
    # The first evaluation after an epoch, of 13 steps, is the third without an improvement; then the decay.
    assert (result.n_steps, result.step) == (30, 0)
    assert seen[-1].n_steps == 30


def test_the_best_weights_are_kept(data, whole):
    """The learning rate is so high that the initial weights remain the best."""
    bad = Hyperparameters(n_steps=20, batch_tokens=400, learning_rate=1.0, warmup_steps=1)
    result = run(data, bad, whole.weights)
    assert result.step == 0
    assert all((result.weights[name] == whole.weights[name]).all() for name in whole.weights)
    assert result.evaluation == whole.evaluation


def test_training_speed_is_measured_without_changing_the_weights(data):
    dataset, main = data
    start = random_weights()
    before = {name: value.copy() for name, value in start.items()}
    assert 1 < steps_per_second(TrainingRun(start, SHAPE, main, dataset, HYPERPARAMETERS), seconds=0.2) < 1e4
    assert all((start[name] == before[name]).all() for name in start)


def test_the_users_answers_count_unless_others_suffer(data):
    """Evaluations whose agreement on the user's answers and on others is made up."""
    dataset, main = data
    rates = [(0.5, 0.5), (0.7, 0.485), (0.6, 0.495), (0.55, 0.9)]  # at the start, and after each step
    made_up = iter(rates)

    def evaluate(*_):
        own, others = next(made_up)
        both = Score(400, 0.25 * own + 0.75 * others, 0.0)
        return Evaluation(both, {"your answers": Score(100, own, 0.0), "other": Score(300, others, 0.0)}, [])

    training = TrainingRun(random_weights(), SHAPE, main, dataset, HYPERPARAMETERS, evaluate=evaluate)
    scores = []
    for step in range(len(rates)):
        training.evaluate()
        scores.append((training.state.best, training.state.best_step))
        training.state.step = step + 1
    assert scores == [(0.5, 0), (0.5, 0), (0.6, 2), (0.6, 2)]


def test_weights_between_the_first_and_the_last_ones_are_tried(data):
    """Where only half of the way is not too far: made-up agreement on others, which falls with the way."""
    dataset, main = data
    start = random_weights()
    name = "fc.weight"
    ways = []

    def evaluate(*_):
        weights = training.parameters[name].detach()
        way = float((weights - torch.from_numpy(start[name])).norm() / max(whole, 1e-9))
        ways.append(way)
        own, others = 0.5 + 0.2 * way, 0.5 - 0.018 * way
        both = Score(400, 0.25 * own + 0.75 * others, 0.0)
        return Evaluation(both, {"your answers": Score(100, own, 0.0), "other": Score(300, others, 0.0)}, [])

    short = replace(HYPERPARAMETERS, n_steps=3, eval_every=3)
    training = TrainingRun(start, SHAPE, main, dataset, short, evaluate=evaluate)
    whole = 1e9
    training.evaluate()
    for _ in range(3):
        training.step()
    last = training.parameters[name].detach().clone()
    whole = float((last - torch.from_numpy(start[name])).norm())
    training.evaluate()
    assert training.state.best == 0.5  # all of the way is too far
    training.interpolate()
    assert ways[2:] == pytest.approx([0.8, 0.65, 0.5], abs=1e-3)
    assert training.state.best == pytest.approx(0.6, abs=1e-3)
    way = (training.best[name] - torch.from_numpy(start[name])).norm() / whole
    assert float(way) == pytest.approx(0.5, abs=1e-3)
    assert (training.parameters[name] == last).all()
