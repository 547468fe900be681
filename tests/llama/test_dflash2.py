"""DFlash2 heads: the lattice of a block, and draft tokens that depend on the one before. In F32.

What they have in common with other heads that draft blocks is tested in test_heads.py and
test_block_heads.py.
"""

import random

import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.core.proposal import Limit
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.llama.heads.lattice import Lattice, SparseRows
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Drawn
from tests.llama.test_heads import NOISE, PROMPT, Pair, walk_together
from tests.reference_dflash2 import ReferenceDFlash2
from tests.tiny_block_heads import N_CANDIDATES, write_tiny_block_head
from tests.tiny_heads import write_tiny_main
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("f32_caches")

VARIANTS = {
    "own tensors": {"own_tensors": True},
    "list of tokens": {"n_draft_vocab": 400},
    "window": {"window": 6},
    "several positions": {"several_positions": True},
    "causal": {"attention__causal": True},
    "one tap, fewer candidates": {"conv_kernel_size": 1, "selector_top_k": 3},
    "more taps than tokens, smaller groups": {"conv_kernel_size": 10, "conv_group_size": 4, "size": 5},
}
OTHER = 20
"""A token that is not among the candidates of the tests."""


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "dflash2-main.gguf")


@pytest.fixture
def open_pair(main_path, tmp_path):
    """A function that opens the main model with a head that it writes, which has received a prompt."""
    made = []

    def make(n_parallel=1, **options):
        pair = Pair("dflash2", main_path, write_tiny_block_head(tmp_path / "head.gguf", "dflash2", **options))
        made.append(pair)
        mains, heads = pair.open(n_parallel, max_branches=16)
        for main, head in zip(mains, heads, strict=True):
            run(main.call(PROMPT[:-1], n_logits=0))
            head.receive(0, PROMPT[:-1], main.states(range(len(PROMPT) - 1)))
        return pair, mains, heads

    yield make
    for pair in made:
        pair.close()


def candidates(logits):
    return np.isfinite(logits).nonzero()[0].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_are_those_of_a_reference(main_path, tmp_path, name):
    """Of blocks of two tokens and more, and of rows that draft together."""
    options = VARIANTS[name]
    pair = Pair("dflash2", main_path, write_tiny_block_head(tmp_path / "head.gguf", "dflash2", **options))
    walk_together(pair, 3, random.Random(0), n_steps=12, n_drafts=(0, 1, 2, options.get("size", 8) - 1))
    pair.close()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_shorter_block_has_the_first_rows_of_a_longer_one_only_if_it_is_causal(open_pair, is_causal):
    _, (main,), (head,) = open_pair(attention__causal=is_causal)
    states = main.states(range(len(PROMPT) - 1))
    found = []
    for n in range(1, 8):
        head.truncate(0)
        head.receive(0, PROMPT[:-1], states)
        found.append(run(head.call(PROMPT, n_logits=1, n_draft=n))[0].copy())
    for logits in found[:-1]:
        assert np.allclose(logits, found[-1], atol=NOISE) is is_causal


# Trees


def test_a_level_has_the_candidates_of_its_place_with_scores_of_their_own(open_pair):
    _, _, (head,) = open_pair()
    first = run(head.call(PROMPT, n_logits=1))[0].copy()
    a, b = candidates(first)[:2]
    assert candidates(first) == head.limits.draft_tokens.tolist()
    n_calls = head.context.n_calls
    level = run(head.call([a, b], [-1, -1])).copy()
    assert candidates(level[0]) == candidates(level[1]) == head.limits.draft_tokens.tolist()
    assert not np.allclose(level[0][candidates(level[0])], level[1][candidates(level[1])], atol=20 * NOISE)
    c, d = candidates(level[0])[:2]
    below = run(head.call([c, d, c], [0, 0, 1])).copy()
    assert np.array_equal(below[0], below[2])
    assert not np.array_equal(below[0], below[1])
    assert np.array_equal(run(head.call([b, d], [-1, 0], 1))[0], below[1])  # without the logits of its parent
    # Nodes at different places in one call.
    mixed = run(head.call([candidates(below[0])[0], c], [2, 1])).copy()
    assert np.array_equal(mixed[1], below[2])
    assert set(head.limits.draft_tokens.tolist()) == set(candidates(mixed[0])) | set(candidates(mixed[1]))
    assert head.context.n_calls == n_calls
    head.commit([1, 4])
    assert np.array_equal(run(head.call([candidates(below[0])[0]], n_logits=1))[0], mixed[0])
    head.truncate(len(PROMPT))
    assert np.array_equal(run(head.call([a, d], n_logits=1))[0], below[1])
    assert head.context.n_calls == n_calls


