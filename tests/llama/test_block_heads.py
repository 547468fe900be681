"""Heads that draft a block in one call: their logits, trees, failures, and which files fit. In F32."""

import random
from collections import Counter

import numpy as np
import pytest

from spec_local.calibration.measure import measure
from spec_local.core.calls import run, together
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.heads.block import BlockFormat
from spec_local.llama.heads.dflash import block_format
from spec_local.llama.model import Model
from tests.llama.test_heads import NOISE, PROMPT, PROMPTS, Pair, Walk, answers, walk_together
from tests.tiny_block_heads import MASK, N_CANDIDATES, write_tiny_block_head
from tests.tiny_heads import write_tiny_main
from tests.tiny_layered_heads import write_layered_eagle

pytestmark = pytest.mark.usefixtures("f32_caches")

VARIANTS = {
    "all tokens": {},
    "own tensors": {"own_tensors": True},
    "list of tokens": {"n_draft_vocab": 400},
    "list of tokens and embeddings": {"n_draft_vocab": 400, "own_tensors": True},
    "window": {"window": 6},
    "several positions": {"several_positions": True},
    "causal": {"attention__causal": True},
    "no size stated": {"size": None},
}
DSPARK = {
    "chain": {},
    "chain and list of tokens": {"n_draft_vocab": 400},
    "chain after the anchor": {"sample_from_anchor": False},
    "chain, window, positions": {"window": 6, "several_positions": True},
}
FILES = {name: ("dflash", options) for name, options in VARIANTS.items()}
FILES |= {name: ("dspark", options) for name, options in DSPARK.items()}


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "block-main.gguf")


@pytest.fixture
def open_pair(main_path, tmp_path):
    """A function that opens the main model with a head that it writes."""
    made = []

    def make(kind="dspark", **options):
        path = tmp_path / f"{len(made)}.gguf"
        if kind in ("layered", "peagle"):
            write_layered_eagle(path, main_path, kind)
        else:
            write_tiny_block_head(path, kind, **options)
        made.append(Pair(kind, main_path, path))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def begin(main, head, prompt=PROMPT):
    """Let a main model and its head read a prompt, and return the logits after it."""
    run(main.call(prompt[:-1], n_logits=0))
    head.receive(0, prompt[:-1], main.states(range(len(prompt) - 1)))
    return run(head.call(prompt, n_logits=1))


@pytest.mark.parametrize(
    ("kind", "n_parallel"), [*((kind, 3) for kind in FILES), ("all tokens", 1), ("window", 1), ("chain", 1)]
)
def test_logits_are_those_of_a_reference(open_pair, kind, n_parallel):
    name, options = FILES[kind]
    walk_together(open_pair(name, **options), n_parallel, random.Random(n_parallel), n_drafts=(0, 1, 2, 7))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_states_matter(open_pair, kind):
    """Otherwise the tests above would not see wrong ones."""
    (main,), (head,) = open_pair(kind).open()
    logits = begin(main, head).copy()
    head.truncate(0)
    states = main.states(range(len(PROMPT) - 1))
    states[-3] = 0
    head.receive(0, PROMPT[:-1], states)
    assert not np.allclose(run(head.call(PROMPT, n_logits=1)), logits, atol=20 * NOISE)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("dflash", {}, BlockFormat(8, 1, MASK, False)),
        ("dflash", {"size": None, "mask": 7}, BlockFormat(16, 1, 7, False)),
        ("dflash", {"sample_from_anchor": True, "attention__causal": True}, BlockFormat(8, 1, MASK, True)),
        ("dspark", {"attention__causal": False}, BlockFormat(8, 0, MASK, False)),
        ("dspark", {"sample_from_anchor": True}, BlockFormat(8, 0, MASK, False)),
        ("dspark", {"sample_from_anchor": False}, BlockFormat(8, 1, MASK, False)),
        ("dflash2", {"attention__causal": True}, BlockFormat(8, 1, MASK, True, N_CANDIDATES)),
    ],
)
def test_how_a_head_drafts(tmp_path, kind, options, expected):
    head = Model(write_tiny_block_head(tmp_path / "head.gguf", kind, **options))
    assert block_format(head) == expected
    head.close()


