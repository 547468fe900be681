"""Layers for multi-token prediction (MTP, NextN), from the folder of the model that they belong to.

Qwen3-Next and Qwen3.5 name them ``mtp.*``; GLM and DeepSeek append them to the model's layers. The result is
what llama.cpp's converter writes with ``--mtp``: a header like the main model's, and, as llama.cpp reads them
from the same file, also the main model's embeddings, last norm and output matrix.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.head import ConvertedHead, HeadTensor, Value, of_main
from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.model import Model

_QWEN = ("qwen3next", "qwen35", "qwen35moe")
_APPENDED = ("glm4moe", "deepseek2", "deepseek32", "glm-dsa")
_MTP = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d{1,9})\.)?(.+)")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,9})\.(.+)")
_PROJECTIONS = ("gate", "up", "down")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,9})\.(\w+)_proj\.weight")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in _PROJECTIONS},
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in _PROJECTIONS},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in _PROJECTIONS},
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    # Qwen
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
"""llama.cpp's names of tensors, by those in the folder, without the layer and without ``.weight``."""


def recognizes(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has such layers, beside those of the model or alone."""
    return any(_MTP.fullmatch(name) or name.endswith(".eh_proj.weight") for name in checkpoint.names)


def convert(checkpoint: Checkpoint, main: Model) -> ConvertedHead:
    """Convert the layers, and check that they fit a main model.

    Raises:
        ModelFileError: they are incomplete or damaged.
        ModelError: they do not fit, or are of an architecture that cannot be converted.
    """
    if main.architecture not in (*_QWEN, *_APPENDED):
        raise ModelError(
            f"layers for multi-token prediction of {main.architecture} cannot be converted: use llama.cpp's "
            "convert_hf_to_gguf.py with --mtp"
        )
    return _Mtp(checkpoint, main).head()


class _Mtp:
    """The conversion of the layers of one model."""

    def __init__(self, checkpoint: Checkpoint, main: Model) -> None:
        self._checkpoint, self._main = checkpoint, main
        inner = checkpoint.config.get("text_config")
        config = inner if isinstance(inner, dict) else checkpoint.config
        for name, ours in (("num_hidden_layers", main.n_layers), ("hidden_size", main.n_embd)):
            theirs = config.get(name)
            if theirs != ours:
                raise ModelError(
                    f"{checkpoint.folder} is for another main model than {main.path.name} (`{name}` {theirs} "
                    f"against {ours}): give the one it is for"
                )

    def head(self) -> ConvertedHead:
        tensors = dict(self._shared())
        layers = self._layers()
        for i, names in enumerate(layers, self._main.n_layers):
            for name, tensor in self._layer(names):
                tensors[f"blk.{i}.{name}"] = tensor
            if f"blk.{i}.nextn.eh_proj.weight" not in tensors:
                raise self._damaged("a layer without eh_proj or fc")
        layout = f"{len(layers)} layers for multi-token prediction" if len(layers) > 1 else "an MTP layer"
        return ConvertedHead(self._main.architecture, layout, self._fields(len(layers)), tensors)

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._checkpoint.folder} has {why}: download it again")

    def _layers(self) -> list[dict[str, str]]:
        """The full names of each layer's tensors, by those without the layer."""
        found: dict[int, dict[str, str]] = defaultdict(dict)
        for name in self._checkpoint.names:
            if self._main.architecture in _QWEN:
                number, plain = match.groups() if (match := _MTP.fullmatch(name)) else (None, None)
                index = int(number or 0)
            else:
                number, plain = match.groups() if (match := _LAYER.fullmatch(name)) else (None, None)
                index = int(number or 0) - self._main.n_layers
            if plain and index >= 0 and not plain.endswith("rotary_emb.inv_freq"):
                found[index][plain] = name
        if not found or sorted(found) != list(range(len(found))):
            raise self._damaged(f"no complete layers for multi-token prediction of {self._main.architecture}")
        return [found[i] for i in range(len(found))]

    def _layer(self, names: dict[str, str]) -> Iterator[tuple[str, HeadTensor]]:
        """The tensors of a layer, by llama.cpp's names without the layer."""
        experts: dict[str, dict[int, str]] = defaultdict(dict)
        for plain, name in names.items():
            base, _, ending = plain.rpartition(".")
            if match := _EXPERT.fullmatch(plain):
                experts[match[2]][int(match[1])] = name
            elif plain.removesuffix(".weight").startswith("mlp.experts."):
                yield from self._packed(plain.removesuffix(".weight").rpartition(".")[2], name)
            elif base == "self_attn.kv_b_proj":
                yield from self._latent(name)
            elif plain == "mlp.gate.e_score_correction_bias":
                yield self._tensor("exp_probs_b.bias", name)
            elif base == "post_attention_layernorm":
                # Latent attention is that of DeepSeek, where this norm is named after what follows it.
                is_latent = "self_attn.kv_b_proj.weight" in names
                yield self._tensor(f"{'ffn_norm' if is_latent else 'post_attention_norm'}.weight", name)
            elif base in _NAMES and ending in ("weight", "bias"):
                yield self._tensor(f"{_NAMES[base]}.{ending}", name)
            else:
                raise self._damaged(f"the tensor {name}, which is not known in such a layer")
        for kind, of_kind in experts.items():
            yield self._stacked(kind, [of_kind.get(i, "") for i in range(len(of_kind))])

    def _tensor(self, ours: str, name: str) -> tuple[str, HeadTensor]:
        if not (shape := self._checkpoint.shape(name)):
            raise self._damaged(f"a tensor {name} of one value")
        if ours == "ffn_gate_inp_shexp.weight":
            shape = shape[-1:]  # of one row
        # Qwen's norms multiply by 1 + weight.
        is_offset = self._main.architecture in _QWEN and ours.endswith("norm.weight")
        is_exact = ours == "ffn_gate_inp.weight"  # of the router
        return ours, HeadTensor(shape, partial(self._values, name, shape, is_offset), is_exact)

    def _values(self, name: str, shape: tuple[int, ...], is_offset: bool) -> NDArray[np.float32]:
        values = self._checkpoint.tensor(name).astype(np.float32, copy=False).reshape(shape)
        return values + np.float32(1) if is_offset else values

    def _packed(self, kind: str, name: str) -> Iterator[tuple[str, HeadTensor]]:
        """The matrices of all experts, in one tensor; ``gate_up_proj`` has two of each."""
        n, rows, columns = self._shape(name, 3)
        if kind == "down_proj":
            yield self._tensor("ffn_down_exps.weight", name)
            return
        if kind != "gate_up_proj" or rows % 2:
            raise self._damaged(f"the tensor {name}, which is not known in such a layer")
        for i, part in enumerate(("gate", "up")):
            some = slice(i * rows // 2, (i + 1) * rows // 2)
            yield (
                f"ffn_{part}_exps.weight",
                HeadTensor((n, rows // 2, columns), partial(self._rows, name, some)),
            )

    def _rows(self, name: str, rows: slice) -> NDArray[np.float32]:
        return self._checkpoint.tensor(name)[:, rows].astype(np.float32)

    def _stacked(self, kind: str, names: list[str]) -> tuple[str, HeadTensor]:
        if kind not in _PROJECTIONS or "" in names:
            raise self._damaged(f"no complete experts (`{kind}_proj`)")
        shapes = {self._checkpoint.shape(name) for name in names}
        if len(shapes) > 1:
            raise self._damaged(f"experts of different sizes (`{kind}_proj`)")
        return f"ffn_{kind}_exps.weight", HeadTensor((len(names), *shapes.pop()), partial(self._stack, names))

    def _stack(self, names: list[str]) -> NDArray[np.float32]:
        found = np.empty((len(names), *self._checkpoint.shape(names[0])), np.float32)
        for i, name in enumerate(names):  # one after another: all of them take gigabytes
            found[i] = self._checkpoint.tensor(name)
        return found

    def _latent(self, name: str) -> Iterator[tuple[str, HeadTensor]]:
        """The two matrices of latent attention, for keys (transposed) and values, of each attention head."""
        n_heads, key, value, rotated = (
            self._main.number(key) or 0
            for key in (
                "attention.head_count",
                "attention.key_length_mla",
                "attention.value_length_mla",
                "rope.dimension_count",
            )
        )
        rows, rank = self._shape(name, 2)
        n_key = key - rotated  # of a key, the rest has a position and is not compressed
        if not n_heads or n_key < 1 or rows != n_heads * (n_key + value):
            raise self._damaged(f"a tensor {name} of {rows} rows")
        heads = (n_heads, n_key + value, rank)
        keys = partial(self._heads, name, heads, slice(n_key), True)
        yield "attn_k_b.weight", HeadTensor((n_heads, rank, n_key), keys)
        values = partial(self._heads, name, heads, slice(n_key, None), False)
        yield "attn_v_b.weight", HeadTensor((n_heads, value, rank), values)

    def _heads(self, name: str, heads: tuple[int, ...], rows: slice, transposed: bool) -> NDArray[np.float32]:
        found = self._checkpoint.tensor(name).astype(np.float32, copy=False).reshape(heads)[:, rows]
        return np.ascontiguousarray(found.transpose(0, 2, 1) if transposed else found)

    def _shape(self, name: str, n: int) -> tuple[int, ...]:
        if len(shape := self._checkpoint.shape(name)) != n:
            raise self._damaged(f"a tensor {name} of {len(shape)} dimensions")
        return shape

    def _shared(self) -> Iterator[tuple[str, HeadTensor]]:
        """The tensors of the main model's file that llama.cpp reads from the same file as the layers."""
        matrix = (self._main.vocabulary.n_tokens, self._main.n_embd)
        for name, shape in (
            ("token_embd.weight", matrix),
            ("output_norm.weight", matrix[1:]),
            ("output.weight", matrix),
        ):
            for tensor in of_main(self._main, shape, name):
                yield name, tensor

    def _fields(self, n: int) -> dict[str, Value]:
        """The main model's header, with these layers."""
        import gguf  # takes 0.1 s

        prefix, n_main = f"{self._main.architecture}.", self._main.n_layers
        found: dict[str, Value] = {
            name.removeprefix(prefix): field.contents()
            for name, field in gguf.GGUFReader(self._main.path).fields.items()
            if name.startswith(prefix)
        }
        if isinstance(recurrent := found.get("attention.recurrent_layers"), list):
            found["attention.recurrent_layers"] = [*recurrent[:n_main], *[False] * n]
        return found | {"block_count": n_main + n, "nextn_predict_layers": n}
