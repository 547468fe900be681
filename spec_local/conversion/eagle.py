"""EAGLE-3 and P-EAGLE heads, in the layouts of SafeAILab, SpecForge, AngelSlim, ModelOpt, vLLM and NeMo.

They have the same tensors under slightly different names, and settings in different places. What they mean
is in llama.cpp's src/models/eagle3.cpp. llama.cpp rotates adjacent values of queries and keys, PyTorch
those of the two halves, so that their rows are put in another order. The layers after the first one become a
model of their own: see `spec_local.llama.later_model`.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.head import ConvertedHead, HeadTensor, Value, draft_tokens, of_main
from spec_local.conversion.rotation import Rotation, read_rotation
from spec_local.conversion.settings import STRICT, Index, Positive, Size, read_settings, unsupported
from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.heads.fit import difference, layer_inputs
from spec_local.llama.model import Model

_N_LAYERS_READ = 3  # llama.cpp accepts no other number
_Layers = Annotated[list[Index], Field(min_length=_N_LAYERS_READ, max_length=_N_LAYERS_READ)]
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_LAYER = "layer."  # in place of those
_LATER = re.compile(r"layers\.(\d{1,4})\.")
# The norm of the state is of the first layer only; vLLM's class has it in all of them.
_NOT_NEEDED = re.compile(r"t2d|d2t|(.*\.)?rotary_emb\.inv_freq|layers\.\d+\.hidden_norm\.weight")
_MASK = "mask_hidden"
_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(_N_LAYERS_READ))
_DEPTH = 8  # draft tokens of a block, where it is not stated: published heads were trained for 8 and 10
_PER_TOKEN = {"embed_tokens.weight", "lm_head.weight"}


class _Settings(BaseModel):
    """The settings of an EAGLE-3 head; the defaults are those of transformers, which speculators omits.

    Where there is only one value, llama.cpp supports no other.
    """

    model_config = STRICT

    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: Size = 2048
    vocab_size: Size | None = None
    hidden_act: Literal["silu"] = "silu"
    eagle_aux_hidden_state_layer_ids: _Layers | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    embed_requires_grad: bool = True
    use_sliding_window: bool = False
    layer_types: list[str] = []
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: Annotated[float, Field(ge=1, le=1)] = 1.0
    use_aux_hidden_state: Literal[True] = True
    use_input_layernorm_in_first_layer: Literal[True] = True
    use_last_layernorm: Literal[True] = True
    parallel_draft_step: Annotated[int, Field(ge=1, le=1)] = 1
    parallel_drafting: bool = False
    mask_token_id: Index | None = None
    pard_token: Index | None = None
    ptd_token_id: Index | None = None


def recognizes(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has an EAGLE-3 head of any of these layouts."""
    names = _plain_names(checkpoint)
    return "fc.weight" in names and f"{_LAYER}hidden_norm.weight" in names


def convert(checkpoint: Checkpoint, main: Model) -> ConvertedHead:
    """Convert a head, and check that it fits a main model.

    Raises:
        ModelFileError: the head is incomplete or damaged.
        ModelError: it does not fit, or llama.cpp does not evaluate a part of it.
    """
    return _Eagle(checkpoint, main).head()


def _plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The names of the tensors, by those that do not depend on the layout."""
    found = {}
    for name in checkpoint.names:
        plain = name.removeprefix("model.")
        for prefix in _LAYER_PREFIXES:
            if plain.startswith(prefix):
                plain = _LAYER + plain.removeprefix(prefix)
        found[plain] = name
    return found


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes. fused: of the main model's hidden states together. head: of an attention head."""

    width: int
    fused: int
    n_ff: int
    n_heads: int
    n_kv: int
    head: int


