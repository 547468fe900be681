"""EAGLE-3 heads in safetensors: their GGUF files have the logits of PyTorch. In F32."""

import gguf
import numpy as np
import pytest

from spec_local.conversion.convert import convert_head
from spec_local.core.calls import run
from tests.checkpoints import write_checkpoint
from tests.llama.test_heads import NOISE, PROMPT, Pair
from tests.tiny_heads import write_tiny_main
from tests.torch_eagle import tiny_eagles

pytestmark = pytest.mark.usefixtures("f32_caches")

HEADS = tiny_eagles()
DRAFTED = (20, 300, 7)


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "conversion-main.gguf", n_layers=8)


@pytest.fixture(scope="module")
def embeddings(main_path):
    (found,) = (each for each in gguf.GGUFReader(main_path).tensors if each.name == "token_embd.weight")
    return np.array(found.data)


@pytest.fixture
def open_pair(main_path, tmp_path):
    made = []

    def make(head, kind="F32", precision="F32"):
        folder = write_checkpoint(tmp_path / "folder", head.config, head.tensors, precision)
        path = convert_head(folder, main_path, tmp_path / "head.gguf", kind)
        made.append(Pair("eagle", main_path, path))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize("layout", HEADS)
def test_logits_are_those_of_pytorch(open_pair, embeddings, layout):
    """After each token of a prompt, and after draft tokens, whose states the head makes itself."""
    pair, reference = open_pair(HEADS[layout]), HEADS[layout]
    assert pair.chosen.hidden.layers == tuple(layer - 1 for layer in reference.layers)
    (main,), (head,) = pair.open()
    run(main.call(PROMPT, n_logits=0))
    states = main.states(range(len(PROMPT)))
    for n in (2, 3, 20, len(PROMPT)):
        head.truncate(0)
        head.receive(0, PROMPT[: n - 1], states[: n - 1])
        rows = [run(head.call(PROMPT[:n], n_logits=1))[0].copy()]
        rows += [run(head.call([token], n_logits=1))[0].copy() for token in DRAFTED]
        expected = reference.logits(embeddings, PROMPT[:n], states[: n - 1], DRAFTED)
        np.testing.assert_allclose(rows, expected, atol=NOISE, rtol=0)
        assert np.ptp(expected[0][np.isfinite(expected[0])]) > 1
