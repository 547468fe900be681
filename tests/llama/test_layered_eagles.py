"""EAGLE-3 heads with several layers, and P-EAGLE heads: their files have the logits of PyTorch. In F32."""

from contextlib import closing
from dataclasses import replace
from types import MappingProxyType

import gguf
import numpy as np
import pytest

from spec_local.conversion import eagle
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.convert import is_head
from spec_local.conversion.writer import write_head
from spec_local.core.calls import run
from spec_local.errors import InvalidRequest, ModelError, ModelFileError
from spec_local.llama.gguf_tensors import end_of_tensors
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize
from tests.checkpoints import write_checkpoint
from tests.llama.converted_eagles import DRAFTED, agree, agree_token_by_token, converted_pairs
from tests.llama.test_heads import NOISE, PROMPT
from tests.tiny_heads import write_tiny_main
from tests.torch_eagle import MASK, tiny_layered_eagles

pytestmark = pytest.mark.usefixtures("f32_caches", "unchecked_headers")

HEADS = tiny_layered_eagles()
PARALLEL = [name for name in HEADS if name.startswith("P-EAGLE")]
CHAINED = [name for name in HEADS if name not in PARALLEL]
NONE = MappingProxyType({})


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "layered-main.gguf", n_layers=8)


@pytest.fixture(scope="module")
def matrices(main_path):
    """The main model's embeddings and output matrix."""
    found = {each.name: np.array(each.data) for each in gguf.GGUFReader(main_path).tensors}
    return found["token_embd.weight"], found["output.weight"]


@pytest.fixture(scope="module")
def header(main_path):
    with closing(Model(main_path, weights=False)) as model:
        yield model


@pytest.fixture
def open_pair(main_path, tmp_path):
    with converted_pairs(main_path, tmp_path) as make:
        yield make


@pytest.mark.parametrize("layout", CHAINED)
def test_logits_of_several_layers_are_those_of_pytorch(open_pair, matrices, layout):
    agree_token_by_token(open_pair(HEADS[layout]), HEADS[layout], matrices[0])


@pytest.mark.parametrize("layout", PARALLEL)
def test_logits_of_a_block_are_those_of_pytorch(open_pair, matrices, layout):
    """Of all draft tokens, whichever they are; with entries that are in the cache, and in the same call."""
    pair, reference = open_pair(HEADS[layout]), HEADS[layout]
    if "lm_head.weight" not in reference.tensors:
        reference = replace(reference, tensors={**reference.tensors, "lm_head.weight": matrices[1]})
    assert pair.chosen.drafts_blocks
    assert pair.chosen.max_draft == (4 if "speculators" in layout else 8)
    (main,), (head,) = pair.open()
    run(main.call(PROMPT, n_logits=0))
    states = main.states(range(len(PROMPT)))
    for n in (2, 3, 20, len(PROMPT)):
        for n_before in (0, n // 2):
            head.truncate(0)
            if n_before:
                head.receive(0, PROMPT[:n_before], states[:n_before])
                run(head.call(PROMPT[:n_before], n_logits=0))
            head.receive(n_before, PROMPT[n_before : n - 1], states[n_before : n - 1])
            rows = [run(head.call(PROMPT[len(head.cached) : n], n_logits=1, n_draft=4))[0].copy()]
            rows += [run(head.call([token], n_logits=1))[0].copy() for token in DRAFTED]
            agree(rows, reference.block(matrices[0], PROMPT[:n], states[: n - 1], 4))


def test_a_norm_of_another_width(main_path, header, tmp_path):
    head = convert(tmp_path / "folder", header, HEADS["EAGLE-3.1"])
    head = replace(head, arrays={"output_norm": np.ones(63, np.float32)})
    with pytest.raises(ModelError, match="its output has a norm of width 63"):
        write_head(tmp_path / "head.gguf", head, header, "F32")


@pytest.mark.parametrize("layout", ["vLLM", "P-EAGLE", "P-EAGLE, one layer"])
@pytest.mark.parametrize("n_kept", [0, 1, 10, 20, 30, len(PROMPT) - 1])
def test_rows_share_what_they_have_read(open_pair, layout, n_kept):
    """Entries in the caches, and states that are not in them yet; the logits are those of a row of its own.

    Of a text that branches off within the entries, the state of the last common token is needed again.
    """
    pair = open_pair(HEADS[layout])
    mains, (a, b) = pair.open(2)
    other = [*PROMPT[:n_kept], 33, 44]
    run(mains[0].call(PROMPT[:20], n_logits=0))
    a.receive(0, PROMPT[:20], mains[0].states(range(20)))
    run(a.call(PROMPT[:20], n_logits=0))
    run(mains[0].call(PROMPT[20:-1], n_logits=0))
    a.receive(20, PROMPT[20:-1], mains[0].states(range(len(PROMPT) - 21)))
    for row, main in ((b, mains[1]), (a, mains[0])):
        row.reuse(other)
        n = row.n_received
        assert row is a or n == (n_kept if n_kept >= 20 else max(0, n_kept - 1))
        main.truncate(0)
        run(main.call(other[:-1], n_logits=0))
        row.receive(n, other[n:-1], main.states(range(n, len(other) - 1)))
        found = run(row.call(other[len(row.cached) :], n_logits=1))[0].copy()
        row.truncate(0)
        row.receive(0, other[:-1], main.states(range(len(other) - 1)))
        expected = run(row.call(other, n_logits=1))[0]
        known = np.isfinite(expected)
        assert np.allclose(found[known], expected[known], atol=NOISE)
        if row is b:
            row.truncate(0)


def test_a_block_after_an_entry_whose_state_has_been_forgotten(open_pair):
    """It is evaluated again, with zeros in place of the state."""
    pair = open_pair(HEADS["P-EAGLE"])
    (main,), (head,) = pair.open()
    run(main.call(PROMPT, n_logits=0))
    head.receive(0, PROMPT[:-1], main.states(range(len(PROMPT) - 1)))
    run(head.call(PROMPT[:-1], n_logits=0))
    head.reuse(PROMPT[:10])
    assert (head.n_received, head.n_stored) == (9, 10)
    assert np.isfinite(run(head.call([5], n_logits=1))).all()


@pytest.mark.parametrize("layout", ["vLLM", "P-EAGLE"])
def test_quantized_files(open_pair, layout):
    """Both models of the file have matrices of the type, and llama.cpp evaluates them."""
    pair = open_pair(HEADS[layout], "Q8_0")
    (main,), (head,) = pair.open()
    run(main.call(PROMPT, n_logits=0))
    head.receive(0, PROMPT[:-1], main.states(range(len(PROMPT) - 1)))
    assert np.isfinite(run(head.call(PROMPT, n_logits=1))).any()
    plain = open_pair(HEADS[layout])
    sizes = [model.size for model in (pair.head, plain.head)]
    assert sizes[0] < 0.4 * sizes[1]
    for model in (pair.head, plain.head):
        assert 0.8 * model.path.stat().st_size < model.size < model.path.stat().st_size
    n_parameters = sum(each.size for each in HEADS[layout].tensors.values() if each.dtype == np.float32)
    assert pair.head.parameters == f"{n_parameters / 1e6:.1f}M"
    assert pair.head.kv_bytes(10) == 3 * 10 * 2 * 2 * 16 * 2  # layers, tokens, heads, keys and values


def test_llama_cpp_does_not_quantize_them(open_pair, tmp_path):
    """It would leave out the second model."""
    with pytest.raises(InvalidRequest, match="a head with several layers"):
        quantize(open_pair(HEADS["vLLM"]).head.path, tmp_path / "copy.gguf", "Q8_0")


def test_a_file_that_ends_after_its_first_layer(open_pair, main_path, tmp_path):
    pair = open_pair(HEADS["P-EAGLE"])
    content = pair.head.path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: end_of_tensors(pair.head.path)])
    with closing(Model(path)) as head, pytest.raises(ModelFileError, match="ends after its first layer"):
        choose_head(pair.main, head)
    path.write_bytes(content[:-100])
    with closing(Model(path)) as head, pytest.raises(ModelFileError, match="cannot be loaded"):
        choose_head(pair.main, head)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (b"eagle3.later_layers", 3, "2 layers instead of 3 after the first one"),
        (b"eagle3.block_size", 0, "incomplete P-EAGLE head"),
        (b"eagle3.draft_tokens", 900, "does not list different tokens"),
        (b"eagle3.mask_state", 0x7FC00000, "incomplete P-EAGLE head"),
        (b"llama.rope.dimension_count", 8, "invalid n_rot"),
        (b"llama.vocab_size", 299, "wrong shape"),
    ],
)
def test_fields_that_llama_cpp_would_not_survive(open_pair, tmp_path, field, value, why):
    """The number of a field, or the first one of an array, is replaced."""
    pair = open_pair(HEADS["P-EAGLE, norm before fc"])
    content = bytearray(pair.head.path.read_bytes())
    start = content.index(field) + len(field) + (16 if value > 300 else 4)  # after the type
    content[start : start + 4] = value.to_bytes(4, "little")
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    with closing(Model(path)) as head, pytest.raises((ModelError, ModelFileError), match=why):
        choose_head(pair.main, head)


