"""Which files are heads of which main models."""

from functools import partial

import gguf
import numpy as np
import pytest

from spec_local.errors import ModelError, ModelFileError, SpecLocalError
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.session import Session
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

write_tiny_dspark = partial(write_tiny_block_head, kind="dspark")
write_tiny_dflash2 = partial(write_tiny_block_head, kind="dflash2")


@pytest.fixture(scope="module")
def mains(folder):
    """The main models of the kinds of heads."""
    paths = {
        "llama": write_tiny_main(folder / "llama.gguf"),
        "gemma": write_tiny_gemma(folder / "gemma.gguf"),
        # llama.cpp takes the caches of the last two layers: one with a window, and one without
        "five layers": write_tiny_gemma(folder / "five.gguf", n_layers=5),
    }
    models = {name: Model(path, weights=False) for name, path in paths.items()}
    yield models
    for model in models.values():
        model.close()


EAGLE = "is an EAGLE-3 head for another model"
ASSISTANT = "is a Gemma 4 assistant for another model"
LAST_LAYER = "is a DFlash head that reads the last layer of .*, which is not supported"
MISFITS = {
    write_tiny_eagle: [
        ("llama", {"target_width": 128}, f"{EAGLE} .hidden states of width 128 against 64.: use one"),
        ("llama", {"layers": (1, 2, 6)}, f"{EAGLE} .it reads layers up to 5, but there are only 5.: use one"),
        ("llama", {"layers": (2, 2, 4)}, f"{EAGLE} .it reads a layer twice.: use one"),
        ("llama", {"n_vocab": 900}, f"{EAGLE} .900 tokens against 823.: use one"),
    ],
    write_tiny_block_head: [
        ("llama", {"layers": (1, 2, 6)}, "for another model .it reads layers up to 5, but there are only 5."),
        ("llama", {"layers": (1, 2, 5)}, LAST_LAYER),
        ("llama", {"layers": (0, 2)}, "for another model .it reads the token embeddings."),
        ("llama", {"extra_tokens": ["<a>"]}, "for another model .824 tokens against 823."),
        ("llama", {"mask": None}, "is an incomplete head .no mask token.: convert"),
        ("llama", {"size": 1}, "is an incomplete head .blocks without draft tokens."),
        ("llama", {"n_draft_vocab": 400, "drop": "output.weight"}, "no output matrix for it"),
    ],
    write_tiny_dspark: [
        ("llama", {"size": None}, "is an incomplete head .no block size."),
        ("llama", {"size": 0}, "is an incomplete head .blocks without draft tokens."),
    ],
    write_tiny_dflash2: [
        ("llama", {"size": 1}, "is an incomplete head .blocks without draft tokens."),
        ("llama", {"mask": None}, "is an incomplete head .no mask token."),
        ("llama", {"n_draft_vocab": 400, "drop": "output.weight"}, "no output matrix for it"),
        ("llama", {"conv_kernel_size": 13}, "cannot run .convolutions over 13 tokens need a larger graph."),
        (
            "llama",
            {"base_type": np.float16},
            "is a DFlash2 head that llama.cpp cannot run .convolutions in F16.",
        ),
        ("llama", {"with_markov": True}, "cannot run .a selector and a Markov model.: use another"),
        ("llama", {"layers": (1, 2, 5)}, "is a DFlash2 head that reads the last layer of"),
    ],
    write_tiny_assistant: [
        ("gemma", {"target_width": 128}, f"{ASSISTANT} .hidden states of width 128 against 64.: use"),
        ("gemma", {"n_vocab": 900}, f"{ASSISTANT} .900 tokens against 823.: use"),
        ("gemma", {"attention.sliding_window": 16}, "its sliding window has a different length"),
        ("gemma", {"attention.head_count_kv": 2}, "with a sliding window need other keys and values"),
        ("gemma", {"attention.head_count_kv": [1, 2]}, "without a sliding window need other keys and values"),
        ("five layers", {}, "its layers with a sliding window need other keys and values"),
        ("llama", {}, r"llama\.gguf has the architecture llama"),
    ],
}


@pytest.mark.parametrize(
    ("write", "main", "options", "why"),
    [(write, *misfit) for write, misfits in MISFITS.items() for misfit in misfits],
)
def test_a_head_that_does_not_fit(mains, tmp_path, write, main, options, why):
    head = Model(write(tmp_path / "other.gguf", **options), weights=False)
    with pytest.raises(ModelError, match=why) as caught:
        choose_head(mains[main], head)
    assert "other.gguf" in str(caught.value)
    head.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"size": None}, "missing conv/selector metadata"),
        ({"selector_rank": 0}, "missing conv/selector metadata"),
        ({"conv_group_size": 24}, "hidden size must be divisible by conv_group_size"),
        ({"selector_top_k": 8}, "hidden size is too small"),
        ({"drop": "selector_successor.weight"}, "selector_successor.weight. not found"),
    ],
)
def test_llama_cpp_refuses_a_selector_without_its_sizes(tmp_path, options, why):
    """Instead of aborting the process, so that nothing else has to check them."""
    with pytest.raises(ModelFileError, match=f"cannot be loaded .*{why}"):
        Model(write_tiny_dflash2(tmp_path / "head.gguf", **options), weights=False)


@pytest.mark.parametrize(
    ("fact", "value", "why"),
    [
        ("n_embd", 128, "for another model .hidden states of width 128 against 64."),
        ("target_layers", (), "for another model .its file names no layers to read."),
        ("number", lambda key: 4, "a DSpark head of DeepSeek-V4, which is not supported"),
    ],
)
def test_further_heads_that_do_not_fit(mains, tmp_path, fact, value, why):
    """Files of them would not be tiny."""
    head = Model(write_tiny_block_head(tmp_path / "head.gguf"), weights=False)
    setattr(head, fact, value)
    with pytest.raises(ModelError, match=f"head.gguf.*{why}"):
        choose_head(mains["llama"], head)
    head.close()


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_tiny_eagle, "an EAGLE-3 head"),
        (write_tiny_block_head, "a DFlash head"),
        (write_tiny_dflash2, "a DFlash2 head"),
        (write_tiny_assistant, "a Gemma 4 assistant"),
    ],
)
def test_a_head_is_not_a_main_model(tmp_path, write, name):
    head = Model(write(tmp_path / "head.gguf"), weights=False)
    with pytest.raises(ModelError, match=rf"head\.gguf is {name}: give it as the draft of the model"):
        choose_head(head)
    head.close()


@pytest.mark.parametrize("write", [write_tiny_eagle, partial(write_tiny_dspark, n_draft_vocab=400)])
def test_a_damaged_head_does_not_crash_the_process(mains, tmp_path, own_cache, write):
    """Its list of tokens names one that the main model does not have."""
    damaged = write(tmp_path / "damaged.gguf")
    tensor = next(t for t in gguf.GGUFReader(damaged, "r+").tensors if t.name == "d2t")
    tensor.data[-1] = 1 << 40
    tensor.data.flush()
    with pytest.raises(SpecLocalError, match=r"damaged\.gguf"):
        Session.open(mains["llama"].path, damaged, n_ctx=256)
