"""Typed mutations of GGUF files: headers that a damaged or hostile file may have.

A header is parsed into keys, values and tensor descriptions, some of them are changed, and the result is
written again, with counts, lengths and types that may be wrong. A mutation is chosen and described by a seed.
"""

import copy
import random
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from gguf.constants import GGML_QUANT_SIZES

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
_ALIGNMENT = 32  # bytes
_SIZES = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # values and bytes of a block
_MAX_VALUES = 1 << 22  # of a tensor whose data is written
_HUGE = [2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
_EXTREME = [0, 1, 2, 3, 7, 64, 255, -1, -2, -(2**31), *_HUGE]
_FLOATS = [0.0, -1.0, 1e-30, 1e38, float("inf"), float("-inf"), float("nan")]
_TEXTS = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"x" * 70,
    b"y" * 100_000,
    "ญี่ปุ่น".encode(),
    b"%s%n",
    b"{{ 1/0 }}",
    b"{% for",
]
_ARCHITECTURES = (
    b"llama llama4 qwen2 qwen2moe qwen3 qwen3moe qwen3next qwen35 gemma gemma2 gemma3 gemma3n mamba mamba2 "
    b"jamba falcon falcon-h1 phi2 phi3 gpt2 gptj bloom mpt starcoder2 olmo olmo2 deepseek deepseek2 glm4 "
    b"granite granitehybrid lfm2 rwkv6 rwkv7 t5 t5encoder bert nomic-bert clip mmproj minicpm command-r "
    b"dbrx cohere2 exaone plamo2 nemotron_h gpt-oss llada dream kimi-linear bitnet arwkv7 wavtokenizer-dec"
).split()
_TOKENIZERS = b"llama gpt2 bert t5 rwkv plamo2 none no_vocab unknown".split()
_PRE = b"default llama-bpe qwen2 deepseek-llm falcon gpt-2 tekken refact chatglm-bpe superbpe unknown".split()
_TOKEN_KEYS = (
    "bos eos eot eom unknown seperator padding cls mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep "
    "prefix suffix middle"
)
_NUMBERS = (
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.sliding_window attention.sliding_window_pattern attention.layer_norm_rms_epsilon "
    "attention.causal attention.clamp_kqv attention.temperature_length attention.scale "
    "rope.dimension_count rope.freq_base rope.freq_base_swa rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_log_multiplier "
    "rope.scale_linear context_length embedding_length embedding_length_out block_count "
    "feed_forward_length expert_count expert_used_count expert_shared_count expert_group_count "
    "expert_group_used_count expert_feed_forward_length expert_gating_func expert_weights_scale "
    "leading_dense_block_count interleave_moe_layer_step ssm.conv_kernel ssm.inner_size ssm.state_size "
    "ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms vocab_size logit_scale residual_scale "
    "embedding_scale attn_logit_softcapping final_logit_softcapping pooling_type nextn_predict_layers "
    "use_parallel_residual tensor_data_layout decoder_start_token_id attention.shared_kv_layers "
    "embedding_length_per_layer_input full_attention_interval"
)


@dataclass
class Entry:
    """A key and its value.

    item: type of the items of an array. count: the length that the file states, if not the true one.
    """

    key: bytes
    kind: int
    value: Any
    item: int = UINT32
    count: int | None = None


