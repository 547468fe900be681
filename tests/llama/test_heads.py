"""Heads on llama.cpp: their logits, and their place in the engine. In F32, so that the noise is small."""

import json
import random

import numpy as np
import pytest

from spec_local import kernels
from spec_local.core.calls import run, together
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Finished, Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.gguf_tensors import has_tensor
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.heads.dflash import block_format
from spec_local.llama.heads.mtp import HIDDEN_STATES
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.verifiers import VERIFIERS
from tests.reference_block_head import ReferenceBlockHead
from tests.reference_dflash2 import ReferenceDFlash2
from tests.reference_head import ReferenceAssistant, ReferenceHead
from tests.rounding import limit
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_layered_heads import ReferenceLayeredHead, write_layered_eagle
from tests.unfiltered import unfiltered
from tools.record_llama_drafts import DATA, N_DRAFT, write_models

pytestmark = pytest.mark.usefixtures("f32_caches")

NOISE = limit(0.001)
PROMPT = [1, *range(300, 340), 77, 400]


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "head-main.gguf")


@pytest.fixture(scope="module")
def eagle_path(folder):
    return write_tiny_eagle(folder / "eagle.gguf")


@pytest.fixture(scope="module")
def dflash_path(folder):
    return write_tiny_block_head(folder / "dflash.gguf", window=8, own_tensors=True)


@pytest.fixture(scope="module")
def dflash2_path(folder):
    return write_tiny_block_head(folder / "dflash2.gguf", "dflash2")


@pytest.fixture(scope="module")
def dspark_path(folder):
    return write_tiny_block_head(folder / "dspark.gguf", "dspark", n_draft_vocab=400)


@pytest.fixture(scope="module")
def layered_path(folder, main_path):
    return write_layered_eagle(folder / "layered.gguf", main_path)


@pytest.fixture(scope="module")
def peagle_path(folder, main_path):
    return write_layered_eagle(folder / "peagle.gguf", main_path, "peagle")


@pytest.fixture(scope="module")
def peagle1_path(folder, main_path):
    return write_layered_eagle(folder / "peagle1.gguf", main_path, "peagle1")


@pytest.fixture(scope="module")
def mtp_path(folder):
    return write_tiny(folder / "mtp.gguf", "qwen35", n_mtp=1)


class Pair:
    """A main model with a head. kind: see `tools.record_llama_drafts.write_models`."""

    def __init__(self, kind, main_path, head_path):
        self.kind = kind
        is_own = head_path in (None, main_path)
        self.main = Model(main_path, load_mtp=is_own)
        self.head = self.main if is_own else Model(head_path)
        self.chosen = choose_head(self.main, None if is_own else self.head)
        self.reads_layers, self.is_block = bool(self.chosen.hidden.layers), kind in ("dflash", "dspark")
        self.walk = LatticeWalk if kind == "dflash2" else Walk
        self.made = []

    def open(self, n_parallel=1, max_branches=1, **options):
        """Rows of the main model and of the head; a recurrent main model's head has branches nevertheless."""
        usual = {"n_ctx": 256, "max_tokens": 64, "max_logits": 64, "threads": 1, "flash_attention": False}
        usual |= {"hidden": self.chosen.hidden, "max_branches": max_branches}
        mains = open_sequences(self.main, n_parallel, **usual | options)
        mains[0].context.max_branches = max_branches  # read by the head only
        heads = self.chosen.open(mains)
        self.made += [heads[0], mains[0]]
        return mains, heads

    def reference(self, main):
        if self.kind in ("layered", "peagle", "peagle1"):
            reference = ReferenceLayeredHead(self.kind, self.main.path)
        elif self.kind == "assistant":
            reference = ReferenceAssistant(self.main, self.head)
        elif self.kind == "dflash2":
            reference = ReferenceDFlash2(self.head.path, self.main.path)
        elif self.is_block:
            reference = ReferenceBlockHead(self.head, main, block_format(self.head))
        else:
            reference = ReferenceHead(self.head, main)
        self.made.insert(0, reference)
        return reference

    def close(self):
        for made in self.made:
            made.close()
        for model in {self.main, self.head}:
            model.close()


