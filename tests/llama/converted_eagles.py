"""What tests of converted EAGLE-3 heads share: files made from safetensors, and a comparison with PyTorch."""

from contextlib import contextmanager

import numpy as np

from spec_local.conversion.convert import convert_head
from spec_local.core.calls import run
from tests.checkpoints import write_checkpoint
from tests.llama.test_heads import NOISE, PROMPT, Pair

DRAFTED = (20, 300, 7)


@contextmanager
def converted_pairs(main_path, folder):
    """A function that converts a head and opens it with its main model, for a ``with`` block."""
    made = []

    def make(head, kind="F32", precision="F32"):
        source = write_checkpoint(folder / "folder", head.config, head.tensors, precision)
        path = convert_head(source, main_path, folder / f"{len(made)}.gguf", kind)
        made.append(Pair("eagle", main_path, path))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def agree(found, expected):
    np.testing.assert_allclose(found, expected, atol=NOISE, rtol=0)
    assert np.ptp(expected[0][np.isfinite(expected[0])]) > 1


def agree_token_by_token(pair, reference, embeddings):
    """After each token of a prompt, and after draft tokens, whose states the head makes itself."""
    assert pair.chosen.hidden.layers == tuple(layer - 1 for layer in reference.layers)
    (main,), (head,) = pair.open()
    run(main.call(PROMPT, n_logits=0))
    states = main.states(range(len(PROMPT)))
    for n in (2, 3, 20, len(PROMPT)):
        head.truncate(0)
        head.receive(0, PROMPT[: n - 1], states[: n - 1])
        rows = [run(head.call(PROMPT[:n], n_logits=1))[0].copy()]
        rows += [run(head.call([token], n_logits=1))[0].copy() for token in DRAFTED]
        agree(rows, reference.logits(embeddings, PROMPT[:n], states[: n - 1], DRAFTED))