def test_after_a_token_that_was_no_candidate_scores_are_the_mean(open_pair):
    _, _, (head,) = open_pair()
    first = candidates(run(head.call(PROMPT, n_logits=1))[0])
    assert OTHER not in first
    after = run(head.call([*first, OTHER], [-1] * (N_CANDIDATES + 1)))
    known = candidates(after[0])
    assert candidates(after[-1]) == known
    assert np.allclose(after[-1][known], after[:-1, known].mean(axis=0), atol=1e-5)


def test_the_lattice_outlives_the_call_of_another_row(open_pair):
    _, _, (head, other) = open_pair(2)
    first = candidates(run(head.call(PROMPT, n_logits=1))[0])
    expected = run(head.call(first[:1], [-1]))[0].copy()
    run(other.call(PROMPT[:-3], n_logits=1))
    n_calls = head.context.n_calls
    assert np.array_equal(run(head.call(first[:1], [-1]))[0], expected)
    assert head.context.n_calls == n_calls


@pytest.mark.parametrize(
    ("shape", "depth"), [(lambda: Chain("drawn"), 6), (lambda: Drawn("without replacement", 16), 4)]
)
def test_a_draft_reports_the_distributions_that_it_was_drawn_from(open_pair, shape, depth):
    """Those of the reference: the softmax of the candidates' scores after the token before."""
    pair, mains, (head,) = open_pair()
    how = unfiltered(temperature=0.8)
    proposer = DraftModel(head, Sampler(how), shape(), n_vocab=pair.main.vocabulary.n_tokens)
    reference = ReferenceDFlash2(pair.head.path, pair.main.path)
    reference.n_drafted, states, n_checked = depth, mains[0].states(range(len(PROMPT) - 1)), 0
    unary, score = reference.lattice(PROMPT, states)
    for seed in range(5):
        proposal = run(proposer.propose(PROMPT, Limit(depth, 16, 16), SeededRng(seed)))
        depths = [0]
        for parent in proposal.parents:
            depths.append(depths[parent + 1] + 1)
        assert max(depths) > 1
        for node, q in dict(proposal.distributions).items():
            place, token = depths[node + 1], PROMPT[-1] if node < 0 else proposal.tokens[node]
            known = np.sort(np.argsort(-unary[place])[:N_CANDIDATES])
            scores = score(place, token)[known] / how.temperature
            expected = np.exp(scores - scores.max())
            assert q.ids.tolist() == known.tolist()
            assert np.allclose(q.probs, expected / expected.sum(), atol=NOISE)
            n_checked += 1
        proposer.commit(PROMPT)
    assert n_checked > 15


# Without a model


def test_a_lattice_is_sorted_by_token():
    """llama.cpp gives the candidates in no order."""
    tokens = [[7, 2, 5], [1, 9, 4]]
    scores = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    scores[0] = scores[0, 0]
    rows = np.hstack([tokens, scores.reshape(2, 9), np.zeros((2, 4))]).astype(np.float32)
    lattice = Lattice(rows, 3)
    rows[:] = -1  # the next call overwrites them
    assert lattice.candidates([0, 1]).tolist() == [[2, 5, 7], [1, 4, 9]]
    assert lattice.scores([0], [99]).tolist() == [[1, 2, 0]]
    expected = [scores[1, i, [0, 2, 1]].tolist() for i in (1, 2, 0)]
    assert lattice.scores([1, 1, 1], [2, 5, 7]).tolist() == expected
    assert lattice.scores([1], [6]).tolist() == [np.mean(expected, axis=0).tolist()]


def test_rows_that_are_used_again_have_no_other_logits():
    rows, rng = SparseRows(50), np.random.default_rng(0)
    for n in (2, 1, 5, 3, 4, 40):
        tokens = np.array([rng.choice(50, 4, replace=False) for _ in range(n)])
        logits = rng.normal(size=(n, 4)).astype(np.float32)
        expected = np.full((n, 50), -np.inf, np.float32)
        np.put_along_axis(expected, tokens, logits, 1)
        assert np.array_equal(rows.fill(tokens, logits), expected)