PATHS = {  # fixtures of the files of the main model and of the head
    "eagle": ("main_path", "eagle_path"),
    "layered": ("main_path", "layered_path"),
    "peagle": ("main_path", "peagle_path"),
    "peagle1": ("main_path", "peagle1_path"),
    "mtp": ("mtp_path", "mtp_path"),
    "dflash": ("main_path", "dflash_path"),
    "dspark": ("main_path", "dspark_path"),
    "dflash2": ("main_path", "dflash2_path"),
}


@pytest.fixture(params=PATHS)
def pair(request):
    """Of each kind."""
    made = Pair(request.param, *map(request.getfixturevalue, PATHS[request.param]))
    yield made
    made.close()


@pytest.fixture
def eagle(main_path, eagle_path):
    made = Pair("eagle", main_path, eagle_path)
    yield made
    made.close()


# Hidden states


def test_hidden_states_leave_the_logits_unchanged(pair):
    """Bit for bit, in calls of several rows, and whether or not logits are wanted."""
    (a, b), _ = pair.open(2)
    plain = open_sequences(
        pair.main, 2, n_ctx=256, max_tokens=64, max_logits=64, threads=1, flash_attention=False
    )
    for n, n_logits in ((20, 0), (3, 1), (5, 5), (1, 1)):
        results = []
        for rows in ((a, b), plain):
            tokens = PROMPT[:n], PROMPT[n : n + 2]
            calls = [
                row.call(t, range(-1, len(t) - 1), min(n_logits, len(t)))
                for row, t in zip(rows, tokens, strict=True)
            ]
            results.append(np.concatenate(rows[0].context.decode(calls)))
            for row, t in zip(rows, tokens, strict=True):
                row.commit(range(len(t)))
        assert np.array_equal(*results)
    plain[0].close()


def test_states_belong_to_their_tokens(pair):
    """Of ragged rows, and of a row alone; a tree's nodes come in the order of the call."""
    (a, b), _ = pair.open(2)
    expected = []
    for token in PROMPT[:8]:
        run(a.call([token], n_logits=0))
        expected.append(a.states([0])[0])
    a.truncate(0)
    calls = [a.call(PROMPT[5:7], (-1, 0), 1), b.call(PROMPT[:8], range(-1, 7), 0)]
    a.context.decode(calls)
    np.testing.assert_allclose(b.states(range(8)), expected, atol=limit(1e-4), rtol=1e-5)
    np.testing.assert_allclose(b.states([6, 2]), [expected[6], expected[2]], atol=limit(1e-4), rtol=1e-5)
    width = 3 * pair.main.n_embd if pair.reads_layers else pair.main.n_state
    assert a.states([1]).shape == (1, width)
    assert a.states([1]).dtype == np.float32


def test_states_of_a_tree(eagle):
    (main,), _ = eagle.open(max_branches=4)
    run(main.call(PROMPT[:3], n_logits=0))
    run(main.call([10, 11, 12], [-1, -1, 1]))
    states = main.states([0, 2])
    main.commit([])
    run(main.call([11, 12], n_logits=0))
    np.testing.assert_allclose(main.states([1])[0], states[1], atol=limit(1e-4), rtol=1e-5)
    main.truncate(3)
    run(main.call([10], n_logits=0))
    np.testing.assert_allclose(main.states([0])[0], states[0], atol=limit(1e-4), rtol=1e-5)


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()])
def test_an_error_while_states_are_copied_ends_the_call(eagle, monkeypatch, error):
    """Without the error, llama.cpp would return wrong logits. The caches are right afterwards."""
    kernels.use("off")  # the callback in Python
    (a, b), _ = eagle.open(2)
    kernels.use("auto")
    fresh = run(a.call(PROMPT[:12], n_logits=12)).copy()
    for row in (a, b):
        row.truncate(0)
        run(row.call(PROMPT[:6], n_logits=0))

    def fail(*arguments):
        raise error

    monkeypatch.setattr(runtime.ggml(), "ggml_backend_tensor_get", fail)
    with pytest.raises(type(error)):
        a.context.decode([row.call(PROMPT[6:9], (-1, 0, 1), 3) for row in (a, b)])
    monkeypatch.undo()
    assert a.cached == b.cached == PROMPT[:6]
    for row in (a, b):
        np.testing.assert_allclose(run(row.call(PROMPT[6:12], n_logits=6)), fresh[6:], atol=NOISE, rtol=1e-5)