def convert(folder, header, head, config=NONE, tensors=NONE):
    """The converted head, with other settings and tensors; those with the value None are left out."""
    parts = [
        {key: value for key, value in ({**given, **other}).items() if value is not None}
        for given, other in ((head.config, config), (head.tensors, tensors))
    ]
    return eagle.convert(Checkpoint(write_checkpoint(folder, *parts)), header)


def test_the_mask_token_and_the_size_of_a_block(tmp_path, header):
    for name, size in (("P-EAGLE", 8), ("P-EAGLE, norm before fc", 8), ("P-EAGLE, speculators", 4)):
        found = convert(tmp_path, header, HEADS[name])
        assert (found.mask, found.fields["block_size"], found.layout) == (MASK, size, "P-EAGLE")
    assert convert(tmp_path, header, HEADS["vLLM"]).layout == "EAGLE-3"
    assert is_head({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "ptd_token_id": MASK})


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({"ptd_token_id": None}, {}, "names no token for `mask_hidden`"),
        ({"ptd_token_id": 823}, {}, "names no token for `mask_hidden`"),
        ({"parallel_drafting": True}, {"mask_hidden": None}, "it has no tensor mask_hidden"),
        ({}, {"mask_hidden": np.ones((1, 64), np.float32)}, r"mask_hidden has the shape \[1, 64\]"),
        ({}, {"layers.2.mlp.up_proj.weight": None}, "it has no tensor layers.2.mlp.up_proj"),
        ({}, {"layers.2.self_attn.q_proj.weight": np.ones((64, 128), np.float32)}, r"\[64, 128\] instead"),
        ({}, {"layers.4.input_layernorm.weight": np.ones(64, np.float32)}, "a tensor layers.4.input"),
        (
            {},
            {"layers.1.self_attn.q_proj.bias": np.ones(64, np.float32)},
            "a tensor layers.1.self_attn.q_proj.b",
        ),
    ],
)
def test_what_is_refused(tmp_path, header, config, tensors, why):
    with pytest.raises((ModelError, ModelFileError), match=why):
        convert(tmp_path, header, HEADS["P-EAGLE"], config, tensors)
