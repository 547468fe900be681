"""A head in PyTorch computes what llama.cpp computes from its file. In F32, so that the noise is small."""

import numpy as np
import pytest
import torch

from spec_local.core.calls import run
from spec_local.llama.gguf_tensors import floats, integers
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.training import network
from spec_local.training.head_file import export_head
from spec_local.training.head_shape import HeadShape, tensor_shapes
from tests.reference_head import ReferenceHead
from tests.tiny_heads import N_EMBD, write_tiny_main

pytestmark = pytest.mark.usefixtures("f32_caches")

LAYERS = (0, 2, 3)
SHAPE = HeadShape(n_embd=N_EMBD, n_head=3, head_dim=32, n_ff=96, rope_base=5000.0, eps=1e-4)
TOKENS = [1, 40, 7, 99, 269, 40, 40, 200, 13, 5, 250, 77, 31, 8, 9, 10, 300, 301, 302, 330]
DRAFTED = np.array([*range(5, 400, 2), 410, 500])


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf")


@pytest.fixture(scope="module")
def head_path(main_path):
    """Random weights, so that every tensor matters; strong queries, so that the position does.

    In F32, because llama.cpp rounds activations to 8 bits where it multiplies by Q8_0.
    """
    rng = np.random.default_rng(1)
    weights = {}
    for name, size in tensor_shapes(SHAPE).items():
        deviation = size[1] ** -0.5 if len(size) > 1 else 0.3
        weights[name] = rng.normal(float(len(size) == 1), deviation, size).astype(np.float32)
    weights["blk.0.attn_q.weight"] *= 3
    output = rng.normal(0, 2 * N_EMBD**-0.5, (len(DRAFTED), N_EMBD)).astype(np.float32)
    path = main_path.with_name("head.gguf")
    weights["output.weight"] = output
    return export_head(path, main_path, SHAPE, weights, layers=LAYERS, drafted=DRAFTED, kind="F32")


@pytest.fixture(scope="module")
def parameters(head_path):
    return {
        name: torch.tensor(floats(head_path, name, size[-1]).reshape(size))
        for name, size in tensor_shapes(SHAPE).items()
    }


def test_every_draft_token_has_the_logits_of_llama_cpp(main_path, head_path, parameters):
    """The history grows by one token at a time, and three tokens are drafted after each."""
    main, head = Model(main_path), Model(head_path)
    context = open_sequence(
        main, n_ctx=256, max_tokens=64, threads=1, hidden=HiddenStates(LAYERS), flash_attention=False
    )
    run(context.call(TOKENS, n_logits=1))
    states = context.states(range(len(TOKENS))).copy()
    reference = ReferenceHead(head, context)
    shifted = np.vstack([np.zeros_like(states[:1]), states[:-1]])
    embeddings = floats(main_path, "token_embd.weight", N_EMBD)[TOKENS]
    found = network.draft_states(
        parameters, SHAPE, torch.tensor(shifted[None]), torch.tensor(embeddings[None]), depth=3
    )
    output = torch.tensor(floats(head_path, "output.weight", N_EMBD))
    logits = [(each[0] @ output.T).numpy() for each in found]
    ids = integers(head_path, "d2t")
    for n in range(2, len(TOKENS) - 2):
        expected = reference.logits(TOKENS[:n], states[: n - 1], TOKENS[n : n + 2])
        for depth, row in enumerate(expected):
            assert np.array_equal(np.flatnonzero(np.isfinite(row)), ids)
            np.testing.assert_allclose(logits[depth][n - 1 + depth], row[ids], atol=1e-3)
    reference.close()
    context.close()
