"""Models on a GPU, and pairs of which one is: skipped without a build of llama.cpp for a GPU.

`tools/test_vulkan.py` runs this, and other tests of this folder, with a driver that computes on the CPU.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import ModelError
from spec_local.llama.devices import OFFLOADED, ON_CPU, Offload, gpus
from spec_local.llama.draft_vocabulary import DraftVocabulary
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.llama.quantize import quantize
from spec_local.llama.tiny import write_tiny_model
from spec_local.opening.loading import LoadSettings, load
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from tests import tiny_architectures
from tests.llama.answers import text_of
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_mtp import write_tiny_mtp

pytestmark = [
    pytest.mark.usefixtures("unchecked", "own_cache"),
    pytest.mark.skipif(not gpus(), reason="llama.cpp has no GPU here"),
]

PROMPT = [1, *range(300, 340), 77, 400]
NEAR = 0.05  # logits have a standard deviation of 3
PLAIN = GenerationSettings(SamplingSettings(temperature=0), max_tokens=24, policy="off")
DRAFT = replace(PLAIN, policy="fixed", proposer="draft", draft_max=3)
OF_LLAMA = {
    "llama": {},
    "qwen2": {"architecture": "qwen2"},
    "experts": {"n_experts": 4},
    "gemma3": {"architecture": "gemma3"},
    "mamba": {"architecture": "mamba"},
}


@pytest.mark.parametrize("name", [*OF_LLAMA, *tiny_architectures.ARCHITECTURES])
def test_logits_are_those_of_the_cpu(tmp_path, make_context, name):
    """Of a prompt, of tokens one by one, and after a rollback."""
    path = tmp_path / "model.gguf"
    if name in OF_LLAMA:
        write_tiny_model(path, tensor_type="F32", **OF_LLAMA[name])
    else:
        write_tiny(path, name)
    found = []
    for offload in (OFFLOADED, ON_CPU):
        row = make_context(Model(path, offload=offload))
        rows = [run(row.call(PROMPT[:20])).copy()]
        row.checkpoint()
        rows += [run(row.call([token], n_logits=1)).copy() for token in PROMPT[20:23]]
        row.truncate(20)
        rows += [run(row.call(PROMPT[30:33])).copy()]
        found.append(np.concatenate(rows))
    np.testing.assert_allclose(*found, atol=NEAR, rtol=0)


@pytest.fixture(scope="module")
def files(folder):
    """Of each kind of draft, the main model's file and the draft's."""
    return {
        "model": (
            write_tiny_model(folder / "gpu-main.gguf", tensor_type="F32"),
            write_tiny_model(folder / "gpu-draft.gguf", tensor_type="F32", noise=0.05),
        ),
        "quantized": (
            quantize(write_tiny_model(folder / "gpu-f16.gguf", n_embd=256), folder / "gpu-q4.gguf", "Q4_K_M"),
            write_tiny_model(folder / "gpu-small.gguf", n_embd=256, noise=0.05),
        ),
        "eagle": (write_tiny_main(folder / "gpu-m.gguf"), write_tiny_eagle(folder / "gpu-eagle.gguf")),
        "mtp": (write_tiny(folder / "gpu-own.gguf", "qwen35", n_mtp=1), None),
        "chained": (write_tiny_mtp(folder / "gpu-three.gguf", "step35", n_mtp=3), None),
        "dflash": (folder / "gpu-m.gguf", write_tiny_block_head(folder / "gpu-dflash.gguf")),
        "dspark": (
            folder / "gpu-m.gguf",
            write_tiny_block_head(folder / "gpu-dspark.gguf", "dspark", n_draft_vocab=400),
        ),
        "hybrid": (write_tiny(folder / "gpu-hybrid.gguf", "lfm2", n_layers=5), folder / "gpu-eagle.gguf"),
        "assistant": (
            write_tiny_gemma(folder / "gpu-gemma.gguf"),
            write_tiny_assistant(folder / "gpu-assistant.gguf"),
        ),
    }


SETTINGS = LoadSettings(
    n_ctx=256,
    threads=1,
    offload=OFFLOADED,
    draft_offload=OFFLOADED,
    cache_type="f16",
    branches=16,
    reproducible=False,
    parallel=2,
    draft_vocab="auto",
    mtp=True,
    workers=(),
)
PLACES = {"both": (OFFLOADED, OFFLOADED), "main": (OFFLOADED, ON_CPU), "draft": (ON_CPU, OFFLOADED)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "kind", ["model", "eagle", "mtp", "chained", "dflash", "dspark", "hybrid", "assistant"]
)
def test_the_text_is_that_without_drafts(files, kind, place, f32_caches):
    """With chains, trees, and two answers at the same time, wherever the models are."""
    if kind != "model" and place == "draft":
        pytest.skip("a head runs where its main model does")
    main, draft = PLACES[place]
    settings = replace(SETTINGS, offload=main, draft_offload=draft)
    sequences, resources = load(*files[kind], settings, lambda line: None)
    with resources, Session(*sequences[0], sequences[1:], None) as session:
        expected, _ = answer(session, PLAIN)
        tree = {"shape": "chain" if kind in ("mtp", "chained", "hybrid") else "tree", "tree_nodes": 8}
        for more in ({}, tree, {"policy": "adaptive"}):
            text, statistics = answer(session, replace(DRAFT, **more))
            assert text == expected
            assert statistics.draft_n or "policy" in more  # the costs of a busy machine may allow no draft
        found = ["", ""]
        for number, event in session.generate_many(["the of and to", "water people"], DRAFT):
            found[number] += getattr(event, "text", "")
        assert found[0] == expected


@pytest.mark.skipif(not kernels.status().instruction_set, reason="the CPU kernels are not used")
@pytest.mark.parametrize("place", PLACES)
def test_a_draft_on_the_cpu_computes_a_part_of_the_vocabulary(files, place, f32_caches):
    main, draft = PLACES[place]
    settings = replace(SETTINGS, offload=main, draft_offload=draft, draft_vocab=48)
    sequences, resources = load(*files["model"], settings, lambda line: None)
    with resources, Session(*sequences[0], (), None) as session:
        assert (session.draft.limits.draft_tokens is not None) == (draft == ON_CPU)
        text, statistics = answer(session, DRAFT)
        assert text == answer(session, PLAIN)[0]
        assert statistics.draft_n


@pytest.mark.parametrize("kind", ["quantized", "eagle", "dspark"])
def test_reproducible_text_is_that_without_drafts(files, kind):
    """With caches in F16, whose logits otherwise depend on the size of a call, and sampled."""
    settings = replace(SETTINGS, reproducible=True, parallel=1, branches=1)
    sequences, resources = load(*files[kind], settings, lambda line: None)
    with resources, Session(*sequences[0], (), None) as session:
        check_reproducible(session, {"draft_max": 2}, {"draft_max": 7})


def test_reproducible_trees_or_none(files):
    """Where attention depends on the places of a path's cells, as on lavapipe, trees are refused."""
    settings = replace(SETTINGS, reproducible=True, parallel=1)
    try:
        sequences, resources = load(*files["model"], settings, lambda line: None)
    except ModelError as error:
        assert "add `shape=chain` or `device=cpu`" in str(error)  # noqa: PT017
        return
    with resources, Session(*sequences[0], (), None) as session:
        check_reproducible(session, {"shape": "tree", "tree_nodes": 6}, {"shape": "beam"})