@dataclass
class Tensor:
    """A tensor: its data is cut or repeated to the size of its shape and type.

    shape: the innermost dimension first. rank, offset: what the file states, if not the true values.
    """

    name: bytes
    shape: list[int]
    kind: int
    data: bytes
    rank: int | None = None
    offset: int | None = None

    def fitting_data(self) -> bytes:
        n = prod(self.shape)
        if self.kind in _SIZES and self.data and 0 <= n <= _MAX_VALUES:
            values, size = _SIZES[self.kind]
            n_bytes = n // values * size
            return (self.data * (n_bytes // len(self.data) + 1))[:n_bytes]
        return self.data


@dataclass
class Gguf:
    """A GGUF file.

    n_entries, n_tensors: the counts that the file states, if not the true ones.
    """

    entries: list[Entry]
    tensors: list[Tensor]
    version: int = 3
    n_entries: int | None = None
    n_tensors: int | None = None

    def encoded(self) -> bytes:
        """The file."""
        counts = [_or(self.n_tensors, len(self.tensors)), _or(self.n_entries, len(self.entries))]
        header = [b"GGUF", struct.pack("<I", self.version), *map(_u64, counts)]
        for entry in self.entries:
            header += [_string(entry.key), struct.pack("<I", entry.kind)]
            if entry.kind == STRING and isinstance(entry.value, bytes):
                header.append(_string(entry.value, entry.count))
            elif isinstance(entry.value, list):
                header += [struct.pack("<I", entry.item), _u64(_or(entry.count, len(entry.value)))]
                header += [_scalar(entry.item, value) for value in entry.value]
            else:
                header.append(_scalar(entry.kind, entry.value))
        entry, data = self.find("general.alignment"), b""
        alignment = entry.value if entry and entry.value in (8, 16, 64) else _ALIGNMENT
        for tensor in self.tensors:
            header += [_string(tensor.name), struct.pack("<I", _or(tensor.rank, len(tensor.shape)))]
            header += [*map(_u64, tensor.shape), struct.pack("<I", tensor.kind)]
            header.append(_u64(_or(tensor.offset, len(data))))
            data += tensor.fitting_data()
            data += bytes(-len(data) % alignment)
        start = b"".join(header)
        return start + bytes(-len(start) % alignment) + data

    def find(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key.decode("latin-1") == key), None)

    def set(self, key: str, kind: int, value: Any, item: int = UINT32) -> None:
        """Replace a value, or add it."""
        entry = self.find(key)
        if not entry:
            entry = Entry(key.encode(), kind, value)
            self.entries.append(entry)
        entry.kind, entry.value, entry.item, entry.count = kind, value, item, None

    @property
    def architecture(self) -> str:
        entry = self.find("general.architecture")
        return entry.value.decode("latin-1") if entry and isinstance(entry.value, bytes) else "llama"


def parse(content: bytes) -> Gguf:
    """Parse a valid file."""
    at = 8

    def scalar(kind: int) -> Any:
        nonlocal at
        if kind == STRING:
            n = scalar(10)
            at += n
            return content[at - n : at]
        (value,) = struct.unpack_from(f"<{_FORMATS[kind]}", content, at)
        at += struct.calcsize(f"<{_FORMATS[kind]}")
        return value

    n_tensors, n_entries = scalar(10), scalar(10)
    entries, tensors = [], []
    for _ in range(n_entries):
        key, kind = scalar(STRING), scalar(UINT32)
        if kind == ARRAY:
            item, n = scalar(UINT32), scalar(10)
            entries.append(Entry(key, kind, [scalar(item) for _ in range(n)], item))
        else:
            entries.append(Entry(key, kind, scalar(kind)))
    for _ in range(n_tensors):
        name, rank = scalar(STRING), scalar(UINT32)
        shape = [scalar(10) for _ in range(rank)]
        tensors.append(Tensor(name, shape, scalar(UINT32), b"", offset=scalar(10)))
    at += -at % _ALIGNMENT
    for tensor, after in zip(tensors, [*tensors[1:], None], strict=True):
        tensor.data = content[at + tensor.offset : at + after.offset if after else None]
    for tensor in tensors:
        tensor.offset = None
    return Gguf(entries, tensors)


def mutated(base: Gguf, seed: int) -> tuple[Gguf, str]:
    """A copy of a file with one to three mutations, and their description."""
    rng = random.Random(seed)
    gguf, notes = copy.deepcopy(base), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutation = rng.choice(_MUTATIONS)
        notes.append(f"{mutation.__name__.lstrip('_')}: {mutation(gguf, rng)}")
    return gguf, "; ".join(notes)


def _counts(gguf: Gguf, rng: random.Random) -> str:
    values = [0, 1, *_HUGE]
    if rng.random() < 0.5:
        gguf.n_entries = rng.choice([*values, len(gguf.entries) - 1, len(gguf.entries) + 1])
        return f"{gguf.n_entries} entries"
    gguf.n_tensors = rng.choice([*values, len(gguf.tensors) - 1, len(gguf.tensors) + 1])
    return f"{gguf.n_tensors} tensors"


def _version(gguf: Gguf, rng: random.Random) -> str:
    gguf.version = rng.choice([0, 1, 2, 4, 3 << 24, 2**32 - 1])
    return str(gguf.version)


def _number(gguf: Gguf, rng: random.Random) -> str:
    """An extreme value, of the same or of another type."""
    entry = rng.choice([e for e in gguf.entries if not isinstance(e.value, bytes | list)] or gguf.entries)
    old = entry.value if isinstance(entry.value, int | float) else 1
    near = [old + 1, old - 1, old * 2, old // 2, -old]
    entry.value = rng.choice([*near, *_EXTREME] if entry.kind != FLOAT32 else [*near, *_FLOATS])
    if rng.random() < 0.2:
        entry.kind = rng.choice([*_FORMATS])
    return f"{entry.key!r} = {entry.value} ({entry.kind})"


def _type(gguf: Gguf, rng: random.Random) -> str:
    entry = rng.choice(gguf.entries)
    entry.kind = rng.choice([*range(14), 2**31, 2**32 - 1])
    return f"{entry.key!r} has type {entry.kind}"


def _text(gguf: Gguf, rng: random.Random) -> str:
    entry = rng.choice([e for e in gguf.entries if isinstance(e.value, bytes)] or gguf.entries)
    choices = {b"general.architecture": _ARCHITECTURES, b"tokenizer.ggml.model": _TOKENIZERS}
    entry.kind, entry.value = STRING, rng.choice(choices.get(entry.key, _TEXTS))
    return f"{entry.key!r} = {entry.value[:20]!r}"


def _architecture(gguf: Gguf, rng: random.Random) -> str:
    """The architecture, with or without its keys under its name."""
    old, new = gguf.architecture.encode("latin-1"), rng.choice(_ARCHITECTURES)
    gguf.set("general.architecture", STRING, new)
    if rename := rng.random() < 0.8:
        for entry in gguf.entries:
            if entry.key.startswith(old + b"."):
                entry.key = new + entry.key[len(old) :]
    return f"{new!r}, keys renamed: {rename}"


def _tokenizer(gguf: Gguf, rng: random.Random) -> str:
    model, pre = rng.choice(_TOKENIZERS), rng.choice(_PRE)
    gguf.set("tokenizer.ggml.model", STRING, model)
    gguf.set("tokenizer.ggml.pre", STRING, pre)
    merges = rng.choice([[], [b"t h"], [b"th"], [b""], [b" "], [b"a b c"], [b"\xff \xfe"] * 3, [b"t h"] * 9])
    gguf.set("tokenizer.ggml.merges", ARRAY, merges, STRING)
    return f"{model!r}, {pre!r}, {len(merges)} merges"


def _stated_length(gguf: Gguf, rng: random.Random) -> str:
    entry = rng.choice([e for e in gguf.entries if isinstance(e.value, bytes | list)] or gguf.entries)
    n = len(entry.value) if isinstance(entry.value, bytes | list) else 1
    entry.count = rng.choice([0, n - 1, n + 1, n * 2, *_HUGE])
    return f"{entry.key!r} states {entry.count}"


def _array(gguf: Gguf, rng: random.Random) -> str:
    entry = rng.choice([e for e in gguf.entries if isinstance(e.value, list)] or gguf.entries)
    values = entry.value if isinstance(entry.value, list) else [0]
    kind = rng.choice(["shorter", "longer", "empty", "huge", "item type", "items", "reversed"])
    if kind == "shorter":
        values = values[: rng.randrange(len(values) + 1)]
    elif kind == "longer":
        values = values + values[: rng.choice([1, 7, 100])]
    elif kind == "empty":
        values = []
    elif kind == "huge":
        short = [value for value in values if not isinstance(value, bytes) or len(value) < 100]
        values = (short * (200_000 // max(1, len(short))))[:200_000]
    elif kind == "item type":
        entry.item = rng.choice([*range(14), 2**31])
    elif kind == "items":
        _change_items(values, rng)
    else:
        values = values[::-1]
    entry.value, entry.kind = values, ARRAY
    return f"{entry.key!r} {kind} {len(values)} of {entry.item}"


def _change_items(values: list[Any], rng: random.Random) -> None:
    for _ in range(rng.choice([1, 3, 300])):
        if not values:
            return
        at = rng.randrange(len(values))
        if isinstance(values[at], bytes):
            values[at] = rng.choice([*_TEXTS, rng.choice(values), b"<0xZZ>", b"<0x>", b"\xe2\x96\x81", b" a"])
        elif isinstance(values[at], float):
            values[at] = rng.choice(_FLOATS)
        else:
            values[at] = rng.choice(_EXTREME)


def _special_token(gguf: Gguf, rng: random.Random) -> str:
    key = f"tokenizer.ggml.{rng.choice(_TOKEN_KEYS.split())}_token_id"
    tokens = gguf.find("tokenizer.ggml.tokens")
    n = len(tokens.value) if tokens and isinstance(tokens.value, list) else 0
    value = rng.choice([0, 1, 5, n - 1, n, n + 1, 2**31 - 1, 2**31, 2**32 - 1])
    gguf.set(key, rng.choice([UINT32, UINT32, INT32]), value)
    return f"{key} = {value}"


def _flags(gguf: Gguf, rng: random.Random) -> str:
    names = "add_bos_token add_eos_token add_space_prefix remove_extra_whitespaces escape_whitespaces"
    name = rng.choice([*names.split(), "token_type_count", "precompiled_charsmap", "chat_template"])
    kind = rng.choice([BOOL, UINT32, STRING, FLOAT32])
    key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
    gguf.set(key, kind, rng.choice(_TEXTS) if kind == STRING else rng.choice([0, 1]))
    return f"{key} of type {kind}"


def _shape_key(gguf: Gguf, rng: random.Random) -> str:
    """A number that llama.cpp reads for this or for another architecture, scalar or one per layer."""
    name = rng.choice(_NUMBERS.split())
    key = f"{gguf.architecture}.{name}"
    real = any(word in name for word in ("epsilon", "freq", "scal", "softcapping", "factor", "multiplier"))
    kind = FLOAT32 if real else rng.choice([UINT32, UINT32, UINT32, INT32, BOOL])
    value = rng.choice(_FLOATS if real else _EXTREME)
    if rng.random() < 0.2:
        gguf.set(key, ARRAY, [value] * rng.choice([0, 1, 2, 3, 600]), kind)
    else:
        gguf.set(key, kind, value)
    return f"{key} = {value}"


def _rope(gguf: Gguf, rng: random.Random) -> str:
    scaling = rng.choice([b"none", b"linear", b"yarn", b"longrope", b"bogus", b""])
    gguf.set(f"{gguf.architecture}.rope.scaling.type", STRING, scaling)
    gguf.set(f"{gguf.architecture}.rope.scaling.factor", FLOAT32, rng.choice(_FLOATS))
    sections = [rng.choice([0, 1, 8, -1, 2**31 - 1]) for _ in range(rng.choice([0, 3, 4, 5]))]
    gguf.set(f"{gguf.architecture}.rope.dimension_sections", ARRAY, sections, INT32)
    return f"{scaling!r}"


def _general(gguf: Gguf, rng: random.Random) -> str:
    key, kind, values = rng.choice(
        [
            ("general.alignment", UINT32, [0, 1, 3, 8, 16, 64, 2**20, 2**31, 2**32 - 1]),
            ("general.alignment", STRING, _TEXTS),
            ("general.file_type", UINT32, _EXTREME),
            ("general.type", STRING, [b"adapter", b"mmproj", b"imatrix", b""]),
            ("general.quantization_version", UINT32, _EXTREME),
            ("general.name", STRING, _TEXTS),
            ("split.count", 2, [0, 1, 2, 65535]),
            ("split.no", 2, [0, 1, 2, 65535]),
            ("split.tensors.count", INT32, [0, 1, -1, 2**31 - 1]),
        ]
    )
    value = rng.choice(values)
    gguf.set(key, kind, value)
    return f"{key} = {str(value)[:20]}"


def _keys(gguf: Gguf, rng: random.Random) -> str:
    """A key is deleted, repeated or renamed, or two values are exchanged."""
    kind, entry = rng.choice(["delete", "repeat", "rename", "exchange"]), rng.choice(gguf.entries)
    note = f"{kind} {entry.key!r}"
    if kind == "delete" and len(gguf.entries) > 1:
        gguf.entries.remove(entry)
    elif kind == "repeat":
        gguf.entries.append(copy.deepcopy(entry))
    elif kind == "rename":
        entry.key = rng.choice(_TEXTS[:6])
    else:
        other = rng.choice(gguf.entries)
        note += f" {other.key!r}"
        entry.key, other.key = other.key, entry.key
    return note


def _tensor_type(gguf: Gguf, rng: random.Random) -> str:
    tensor = rng.choice(gguf.tensors)
    tensor.kind = rng.choice([*range(45), 2**31 - 1, 2**31, 2**32 - 1])
    return f"{tensor.name!r} has type {tensor.kind}"


def _tensor_shape(gguf: Gguf, rng: random.Random) -> str:
    tensor = rng.choice(gguf.tensors)
    kind = rng.choice(["value", "value", "rank", "reversed", "exchanged", "both"])
    if kind == "value" and tensor.shape:
        at = rng.randrange(len(tensor.shape))
        old = tensor.shape[at]
        tensor.shape[at] = rng.choice([0, 1, 2, old - 1, old + 1, old * 2, old // 2, *_HUGE])
    elif kind == "rank":
        tensor.rank = rng.choice([0, 1, 2, 3, 4, 5, 9, 2**31, 2**32 - 1])
        if rng.random() < 0.5 and tensor.rank < 9:
            tensor.shape = (tensor.shape + [1] * 9)[: tensor.rank]
    elif kind == "reversed":
        tensor.shape.reverse()
    elif kind == "exchanged":
        other = rng.choice(gguf.tensors)
        tensor.shape, other.shape = other.shape, tensor.shape
    else:  # the same number of values
        tensor.shape = rng.choice([[2**32, 2**32], [2**31, 2**31, 4], [2**63, 2], [0, 2**40], [1, 1, 1, 1]])
    return f"{tensor.name!r} {tensor.shape} rank {tensor.rank}"


def _tensor_offset(gguf: Gguf, rng: random.Random) -> str:
    tensor = rng.choice(gguf.tensors)
    n = sum(len(other.data) for other in gguf.tensors)
    tensor.offset = rng.choice([0, 1, 32, n - 32, n, n + 32, *_HUGE, 2**64 - 32])
    return f"{tensor.name!r} at {tensor.offset}"


def _tensors(gguf: Gguf, rng: random.Random) -> str:
    kind, tensor = rng.choice(["delete", "repeat", "rename", "exchange"]), rng.choice(gguf.tensors)
    note = f"{kind} {tensor.name!r}"
    if kind == "delete" and len(gguf.tensors) > 1:
        gguf.tensors.remove(tensor)
    elif kind == "repeat":
        gguf.tensors.append(copy.deepcopy(tensor))
    elif kind == "rename":
        extra = [b"rope_freqs.weight", b"output.bias", b"token_embd_norm.weight", b"blk.7.attn_q.weight"]
        tensor.name = rng.choice([*_TEXTS[:6], *extra])
    else:
        other = rng.choice(gguf.tensors)
        tensor.name, other.name = other.name, tensor.name
    return note


def _data(gguf: Gguf, rng: random.Random) -> str:
    tensor = rng.choice(gguf.tensors)
    fill = rng.choice([b"\xff", b"\0", b"\x7f", b"\xfc"])
    tensor.data = fill * len(tensor.data)
    return f"{tensor.name!r} filled with {fill!r}"


def _vocabulary(gguf: Gguf, rng: random.Random) -> str:
    n = rng.choice([0, 1, 2, 3, 5, 100, 260, 261, 262])
    shorten_vocabulary(gguf, n)
    return f"{n} tokens"


def shorten_vocabulary(gguf: Gguf, n: int) -> None:
    """Keep the first n tokens: in all arrays of the vocabulary and in the tensors of its size."""
    for entry in gguf.entries:
        if isinstance(entry.value, list) and entry.key.startswith(b"tokenizer.ggml."):
            entry.value = entry.value[:n]
        elif entry.key.endswith(b".vocab_size"):
            entry.value = n
    for tensor in gguf.tensors:
        if tensor.name in (b"token_embd.weight", b"output.weight"):
            tensor.shape[-1:] = [n]


_MUTATIONS = [
    _architecture, _array, _array, _counts, _data, _flags, _general, _keys, _number, _number, _rope,
    _shape_key, _shape_key, _shape_key, _special_token, _stated_length, _tensor_offset, _tensor_shape,
    _tensor_shape, _tensor_type, _tensors, _text, _tokenizer, _type, _version, _vocabulary,
]  # fmt: skip


def _or(stated: int | None, true: int) -> int:
    return true if stated is None else stated


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value & (2**64 - 1))


def _string(text: bytes, count: int | None = None) -> bytes:
    return _u64(_or(count, len(text))) + text


def _scalar(kind: int, value: Any) -> bytes:
    """A value in the encoding of a type, whatever it was before; unknown types take four bytes."""
    form = _FORMATS.get(kind, "I")
    if kind == STRING:
        return _string(value if isinstance(value, bytes) else str(value).encode())
    if isinstance(value, bytes | list):
        value = len(value)
    if form in "fd":
        try:
            return struct.pack(f"<{form}", float(value))
        except OverflowError:
            return struct.pack(f"<{form}", float("inf"))
    if form == "?":
        return struct.pack("<?", bool(value))
    if value != value or value in (float("inf"), float("-inf")):
        value = 0
    n = struct.calcsize(f"<{form}")
    return (int(value) & (256**n - 1)).to_bytes(n, "little")