def test_states_that_a_context_does_not_have(eagle):
    plain = open_sequences(eagle.main, 1, n_ctx=64, threads=1)[0]
    with pytest.raises(InvalidRequest, match="keeps no hidden states"):
        plain.states([0])
    plain.close()
    with pytest.raises(InvalidRequest, match="no states for multi-token prediction of head-main"):
        open_sequences(eagle.main, 1, n_ctx=64, hidden=HIDDEN_STATES)
    with pytest.raises(InvalidRequest, match="outputs of layers 0 to 3"):
        open_sequences(eagle.main, 1, n_ctx=64, hidden=HiddenStates((1, 4)))


# Logits of a head


def test_only_the_tokens_that_a_head_can_draft_have_logits(eagle):
    (main,), (head,) = eagle.open()
    run(main.call(PROMPT[:6], n_logits=0))
    head.receive(0, PROMPT[:6], main.states(range(6)))
    assert (
        np.isfinite(run(head.call(PROMPT[:6], n_logits=1))[0]).nonzero()[0].tolist()
        == head.limits.draft_tokens.tolist()
    )


class Walk:
    """A row of the main model and one of the head, whose steps accept any number of draft tokens."""

    def __init__(self, main, head, prompt, reference):
        self.main, self.head, self.reference = main, head, reference
        self.tokens, self.states, self.drafted = list(prompt), [], []
        self.is_markov = has_tensor(head.model.path, "markov_w1.weight")

    def read(self, call, path):
        """Commit nodes of a call, and hand their states to the head."""
        start, states = len(self.main.cached), self.main.states(path)
        self.main.commit(path)
        self.head.receive(start, [call.tokens[node] for node in path], states)
        self.states[start:] = list(states)

    async def draft(self, n, rng, check=True):
        """Draft n tokens, and check the head's logits."""
        self.drafted, found = [], []
        for _ in range(n):
            new = self.drafted[-1:] or self.tokens[len(self.head.cached) :]
            logits = await self.head.call(new, n_logits=1, n_draft=n)
            found.append(logits[0].copy())
            best = np.argsort(logits[0])[-3:].tolist()
            self.drafted.append(rng.choice(best))
        if n and check:
            assert self.head.cached == [*self.tokens, *self.drafted[:-1]]
            self.check(found)

    def check(self, found):
        for a, b in zip(found, self.expected(), strict=True):
            assert np.array_equal(np.isfinite(a), np.isfinite(b))
            known = np.isfinite(a)
            np.testing.assert_allclose(a[known], b[known], atol=NOISE, rtol=1e-5)
            second, best = np.sort(b[known])[-2:]
            if self.is_markov and best - second < 2 * NOISE:
                return  # the head may go on from either

    def expected(self):
        """The logits after the history and each draft token but the last."""
        return self.reference.logits(self.tokens, self.states, self.drafted[:-1])

    def verify_call(self):
        before = self.tokens[len(self.main.cached) :]
        tokens = [*before, *self.drafted]
        return self.main.call(tokens, range(-1, len(tokens) - 1), len(tokens))

    def accept(self, call, n, token):
        n_before = len(call.tokens) - len(self.drafted)
        self.read(call, range(n_before + n))
        self.tokens += [*self.drafted[:n], token]