class _Eagle:
    """The conversion of one head."""

    def __init__(self, checkpoint: Checkpoint, main: Model) -> None:
        self._checkpoint, self._main = checkpoint, main
        self._names = _plain_names(checkpoint)
        config = checkpoint.config
        layer = config.get("transformer_layer_config")
        self._is_speculator = isinstance(layer, dict)
        self._n_later = len({each[1] for name in self._names if (each := _LATER.match(name))})
        parts = [config.get("eagle_config"), config, layer]
        self._raw: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                self._raw |= {key: value for key, value in part.items() if value is not None}
        self._settings = read_settings(_Settings, self._raw, checkpoint.folder)
        if self._settings.use_sliding_window and "sliding_attention" in self._settings.layer_types:
            raise unsupported(checkpoint.folder, "use_sliding_window", "llama.cpp does not support it here")

    def head(self) -> ConvertedHead:
        shape = self._shape()
        if not self._settings.embed_requires_grad and shape.width == self._main.n_embd:
            self._names.pop("embed_tokens.weight", None)  # a copy of the main model's
        self._check_tensors(shape)
        layers = self._layers()
        self._check_fit(shape, layers)
        rotation = read_rotation(self._raw, shape.head, self._checkpoint.folder)
        if rotation.n_rotated < shape.head:
            raise self._unsupported(f"it rotates {rotation.n_rotated} of {shape.head} dimensions")
        fields = self._fields(shape, rotation) | {
            "vocab_size": self._main.vocabulary.n_tokens,
            "target_layers": layers,
            "target_hidden_size": self._main.n_embd,
            "norm_before_residual": self._norm_before_residual(),
            "norm_before_fc": "input_norm.weight" in self._names,
        }
        if _NORMS[0] in self._names:
            fields["norm_states"] = True
        tensors = self._tensors(self._first(shape), shape, rotation)
        tokens, arrays = None, dict[str, NDArray[np.int32] | NDArray[np.float32]]()
        if "d2t" in self._names:
            tokens = draft_tokens(self._checkpoint, self._names["d2t"], self._main.vocabulary.n_tokens)
        rest = self._rest(shape, rotation)
        if rest:
            # The first layer's context computes an output matrix, too: as small a one as possible.
            fields["later_layers"] = self._n_later
            tensors["output_norm.weight"] = HeadTensor(
                (shape.width,), lambda: np.ones(shape.width, np.float32)
            )
            tensors["output.weight"] = HeadTensor(
                (1, shape.width), lambda: np.zeros((1, shape.width), np.float32), is_exact=True
            )
            tensors["d2t"] = HeadTensor((1,), lambda: np.zeros(1, np.int64))
            if tokens:
                arrays["draft_tokens"] = tokens.load().astype(np.int32)
        elif tokens:
            tensors["d2t"] = tokens
        mask = self._mask() if _MASK in self._names else None
        if mask is not None:
            fields["block_size"] = self._depth()
            arrays["mask_state"] = self._mask_state()
        elif self._settings.norm_output:  # a block does not read its own outputs
            arrays["output_norm"] = self._values("norm.weight").astype(np.float32)
        layout = "EAGLE-3" if mask is None else "P-EAGLE"
        return ConvertedHead("eagle3", layout, fields, tensors, mask, arrays=arrays, rest=rest)

    def _fields(self, shape: _Shape, rotation: Rotation, n_layers: int = 1) -> dict[str, Value]:
        return {
            "rope.dimension_count": shape.head,
            **rotation.fields,
            "block_count": n_layers,
            "context_length": self._settings.max_position_embeddings,
            "embedding_length": shape.width,
            "feed_forward_length": shape.n_ff,
            "attention.head_count": shape.n_heads,
            "attention.head_count_kv": shape.n_kv,
            "attention.key_length": shape.head,
            "attention.value_length": shape.head,
            "attention.layer_norm_rms_epsilon": self._settings.rms_norm_eps,
        }

    def _tensors(
        self, names: dict[str, tuple[str, tuple[int, ...]]], shape: _Shape, rotation: Rotation
    ) -> dict[str, HeadTensor]:
        """These tensors, by llama.cpp's names, and the factors of the rotation."""
        found = {name: self._tensor(plain, shape) for plain, (name, _) in names.items()}
        if (factors := rotation.factors) is not None:
            found["rope_freqs.weight"] = HeadTensor(factors.shape, lambda: factors)
        return found

    def _rest(self, shape: _Shape, rotation: Rotation) -> ConvertedHead | None:
        """The layers after the first one, with the output matrix; None: there are none."""
        if not self._n_later:
            return None
        fields = self._fields(shape, rotation, self._n_later) | {"vocab_size": self._n_drafted()}
        tensors = self._tensors(self._later(shape), shape, rotation)
        if "token_embd.weight" not in tensors:  # llama.cpp also uses it as the output matrix
            rows = (self._main.vocabulary.n_tokens, shape.width)
            tensors["token_embd.weight"] = of_main(self._main, rows, "output.weight", "token_embd.weight")[0]
        return ConvertedHead("llama", "EAGLE-3", fields, tensors, has_tokenizer=False)

    def _mask(self) -> int:
        """The mask token."""
        settings = self._settings
        for token in (settings.mask_token_id, settings.pard_token, settings.ptd_token_id):
            if token is not None and token < self._main.vocabulary.n_tokens:
                return token
        raise self._damaged("config.json names no token for `mask_hidden`")

    def _mask_state(self) -> NDArray[np.float32]:
        """What takes the place of a state of the main model, encoded as those are."""
        # Norms of the states together, or of each layer's.
        n_norms = _N_LAYERS_READ if _NORMS[0] in self._names else int("input_norm.weight" in self._names)
        values = self._values(_MASK).reshape(n_norms or 1, -1)
        if n_norms:
            mean = np.square(values).mean(1, keepdims=True)
            values = values / np.sqrt(mean + self._settings.rms_norm_eps)
        if n_norms == 1:
            values = values * self._values("input_norm.weight")
        return (self._fused() @ values.ravel()).astype(np.float32)

    def _fused(self) -> NDArray[np.float64]:
        """The matrix that fuses the states, with the weights of the norms of each layer's states."""
        matrix = self._values("fc.weight")
        if _NORMS[0] in self._names:
            matrix = matrix * np.concatenate([self._values(name) for name in _NORMS])
        return matrix

    def _values(self, plain: str) -> NDArray[np.float64]:
        return self._checkpoint.tensor(self._names[plain]).astype(np.float64)

    def _depth(self) -> int:
        """Number of draft tokens of a block: as many as in training, as far as speculators states it."""
        methods: Any = self._raw.get("speculators_config")
        methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
        for method in methods if isinstance(methods, list) else ():
            n = method.get("speculative_tokens") if isinstance(method, dict) else None
            if isinstance(n, int) and n > 0:
                return n
        return _DEPTH

    def _unsupported(self, what: str) -> ModelError:
        return ModelError(
            f"{self._checkpoint.folder} is an EAGLE-3 head that cannot be converted: {what}, which llama.cpp "
            "does not support: use another head"
        )

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._checkpoint.folder} is damaged ({why}): download it again")

    def _norm_before_residual(self) -> bool:
        found = self._settings.norm_before_residual
        if found is None and self._is_speculator:  # its versions have different defaults
            raise self._damaged("config.json has no norm_before_residual")
        return bool(found)

    def _size(self, plain: str, axis: int) -> int:
        """The size of a tensor along an axis, of a matrix unless the axis is the only one."""
        if plain not in self._names:
            raise self._damaged(f"it has no tensor {plain}")
        shape = self._checkpoint.shape(self._names[plain])
        if not axis < len(shape) <= 2 or not all(shape):
            raise self._damaged(f"{self._names[plain]} has the shape {list(shape)}")
        return shape[axis]

    def _shape(self) -> _Shape:
        attention, settings = f"{_LAYER}self_attn.", self._settings
        n_heads = settings.num_attention_heads
        n_kv = settings.num_key_value_heads or n_heads
        rows = self._size(f"{attention}q_proj.weight", 0)
        head = settings.head_dim or rows // n_heads
        if head % 2 or n_heads % n_kv:
            raise self._damaged(f"{n_heads} and {n_kv} attention heads of width {head}")
        return _Shape(
            self._size("norm.weight", 0),
            self._size("fc.weight", 1),
            self._size(f"{_LAYER}mlp.gate_proj.weight", 0),
            n_heads,
            n_kv,
            head,
        )

    def _first(self, shape: _Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """llama.cpp's name and the shape of each tensor of the first layer's model."""
        width, n_vocab = shape.width, self._main.vocabulary.n_tokens
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "fc.weight": ("fc.weight", (width, shape.fused)),
            **_layer_tensors(shape, _LAYER, 0, 2 * width),
            f"{_LAYER}hidden_norm.weight": ("blk.0.attn_norm_2.weight", (width,)),
        }
        optional = {
            "input_norm.weight": ("enc.output_norm.weight", (shape.fused,)),
            "embed_tokens.weight": ("token_embd.weight", (n_vocab, width)),
        }
        if not self._n_later:
            found["norm.weight"] = ("output_norm.weight", (width,))
            optional["lm_head.weight"] = ("output.weight", (self._n_drafted(), width))
        return found | {plain: each for plain, each in optional.items() if plain in self._names}

    def _later(self, shape: _Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The same of the model of the layers after it."""
        if not self._n_later:
            return {}
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "norm.weight": ("output_norm.weight", (shape.width,))
        }
        for i in range(self._n_later):
            found |= _layer_tensors(shape, f"layers.{i + 1}.", i, shape.width)
        if "lm_head.weight" in self._names:
            found["lm_head.weight"] = ("token_embd.weight", (self._n_drafted(), shape.width))
        return found

    def _expected(self, shape: _Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
        return self._first(shape) | self._later(shape)

    def _n_drafted(self) -> int:
        """Number of tokens that the head can draft."""
        return self._size("d2t", 0) if "d2t" in self._names else self._main.vocabulary.n_tokens

    def _check_tensors(self, shape: _Shape) -> None:
        expected = self._expected(shape)
        for plain, name in self._names.items():
            if plain not in (*expected, _MASK, *_NORMS) and not _NOT_NEEDED.fullmatch(plain):
                raise self._unsupported(f"it has a tensor {name}")
        for plain, (_, size) in expected.items():
            if plain not in self._names:
                raise self._damaged(f"it has no tensor {plain}")
            found = self._checkpoint.shape(self._names[plain])
            if found != size and plain not in _PER_TOKEN:
                raise self._damaged(_other_shape(self._names[plain], found, size))
        if "lm_head.weight" not in self._names and "d2t" in self._names:
            raise self._damaged("it has no tensor lm_head.weight")
        settings, has_norms = self._settings, _NORMS[0] in self._names
        sizes = {"input_norm.weight": shape.fused, _MASK: shape.fused}
        sizes |= dict.fromkeys(_NORMS, shape.fused // _N_LAYERS_READ)
        for is_needed, names in (
            (settings.norm_before_fc, ("input_norm.weight",)),
            (settings.parallel_drafting, (_MASK,)),
            (settings.fc_norm or has_norms, _NORMS),
        ):
            for plain in names:
                if is_needed and plain not in self._names:
                    raise self._damaged(f"it has no tensor {plain}")
                if plain in self._names:
                    found = self._checkpoint.shape(self._names[plain])
                    if np.prod(found) != sizes[plain]:
                        raise self._damaged(_other_shape(self._names[plain], found, (1, sizes[plain])))

    def _layers(self) -> list[int]:
        """The layers of the main model whose inputs are read.

        Some configurations number the layers whose outputs are read instead. As SGLang, this takes a list
        that begins with 1 to be one, but in the layout of speculators only if it is the usual choice.
        """
        n = self._main.n_layers
        usual, given = [2, n // 2, n - 3], self._settings.eagle_aux_hidden_state_layer_ids
        if not given:
            return usual
        shifted = [layer + 1 for layer in given]
        if shifted == usual or (given[0] == 1 and not self._is_speculator):
            return shifted
        return given

    def _check_fit(self, shape: _Shape, layers: list[int]) -> None:
        main, n_vocab = self._main, self._settings.vocab_size or self._main.vocabulary.n_tokens
        width, rest = divmod(shape.fused, _N_LAYERS_READ)
        if rest:
            raise self._unsupported(f"it does not read {_N_LAYERS_READ} layers")
        own_width = None if self._names.keys() >= _PER_TOKEN else shape.width
        why = difference(main, width, layers, n_vocab, own_width)
        for plain in _PER_TOKEN & self._names.keys():
            expected = self._expected(shape)[plain][1]
            if (found := self._checkpoint.shape(self._names[plain])) != expected:
                why = why or _other_shape(self._names[plain], found, expected)
        layer_inputs(str(self._checkpoint.folder), "an EAGLE-3 head", main, layers, why)

    def _tensor(self, plain: str, shape: _Shape) -> HeadTensor:
        checkpoint, name = self._checkpoint, self._names[plain]

        def load() -> NDArray[np.float32]:
            if plain == "fc.weight":
                return self._fused().astype(np.float32)
            values = checkpoint.tensor(name).astype(np.float32, copy=False)
            n_heads = {"q_proj": shape.n_heads, "k_proj": shape.n_kv}.get(plain.split(".")[-2])
            return _interleaved(values, n_heads) if n_heads else values

        return HeadTensor(checkpoint.shape(name), load)


def _layer_tensors(
    shape: _Shape, prefix: str, number: int, inputs: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """llama.cpp's name and the shape of each tensor that all layers have.

    Args:
        prefix: of the names in the checkpoint. number: of the layer, in llama.cpp's names.
        inputs: width of what queries, keys and values are computed from.
    """
    width, n_ff = shape.width, shape.n_ff
    rows, rows_kv = shape.n_heads * shape.head, shape.n_kv * shape.head
    found = {
        "input_layernorm": ("attn_norm", (width,)),
        "self_attn.q_proj": ("attn_q", (rows, inputs)),
        "self_attn.k_proj": ("attn_k", (rows_kv, inputs)),
        "self_attn.v_proj": ("attn_v", (rows_kv, inputs)),
        "self_attn.o_proj": ("attn_output", (width, rows)),
        "post_attention_layernorm": ("ffn_norm", (width,)),
        "mlp.gate_proj": ("ffn_gate", (n_ff, width)),
        "mlp.up_proj": ("ffn_up", (n_ff, width)),
        "mlp.down_proj": ("ffn_down", (width, n_ff)),
    }
    return {
        f"{prefix}{plain}.weight": (f"blk.{number}.{name}.weight", size)
        for plain, (name, size) in found.items()
    }


def _other_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{name} has the shape {list(found)} instead of {list(expected)}"


def _interleaved(rows: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """Put the rows of the two halves of each attention head one after another in turn."""
    halves = rows.reshape(n_heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
