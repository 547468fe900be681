"""Loading valid and invalid GGUF files, and the tiny models of the tests."""

import gc
import os
import subprocess
import sys
import weakref

import gguf
import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.errors import InvalidRequest, ModelFileError
from spec_local.llama import runtime, tiny
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.tiny import CHAT_TEMPLATE, write_tiny_model


def greedy(model, prompt, n):
    context = open_sequence(model, n_ctx=512, max_logits=1, threads=1)
    row = run(context.call(model.vocabulary.tokenize(prompt, add_special=True), n_logits=1))
    output = []
    for _ in range(n):
        output.append(int(row[0].argmax()))
        row = run(context.call(output[-1:], n_logits=1))
    return output


# Invalid files


def write_gguf(path, architecture, numbers=None, kind=None, n_tensors=1):
    """Write a small GGUF file that is no model."""
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:
        writer.kv_data[0].clear()
    if kind:
        writer.add_type(kind)
    for key, number in (numbers or {}).items():
        kind = "uint16" if key in ("split.no", "split.count") else "int32" if "tensors" in key else "uint32"
        getattr(writer, f"add_{kind}")(key, number)
    for _ in range(n_tensors):
        writer.add_tensor("x", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


UNUSABLE = {  # how a path is made, and what the error says
    "missing": (lambda path: None, r"model\.gguf does not exist: check the path"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "a pipe": (os.mkfifo, "not a regular file"),  # it must not be opened: that would wait for a writer
    "empty": (lambda path: path.touch(), "is empty: download it again"),
    "safetensors": (
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
        r"not GGUF: convert it .*_hf_to_gguf.py \S+ --outfile .*head with specdec draft convert",
    ),
    "a folder of safetensors": (
        lambda path: (path.mkdir(), (path / "model-00001-of-00002.safetensors").touch()),
        "safetensors format, not GGUF: convert it .* or pull a GGUF file of this model from the Hub",
    ),
    "one byte": (lambda path: path.write_bytes(b"G"), "is not a GGUF file"),
    "GGML": (lambda path: path.write_bytes(b"GGML" * 9), "is not a GGUF file"),
    "a web page": (lambda path: path.write_bytes(b"<!DOCTYPE html>"), "is not a GGUF file"),
    "a pointer of Git LFS": (
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "stands for a file in Git LFS: run git lfs pull",
    ),
    "a part": (
        lambda path: write_gguf(path, "", {"split.no": 1, "split.count": 3}),
        "is part 2 of 3 of a model: give the first part",
    ),
    "a projector": (lambda path: write_gguf(path, "clip"), r"is a projector .* \(mmproj\): give the model"),
    "an adapter": (lambda path: write_gguf(path, "llama", {}, "adapter"), "is a LoRA adapter: merge it"),
    "a control vector": (lambda path: write_gguf(path, "controlvector"), "is a control vector: give a model"),
    "an importance matrix": (lambda path: write_gguf(path, "", {}, "imatrix"), "is an importance matrix"),
    "an embedding model": (
        lambda path: write_gguf(path, "bert"),
        r"does not generate text \(bert\): use one",
    ),
    "speech": (lambda path: write_gguf(path, "whisper"), r"does not generate text \(whisper\): use one"),
    "a vocabulary": (
        lambda path: write_gguf(path, "llama", n_tensors=0),
        "is a vocabulary without weights: give a complete model",
    ),
}


FAILURES = {  # what is done to a whole file, and what the error says
    "cut off": (lambda data: data[: len(data) // 2], "incomplete: download it again$"),
    "cut off in the header": (lambda data: data[:5_000], "incomplete: download it again$"),
    "a newer version": (lambda data: data[:4] + b"\x09" + data[5:], "update llama-cpp-python$"),
    "another byte order": (lambda data: data[:4] + data[7:3:-1] + data[8:], "download another one$"),
    "an unknown architecture": (
        lambda data: data.replace(b"llama", b"flux2"),
        "use a model that generates text; if it is one, update llama-cpp-python$",
    ),
    "a tensor is missing": (
        lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
        "download it again or update llama-cpp-python$",
    ),
}


@pytest.mark.parametrize(("damage", "message"), FAILURES.values(), ids=FAILURES.keys())
def test_what_to_do_fits_the_reason(tiny_path, tmp_path, damage, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(tiny_path.read_bytes()))
    with pytest.raises(ModelFileError, match=message):
        Model(path)


def test_a_part_that_is_missing(tmp_path):
    path = tmp_path / "model-00001-of-00002.gguf"
    numbers = {"context_length": 8, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8}
    numbers = {f"llama.{name}": n for name, n in numbers.items()}
    write_gguf(path, "llama", numbers | {"split.no": 0, "split.count": 2, "split.tensors.count": 2})
    with pytest.raises(ModelFileError, match="put all parts of the model into one folder"):
        Model(path)


@pytest.mark.parametrize(("make", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_path_without_a_model(tmp_path, make, message):
    make(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=message):
        Model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["model.gguf/below", "a\0b.gguf", "x" * 300], ids=["below", "zero", "long"])
def test_names_that_no_file_can_have(tmp_path, name):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        Model(tmp_path / name)


def test_a_file_without_read_permission(tmp_path, monkeypatch):
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelFileError, match=r"cannot be read \(Permission denied\)"):
        Model(path)


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (48, "the file is incomplete or damaged: download it again"),  # within its header
        (0.02, r"cannot be loaded \(.+\): the file is incomplete"),
        (0.999, r"cannot be loaded \(.+\): the file is incomplete"),
    ],
)
def test_a_truncated_file(tmp_path, tiny_path, size, why):
    whole = tiny_path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: size if size > 1 else int(len(whole) * size)])
    with pytest.raises(ModelFileError, match=why):
        Model(path)