class LatticeWalk(Walk):
    """Only the candidates have logits, which depend on the draft token before them."""

    def check(self, found):
        before = [self.tokens[-1], *self.drafted[:-1]]
        unary, score = self.reference.lattice(self.tokens, self.states)
        for place, (logits, token) in enumerate(zip(found, before, strict=True)):
            known = np.isfinite(logits).nonzero()[0]
            assert len(known) == self.reference.k
            np.testing.assert_allclose(logits[known], score(place, token)[known], atol=NOISE, rtol=1e-5)
            assert unary[place][known].min() > np.sort(unary[place])[-self.reference.k] - NOISE


def walk_together(pair, n_parallel, rng, n_steps=25, n_drafts=(0, 1, 2, 5), kind=None, **options):
    """Random patterns of acceptance, with rows that draft different numbers of tokens at once.

    kind: of walk. options: of `Pair.open`.
    """
    kind = kind or pair.walk
    mains, heads = pair.open(n_parallel, **options)
    reference = pair.reference(mains[0])
    walks = []
    for i, (main, head) in enumerate(zip(mains, heads, strict=True)):
        walk = kind(main, head, rng.choices(range(5, 800), k=(17, 2, 40)[i]), reference)
        while len(main.cached) < len(walk.tokens) - 1:
            start = len(main.cached)
            call = main.call(walk.tokens[start:-1][:16], range(-1, len(walk.tokens[start:-1][:16]) - 1), 0)
            main.context.decode([call])
            walk.read(call, range(len(call.tokens)))
            run(head.read())
        walks.append(walk)
    for _ in range(n_steps):
        active = [walk for walk in walks if rng.random() < 0.8] or walks[:1]
        for walk in active:
            walk.main.checkpoint()
        n_drafted = [rng.choice(n_drafts) for _ in active]
        reference.n_drafted = max(n_drafted)  # those of a call are equally long
        tasks = [walk.draft(n, rng) for walk, n in zip(active, n_drafted, strict=True)]
        for result in together(tasks):
            if result is not None:
                raise result
        for walk, n in zip(active, n_drafted, strict=True):
            walk.drafted = walk.drafted[:n] if n else []
        calls = [walk.verify_call() for walk in active]
        mains[0].context.decode(calls)
        for walk, call in zip(active, calls, strict=True):
            walk.accept(call, rng.randint(0, len(walk.drafted)), rng.randrange(5, 800))


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_logits_are_those_of_a_reference(pair, n_parallel):
    walk_together(pair, n_parallel, random.Random(n_parallel))


def test_logits_do_not_depend_on_how_calls_are_made(pair):
    """Staged tokens, which are evaluated with the head's own output, and nodes of a tree that is a chain."""
    (main,), (head,) = pair.open()
    run(main.call(PROMPT[:-1], n_logits=0))
    head.receive(0, PROMPT[:-1], main.states(range(len(PROMPT) - 1)))
    first = run(head.call(PROMPT, n_logits=1)).copy()
    rows = [first[0], *(run(head.call([token], n_logits=1))[0].copy() for token in (20, 30, 40))]
    head.truncate(len(PROMPT))
    again = run(head.call([20, 30, 40], n_logits=3))
    assert np.array_equal(again, rows[1:])
    head.truncate(len(PROMPT))
    assert np.array_equal(run(head.call([20, 30], [-1, 0], 1))[0], rows[2])
    assert np.array_equal(run(head.call([40], [1]))[0], rows[3])
    head.commit([0, 1])
    assert head.cached == [*PROMPT, 20, 30]


def test_memory_does_not_grow_with_the_prompt(pair):
    (main,), (head,) = pair.open(n_ctx=1024)
    tokens = random.Random(0).choices(range(5, 800), k=900)
    for start in range(0, 900, 50):
        chunk = tokens[start : start + 50]
        run(main.call(chunk, n_logits=0))
        head.receive(start, chunk, main.states(range(50)))
        run(head.read())
        assert len(head.received) <= 4
    assert head.cached == tokens


# In the engine


