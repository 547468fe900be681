"""Tiny projectors with random weights: files that llama.cpp's libmtmd reads, and that encode a picture in
milliseconds, and half a minute of sound in half a second.

Different pictures have clearly different vectors, of about the size of a tiny model's embeddings. Models that
they fit are in `tests.tiny_vision`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from spec_local.llama import tiny
from tests.tiny_architectures import Tensor, _add, _matrix, _vector

_N = 32  # width
_N_HEADS = 2
_N_FF = 64
_N_MELS = 8
_N_FRAMES = 1500  # of Whisper's encoder, for 30 seconds
_STACKED = 30  # pairs of frames that one cell has
SOUND_CELLS = _N_FRAMES // 2 // _STACKED
"""Number of cells of a window of 30 seconds of sound."""


class _Kind(NamedTuple):
    """A kind of projector.

    image_size, patch_size: in pixels. merge: number of patches that one cell has, each way. tensors: those
    after the layers, of the language model's width. joint: whether queries, keys and values are one matrix.
    """

    architecture: str
    image_size: int
    patch_size: int
    merge: int
    tensors: Callable[[int], Iterator[Tensor]]
    settings: dict[str, int] = {}  # noqa: RUF012
    joint: bool = False


def write_projector(
    path: Path | str,
    kind: str,
    n_embd: int = 64,
    *,
    seed: int = 0,
    n_layers: int = 2,
    n_deepstack: int | None = None,
) -> Path:
    """Write a projector of some 100 kB, in F32.

    Args:
        path: an existing file is overwritten.
        kind: one of `KINDS`.
        n_embd: width of the language model.
        seed: seed of the weights.
        n_layers: number of layers of the encoder; llava, as llama.cpp has it, leaves out the last one.
        n_deepstack: of qwen3vl_merger: number of layers, the first ones, whose output is a part of the
            vectors, which are then `n_embd * (1 + n_deepstack)` values wide. By default, 2; a language model
            without deepstack, such as qwen35, needs 0.

    Returns:
        `path`.
    """
    path = Path(path)
    known = _KINDS[kind]
    if n_deepstack is None:
        n_deepstack = 2 if kind == "qwen3vl_merger" else 0
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny-{kind}-{seed}")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    for key, value in _settings(known, n_embd, n_layers).items():
        _add(writer, f"clip.vision.{key}", value)
    if n_deepstack:
        deep = [i < n_deepstack for i in range(n_layers)]
        writer.add_array("clip.vision.is_deepstack_layers", deep)
    for name, shape, scale in _tensors(kind, n_embd, n_layers, n_deepstack):
        writer.add_tensor(name, tiny.random_weights(name, shape, scale, seed, 0))
    return tiny.finish(writer, path)


def write_sound_projector(path: Path | str, n_embd: int = 64, *, seed: int = 0, vision: str = "") -> Path:
    """Write a projector of the type voxtral: Whisper's encoder, with `SOUND_CELLS` vectors for 30 seconds.

    vision: a kind of `KINDS` whose encoder of pictures the file has, too.
    """
    path = Path(path)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny-voxtral-{seed}")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.audio.projector_type", "voxtral")
    writer.add_bool("clip.use_gelu", True)
    settings = {"num_mel_bins": _N_MELS, "projector.stack_factor": _STACKED}
    common = ("embedding_length", "feed_forward_length", "block_count", "projection_dim")
    known = _settings(_KINDS["mlp"], n_embd, 2)
    for key, value in settings.items():
        _add(writer, f"clip.audio.{key}", value)
    for key in (*common, "attention.head_count", "attention.layer_norm_epsilon"):
        _add(writer, f"clip.audio.{key}", known[key])
    tensors = list(_sound_tensors(n_embd))
    if vision:
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.vision.projector_type", vision)
        for key, value in _settings(_KINDS[vision], n_embd, 2).items():
            _add(writer, f"clip.vision.{key}", value)
        tensors += _tensors(vision, n_embd, 2, 0)
    for name, shape, scale in tensors:
        weights = tiny.random_weights(name, shape, scale, seed, 0)
        is_kernel = "conv" in name and name.endswith("weight")
        writer.add_tensor(name, weights.astype(np.float16) if is_kernel else weights)
    return tiny.finish(writer, path)


def _sound_tensors(n_embd: int) -> Iterator[Tensor]:
    for i, n in ((1, _N_MELS), (2, _N)):
        yield f"a.conv1d.{i}.weight", (_N, n, 3), 2 * (3 * n) ** -0.5
        yield f"a.conv1d.{i}.bias", (_N, 1), 0.1
    yield "a.position_embd.weight", (_N_FRAMES, _N), 0.3
    for i in range(2):
        for name, shape, scale in _layer(False):
            if name != "attn_k.bias":
                yield f"a.blk.{i}.{name}", shape, scale
    yield from _norm("a.post_ln")
    n = _N * _STACKED
    yield _matrix("mm.a.mlp.1", _N_FF, n)
    yield _matrix("mm.a.mlp.2", n_embd, _N_FF, 2.0)


def _settings(known: _Kind, n_embd: int, n_layers: int) -> dict[str, Any]:
    return {
        "image_size": known.image_size,
        "patch_size": known.patch_size,
        "embedding_length": _N,
        "feed_forward_length": _N_FF,
        "block_count": n_layers,
        "projection_dim": n_embd,
        "attention.head_count": _N_HEADS,
        "attention.layer_norm_epsilon": 1e-5,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        **known.settings,
    }


def _tensors(kind: str, n_embd: int, n_layers: int, n_deepstack: int) -> Iterator[Tensor]:
    known = _KINDS[kind]
    # The pixels of a patch are often alike: their weights add up, and a smaller scale is enough.
    patch = (_N, 3, known.patch_size, known.patch_size)
    scale = 2 * (3 * known.patch_size**2) ** -0.5
    yield "v.patch_embd.weight", patch, scale
    if kind.startswith("qwen"):  # of the second one of two frames; a picture is both
        yield "v.patch_embd.weight.1", patch, scale
    if kind in ("gemma3", "idefics3", "qwen3vl_merger"):
        yield _vector("v.patch_embd.bias", _N)
    if kind == "mlp":
        yield "v.class_embd", (_N,), 1.0
        yield from _norm("v.pre_ln")
    if not kind.startswith("qwen2"):  # which has only rotary positions
        n_positions = (known.image_size // known.patch_size) ** 2 + (kind == "mlp")
        yield "v.position_embd.weight", (n_positions, _N), 0.3
    for i in range(n_layers):
        for name, shape, scale in _layer(known.joint):
            yield f"v.blk.{i}.{name}", shape, scale
    for i in range(n_deepstack):
        yield from _norm(f"v.deepstack.{i}.norm", 4 * _N)
        yield from _linear(f"v.deepstack.{i}.fc1", 4 * _N, 4 * _N)
        yield from _linear(f"v.deepstack.{i}.fc2", n_embd, 4 * _N, 2.0)
    yield from _norm("v.post_ln")
    yield from known.tensors(n_embd)


def _norm(name: str, n: int = _N) -> Iterator[Tensor]:
    yield _vector(name, n)
    yield _vector(f"{name}.bias", n)


def _linear(name: str, n_rows: int, n_columns: int, gain: float = 1.0) -> Iterator[Tensor]:
    yield _matrix(name, n_rows, n_columns, gain)
    yield _vector(f"{name}.bias", n_rows)


def _layer(joint: bool) -> Iterator[Tensor]:
    yield from _norm("ln1")
    if joint:
        yield from _linear("attn_qkv", 3 * _N, _N)
    else:
        for name in ("attn_q", "attn_k", "attn_v"):
            yield from _linear(name, _N, _N)
    yield from _linear("attn_out", _N, _N)
    yield from _norm("ln2")
    yield from _linear("ffn_up", _N_FF, _N)
    yield from _linear("ffn_down", _N, _N_FF)


def _perceptron(merge: int) -> Callable[[int], Iterator[Tensor]]:
    def tensors(n_embd: int) -> Iterator[Tensor]:
        n = merge**2 * _N
        yield from _linear("mm.0", n, n)
        yield from _linear("mm.2", n_embd, n, 2.0)  # after an activation that halves them

    return tensors


def _gemma3_tensors(n_embd: int) -> Iterator[Tensor]:
    yield _vector("mm.soft_emb_norm", _N)
    yield "mm.input_projection.weight", (_N, n_embd), _N**-0.5


def _idefics3_tensors(n_embd: int) -> Iterator[Tensor]:
    yield _matrix("mm.model.fc", n_embd, 4 * _N)


_KINDS = {
    "gemma3": _Kind("gemma3", 112, 14, 2, _gemma3_tensors, {"projector.scale_factor": 2}),
    "qwen2vl_merger": _Kind("qwen2vl", 112, 14, 2, _perceptron(2)),
    "qwen3vl_merger": _Kind("qwen3vl", 112, 14, 2, _perceptron(2), joint=True),
    "idefics3": _Kind(
        "llama",
        56,
        14,
        2,
        _idefics3_tensors,
        {"projector.scale_factor": 2, "preproc_image_size": 112},
    ),
    "mlp": _Kind("llama", 56, 14, 1, _perceptron(1)),
}
KINDS = {kind: known.architecture for kind, known in _KINDS.items()}
"""The kinds that `write_projector` accepts, by their names in the file, and an architecture of
`tests.tiny_vision` that each of them is for. qwen3vl_merger without deepstack is for qwen35, too."""