def test_states_have_a_position_for_each_axis(open_pair):
    """llama.cpp would read beyond the array."""
    (main,), (head,) = open_pair(several_positions=True).open()
    begin(main, head, PROMPT[:6])
    positions = head.context._states._arrays["pos"]
    assert len(positions) == 4 * head.limits.max_tokens
    assert positions[:20].tolist() == [*range(5)] * 3 + [0] * 5


# Trees


@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle"])
def test_a_tree_takes_no_further_call(open_pair, kind):
    """Nodes of the same depth have the same logits, those of a chain."""
    (main,), (head,) = open_pair(kind).open()
    rows = [
        begin(main, head)[0].copy(),
        *(run(head.call([token], n_logits=1))[0].copy() for token in (20, 30, 40)),
    ]
    head.truncate(len(PROMPT))
    n_calls = head.context.n_calls
    assert np.array_equal(run(head.call([20, 21], [-1, -1])), [rows[1], rows[1]])
    expected = [rows[1], rows[2], rows[2], rows[3]]
    assert np.array_equal(run(head.call([22, 30, 31, 41], [-1, 0, 1, 4])), expected)
    assert np.array_equal(run(head.call([50], [3], 1)), rows[3:])
    head.commit([0, 3])
    assert head.cached == [*PROMPT, 20, 30]
    assert np.array_equal(run(head.call([41], n_logits=1))[0], rows[3])
    assert head.context.n_calls == n_calls


def test_what_a_tree_must_not_be(open_pair):
    (main,), (head,) = open_pair(size=3).open()
    begin(main, head)
    run(head.call([10, 11], [-1, -1]))
    for parents, why in (([2], "node 2 has parent 2"), ([-2], "has parent -2"), ([], "1 tokens with 0")):
        with pytest.raises(InvalidRequest, match=why):
            run(head.call([12], parents))
    run(head.call([12], [1]))
    with pytest.raises(InvalidRequest, match="this head drafts up to 3 tokens"):
        run(head.call([13], [2]))
    for path in ([0, 1], [1, 0], [2], [3]):
        with pytest.raises(InvalidRequest, match="is not a child of node"):
            head.commit(path)
    head.commit([1, 2])
    assert head.cached == [*PROMPT, 11, 12]
    with pytest.raises(InvalidRequest, match="this head drafts up to 3 tokens"):
        run(head.call([13], n_logits=1))
    assert head.cached == [*PROMPT, 11, 12]


# Calls


@pytest.mark.parametrize("kind", ["dspark", "peagle"])
def test_a_block_that_was_overwritten_is_evaluated_again(open_pair, kind):
    """Another row's call overwrites the logits."""
    (main, other), (head, another) = open_pair(kind).open(2)
    rows = [
        begin(main, head)[0].copy(),
        *(run(head.call([token], n_logits=1))[0].copy() for token in (20, 30)),
    ]
    head.truncate(len(PROMPT))
    assert np.array_equal(run(head.call([20], n_logits=1))[0], rows[1])
    begin(other, another, [1, 50, 60, 70])
    n_calls = head.context.n_calls
    assert np.allclose(run(head.call([30], n_logits=1))[0], rows[2], atol=NOISE)
    assert head.context.n_calls == n_calls + 1


@pytest.mark.parametrize("kind", ["dspark", "peagle"])
def test_a_block_that_is_too_short_is_evaluated_again(open_pair, kind):
    pair = open_pair(kind)
    (main,), (head,) = pair.open()
    walk = Walk(main, head, PROMPT, pair.reference(main))
    run(main.call(PROMPT[:-1], n_logits=0))
    walk.states = list(main.states(range(len(PROMPT) - 1)))
    head.receive(0, PROMPT[:-1], walk.states)
    run(head.call(PROMPT, n_logits=1, n_draft=1))
    n_calls = head.context.n_calls
    found = run(head.call([20], n_logits=1, n_draft=1))[0].copy()
    walk.reference.n_drafted = 2
    assert np.allclose(found, walk.reference.logits(PROMPT, walk.states, [20])[1], atol=NOISE)
    assert head.context.n_calls == n_calls + 1