def check_reproducible(session, *variants):
    """Check that the text of a seed is that without drafts."""
    assert session.logits_vary == []
    sampled = GenerationSettings(SamplingSettings(temperature=1), seed=3, max_tokens=16)
    expected, _ = answer(session, replace(sampled, policy="off"))
    for more in variants:
        drafting = {"policy": "fixed", "proposer": "draft", "verifier": "exact-match"} | more
        text, statistics = answer(session, replace(sampled, **drafting))
        assert text == expected, more
        assert statistics.draft_n or "policy" in more


@pytest.mark.parametrize("kind", ["eagle", "mtp", "dflash", "dspark", "assistant"])
def test_states_and_a_head_are_those_of_the_cpu(files, kind):
    """The states of two rows of a call, one by one, and the head's logits after them."""
    found = [states_and_logits(*files[kind], offload) for offload in (OFFLOADED, ON_CPU)]
    for on_gpu, on_cpu in zip(*found, strict=True):
        assert np.array_equal(np.isfinite(on_gpu), np.isfinite(on_cpu))
        np.testing.assert_allclose(on_gpu, on_cpu, atol=NEAR, rtol=0)


def states_and_logits(main_path, head_path, offload):
    """The states of two rows, and the logits of the head of the first one."""
    main = Model(main_path, offload=offload, load_mtp=not head_path)
    chosen = choose_head(main, Model(head_path, offload=offload) if head_path else None)
    options = {"n_ctx": 256, "max_tokens": 64, "max_logits": 64, "threads": 1, "hidden": chosen.hidden}
    a, b = mains = open_sequences(main, 2, **options)
    heads = chosen.open(mains)
    tokens = PROMPT[:12], PROMPT[20:27]
    calls = [row.call(t, range(-1, len(t) - 1), 0) for row, t in zip(mains, tokens, strict=True)]
    a.context.decode(calls)
    states = [row.states(range(len(t))) for row, t in zip(mains, tokens, strict=True)]
    for row, t in zip(mains, tokens, strict=True):
        row.commit(range(len(t)))
    heads[0].receive(0, tokens[0], states[0])
    logits = run(heads[0].call([*tokens[0], 40], n_logits=1)).copy()
    heads[0].close()
    b.close()
    a.close()
    return *states, logits


