"""The PyTorch forward pass against llama.cpp, and weights pruned from GGUF files of several kinds."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch

from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.context import open_context
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize
from spec_local.llama.tiny import write_tiny_model
from spec_local.training import network
from spec_local.training.initial_weights import pruned_weights, random_weights, rescaled
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, tensor_shapes

SHAPE = ModelShape(
    n_vocab=270,
    n_embd=64,
    n_layers=3,
    n_head=4,
    n_head_kv=2,
    head_dim=32,  # more than n_embd / n_head
    n_ff=96,
    rope_base=5000.0,
    eps=1e-4,
    n_ctx=512,
)
TOKENS = [1, 40, 7, 99, 269, 40, 40, 200, 13, 5, 250, 77, 31, 8, 9, 10]


def write(path, shape, weights, architecture="llama", **facts):
    """A GGUF file with these weights and a vocabulary of bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [chr(ord("a") + i) for i in range(shape.n_vocab - len(tokens))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(facts.get("rotated", shape.head_dim))
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_biases(shape, seed=0):
    weights, rng = random_weights(shape, seed), np.random.default_rng(seed)
    for name, size in tensor_shapes(shape, biases=True).items():
        if name.endswith("bias"):
            weights[name] = rng.standard_normal(size, np.float32)
        elif len(size) == 1:
            weights[name] = 1 + 0.3 * rng.standard_normal(size, np.float32)
    return weights


def as_qwen2(weights, head_dim):
    """Reorder queries and keys: RoPE pairs from neighbours to half a head apart."""

    def halves(values):
        apart = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
        return apart.swapaxes(1, 2).reshape(values.shape).copy()

    return {
        name: halves(value) if "attn_q." in name or "attn_k." in name else value
        for name, value in weights.items()
    }


def logits(shape, weights):
    parameters = {name: torch.tensor(value) for name, value in weights.items()}
    states = network.hidden_states(parameters, shape, torch.tensor([TOKENS]))[0]
    return (states @ parameters[EMBEDDINGS].T).numpy()


def llama_cpp_logits(path):
    context = open_context(Model(path), n_ctx=64, max_logits=32, threads=1, flash_attention=False)
    found = context.evaluate(TOKENS, len(TOKENS)).copy()
    context.close()
    return found


@pytest.mark.parametrize("biases", [False, True])
def test_the_network_matches_llama_cpp(tmp_path, biases):
    weights = with_biases(SHAPE) if biases else random_weights(SHAPE)
    found, expected = logits(SHAPE, weights), llama_cpp_logits(write(tmp_path / "m.gguf", SHAPE, weights))
    assert expected.std() > 0.3
    assert np.abs(found - expected).max() < 5e-3 * expected.std()  # llama.cpp keeps keys and values in f16


def test_a_whole_model_can_be_extracted(tmp_path):
    weights = with_biases(SHAPE)
    path = write(tmp_path / "m.gguf", SHAPE, weights)
    shape, found = pruned_weights(path, np.arange(SHAPE.n_vocab), range(SHAPE.n_layers))
    assert dataclasses.replace(shape, eps=SHAPE.eps) == SHAPE
    assert shape.eps == pytest.approx(SHAPE.eps)
    assert found.keys() == weights.keys()
    assert all((found[name] == weights[name]).all() for name in weights)


def test_the_requested_tokens_and_layers_are_extracted(tmp_path):
    weights = random_weights(SHAPE)
    path = write(tmp_path / "m.gguf", SHAPE, weights)
    kept = np.array([3, 200, 7], np.uint32)
    shape, found = pruned_weights(path, kept)
    assert (shape.n_vocab, shape.n_layers) == (3, 2)
    assert (found["token_embd.weight"] == weights["token_embd.weight"][kept]).all()
    assert (found["blk.1.ffn_up.weight"] == weights["blk.2.ffn_up.weight"]).all()
    assert (found["blk.0.ffn_up.weight"] == weights["blk.0.ffn_up.weight"]).all()
    assert tensor_shapes(shape) == {name: value.shape for name, value in found.items()}


def test_rescaled_logits_have_unit_deviation():
    weights = random_weights(SHAPE)
    weights["output_norm.weight"] *= 7
    assert logits(SHAPE, weights).std() > 3
    assert logits(SHAPE, rescaled(SHAPE, weights)).std() == pytest.approx(1, abs=0.15)


def test_rope_pairs_of_qwen2_are_interleaved(tmp_path):
    narrow = dataclasses.replace(SHAPE, head_dim=16)  # the only one that llama.cpp accepts for qwen2
    weights = with_biases(narrow)
    path = write(tmp_path / "m.gguf", narrow, as_qwen2(weights, 16), "qwen2", rotated=16)
    shape, found = pruned_weights(path, np.arange(SHAPE.n_vocab), range(SHAPE.n_layers))
    expected = llama_cpp_logits(path)
    assert np.abs(logits(shape, found) - expected).max() < 5e-3 * expected.std()
    assert all((found[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K"])
def test_quantized_weights_are_dequantized(tmp_path, kind):
    plain = write_tiny_model(tmp_path / "plain.gguf", n_embd=256, tensor_type="F32")
    _, exact = pruned_weights(plain, np.arange(100, 200))
    _, rough = pruned_weights(quantize(plain, tmp_path / "q.gguf", kind, threads=1), np.arange(100, 200))
    for name, value in exact.items():
        assert np.abs(rough[name] - value).mean() < 0.1 * np.abs(value).mean()


def test_a_separate_output_matrix_replaces_the_embeddings(tmp_path):
    weights = random_weights(SHAPE)
    output = random_weights(SHAPE, 1)["token_embd.weight"]
    path = write(tmp_path / "m.gguf", SHAPE, weights | {"output.weight": output})
    _, found = pruned_weights(path, np.arange(5))
    assert (found["token_embd.weight"] == output[:5]).all()


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("architecture is gemma3", {"architecture": "gemma3"}),
        ("blk.0.attn_q_norm.weight", {"extra": {"blk.0.attn_q_norm.weight": (32,)}}),
        ("it has output_norm.bias", {"extra": {"output_norm.bias": (64,)}}),
        ("only a part of each head is rotated", {"rotated": 16}),
        ("blk.0.ffn_up.weight is missing", {"without": "blk.0.ffn_up.weight"}),
    ],
)
def test_unsupported_parts_are_named(tmp_path, why, change):
    weights = random_weights(SHAPE)
    weights.pop(change.get("without"), None)
    weights |= {name: np.ones(size, np.float32) for name, size in change.get("extra", {}).items()}
    path = write(
        tmp_path / "m.gguf",
        SHAPE,
        weights,
        change.get("architecture", "llama"),
        rotated=change.get("rotated", 32),
    )
    with pytest.raises(
        ModelError, match=rf"m\.gguf cannot be pruned to a draft model \(.*{why}.*\): train one from random"
    ):
        pruned_weights(path, np.arange(5))


def test_files_that_are_not_models_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match="does not exist"):
        pruned_weights(tmp_path / "none.gguf", np.arange(5))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        pruned_weights(tmp_path / "text.gguf", np.arange(5))


@pytest.mark.starter
def test_the_whole_starter_model_matches_llama_cpp(starter):
    n = starter.vocabulary.n_tokens
    shape, weights = pruned_weights(starter.path, np.arange(n), range(30))
    tokens = starter.vocabulary.tokenize("The capital of France is Paris, and the capital of Italy is")
    parameters = {name: torch.tensor(value) for name, value in weights.items()}
    states = network.hidden_states(parameters, shape, torch.tensor([tokens]))[0]
    found = (states @ parameters[EMBEDDINGS].T).numpy()
    context = open_context(starter, n_ctx=64, max_logits=32, threads=1)
    expected = context.evaluate(tokens, len(tokens)).copy()
    context.close()
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9
    assert np.abs(found - expected).mean() < 0.1 * expected.std()  # llama.cpp rounds activations to 8 bits
