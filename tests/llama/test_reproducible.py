"""Test reproducible output: with llama.cpp's own kernels, whose logits depend on the size of a call."""

import numpy as np
import pytest

from spec_local import GenerationSettings, SamplingSettings, Session, kernels
from spec_local.core.calls import run
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama import reproducible
from spec_local.llama.devices import OFFLOADED, ON_CPU
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize
from spec_local.llama.reproducible import open_reproducible_sequences
from spec_local.llama.tiny import write_tiny_model
from tests.broken_llama import Broken, interrupted_after, interrupted_before
from tests.llama.answers import tokens_of
from tests.sequences import sequence_ends
from tests.unfiltered import unfiltered

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "gemma3 Q4_K_M")


@pytest.fixture(scope="module", autouse=True)
def llama_cpp_kernels(unchecked):
    kernels.use("off")
    yield
    kernels.use("auto")


@pytest.fixture(scope="module")
def path_of(folder):
    """A function that returns the path of a tiny model of a kind in `KINDS`, created once."""

    def make(kind):
        *special, name = kind.split()
        path = folder / f"reproducible-{kind.replace(' ', '-')}.gguf"
        if not path.exists():
            source = write_tiny_model(
                folder / "reproducible-source.gguf",
                n_embd=256,
                tensor_type="F32",
                n_experts=4 if special == ["experts"] else 0,
                architecture="gemma3" if special == ["gemma3"] else "llama",
            )
            source.replace(path) if name == "F32" else quantize(source, path, name)
        return path

    return make


@pytest.fixture(scope="module")
def draft_of(folder):
    """A function that returns the path of a draft model for a kind."""

    def make(kind):
        architecture = "gemma3" if kind.startswith("gemma3") else "llama"
        path = folder / f"reproducible-draft-{architecture}.gguf"
        return write_tiny_model(path, n_embd=256, noise=0.05, architecture=architecture)

    return make


def open_sequence(model, **options):
    """A reproducible context."""
    return open_reproducible_sequences(model, 1, **options)[0]


def text_of(n, seed=0):
    return [1, *np.random.default_rng(seed).integers(5, 400, n - 1).tolist()]


def bits(rows):
    return rows.view(np.uint32).tolist()