def answer(session, settings, prompt="the of and to"):
    events = list(session.generate(prompt, settings))
    return text_of(events), events[-1].statistics


@pytest.fixture(scope="module")
def quantized(folder):
    source = write_tiny_model(folder / "gpu-source.gguf", n_layers=3, n_experts=4)
    return quantize(source, folder / "gpu-q8.gguf", "Q8_0")


@pytest.mark.skipif(not kernels.status().instruction_set, reason="the CPU kernels are not used")
def test_what_is_on_the_cpu_uses_the_cpu_kernels(quantized, make_context):
    native = kernels.installed()
    row = make_context(Model(quantized, offload=ON_CPU))
    row.limit(DraftVocabulary(row.limits.n_vocab, 48))
    whole = run(make_context(Model(quantized, offload=ON_CPU)).call([5, 6, 7], n_logits=1))[0]
    chosen = run(row.call([5, 6, 7], n_logits=1))[0]
    tokens = row.limits.draft_tokens
    assert (chosen[tokens] == whole[tokens]).all()
    assert not (np.delete(chosen, tokens) == np.delete(whole, tokens)).any()  # they were not computed
    before = native.experts_read
    run(make_context(Model(quantized, offload=Offload(2))).call([5, 6, 7], n_logits=1))
    assert native.experts_read > before


def test_large_calls_of_a_model_on_the_cpu_stay_there(tmp_path, make_context):
    """Their logits are those of small calls, bit for bit: from 32 tokens on, llama.cpp would use the GPU."""
    model = Model(write_tiny_model(tmp_path / "f32.gguf", tensor_type="F32"), offload=ON_CPU)
    one, many = make_context(model), make_context(model)
    large = run(many.call(PROMPT, n_logits=2)).copy()
    run(one.call(PROMPT[:-20], n_logits=0))
    small = run(one.call(PROMPT[-20:], n_logits=2))
    np.testing.assert_allclose(small, large, atol=1e-4, rtol=0)


def test_what_was_read_is_restored(files):
    """From the disk, of both models, in another session."""
    prompt, settings = "the of and to water people " * 12, replace(DRAFT, max_tokens=12)
    options = {"n_ctx": 256, "threads": 1, "device": "gpu", "prompt_cache": 1 << 28}
    answers = []
    for _ in range(2):
        with Session.open(*files["model"], **options) as session:
            answers.append(answer(session, settings, prompt))
    (first, _), (again, statistics) = answers
    assert again == first
    assert statistics.cached_n >= 64


@pytest.mark.parametrize("draft", [True, False])
def test_json(files, draft):
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    with Session.open(*files["eagle"], n_ctx=256, threads=1, device="gpu") as session:
        text, _ = answer(session, replace(DRAFT if draft else PLAIN, json_schema=schema, max_tokens=60))
        assert json.loads(text)["a"] in (1, 2)


def test_a_session_shows_where_its_models_are(files):
    name = gpus()[0].name
    for layers, shown in ((-1, name), (0, "CPU"), (1, f"{name} (1 of 3 layers)")):
        with Session.open(*files["model"], n_ctx=64, threads=1, gpu_layers=layers) as session:
            assert session.device == shown
            assert (session.logits_vary == ["layers on other devices"]) == bool(layers)


@pytest.mark.parametrize(("layers", "n_tokens"), [(-1, 512), (1, 96)])
def test_prompts_are_read_in_large_calls_where_no_layer_is_on_the_cpu(files, layers, n_tokens):
    settings = replace(SETTINGS, n_ctx=600, offload=Offload(layers), parallel=1)
    sequences, resources = load(*files["model"], settings, lambda line: None)
    with resources, Session(*sequences[0], [], None) as session:
        assert sequences[0][0].limits.max_tokens == n_tokens
        prompt = "the of and to " * 75
        assert answer(session, DRAFT, prompt)[0] == answer(session, PLAIN, prompt)[0]
