"""A draft model's trimmed vocabulary and GGUF file, as llama.cpp reads them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import TokenType

from spec_local.errors import BackendError, InvalidRequest, ModelError, ModelFileError
from spec_local.llama.context import open_context
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.training import export, tokenizer
from spec_local.training.export import tokenize_vocabulary, write_draft
from spec_local.training.model_shape import ModelShape
from spec_local.training.vocabulary_trimming import select_tokens

MERGES = [
    "Ġ t",
    "h e",
    "i n",
    "r e",
    "Ġt he",
    "in g",
    "Ġ re",
    "o n",
    "Ġre ad",
    "a d",
    "Ġ on",
    "Ã ©",
    "on ing",
]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>", "<|asked|>"]
FILL_IN = ["<PRE>", "<SUF>", "<MID>"]
TEMPLATE = "{{ '<|im_start|>' }}{{ messages[0]['content'] }}"


def spelled(byte):
    """A byte as the GPT-2 tokenizer writes it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A BPE model that names its EOS token but not its EOT token, for which there are two candidates."""
    path = tmp_path_factory.mktemp("bpe") / "main.gguf"
    words = [spelled(b) for b in range(256)] + ["".join(m.split()) for m in MERGES]
    texts = [*words, *CONTROLS, "<tool>", "<other tool>"]
    types = (
        [TokenType.NORMAL] * len(words) + [TokenType.CONTROL] * len(CONTROLS) + [TokenType.USER_DEFINED] * 2
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny BPE")
    writer.add_license("apache-2.0")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(texts.index("<|endoftext|>"))
    writer.add_bos_token_id(texts.index("<|endoftext|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    shape = small(len(texts))
    export._add_shape(writer, shape)
    for name, values in export._zeros(shape).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "main.gguf"
    return write_tiny_model(path, extra_tokens=["<long>", *FILL_IN], space_prefix=True)


def small(n_vocab, n_embd=64, n_layers=2):
    return ModelShape(
        n_vocab, n_embd, n_layers, 2, 1, n_embd // 2, 2 * n_embd, rope_base=5000.0, eps=1e-6, n_ctx=321
    )


def weights_of(shape):
    """Weights of a draft model whose layers add nothing, so that only the last token matters."""
    weights = export._zeros(shape)
    rng = np.random.default_rng(1)
    weights["token_embd.weight"] = rng.normal(size=(shape.n_vocab, shape.n_embd)).astype(np.float32)
    weights["output_norm.weight"] += rng.uniform(0.5, 2, shape.n_embd).astype(np.float32)
    return weights


def counts_of(path, **times):
    """Numbers of occurrences of tokens, which are given by their texts in the file."""
    model = Model(path, weights=False)
    vocabulary = model.vocabulary
    ids = {vocabulary.text(t).decode(): t for t in range(vocabulary.n_tokens)}
    counts = np.zeros(vocabulary.n_tokens, np.int64)
    for text, n in times.items():
        counts[ids[text]] = n
    return counts


def texts_of(path, kept):
    model = Model(path, weights=False)
    vocabulary = model.vocabulary
    return [vocabulary.text(t).decode() for t in kept.tolist()]


def draft_of(path, main, kept, **options):
    shape = small(len(kept))
    return write_draft(path, main, kept, shape, weights_of(shape), **{"provenance": {}} | options)


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_token_is_kept_with_its_merges(bpe):
    counts = counts_of(bpe, **{"Ġthe": 9, "oning": 1, "<tool>": 1, "<|asked|>": 1, "a": 4})
    kept = select_tokens(bpe, counts, 1000)
    assert kept.dtype == np.uint32
    assert np.all(np.diff(kept.astype(int)) > 0)
    merged = texts_of(bpe, kept)[256:]
    assert merged == ["Ġt", "he", "in", "Ġthe", "ing", "on", "oning", *CONTROLS[:3], "<|asked|>", "<tool>"]


def test_frequent_tokens_come_first(bpe):
    counts = counts_of(bpe, **{"Ġthe": 9, "Ġre": 8, "oning": 7, "on": 6})
    n = 256 + 3  # bytes and special tokens
    assert texts_of(bpe, select_tokens(bpe, counts, n + 3))[256:-3] == ["Ġt", "he", "Ġthe"]
    # "Ġre" needs "re" and does not fit; "on" does.
    assert texts_of(bpe, select_tokens(bpe, counts, n + 4))[256:-3] == ["Ġt", "he", "Ġthe", "on"]
    assert texts_of(bpe, select_tokens(bpe, counts, n + 5))[256:-3] == ["Ġt", "he", "re", "Ġthe", "Ġre"]
    with pytest.raises(
        InvalidRequest, match=f"^{n - 1} tokens are too few for main.gguf: give at least {n}$"
    ):
        select_tokens(bpe, counts, n - 1)
    counts = counts_of(bpe, **{"on": 6, "<tool>": 1, "<|asked|>": 1})
    assert texts_of(bpe, select_tokens(bpe, counts, n + 2))[256:] == [*CONTROLS[:3], "<|asked|>", "<tool>"]


def test_sentencepiece_merges_by_score(sentencepiece):
    counts = counts_of(sentencepiece, **{"▁little": 1, "<long>": 1})
    kept = texts_of(sentencepiece, select_tokens(sentencepiece, counts, 1000))
    assert kept[:5] == ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    assert kept[5:261] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert set(kept[261:]) == {"▁l", "▁li", "▁lit", "▁litt", "▁littl", "▁little", "<long>", *FILL_IN}


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "starter"])
def test_the_draft_tokenizes_kept_tokens_as_themselves(kind, request, tmp_path):
    main = request.getfixturevalue(kind)
    path = main.path if kind == "starter" else main
    model = Model(path, weights=False)
    vocabulary = model.vocabulary
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, vocabulary.n_tokens)
    if kind == "starter":
        text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
        counts = np.bincount(vocabulary.tokenize(text), minlength=vocabulary.n_tokens)
    kept = select_tokens(path, counts, min(4000, vocabulary.n_tokens - 3))
    trimmed = Model(draft_of(tmp_path / "draft.gguf", path, kept))
    draft = trimmed.vocabulary
    vocabulary_map = VocabularyMap(vocabulary, draft)
    types = tokenizer.read_metadata(path)["tokenizer.ggml.token_type"]
    # Where a byte and a character are the same, VocabularyMap takes the character.
    expected = {t for t in kept.tolist() if types[t] != TokenType.BYTE}
    assert expected - set(vocabulary_map.main_ids.tolist()) == set()
    plain = [(i, vocabulary.piece(t)) for i, t in enumerate(kept.tolist()) if types[t] == TokenType.NORMAL]
    assert len(plain) > 250
    lost = [p for i, p in plain if draft.tokenize(p.decode("utf-8", "surrogateescape")) != [i]]
    assert [
        p for p in lost if "\ufffd" not in p.decode("utf-8", "replace")
    ] == []  # nor can the main model's tokenizer


def test_other_tokens_are_read_as_several_kept_ones(bpe):
    kept = select_tokens(bpe, counts_of(bpe, **{"Ġre": 2, "in": 1}), 300)
    read = tokenize_vocabulary(bpe, kept)
    names = texts_of(bpe, np.arange(len(read)))
    own = texts_of(bpe, kept)
    assert [own[i] for i in read[names.index("ing")]] == ["in", "g"]
    assert [own[i] for i in read[names.index("oning")]] == ["o", "n", "in", "g"]
    assert [own[i] for i in read[names.index("Ġthe")]] == ["Ġ", "t", "h", "e"]
    assert all(read[token] == (i,) for i, token in enumerate(kept.tolist()))


def test_tokens_get_no_space_prefix(sentencepiece):
    """The main model prefixes every text with a space; the draft model reads token by token."""
    kept = select_tokens(sentencepiece, counts_of(sentencepiece, **{"▁li": 1, "t": 1}), 300)
    read = tokenize_vocabulary(sentencepiece, kept)
    names, own = texts_of(sentencepiece, np.arange(len(read))), texts_of(sentencepiece, kept)
    assert [own[i] for i in read[names.index("▁lit")]] == ["▁li", "t"]
    assert [own[i] for i in read[names.index("é")]] == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_special_tokens_keep_their_roles(kind, request, tmp_path):
    path = request.getfixturevalue(kind)
    main = Model(path, weights=False)
    kept = select_tokens(path, counts_of(path, t=1), 300)
    draft = Model(draft_of(tmp_path / "draft.gguf", path, kept))
    ours, theirs = main.vocabulary, draft.vocabulary
    for role in ("bos", "eos", "eot"):
        assert theirs.text(getattr(theirs, role)) == ours.text(getattr(ours, role)), role
    ends = [{v.text(t) for t in range(v.n_tokens) if v.is_end(t)} for v in (ours, theirs)]
    assert ends[0] == ends[1]
    assert (theirs.add_bos, theirs.add_eos) == (ours.add_bos, ours.add_eos) == (True, False)
    assert draft.chat_template == main.chat_template
    fill_in = [[v.text(t) for t in v.fill_in or ()] for v in (ours, theirs)]
    assert fill_in[0] == fill_in[1] == ([t.encode() for t in FILL_IN] if kind == "sentencepiece" else [])
    facts = tokenizer.read_metadata(draft.path)
    assert theirs.text(facts["tokenizer.ggml.eot_token_id"]) == ours.text(
        ours.eot
    )  # missing in the main model's file
    if kind == "sentencepiece":
        assert theirs.text(facts["tokenizer.ggml.unknown_token_id"]) == b"<unk>"
        assert np.array_equal(
            facts["tokenizer.ggml.scores"], tokenizer.read_metadata(path)["tokenizer.ggml.scores"][kept]
        )
    else:
        assert facts["tokenizer.ggml.pre"] == "gpt-2"
    without = kept[[theirs.text(i) != ours.text(ours.eos) for i in range(len(kept))]]
    with pytest.raises(InvalidRequest, match=r"lacks .*eos_token_id of the main model, token \d+: keep it$"):
        tokenize_vocabulary(path, without)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_the_exported_draft_computes_the_same_logits(bpe, tmp_path, kind):
    kept = select_tokens(bpe, counts_of(bpe, **{"Ġthe": 1}), 300)
    shape, n = small(len(kept)), len(kept)
    weights = weights_of(shape)
    path = write_draft(tmp_path / "draft.gguf", bpe, kept, shape, weights, kind=kind, provenance={})
    model = Model(path)
    assert model.n_ctx_train == 321
    context = open_context(model, n_ctx=64, max_tokens=8, max_logits=8, threads=1)
    tokens = [3, n - 1, 7]
    embeddings = weights["token_embd.weight"]
    rows = embeddings[tokens]
    normed = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6) * weights["output_norm.weight"]
    expected = normed @ embeddings.T
    got = context.evaluate(tokens, 3).copy()
    assert np.abs(got - expected).max() < 0.3  # of logits up to a hundred
    context.truncate(0)
    main = Model(bpe, weights=False)
    vocabulary_map = VocabularyMap(main.vocabulary, model.vocabulary)
    seen = IntersectionModel(context, vocabulary_map, main.vocabulary.n_tokens)
    row = seen.evaluate([int(kept[t]) for t in tokens], 1)[0]
    assert np.array_equal(np.flatnonzero(np.isfinite(row)), kept)
    context.close()


@pytest.mark.parametrize(
    ("kind", "embedding_kind", "n_embd", "embedding", "others"),
    [
        ("Q8_0", None, 64, "Q8_0", "Q8_0"),
        ("Q4_0", None, 64, "Q4_0", "Q4_0"),
        ("Q4_0", None, 256, "Q4_0", "Q4_0"),
        ("Q4_0", "BF16", 64, "BF16", "Q4_0"),
        ("Q5_1", "Q5_1", 64, "Q5_1", "Q5_1"),
        ("F16", None, 64, "F16", "F16"),
        ("BF16", None, 64, "BF16", "BF16"),
    ],
)
def test_matrices_have_the_requested_type(bpe, tmp_path, kind, embedding_kind, n_embd, embedding, others):
    kept = select_tokens(bpe, counts_of(bpe), 300)
    shape = small(len(kept), n_embd, 1)
    path = write_draft(
        tmp_path / "a.gguf",
        bpe,
        kept,
        shape,
        weights_of(shape),
        kind=kind,
        embedding_kind=embedding_kind,
        provenance={},
    )
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert types["token_embd.weight"] == embedding
    assert {t for name, t in types.items() if name.startswith("blk") and "norm" not in name} == {others}
    assert {t for name, t in types.items() if "norm" in name} == {"F32"}


def test_the_file_records_its_provenance(bpe, tmp_path):
    bpe.chmod(0o640)
    provenance = {"tokens": 2**33, "acceptance": 0.625, "device": "cpu"}
    path = draft_of(
        tmp_path / "new" / "draft.gguf", bpe, select_tokens(bpe, counts_of(bpe), 300), provenance=provenance
    )
    facts = tokenizer.read_metadata(path)
    assert facts["general.name"] == "Tiny BPE draft"
    assert facts["general.license"] == "apache-2.0"
    assert facts["general.base_model.0.name"] == facts["specdec.main.name"] == "Tiny BPE"
    assert facts["specdec.main.sha256"] == export.sha256(bpe)
    assert {key: facts[f"specdec.{key}"] for key in provenance} == provenance
    assert facts["llama.rope.freq_base"] == 5000
    assert facts["llama.rope.dimension_count"] == facts["llama.attention.key_length"] == 32
    assert path.stat().st_mode & 0o777 == 0o640
    assert files(path.parent) == ["draft.gguf"]


def test_metadata_is_read_as_the_gguf_package_reads_it(sentencepiece, bpe):
    for path in (sentencepiece, bpe):
        fields = gguf.GGUFReader(path).fields
        expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
        read = tokenizer.read_metadata(path)
        assert read.keys() == expected.keys()
        for key, value in read.items():
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            texts = (
                [t.decode() for t in plain]
                if isinstance(plain, list) and isinstance(plain[0], bytes)
                else plain
            )
            assert texts == expected[key], key


def test_unsupported_tokenizers_are_refused(bpe, sentencepiece):
    main = Model(bpe, weights=False)
    facts = tokenizer.read_metadata(bpe)
    with pytest.raises(ModelError, match=r"^main.gguf has a tokenizer of kind 't5'; .*: give another main"):
        tokenizer.read(main, facts | {"tokenizer.ggml.model": "t5"})
    main, facts = Model(sentencepiece, weights=False), tokenizer.read_metadata(sentencepiece)
    types = np.full(len(facts["tokenizer.ggml.tokens"]), TokenType.NORMAL)
    with pytest.raises(ModelError, match=r"lacks single-byte tokens, .*: give another main model$"):
        tokenizer.read(main, facts | {"tokenizer.ggml.token_type": types})
    with pytest.raises(ModelFileError, match="does not exist"):
        select_tokens(bpe.with_name("none.gguf"), np.zeros(3, int), 9)


def test_a_failed_export_leaves_the_old_file(bpe, tmp_path):
    kept = select_tokens(bpe, counts_of(bpe), 300)
    shape, path = small(len(kept)), tmp_path / "draft.gguf"
    path.write_text("old")
    good = weights_of(shape)
    narrow = good | {"blk.0.ffn_up.weight": np.zeros((64, 64), np.float32)}
    less = {k: v for k, v in good.items() if k != "blk.1.attn_q.weight"}
    nan = good | {"blk.0.attn_q.weight": np.full_like(good["blk.0.attn_q.weight"], np.nan)}
    for weights, why in [
        (narrow, "ffn_up.*wrong shape"),
        (less, "attn_q.*not found"),
        (nan, "attn_q.*invalid data"),
    ]:
        with pytest.raises(
            BackendError, match=rf"^llama.cpp rejects the draft model \(.*{why}.*\): check that"
        ):
            write_draft(path, bpe, kept, shape, weights, provenance={})
    for kinds in ({"kind": "Q9"}, {"embedding_kind": "Q4_K"}):
        with pytest.raises(InvalidRequest, match=r"^quantization 'Q\w+' is .*: give "):
            draft_of(path, bpe, kept, **kinds)
    with pytest.raises(InvalidRequest, match="is the main model itself: give another name"):
        draft_of(bpe, bpe, kept)
    assert path.read_text() == "old"
    assert files(tmp_path) == ["draft.gguf"]
    assert files(bpe.parent) == ["main.gguf"]


def test_an_unwritable_path_is_named(bpe, tmp_path, monkeypatch):
    kept = select_tokens(bpe, counts_of(bpe), 300)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/draft.gguf cannot be written \(.*\): give another path$"):
        draft_of(tmp_path / "file" / "draft.gguf", bpe, kept)

    def fails(*args, **kwargs):
        raise BackendError("it could not")

    monkeypatch.setattr(export, "quantize_into", fails)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(
        InvalidRequest, match=rf"draft.gguf cannot be written \({os.strerror(28)}\): give another"
    ):
        draft_of(tmp_path / "draft.gguf", bpe, kept)
    assert files(tmp_path) == ["file"]


def test_a_full_disk_leaves_nothing(bpe, tmp_path):
    """Simulated by a limit on file sizes: the F32 file has 600 kB, the final file 100 kB."""
    program = """
import resource, sys
from pathlib import Path
import numpy as np
from spec_local.errors import InvalidRequest
from spec_local.training import export, vocabulary_trimming
from spec_local.training.model_shape import ModelShape
main, path = map(Path, sys.argv[1:])
kept = vocabulary_trimming.select_tokens(main, np.zeros(276, int), 300)
shape = ModelShape(len(kept), 64, 2, 2, 1, 32, 128)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
sys.dont_write_bytecode = True
try:
    export.write_draft(path, main, kept, shape, export._zeros(shape), provenance={})
except InvalidRequest as error:
    print(error)
"""
    path = tmp_path / "draft.gguf"
    done = subprocess.run(
        [sys.executable, "-c", program, bpe, path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{path} cannot be written (No space left on device): give another path\n"
    assert files(tmp_path) == []