def feed(context, text, sizes):
    """Evaluate the next tokens of a text in calls of these sizes, and return the logits after each."""
    found = []
    for n in sizes:
        start = len(context.cached)
        found.append(run(context.call(text[start : start + n], n_logits=n)).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_only_on_the_tokens_before(path_of, kind):
    """After 600 tokens: from 512 on, llama.cpp computes attention for a single token differently."""
    model = Model(path_of(kind), offload=ON_CPU)
    context = open_sequence(model, n_ctx=700, threads=1)
    text, results = text_of(640), []
    for first, sizes in [(24, (1,) * 40), (17, (5,) * 8), (8, (24, 16)), (3, (2, 7, 11, 1, 19))]:
        context.truncate(0)
        for start in range(0, 600, first):
            run(context.call(text[start : min(start + first, 600)], n_logits=0))
        results.append(bits(feed(context, text, sizes)))
    assert all(result == results[0] for result in results)
    context.close()
    model.close()


@pytest.mark.parametrize("kind", ["Q4_K_M", "gemma3 Q4_K_M"])
def test_a_branch_is_the_same_as_a_chain(path_of, kind):
    """In the tree, and after it was committed: the cells of rejected nodes are used again."""
    context = open_sequence(Model(path_of(kind), offload=ON_CPU), n_ctx=256, max_branches=8, threads=1)
    text = text_of(40)
    expected = bits(feed(context, text, (8, 8, 8, 8, 8)))
    context.truncate(8)
    # 8 - 9 - 10 are nodes 0, 3, 5 of the tree.
    tree = [text[8], 50, 51, text[9], 52, text[10], 53]
    found = bits(run(context.call(tree, [-1, -1, 0, 0, 3, 3, 5]))[[0, 3, 5]])
    context.commit([0, 3, 5])
    assert context.cached == text[:11]
    found += bits(feed(context, text, (1, 4, 8, 8, 8)))
    assert found == expected[8:]
    context.close()


@pytest.mark.parametrize("interrupted", [interrupted_before, interrupted_after])
def test_an_interrupted_call_leaves_no_dummy_tokens(path_of, monkeypatch, interrupted):
    context = open_sequence(Model(path_of("Q4_K_M"), offload=ON_CPU), n_ctx=256, threads=1)
    text = text_of(40)
    expected = bits(feed(context, text, (5, 5, 5)))
    context.truncate(5)
    with monkeypatch.context() as patch:
        patch.setattr(context.context, "lib", Broken(context.context.lib, interrupted))
        with pytest.raises(KeyboardInterrupt):
            run(context.call(text[5:8], [-1, 0, 1]))
    context.truncate(5)
    assert set(sequence_ends(context)[context.limits.max_branches :]) == {-1}
    assert bits(feed(context, text, (5, 5))) == expected[5:]
    context.close()


def answer(session, prompt, **settings):
    """The tokens of an answer, and of a second turn after it."""
    tokens = []
    for turn in range(2):
        how = GenerationSettings(**{"max_tokens": 24, "draft_max": 4} | settings)
        events = list(session.generate([*prompt, *tokens], how))
        tokens += tokens_of(events)
        tokens += text_of(9, seed=turn)  # the next message
    return tokens, events[-1].statistics.n_steps


@pytest.mark.parametrize(
    ("kind", "temperature"), [("Q4_K_M", 0.0), ("Q4_K_M", 1.0), ("BF16", 1.0), ("gemma3 Q4_K_M", 0.0)]
)
def test_a_seed_gives_the_same_text_whatever_is_drafted(path_of, draft_of, kind, temperature):
    sampling = unfiltered(temperature=temperature)
    prompt = text_of(75)
    with Session.open(
        path_of(kind), draft_of(kind), n_ctx=400, threads=1, branches=64, reproducible=True
    ) as session:
        plain, n_plain = answer(session, prompt, sampling=sampling, seed=1, policy="off")
        assert n_plain == 24
        for settings in (
            {"proposer": "draft", "policy": "fixed"},
            {"proposer": "draft", "policy": "fixed", "draft_max": 23},
            {"proposer": "draft", "policy": "adaptive", "draft_max": None},
            {"proposer": "suffix", "policy": "fixed"},
            {"proposer": "draft", "shape": "tree", "policy": "fixed", "verifier": "exact-match"},
            {"proposer": "draft", "shape": "beam", "policy": "fixed"},
        ):
            output, n_steps = answer(session, prompt, sampling=sampling, seed=1, **settings)
            assert output == plain, settings
            assert n_steps < n_plain or settings["policy"] == "adaptive" or settings["proposer"] == "suffix"


def test_until_the_context_is_full(path_of, draft_of):
    with Session.open(
        path_of("Q4_K_M"), draft_of("Q4_K_M"), n_ctx=64, threads=1, reproducible=True
    ) as session:
        texts = []
        for policy in ("off", "fixed"):
            how = GenerationSettings(seed=1, policy=policy)
            *events, done = session.generate(text_of(20), how)
            texts.append(tokens_of(events))
            assert done.reason == "context"
        assert texts[0] == texts[1]
        assert len(texts[0]) == session.main.n_ctx + 1 - 20


def test_calls_on_a_gpu_have_one_size(path_of, draft_of, a_gpu):
    """Without a device, the model is on the CPU."""
    options = {"n_ctx": 400, "threads": 1, "branches": 8, "reproducible": True}
    with Session.open(path_of("Q4_K_M"), draft_of("Q4_K_M"), device="gpu", **options) as session:
        assert session.main.model.is_on_gpu
        assert (session.main.pad_to, session.main.limits.max_tokens) == (8, 8)
        greedy = unfiltered(temperature=0)
        plain, _ = answer(session, text_of(75), sampling=greedy, policy="off")
        drafted, n_steps = answer(
            session, text_of(75), sampling=greedy, proposer="draft", policy="fixed", draft_max=23
        )
        assert drafted == plain
        assert n_steps < 24
    with Session.open(path_of("Q4_K_M"), **options) as session:
        assert not session.main.model.is_on_gpu


# ---- what is refused ----


def test_drawn_drafts_are_refused_above_temperature_0(path_of):
    with Session.open(path_of("Q4_K_M"), n_ctx=64, threads=1, reproducible=True) as session:
        drawn = GenerationSettings(verifier="block", max_tokens=1)
        with pytest.raises(InvalidRequest, match="verifier exact-match"):
            session.generate(text_of(9), drawn)
        greedy = GenerationSettings(SamplingSettings(temperature=0.0), verifier="block", max_tokens=1)
        list(session.generate(text_of(9), greedy))


def test_experts_on_a_gpu_are_refused(path_of, a_gpu):
    with pytest.raises(ModelError, match=r"on metal, .* the expert's other tokens: add `device=cpu`"):
        Session.open(path_of("experts Q4_K_M"), reproducible=True, device="gpu")


def test_experts_are_refused_with_the_kernels_of_llama_cpp(path_of):
    with pytest.raises(ModelError, match="specdec doctor"):
        Session.open(path_of("experts Q4_K_M"), reproducible=True)


def test_nothing_is_drafted_for_a_recurrent_model_whose_logits_depend_on_the_call(recurrent_path):
    with Session.open(recurrent_path, threads=1, reproducible=True) as session:
        assert session.main.pad_to is None
        assert session.main.limits.rollback == "none"
        assert session.proposers(GenerationSettings()) == []
        *_, done = session.generate(text_of(9), GenerationSettings(max_tokens=4))
        assert done.statistics.draft_n == 0


@pytest.mark.parametrize(("offload", "sizes"), [(ON_CPU, [8]), (OFFLOADED, [8, 8, 16, 16])])
def test_differences_are_noticed(path_of, make_context, monkeypatch, a_gpu, offload, sizes):
    """The trial passes for the sizes that work, and for no size without padding."""
    made = []

    def unpadded(model, *, pad_to, **options):
        made.append(pad_to)
        return make_context(model, **options)

    monkeypatch.setattr(reproducible, "open_sequence", unpadded)
    with pytest.raises(ModelError, match="cannot be made reproducible"):
        open_sequence(Model(path_of("Q4_K_M"), offload=offload), n_ctx=64)
    assert made == sizes
