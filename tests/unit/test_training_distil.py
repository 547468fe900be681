"""Learning from a main that is a chain of Markov: that it gets there, that it goes on after a kill, and what it is told."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_local.errors import InvalidRequest
from spec_local.training import distil
from spec_local.training.corpus import Reader, build
from spec_local.training.cutting import from_scratch
from spec_local.training.distil import Plan, pace, train
from spec_local.training.model_shape import ModelShape
from spec_local.training.scoring import Guesses, figures, guesses
from spec_local.training.shards import TOP, Document

N_MAIN, N_KEPT = 24, 20
SHAPE = ModelShape(n_vocab=N_KEPT, n_embd=32, n_layers=1, n_head=2, n_head_kv=1, head_dim=16, n_ff=64)
PLAN = Plan(n_steps=60, n_tokens=400, rate=1e-2, warm_up=5, measure_every=20, patience=100)


def documents(n, seed):
    """Of a chain in which what follows depends on the two tokens before."""
    p = np.random.default_rng(0).dirichlet(np.full(N_MAIN, 0.05), (N_MAIN, 2))
    p = 0.98 * p + 0.02 / N_MAIN
    rng = np.random.default_rng(seed)
    for i in range(n):
        tokens = rng.integers(0, N_MAIN, 2).tolist()
        rows = []
        while len(tokens) < 30:
            rows.append(p[tokens[-1], tokens[-2] % 2])
            tokens.append(int(rng.choice(N_MAIN, p=rows[-1])))
        top = np.argsort(-np.array(rows), axis=1)[:, :TOP]
        logprobs = np.log(np.take_along_axis(np.array(rows), top, 1)).astype(np.float16)
        kind = ("even", "odd")[i % 2]
        yield Document(np.array(tokens, np.uint32), 2, kind, 1.0, False, top.astype(np.uint32), logprobs)


@pytest.fixture(scope="module")
def corpora():
    spellings = [(i,) for i in range(N_KEPT)] + [(0, 1), (2, 3), (1,), (5, 6, 7)]
    reader = Reader(spellings, np.arange(N_KEPT), N_KEPT)
    return build(documents(150, 1), reader), build(documents(30, 2), reader)


@pytest.fixture(autouse=True)
def one_thread():
    """The sums of several come in any order, and are not the same each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_draft_learns_what_main_thinks(corpora):
    learned, held_out = corpora
    best = (held_out.chances[:, 0] > 0).mean()  # of tokens that it does not know, it cannot guess any
    told = []
    plan = replace(PLAN, n_steps=150, measure_every=50)
    outcome = train(from_scratch(SHAPE), SHAPE, learned, held_out, plan, told=told.append)
    measured = [progress.measured for progress in told if progress.measured]
    assert len(measured) == 4  # before, and three times
    assert measured[0].all.agreement < 0.2
    assert outcome.measured.all.agreement > 0.75 * best
    assert outcome.measured.all.acceptance > measured[0].all.acceptance + 0.4
    assert told[-1].loss < told[5].loss - 0.5
    assert [progress.step for progress in told] == list(range(1, 151))
    assert told[-1].seconds_left == 0
    assert told[-1].n_tokens == outcome.n_tokens
    assert (outcome.weights.keys(), outcome.n_steps) == (from_scratch(SHAPE).keys(), 150)
    again = {name: torch.tensor(value) for name, value in outcome.weights.items()}
    assert figures(held_out, guesses(again, SHAPE, held_out)) == outcome.measured


class Killed(BaseException):
    pass


def killed_at(step):
    def told(progress):
        if progress.step == step:
            raise Killed

    return told


@pytest.mark.parametrize("steps", [[7], [20, 45], [59]])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(corpora, tmp_path, monkeypatch, steps):
    monkeypatch.setattr(distil, "_SAVE_EVERY", 0.0)
    start, path = from_scratch(SHAPE), tmp_path / "run.pt"
    whole = train(start, SHAPE, *corpora, PLAN)
    for step in steps:
        with pytest.raises(Killed):
            train(start, SHAPE, *corpora, PLAN, checkpoint=path, told=killed_at(step))
    rest = []
    outcome = train(start, SHAPE, *corpora, PLAN, checkpoint=path, told=rest.append)
    assert rest[0].step == steps[-1] + 1
    assert outcome.measured == whole.measured
    assert (outcome.step, outcome.n_steps, outcome.n_tokens) == (whole.step, whole.n_steps, whole.n_tokens)
    assert all((outcome.weights[name] == whole.weights[name]).all() for name in whole.weights)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_run_that_is_done_is_not_done_again(corpora, tmp_path):
    start, path, told = from_scratch(SHAPE), tmp_path / "run.pt", []
    plan = replace(PLAN, n_steps=5)
    first = train(start, SHAPE, *corpora, plan, checkpoint=path)
    second = train(start, SHAPE, *corpora, plan, checkpoint=path, told=told.append)
    assert told == []
    assert second.measured == first.measured