@pytest.mark.parametrize("kind", ["dspark", "peagle"])
def test_measuring_leaves_no_wrong_states(open_pair, kind):
    """It stores zeros, also for the last token of the history, whose state comes later."""
    (main,), (head,) = open_pair(kind).open()
    expected = begin(main, head, PROMPT[:20])[0].copy()
    head.truncate(0)
    states = main.states(range(19))
    head.receive(0, PROMPT[:9], states[:9])
    run(head.call(PROMPT[:10], n_logits=1))
    with head.known_states():
        costs = measure(head, (1, 8), 1, n_logits=1)
    assert set(costs.costs) == {1, 8}
    # An entry of P-EAGLE has the state of the token before, which is known.
    assert (head.cached, head.n_stored) == (PROMPT[:10], 9 + (kind == "peagle"))
    head.receive(9, PROMPT[9:19], states[9:])
    assert np.allclose(run(head.call(PROMPT[10:20], n_logits=1))[0], expected, atol=NOISE)


def test_measured_calls_are_blocks_of_as_many_draft_tokens(open_pair, monkeypatch):
    (main,), (head,) = open_pair("dflash").open()
    begin(main, head, PROMPT[:20])
    sizes, decode = [], head.context.decode
    monkeypatch.setattr(
        head.context, "decode", lambda calls: sizes.append(calls[0].n_logits) or decode(calls)
    )
    with head.known_states():
        measure(head, (1, 4, 7, 8, 64), 1, n_logits=1)
    # With the anchor; after these, unclear sizes may be measured again.
    assert sizes[2:7] == [1 + 1, 4 + 1, 7 + 1, 7 + 1, 7 + 1]


def test_a_block_is_as_long_as_the_draft(open_pair, monkeypatch):
    """Or as the longest one of those that share the call, but never longer than in training."""
    mains, heads = open_pair().open(2)
    sizes, fill = [], heads[0].context._blocks.put
    states = np.zeros((1, 192), np.float32)

    def put(i, *args):
        sizes[-1] = i + 1
        fill(i, *args)

    monkeypatch.setattr(heads[0].context._blocks, "put", put)
    for n, m in ((1, None), (2, None), (100, None), (2, 5)):
        for row, main in zip(heads, mains, strict=True):
            row.truncate(0)
            main.truncate(0)
        sizes.append(0)
        tasks = []
        for row, wanted in zip(heads, (n, m), strict=True):
            if wanted:
                row.receive(0, [1], states)
                tasks.append(row.call([1, 20], n_logits=1, n_draft=wanted))
        together(tasks)
    assert sizes == [1, 2, 8, 2 * 5]


@pytest.mark.parametrize("n_kept", [0, 10, 30, len(PROMPT) - 1])
def test_rows_share_what_they_have_read(open_pair, n_kept):
    """Entries in the cache, and states that are not in it yet; the logits are those of a row of its own."""
    mains, (a, b) = open_pair().open(2)
    other = [*PROMPT[:n_kept], 33, 44]
    run(mains[0].call(PROMPT[:20], n_logits=0))
    a.receive(0, PROMPT[:20], mains[0].states(range(20)))
    run(a.call(PROMPT[:20], n_logits=0))
    run(mains[0].call(PROMPT[20:-1], n_logits=0))
    a.receive(20, PROMPT[20:-1], mains[0].states(range(len(PROMPT) - 21)))
    assert (a.n_stored, a.n_received) == (20, len(PROMPT) - 1)
    b.reuse(other)
    assert b.n_received == n_kept
    run(mains[1].call(other[:-1], n_logits=0))
    b.receive(n_kept, other[n_kept:-1], mains[1].states(range(n_kept, len(other) - 1)))
    found = run(b.call(other[len(b.cached) :], n_logits=1))[0].copy()
    mains[0].truncate(0)
    a.truncate(0)
    assert np.allclose(found, begin(mains[0], a, other)[0], atol=NOISE)