def test_the_error_quotes_llama_cpp(tmp_path):
    path = write_tiny_model(tmp_path / "unknown.gguf", architecture="nonsense")
    with pytest.raises(ModelFileError, match="unknown model architecture: 'nonsense'"):
        Model(path)


def test_file_names_that_are_not_ascii(tmp_path, tiny_path):
    for name in ["modèle ไทย 🙂.gguf", os.fsdecode(b"not-utf8-\xff.gguf")]:
        path = tmp_path / name
        path.write_bytes(tiny_path.read_bytes())
        assert Model(str(path)).vocabulary.n_tokens


# Properties


def test_properties(tiny_model, recurrent_model):
    assert tiny_model.n_ctx_train == 2048
    assert not tiny_model.is_recurrent
    assert recurrent_model.is_recurrent
    assert tiny_model.state_bytes == 0
    assert recurrent_model.state_bytes > 10_000
    assert recurrent_model.kv_bytes(1 << 20) == 0
    assert tiny_model.chat_template == CHAT_TEMPLATE
    assert tiny_model.description.startswith(f"llama {tiny_model.parameters} ")
    assert 100_000 < tiny_model.size < tiny_model.path.stat().st_size


@pytest.mark.parametrize(
    ("label", "shown"),
    [("0.5B", "0.5B"), ("135M", "135M"), ("30B-A3B", "30B-A3B"), ("large", None), ("1B\x1b[2J", None)],
)
def test_a_model_is_called_by_the_size_in_its_name(tmp_path, monkeypatch, tiny_model, label, shown):
    add_name = gguf.GGUFWriter.add_name

    def with_label(writer, name):
        add_name(writer, name)
        writer.add_size_label(label)

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", with_label)
    model = Model(write_tiny_model(tmp_path / "m.gguf", tensor_type="F32"), weights=False)
    assert model.parameters == (shown or tiny_model.parameters)
    assert model.description == f"llama {model.parameters} all F32"


def kv_cache_bytes(capsys, model, **kwargs):
    """The size of the KV cache that llama.cpp logs."""
    runtime.set_verbose(True)
    try:
        open_sequence(model, threads=1, **kwargs).close()
    finally:
        runtime.set_verbose(False)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "KV buffer size" in x]
    return float(line.split("=")[1].split()[0]) * 2**20


@pytest.mark.parametrize(("cache_type", "width"), [("f16", 2.0), ("q8_0", 34 / 32), ("q4_0", 18 / 32)])
def test_kv_bytes_is_what_llama_cpp_allocates(capsys, tiny_model, cache_type, width):
    allocated = kv_cache_bytes(capsys, tiny_model, n_ctx=4096, cache_type=cache_type)
    assert tiny_model.kv_bytes(4096, width) == pytest.approx(allocated, rel=0.01)