def test_another_runs_checkpoint_is_refused(corpora, tmp_path):
    start, path = from_scratch(SHAPE), tmp_path / "run.pt"
    learned, held_out = corpora
    plan = replace(PLAN, n_steps=2)
    train(start, SHAPE, learned, held_out, plan, checkpoint=path)
    for change in (
        (from_scratch(SHAPE, 1), learned, held_out, plan),
        (start, held_out, held_out, plan),
        (start, learned, learned, plan),
        (start, learned, held_out, replace(plan, rate=1e-4)),
    ):
        with pytest.raises(InvalidRequest, match=r"run\.pt is of a run with other texts or settings"):
            train(change[0], SHAPE, *change[1:], checkpoint=path)


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half"])
def test_a_damaged_checkpoint_is_said_to_be_one(corpora, tmp_path, damage):
    path = tmp_path / "run.pt"
    plan = replace(PLAN, n_steps=1)
    train(from_scratch(SHAPE), SHAPE, *corpora, plan, checkpoint=path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "half" else damage)
    with pytest.raises(InvalidRequest, match=r"run\.pt is damaged: delete it"):
        train(from_scratch(SHAPE), SHAPE, *corpora, plan, checkpoint=path)


def test_a_draft_that_gets_no_better_ends_early(corpora):
    plan = Plan(n_steps=100, n_tokens=400, rate=0.0, measure_every=5, patience=2, fall=0.5)
    told = []
    outcome = train(from_scratch(SHAPE), SHAPE, *corpora, plan, told=told.append)
    assert (outcome.n_steps, outcome.step) == (
        20,
        0,
    )  # two measurements without a gain, and as many steps of fall
    assert told[-1].n_steps == 20


def test_the_best_weights_are_kept(corpora):
    """A rate that tears everything down: the weights that were measured first are the best."""
    learned, held_out = corpora
    good = train(from_scratch(SHAPE), SHAPE, learned, held_out, PLAN).weights
    outcome = train(good, SHAPE, learned, held_out, Plan(n_steps=20, n_tokens=400, rate=1.0, warm_up=1))
    assert outcome.step == 0
    assert all((outcome.weights[name] == good[name]).all() for name in good)


def test_the_rate_rises_stays_and_falls():
    rates = [distil._share(step, 10, 70, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:71] == [1.0] * 61
    assert (np.diff(rates[70:]) < 0).all()
    assert rates[-1] == pytest.approx(1 - math.sqrt(29 / 30))


def test_what_pytorch_cannot_use_is_refused(corpora):
    with pytest.raises(InvalidRequest, match=r"PyTorch cannot use 'abacus' here .*--device cpu"):
        train(from_scratch(SHAPE), SHAPE, *corpora, PLAN, device="abacus")
    with pytest.raises(InvalidRequest, match="--device cpu"):
        train(from_scratch(SHAPE), SHAPE, *corpora, PLAN, device="mps" if os.name != "posix" else "cuda:99")


def test_the_pace_is_told_beforehand(corpora):
    start = from_scratch(SHAPE)
    before = {name: value.copy() for name, value in start.items()}
    assert 1 < pace(start, SHAPE, corpora[0], PLAN, seconds=0.2) < 1e4
    assert all((start[name] == before[name]).all() for name in start)


def test_figures_are_means_of_the_guesses(corpora):
    _, held_out = corpora
    n = len(held_out.places)
    position = np.arange(n) % 28  # each answer has 28 tokens
    odd = np.arange(n) // 28 % 2 == 1
    agrees = (position < 8) | odd
    made = Guesses(
        agrees, np.where(odd, 0.75, 0.25).astype(np.float32), np.where(odd, 0.95, 0.4).astype(np.float32)
    )
    found = figures(held_out, made)
    assert (found.all.n, found.all.acceptance) == (n, 0.5)
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
    assert found.sure == {
        0.3: (n, pytest.approx(agrees.mean())),
        0.5: (n // 2, 1.0),
        0.7: (n // 2, 1.0),
        0.9: (n // 2, 1.0),
    }


def test_a_guess_agrees_where_the_best_tokens_are_one(corpora):
    """Against logits that are computed one text at a time."""
    _, held_out = corpora
    weights = {name: torch.tensor(value) for name, value in from_scratch(SHAPE, 5).items()}
    made = guesses(weights, SHAPE, held_out)
    from spec_local.training import network

    for text in (0, 7):
        ids = torch.tensor(held_out.ids[held_out.starts[text] : held_out.starts[text + 1]].astype(np.int64))
        logits = network.states(weights, SHAPE, ids[None])[0] @ weights["token_embd.weight"].T
        for number in range(held_out.first[text], held_out.first[text + 1]):
            q = torch.softmax(logits[held_out.places[number] - held_out.starts[text]], -1).numpy()
            known = held_out.chances[number] > 0
            overlap = sum(
                min(float(p), q[token])
                for token, p in zip(held_out.top[number][known], held_out.chances[number][known], strict=True)
            )
            assert made.overlap[number] == pytest.approx(overlap, abs=1e-5)
            assert made.confidence[number] == pytest.approx(q.max(), abs=1e-5)
            assert made.agrees[number] == (known[0] and q.argmax() == held_out.top[number, 0])
