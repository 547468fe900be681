"""Prompts that a later session, or another row, does not read again."""

import random
from dataclasses import replace

import numpy as np
import pytest

from spec_local.answers.saving import conditions
from spec_local.core.calls import run
from spec_local.core.sampling import SamplingSettings
from spec_local.llama.devices import OFFLOADED, Offload
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.prompt_cache import folder as files
from spec_local.session import Done, Prefilled, Session, Text
from spec_local.settings import GenerationSettings
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_layered_heads import write_layered_eagle

pytestmark = pytest.mark.usefixtures("unchecked")

PLAIN = GenerationSettings(SamplingSettings(temperature=0), max_tokens=24, policy="off")
DRAFT = replace(PLAIN, policy="fixed", proposer="draft", draft_max=3)
N = 600  # tokens of a prompt: two blocks, and a part


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of each kind of model, the files of main and draft."""
    folder = tmp_path_factory.mktemp("models")
    main = write_tiny_main(folder / "main.gguf")
    dense = write_tiny_model(folder / "dense.gguf")
    return {
        "dense": (dense, write_tiny_model(folder / "draft.gguf", noise=0.05)),
        "window": (write_tiny_model(folder / "window.gguf", architecture="gemma3"), None),
        "recurrent": (write_tiny(folder / "mamba2.gguf", "mamba2"), None),
        "hybrid": (write_tiny(folder / "hybrid.gguf", "lfm2"), None),
        "hybrid draft": (dense, write_tiny(folder / "small.gguf", "qwen35", noise=0.05)),
        "eagle": (main, write_tiny_eagle(folder / "eagle.gguf")),
        "layered": (main, write_layered_eagle(folder / "layered.gguf", main)),
        "peagle": (main, write_layered_eagle(folder / "peagle.gguf", main, "peagle")),
        "mtp": (write_tiny(folder / "mtp.gguf", "qwen35", n_mtp=1), None),
        "dflash2": (main, write_tiny_block_head(folder / "dflash2.gguf", "dflash2")),
        "assistant": (
            write_tiny_gemma(folder / "gemma.gguf"),
            write_tiny_assistant(folder / "assistant.gguf"),
        ),
    }


KINDS = [
    *(
        "dense",
        "window",
        "recurrent",
        "hybrid",
        "hybrid draft",
        "eagle",
        "layered",
        "peagle",
        "mtp",
        "dflash2",
    ),
    "assistant",
]


@pytest.fixture
def place(own_cache):
    """The folder on disk."""
    return own_cache / "prompts"


@pytest.fixture
def opened(models, place):
    """A function that opens a session with models of a kind, and a cache on disk."""

    def open_session(kind, **options):
        main, draft = models[kind]
        usual = {"n_ctx": 1024, "threads": 1, "prompt_cache": 1 << 30}
        return Session.open(main, draft, **usual | options)

    return open_session


def prompt_of(seed, n=N):
    rng = random.Random(seed)
    return [1, *(rng.randrange(5, 250) for _ in range(n - 1))]


def answer(session, prompt, settings=None):
    """The text of an answer, what the step counts say of drafts, and the tokens that were read."""
    settings = settings or (DRAFT if session.draft else PLAIN)
    text, cached, statistics = [], None, None
    for event in session.generate(prompt, settings):
        if isinstance(event, Text):
            text += event.tokens
        elif isinstance(event, Prefilled):
            cached = event.statistics.cached_n
        elif isinstance(event, Done):
            statistics = event.statistics
    return text, (statistics.draft_n, statistics.draft_n_accepted), len(prompt) - 1 - cached


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_session_reads_nothing_again(opened, kind, cache_type):
    with opened(kind, cache_type=cache_type) as session:
        text, drafts, n_read = answer(session, prompt_of(1))
        assert n_read >= N - 20
        history = list(session.main.cached)
    with opened(kind, cache_type=cache_type) as session:
        again, same_drafts, n_read = answer(session, prompt_of(1))
        assert (again, same_drafts) == (text, drafts)
        assert n_read <= 1
        longer = [*history, *prompt_of(2, 30)]
        more, _, n_read = answer(session, longer)
        assert n_read <= 31 + 16
    with opened(kind, prompt_cache="off", cache_type=cache_type) as session:
        assert answer(session, longer)[0] == more


@pytest.mark.parametrize("kind", ["dense", "window", "recurrent", "hybrid"])
def test_restored_logits_are_those_of_reading(opened, kind):
    tokens = [*prompt_of(1), *prompt_of(2, 5)]
    with opened(kind) as session:
        answer(session, tokens[: N + 1], replace(PLAIN, max_tokens=1))
    with opened(kind) as session:
        session.main.reuse(tokens[:N])
        assert len(session.main.cached) >= N - 16
        rest = tokens[len(session.main.cached) :]
        restored = run(session.main.call(rest)).copy()
    with opened(kind, prompt_cache="off") as session:
        for start in range(0, len(tokens) - len(rest), session.main.limits.max_tokens):
            part = tokens[start : min(len(tokens) - len(rest), start + session.main.limits.max_tokens)]
            run(session.main.call(part, n_logits=0))
        assert np.array_equal(restored, run(session.main.call(rest)))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "eagle"])
def test_more_conversations_than_rows(opened, kind):
    with opened(kind, prompt_cache=0) as session:
        histories = []
        for seed in range(4):
            answer(session, prompt_of(seed))
            histories.append(list(session.main.cached))
        for seed in range(4):
            _, _, n_read = answer(session, [*histories[seed], *prompt_of(9, 20)])
            assert n_read <= 21 + 16


def test_off_keeps_nothing(opened, place):
    with opened("dense", prompt_cache="off") as session:
        answer(session, prompt_of(1))
        answer(session, prompt_of(2))
        assert answer(session, prompt_of(1))[2] >= N - 2
    assert not place.exists()


def test_another_setting_is_another_cache(opened, place):
    for cache_type in ("f16", "q8_0"):
        with opened("window", cache_type=cache_type) as session:
            assert answer(session, prompt_of(1))[2] == N - 1
    assert len(files.usage(place)) == 2


def test_only_some_things_change_the_bytes(models, make_context, tmp_path):
    path = models["dense"][0]
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    first = conditions(make_context(Model(path), n_ctx=256))
    assert conditions(make_context(Model(copy), n_ctx=128, max_branches=4)) == first


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("cache type", {"cache_type": "q8_0"}),
        ("flash attention", {"flash_attention": False}),
        ("padded calls", {"pad_to": 8, "max_tokens": 64}),
        ("is extended", {"n_ctx": 201}),
        ("offload", {"offload": Offload(3)}),
        *((what, {}) for what in ("model", "llama.cpp", "kernels")),
    ],
)
def test_what_changes_the_bytes(models, make_context, pretend, pretend_kernels, what, options):
    def found(path, offload=OFFLOADED, **options):
        model = Model(path)
        model.offload, model.n_ctx_original = offload, 200
        return conditions(make_context(model, **{"n_ctx": 128} | options))

    before = found(models["dense"][0])
    if what == "llama.cpp":
        pretend(llama_cpp_build="another")
    elif what == "kernels":
        pretend_kernels("another")
    after = found(models["dense"][what == "model"], **options)
    assert {name for name in before if before[name] != after[name]} == {what}


def test_damaged_files_are_read_again(opened, place):
    with opened("dense") as session:
        text, *_ = answer(session, prompt_of(1))
    for path in place.rglob("*.prompt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with opened("dense") as session:
        again, _, n_read = answer(session, prompt_of(1))
    assert again == text
    assert n_read == N - 1


def test_caches_of_other_kinds_are_not_copied(opened, place, monkeypatch):
    monkeypatch.setattr("spec_local.llama.saved._OTHER_CACHES", {"llama"})
    for _ in range(2):
        with opened("dense") as session:
            assert answer(session, prompt_of(1))[2] == N - 1
    assert not place.exists()


def test_reproducible_answers_have_a_context_each(opened):
    with opened("dense", reproducible=True, parallel=2) as session:
        expected = answer(session, prompt_of(1))[0]
    with opened("dense", reproducible=True, parallel=2) as session:
        texts, cached = {0: [], 1: []}, {}
        for i, event in session.generate_many([prompt_of(3), prompt_of(1)], PLAIN, keep_caches=True):
            if isinstance(event, Text):
                texts[i] += event.tokens
            elif isinstance(event, Prefilled):
                cached[i] = event.statistics.cached_n
        assert texts[1] == expected
        assert cached[1] >= N - 17
