"""The evaluation of a head, against plain counts of one document at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_local import bfloat16
from spec_local.training import shards
from spec_local.training.dataset import Dataset
from spec_local.training.evaluation import DEPTH, evaluate
from spec_local.training.head_shape import HeadShape, tensor_shapes
from spec_local.training.network import draft_states
from spec_local.training.shards import Shard
from tests.training_data import EMBEDDINGS, N_VOCAB, OUTPUT, WIDTH, chain, document

SHAPE = HeadShape(n_embd=WIDTH, n_head=2, head_dim=8, n_ff=48)
N_DRAFTED = 18


@pytest.fixture(scope="module")
def parameters():
    rng = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=rng) * size[1] ** -0.5
        for name, size in tensor_shapes(SHAPE).items()
    }


def logits_of(parameters, each, output):
    """Of each depth, after each token; computed for this document alone."""
    states = np.zeros((len(each.tokens), 3 * WIDTH), np.float32)
    states[1:] = bfloat16.decode(each.states)
    embeddings = bfloat16.decode(EMBEDDINGS)[each.tokens.astype(int)]
    found = draft_states(parameters, SHAPE, torch.tensor(states[None]), torch.tensor(embeddings[None]), DEPTH)
    return [(state[0] @ output.T).numpy() for state in found]


@pytest.fixture(scope="module")
def dataset(parameters, tmp_path_factory):
    """Documents of different lengths whose best candidates are often what the head predicts."""
    folder = tmp_path_factory.mktemp("data")
    shards.write(folder, 0, Shard(list(chain(60, 1)), 1))
    drafted = Dataset(folder, N_VOCAB, (N_DRAFTED,)).drafted
    output = torch.tensor(OUTPUT[drafted])
    rng = np.random.default_rng(3)
    documents = []
    for each in next(iter(shards.read(folder))).documents:
        n = int(rng.integers(each.n_prompt + 1, len(each.tokens) + 1))
        short = replace(
            each,
            tokens=each.tokens[:n],
            states=each.states[: n - 1],
            top_ids=each.top_ids[: n - each.n_prompt].copy(),
            top_logprobs=each.top_logprobs[: n - each.n_prompt],
            held_out=each.held_out or bool(rng.integers(0, 2)),
        )
        # Depth by depth, so that some second and third draft tokens are right, too.
        for depth, logits in enumerate(logits_of(parameters, short, output)):
            best = drafted[logits.argmax(1)][each.n_prompt - 1 : n - 1]
            copied = rng.random(len(best)) < (0.5, 0.4, 0.4)[depth]
            short.top_ids[copied, 0] = best[copied]
        documents.append(short)
    shards.write(folder, 0, Shard(documents, 1))
    return Dataset(folder, N_VOCAB, (N_DRAFTED,))


def test_scores_and_chains_are_plain_counts(parameters, dataset):
    output = torch.tensor(OUTPUT[dataset.drafted])
    embeddings = torch.tensor(bfloat16.decode(EMBEDDINGS))
    found = evaluate(parameters, SHAPE, output, embeddings, dataset, dataset.held_out, 200)

    hits, overlaps, kinds = [], [], []
    tested, accepted = [0] * DEPTH, [0] * DEPTH
    for each in dataset.held_out:
        logits = logits_of(parameters, each, output)
        for i in range(each.n_prompt - 1, len(each.tokens) - 1):
            row = i - each.n_prompt + 1
            kinds.append(each.category)
            hits.append(dataset.drafted[logits[0][i].argmax()] == each.top_ids[row, 0])
            q = dict(
                zip(
                    dataset.drafted.tolist(),
                    torch.softmax(torch.tensor(logits[0][i]), 0).tolist(),
                    strict=True,
                )
            )
            p = zip(each.top_ids[row].tolist(), np.exp(each.top_logprobs[row].astype(float)), strict=True)
            overlaps.append(sum(min(share, q.get(token, 0.0)) for token, share in p))
            if each.temperature:
                continue
            for depth in range(DEPTH):
                if i + depth >= len(each.tokens) - 1:
                    break
                tested[depth] += 1
                if dataset.drafted[logits[depth][i + depth].argmax()] != each.top_ids[row + depth, 0]:
                    break
                accepted[depth] += 1
    assert min(accepted) > 5
    assert found.chain == pytest.approx([a / t for a, t in zip(accepted, tested, strict=True)])
    assert found.overall.n == len(hits)
    assert found.overall.agreement == pytest.approx(np.mean(hits))
    assert found.overall.acceptance == pytest.approx(np.mean(overlaps), abs=2e-3)
    assert found.by_category.keys() == {"even", "odd"}
    for name, score in found.by_category.items():
        chosen = np.array(kinds) == name
        assert score.n == chosen.sum()
        assert score.agreement == pytest.approx(np.mean(np.array(hits)[chosen]))
        assert score.acceptance == pytest.approx(np.mean(np.array(overlaps)[chosen]), abs=2e-3)


def test_a_token_that_cannot_be_drafted_is_never_right(parameters, tmp_path):
    """Its place in the arrays is that of the first token that can be drafted."""
    train = document([0, 1, 2, 1, 2], 1)
    held_out = document([0, 9, 9, 9], 1, temperature=0.0, held_out=True)
    shards.write(tmp_path, 0, Shard([train, held_out], 1))
    data = Dataset(tmp_path, N_VOCAB, (2,))
    output = torch.zeros(2, WIDTH)  # so that the first token is the most probable
    found = evaluate(
        parameters, SHAPE, output, torch.tensor(bfloat16.decode(EMBEDDINGS)), data, data.held_out
    )
    assert (found.overall.agreement, found.overall.acceptance, found.chain) == (0.0, 0.0, [0.0] * DEPTH)
    assert found.overall.n == 3