def test_kv_bytes_of_heads_wider_than_the_embedding(capsys, tmp_path, monkeypatch):
    """As in Qwen3 and Gemma: here each head of 32 is 128 wide."""

    def add_head_size(writer, _):
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_uint32("llama.rope.dimension_count", 128)

    def widened(name, shape, *options):
        rows, *columns = shape
        if "attn_output" in name:
            shape = (rows, 4 * columns[0])
        elif name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            shape = (4 * rows, *columns)
        return tiny.random_weights(name, shape, *options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_dimension_count", add_head_size)
    model = Model(write_tiny_model(tmp_path / "wide.gguf", weights=widened))
    allocated = kv_cache_bytes(capsys, model, n_ctx=4096)
    assert model.kv_bytes(4096) == pytest.approx(allocated, rel=0.01)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_log_is_printed_only_when_verbose(capfd, tiny_path, verbose):
    runtime.set_verbose(verbose)
    try:
        run(open_sequence(Model(tiny_path), n_ctx=64, threads=1).call([1], n_logits=1))
    finally:
        runtime.set_verbose(False)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("llama_model_loader" in err) == verbose


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("", ""),
        ("", "model.close(); context.close()"),
        ("", "context.self = context; del model, context"),
        ("import tempfile; keep = tempfile.TemporaryDirectory()", ""),  # another finalizer comes first
    ],
)
def test_exit_in_any_order(tiny_path, start, end):
    code = f"""
{start}
from spec_local.core.calls import run
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
model = Model({str(tiny_path)!r})
context = open_sequence(model, n_ctx=64, threads=1)
logits = run(context.call([1, 2], n_logits=1))
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_weights_are_freed_with_the_last_reference(tiny_path):
    model = Model(tiny_path)
    vocabulary, weights = model.vocabulary, weakref.ref(model.handle)
    assert vocabulary.is_end(vocabulary.eos)
    gc.disable()  # they must not wait for the garbage collector
    try:
        del model
        assert weights()
        assert vocabulary.detokenize(vocabulary.tokenize("as before")) == "as before"
        del vocabulary
        assert not weights()
    finally:
        gc.enable()


USES = {
    "tokenize": lambda model: model.vocabulary.tokenize("a"),
    "piece": lambda model: model.vocabulary.piece(65),
    "text": lambda model: model.vocabulary.text(65),
    "is_end": lambda model: model.vocabulary.is_end(65),
    "fill_in": lambda model: model.vocabulary.fill_in,
    "fingerprint": lambda model: model.vocabulary.fingerprint,
    "size": lambda model: model.size,
    "chat_template": lambda model: model.chat_template,
    "is_recurrent": lambda model: model.is_recurrent,
    "kv_bytes": lambda model: model.kv_bytes(16),
    "open_sequence": lambda model: open_sequence(model, n_ctx=16),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_model(tiny_model, tiny_path, use):
    USES[use](tiny_model)
    closed = Model(tiny_path)
    closed.close()
    with pytest.raises(InvalidRequest, match="the model is closed"):
        USES[use](closed)


# Tiny models


def test_equal_seeds_give_equal_files(tmp_path, tiny_path):
    one, two, other = (write_tiny_model(tmp_path / f"{i}.gguf", seed=s) for i, s in enumerate((3, 3, 4)))
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    assert one.stat().st_size < 500_000


def test_writing_a_model_does_not_import_llama_cpp():
    code = "import sys, spec_local.llama.tiny; sys.exit('llama_cpp' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "shape", [{"seed": 1, "n_layers": 4}, {"architecture": "mamba"}, {"architecture": "qwen2"}], ids=str
)
def test_the_output_of_tiny_models_varies(tmp_path, shape):
    model = Model(write_tiny_model(tmp_path / "tiny.gguf", **shape))
    output = greedy(model, "Hello, what is the time?", 100)
    assert len(set(output)) > 30
    assert not any(map(model.vocabulary.is_end, output))
    other = greedy(model, "So what is the time?", 100)
    assert len(set(zip(output, other, strict=True))) > 30, "the prompt makes no difference"


def test_weights_beside_a_gpu_are_repacked(tiny_path, monkeypatch):
    """In memory that a GPU can read, llama.cpp does not repack them, nor leaves them to specdec's kernels."""
    lib, passed = runtime.library(), []
    load = lib.llama_model_load_from_file

    def record(path, params):
        passed.append(params.no_host)
        return load(path, params)

    monkeypatch.setattr(lib, "llama_model_load_from_file", record)
    Model(tiny_path).close()
    assert passed == [True]
