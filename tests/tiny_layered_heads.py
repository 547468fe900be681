"""Tiny EAGLE-3 heads of three layers, and P-EAGLE heads, for the main models of `tests.tiny_heads`.

The first layer is that of `tests.tiny_heads`; later ones add a little noise to it. They are written as
checkpoints and converted. In a block, attention predicts the first draft token only.
"""

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np

from spec_local.conversion import eagle
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.writer import _write
from spec_local.llama.model import Model
from tests.checkpoints import write_checkpoint
from tests.tiny_heads import _NOISE, N_EMBD, eagle_matrices
from tests.torch_eagle import TinyEagle, layer_shapes

MASK, SIZE = 44, 6
"""The mask token, and the draft tokens of a block."""
_LAYERS = (2, 3, 4)  # whose inputs the head reads; a list that begins with 1 would be one of outputs
_N_HEADS = 2
_NAMES = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
}


def layered_eagle(kind: str = "layered") -> TinyEagle:
    """A head. kind: ``layered``; ``peagle``, which drafts blocks; ``peagle1``, one such layer."""
    n_layers, rng = 1 if kind == "peagle1" else 3, np.random.default_rng(5)
    matrices, tensors = eagle_matrices(400), {}
    tensors["d2t"] = matrices["d2t"] - np.arange(len(matrices["d2t"]))
    tensors["lm_head.weight"] = matrices["output.weight"]
    for ours, theirs in _NAMES.items():
        tensors[f"layers.0.{theirs}.weight"] = matrices[f"blk.0.{ours}.weight"]
    names = [f"layers.0.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for name in [*names, "norm"]:
        tensors[f"{name}.weight"] = np.ones(N_EMBD, np.float32)
    for layer in range(1, n_layers):
        for name, shape in layer_shapes(N_EMBD, 32, N_EMBD, 2 * N_EMBD, _N_HEADS).items():
            values = rng.normal(size=shape)
            is_added = "o_proj" in name or "down_proj" in name
            scale = _NOISE if is_added else 1.0
            values = 1 + _NOISE * values if len(shape) == 1 else scale * shape[1] ** -0.5 * values
            tensors[f"layers.{layer}.{name}.weight"] = values.astype(np.float32)
    shape = (N_EMBD, 3 * N_EMBD)
    tensors["fc.weight"] = (_NOISE * shape[1] ** -0.5 * rng.normal(size=shape)).astype(np.float32)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_attention_heads": _N_HEADS,
        "num_key_value_heads": _N_HEADS,
        "num_hidden_layers": n_layers,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": list(_LAYERS),
        "speculators_config": {"proposal_methods": [{"speculative_tokens": SIZE}]},
    }
    if kind != "layered":
        tensors["mask_hidden"] = rng.normal(size=(1, 3 * N_EMBD)).astype(np.float32)
        config["ptd_token_id"] = MASK
    settings = {"eps": 1e-5, "n_layers": n_layers, "n_heads": _N_HEADS, "n_kv": _N_HEADS, "mask": MASK}
    return TinyEagle(config, tensors, _LAYERS, settings)


def write_layered_eagle(path: Path | str, main: Path, kind: str = "layered") -> Path:
    """Write the file of a head for a main model in F32."""
    head, path = layered_eagle(kind), Path(path)
    folder = write_checkpoint(Path(f"{path}-folder"), head.config, head.tensors)
    with closing(Model(main, weights=False)) as header:
        _write(path, eagle.convert(Checkpoint(folder), header), header, "F32", {})
    return path


class ReferenceLayeredHead:
    """The logits of such a head by PyTorch, as of `tests.reference_head.ReferenceHead`.

    n_drafted: number of draft tokens in a block; the logits do not depend on it.
    """

    n_drafted = SIZE

    def __init__(self, kind: str, main: Path) -> None:
        (found,) = (each for each in gguf.GGUFReader(main).tensors if each.name == "token_embd.weight")
        self._head, self._embeddings, self._is_block = (
            layered_eagle(kind),
            np.array(found.data),
            kind != "layered",
        )

    def close(self) -> None:
        pass

    def logits(self, tokens, states, drafted):
        """The logits after the history `tokens`, and after each of the draft tokens after it."""
        states = np.array(states, np.float32).reshape(len(tokens) - 1, -1)
        if self._is_block:
            return self._head.block(self._embeddings, tokens, states, len(drafted) + 1)
        return self._head.logits(self._embeddings, tokens, states, drafted)