@pytest.mark.parametrize("kind", ["dspark", "peagle"])
def test_a_full_context(open_pair, kind):
    """The block needs no room of the context, but no token is drafted beyond it."""
    (main,), (head,) = open_pair(kind).open(n_ctx=64)
    tokens = random.Random(0).choices(range(5, 800), k=64)
    begin(main, head, tokens[:62])
    run(head.call(tokens[62:63], n_logits=1))
    run(head.call(tokens[63:], n_logits=1))
    with pytest.raises(ContextOverflow, match="the context of 64 tokens is full"):
        run(head.call([5], n_logits=1))
    with pytest.raises(ContextOverflow, match="is full"):
        run(head.call([5], [-1]))
    plain, _ = answers(None, [main], None, [tokens[:20]], n=60)
    main.truncate(0)
    head.truncate(0)
    pair = open_pair("dflash")
    found, (statistics,) = answers(pair, [main], [head], [tokens[:20]], n=60)
    assert found == plain
    assert len(found[0]) == 45
    assert statistics.draft_n


def test_wrong_arguments(open_pair):
    (main,), (head,) = open_pair().open()
    begin(main, head)
    for tokens, n_logits, why in (
        ([], 0, "0 tokens"),
        ([5], 2, "2 logits"),
        ([-1], 1, "outside the vocabulary"),
        ([823], 1, "outside the vocabulary"),
        ([5] * 9, 1, "drafts up to 8"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            run(head.call(tokens, n_logits=n_logits))
    with pytest.raises(InvalidRequest, match="are missing"):
        head.receive(99, [1], np.zeros((1, 192), np.float32))
    with pytest.raises(InvalidRequest, match="cannot truncate"):
        head.truncate(100)
    head.close()
    with pytest.raises(InvalidRequest, match="closed"):
        run(head.call([5], n_logits=1))


# The distribution


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *(("dflash", "token"), ("dspark", "block"), ("dflash2", "block")),
        *(("peagle", "block"), ("layered", "token")),
    ],
)
def test_drawn_drafts_leave_the_distribution_unchanged(open_pair, kind, rule):
    """Of the first two tokens, over many answers; each rule accepts some drafts and rejects others."""
    pair = open_pair(kind, n_draft_vocab=400)
    mains, heads = pair.open(3)
    counts = Counter()
    n, accepted = 900, 0
    for seed in range(0, n, 3):
        found, statistics = answers(
            pair, mains, heads, [PROMPTS[0]] * 3, temperature=0.7, rule=rule, seed=seed, draft_max=3, n=2
        )
        counts.update(tuple(tokens) for tokens in found)
        accepted += sum(s.draft_n_accepted for s in statistics)
    assert 0 < accepted < n
    expected = {}
    p = softmax(first_logits(mains[0], PROMPTS[0]))
    for first in np.argsort(-p)[:6].tolist():
        q = softmax(first_logits(mains[0], [*PROMPTS[0], first]))
        expected |= {(first, second): p[first] * q[second] for second in np.argsort(-q)[:6].tolist()}
    chi, degrees = 0.0, 0
    for outcome, probability in expected.items():
        if n * probability > 8:
            chi += (counts[outcome] - n * probability) ** 2 / (n * probability)
            degrees += 1
    assert degrees > 3
    assert chi < degrees + 4 * (2 * degrees) ** 0.5


def softmax(logits, temperature=0.7):
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return p / p.sum()


def first_logits(main, tokens):
    main.truncate(0)
    return run(main.call(tokens, n_logits=1))[0].copy()


def test_the_memory_for_the_cache_is_checked(open_pair, free_memory):
    pair = open_pair()
    mains, _ = pair.open(3)
    need = pair.head.kv_bytes(3 * (256 + 8)) + 3 * 8 * 823 * 4  # of the cache, and of the logits
    free_memory(need - 1)
    with pytest.raises(ContextOverflow, match=r"for the cache of 0\.gguf"):
        pair.chosen.open(mains)
    free_memory(need)
    pair.made.insert(0, pair.chosen.open(mains)[0])