def answers(pair, mains, heads, prompts, *, temperature=0.0, rule="exact-match", seed=0, draft_max=3, n=40):
    """The tokens that rows generate together, and the statistics of each."""
    how = unfiltered(temperature=temperature)
    engine, rows, found = Engine(), [], {}
    for i, prompt in enumerate(prompts):
        sampler = Sampler(how)
        proposer = None
        if heads:
            kind = "greedy" if not temperature else "coupled" if rule == "exact-match" else "drawn"
            n_vocab = pair.main.vocabulary.n_tokens
            proposer = DraftModel(heads[i], sampler, Chain(kind), n_vocab=n_vocab)
        row = Request(
            mains[i],
            prompt,
            RequestOptions(
                sampler=sampler,
                rng=SeededRng(seed + i),
                proposer=proposer,
                verifier=VERIFIERS[rule],
                draft_max=draft_max,
                max_tokens=n,
            ),
        )
        rows.append(row)
        engine.add(row)
    while engine.requests:
        assert engine.n_calls < 500
        for row, event in engine.step():
            if isinstance(event, Step):
                found.setdefault(row, []).extend(event.tokens)
            elif not isinstance(event, Finished):
                assert not hasattr(event, "error"), event
    return [found[row] for row in rows], [row.statistics for row in rows]


PROMPTS = ([1, 300, 310, 320], [7], PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_that_of_plain_decoding(pair, temperature):
    mains, heads = pair.open(3)
    plain, _ = answers(pair, mains, None, PROMPTS, temperature=temperature, seed=3)
    text, statistics = answers(pair, mains, heads, PROMPTS, temperature=temperature, seed=3)
    assert text == plain
    assert all(s.draft_n > 40 for s in statistics)
    if pair.reads_layers:
        assert all(s.draft_n_accepted > 3 for s in statistics)


@pytest.mark.parametrize("pair", ["eagle", "mtp"], indirect=True)
def test_a_state_that_is_missing_is_evaluated_again(pair):
    """A row takes the cache of another one, whose head has forgotten the state that comes next."""
    mains, heads = pair.open(2)
    (text,), _ = answers(pair, mains[:1], heads[:1], [PROMPT], n=30)
    prompt = [*PROMPT, *text, 50, 60]
    (expected,), _ = answers(pair, mains[1:], None, [prompt], n=10)
    mains[1].truncate(0)
    heads[0].received.truncate(len(heads[0].cached) - 1)
    heads[0].received._drop(list(heads[0].received._states))
    (found,), (statistics,) = answers(pair, mains[1:], heads[1:], [prompt], n=10)
    assert found == expected
    # A recurrent model goes back to the other row's checkpoint.
    assert statistics.prompt_n == (4 if pair.kind == "eagle" else 14)


# llama.cpp's own loop


RECORDED = json.loads(DATA.read_text())


@pytest.fixture(scope="module")
def recorded_models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("kind", dict.fromkeys(each["head"] for each in RECORDED))
def test_drafts_are_those_of_llama_cpp(recorded_models, kind):
    """Each draft token that llama.cpp drafted, after the same tokens: see tools/record_llama_drafts.py."""
    pair = Pair(kind, *recorded_models[kind])
    (main,), (head,) = pair.open()
    for recorded in [each for each in RECORDED if each["head"] == kind][::2]:
        head.truncate(0)
        main.truncate(0)
        prompt = pair.main.vocabulary.tokenize(recorded["prompt"], add_special=True, parse_special=True)
        (output,), _ = answers(pair, [main], None, [prompt], n=60)
        main.truncate(0)
        assert len(recorded["drafts"]) > 10
        for n_generated, expected in recorded["drafts"]:
            history = [*prompt, *output[:n_generated]]
            start = len(main.cached)
            run(main.call(history[start:-1], n_logits=0))
            head.receive(start, history[start:-1], main.states(range(len(history) - 1 - start)))
            drafted = []
            for _ in expected:
                new = drafted[-1:] or history[len(head.cached) :]
                logits = run(head.call(new, n_logits=1, n_draft=N_DRAFT))
                drafted.append(int(logits[0].argmax()))
            assert drafted == expected, (recorded["prompt"], n_generated)
    pair.close()
