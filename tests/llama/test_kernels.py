"""Test the CPU kernels against float64, and in llama.cpp on tiny models. Skipped if they are not in use."""

import contextlib
import ctypes
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from spec_local import GenerationSettings, Session, kernels
from spec_local.core.calls import run
from spec_local.core.proposal import path_to
from spec_local.errors import BackendError, InvalidRequest
from spec_local.kernels import build, measure
from spec_local.llama import runtime
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence, open_sequences
from spec_local.llama.quantize import quantize
from spec_local.llama.tiny import write_tiny_model
from tests.llama.answers import tokens_of
from tests.unfiltered import unfiltered

SIMPLE = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.MXFP4)
K_QUANTS = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS)
PLAIN = (Type.F32, Type.F16, Type.BF16)
# Offsets of the half-precision numbers in a block, where random bits would be infinite or NaN.
SCALES = {
    **dict.fromkeys((Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS), (0,)),
    **dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.MXFP4: (),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
}


@pytest.fixture(scope="module", autouse=True)
def in_use():
    runtime.library()
    if not kernels.status().instruction_set:
        pytest.skip(f"kernels {kernels.status()}")
    yield
    kernels.use("auto")


@pytest.fixture
def limited(monkeypatch):
    """A function that sets limits as if they had been measured."""
    native, status = kernels.installed(), kernels.status()
    none = dict.fromkeys((*measure.PACKED, *measure.FLOATS), 1 << 40)

    def limit(limits):
        for kind, most in (none | limits).items():
            native.limit(kind, most)
        monkeypatch.setattr(kernels._state, "loaded", replace(status, limits=limits))

    yield limit
    for kind, most in (none | status.limits).items():
        native.limit(kind, most)


@pytest.fixture(scope="module")
def instruction_sets():
    """The instruction sets that this processor can execute: the selected one and all below it."""
    sets = list(build.instruction_sets())
    below = sets[sets.index(kernels.status().instruction_set) :]
    return [name for name in below if name in build.reported()]


@pytest.fixture(scope="module")
def multiply():
    """A function that returns y (columns, rows).

    Its arguments include a matrix in ggml's layout, uint8 (rows, bytes), and x, float32 (columns, k).
    """
    function = ctypes.CDLL(str(build.built())).specdec_kernels_multiply
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    function.argtypes += [ctypes.c_void_p] * 3

    def call(instruction_set, kind, matrix, x):
        y = np.full((len(x), len(matrix)), 7.0, np.float32)
        arrays = [a.ctypes.data for a in (np.ascontiguousarray(matrix), np.ascontiguousarray(x), y)]
        reason = function(
            instruction_set.encode(),
            int(kind),
            len(matrix),
            x.shape[1],
            len(x),
            *map(ctypes.c_void_p, arrays),
        )
        assert reason is None
        return y

    return call


def random_matrix(rng, kind, rows, k):
    """Return a matrix with random codes, and its weights in float64."""
    if kind in PLAIN:
        weights = rng.normal(size=(rows, k)).astype(np.float16 if kind == Type.F16 else np.float32)
        if kind == Type.BF16:  # the upper half of a float32
            weights = (weights.view(np.uint32) >> 16).astype(np.uint16)
            return weights.view(np.uint8), (weights.astype(np.uint32) << 16).view(np.float32).astype(
                np.float64
            )
        return weights.view(np.uint8), weights.astype(np.float64)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, k // block, size), np.uint8)
    if kind == Type.MXFP4:  # its scales are powers of two
        blocks[:, :, 0] = rng.integers(118, 132, blocks.shape[:2])
    for at in SCALES[kind]:
        scales = (rng.normal(size=blocks.shape[:2]) * 0.1).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    matrix = blocks.reshape(rows, -1)
    return matrix, gguf.quants.dequantize(matrix, kind).astype(np.float64)


def rounded(x, block):
    """Round activations as the kernels do: to 8 bits, with a single-precision scale per block."""
    parts = x.reshape(len(x), -1, block)
    largest = np.abs(parts).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(parts * (np.float32(127) / largest)), 0)
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def as_ggml_rounds(x, kind):
    """Round activations as ggml's own kernels do."""
    if kind in SIMPLE:
        return gguf.quants.dequantize(gguf.quants.quantize(x, Type.Q8_0), Type.Q8_0).astype(np.float64)
    parts = x.reshape(len(x), -1, 256)
    most = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[..., None], axis=2)
    inverse = np.float32(-127) / most
    return (np.minimum(127, np.rint(inverse * parts)) / inverse).reshape(x.shape).astype(np.float64)


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS, *PLAIN], ids=lambda kind: kind.name)
def test_random_matrices(multiply, instruction_sets, kind):
    """100 matrices per type: arbitrary row counts, all column counts, activations of all magnitudes."""
    rng = np.random.default_rng(int(kind))
    step = 256 if kind in K_QUANTS else 1 if kind in PLAIN else 32
    longest = 100 if kind in PLAIN else 4 if kind in K_QUANTS else 12
    for i in range(100):
        rows, n = int(rng.integers(1, 52)), int(rng.integers(1, 18))
        k = step * int(rng.integers(1, 1 + (2999 if i % 10 == 1 and kind in PLAIN else longest)))
        matrix, weights = random_matrix(rng, kind, rows, k)
        x = (rng.normal(size=(n, k)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        if i % 10 == 0:
            x[0] = 0
        read = x.astype(np.float64) if kind in PLAIN else rounded(x, 256 if kind in K_QUANTS else 32)
        expected, size = read @ weights.T, np.abs(read) @ np.abs(weights).T
        results = [multiply(name, kind, matrix, x) for name in instruction_sets]
        for y in results:
            assert (np.abs(y - expected) <= 2e-6 * size * max(1, k / 256) ** 0.5).all()
        if kind not in PLAIN:
            assert all((y == results[0]).all() for y in results)  # the same bits


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS, *PLAIN], ids=lambda kind: kind.name)
def test_a_column_does_not_depend_on_their_number(multiply, instruction_sets, kind):
    rng = np.random.default_rng(1)
    matrix, _ = random_matrix(rng, kind, 37, 512)
    x = rng.normal(size=(17, 512)).astype(np.float32)
    for name in instruction_sets:
        together = multiply(name, kind, matrix, x)
        for n in range(1, 17):
            assert (multiply(name, kind, matrix, x[:n]) == together[:n]).all()


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS, *PLAIN], ids=lambda kind: kind.name)
def test_how_weights_are_read_changes_no_bit(multiply, instruction_sets, kind):
    rng = np.random.default_rng(2)
    matrix, _ = random_matrix(rng, kind, 37, 512)
    x = rng.normal(size=(13, 512)).astype(np.float32)
    native = kernels.installed()
    try:
        for name in instruction_sets:
            for n in range(1, 14):
                found = []
                for way in (0, 1):
                    native.read_as(way, way)
                    found.append(multiply(name, kind, matrix, x[:n]))
                assert (found[0] == found[1]).all()
    finally:
        kernels._configure(native, kernels.status())


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS], ids=lambda kind: kind.name)
def test_at_least_as_exact_as_ggml(multiply, instruction_sets, kind):
    rng = np.random.default_rng(2)
    matrix, weights = random_matrix(rng, kind, 64, 2048)
    x = (rng.normal(size=(16, 2048)) * rng.lognormal(size=2048)).astype(np.float32)
    exact = x.astype(np.float64) @ weights.T
    ggml = np.sqrt(((as_ggml_rounds(x, kind) @ weights.T - exact) ** 2).mean())
    for name in instruction_sets:
        ours = np.sqrt(((multiply(name, kind, matrix, x) - exact) ** 2).mean())
        # The codes are the same; ggml's rounding of scales to half precision changes the error at random.
        assert 0 < ours <= 1.005 * ggml


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS, *PLAIN], ids=lambda kind: kind.name)
def test_infinities_and_nans_stay_in_their_column(multiply, instruction_sets, kind):
    rng = np.random.default_rng(3)
    matrix, _ = random_matrix(rng, kind, 20, 512)
    x = rng.normal(size=(7, 512)).astype(np.float32)
    broken = x.copy()
    broken[[1, 3, 4], 100] = np.nan, np.inf, -np.inf
    for name in instruction_sets:
        y, whole = multiply(name, kind, matrix, broken), multiply(name, kind, matrix, x)
        assert not np.isfinite(y[[1, 3, 4]]).any()
        others = [0, 2, 5, 6]
        assert (y[others] == whole[others]).all()


# ---- in llama.cpp ----

MODELS = ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K"]
MODELS += ["experts Q8_0", "experts Q4_K_M"]


@pytest.fixture(scope="module")
def quantized(folder):
    """A function that returns the path of a tiny model of a kind in `MODELS`, created once."""

    def make(kind):
        experts = 4 if kind.startswith("experts") else 0
        name = kind.split()[-1]
        path = folder / f"kernels-{kind.replace(' ', '-')}.gguf"
        if not path.exists():
            tensor_type = "F32" if name == "F32" else "F16"
            source = write_tiny_model(
                folder / f"kernels-source-{kind}.gguf", n_embd=256, tensor_type=tensor_type, n_experts=experts
            )
            if name in ("F32", "F16"):
                source.rename(path)
            else:
                quantize(source, path, name)
        return path

    return make


def text_of(n):
    return [1, *np.random.default_rng(4).integers(5, 400, n - 1).tolist()]


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_llama_cpp(quantized, make_context, capfd, kind):
    """They differ only by the rounding of activations, and the matrices are in the kernels' buffers."""
    logits = {}
    for mode in ("auto", "off"):
        kernels.use(mode)
        capfd.readouterr()
        runtime.set_verbose(True)
        try:
            model = Model(quantized(kind))
        finally:
            runtime.set_verbose(False)
        packed = "CPU_SPECDEC model buffer" in capfd.readouterr().err
        assert packed == (mode == "auto" and kind not in ("F32", "F16"))
        # One large call, then a small one.
        context = make_context(model, threads=2)
        run(context.call(text_of(40), n_logits=1))
        logits[mode] = run(context.call(text_of(5), n_logits=5)).copy()
        context.close()
    kernels.use("auto")
    difference = np.abs(logits["auto"] - logits["off"])
    assert difference.max() > 0 or kind == "F32"  # computed differently
    # With two nearly equal experts, rounding selects one of them, and the row differs by much.
    close = np.sqrt((difference**2).mean(axis=1)) < 0.05 * logits["off"].std()
    assert close.sum() >= 3 if kind.startswith("experts") else close.all()


@pytest.mark.parametrize(
    ("kind", "cache_type"),
    [*((kind, "f16") for kind in MODELS), ("F16", "q8_0"), ("Q4_K_M", "q8_0"), ("experts Q8_0", "q8_0")],
)
def test_logits_do_not_depend_on_the_size_of_a_call(quantized, make_context, kind, cache_type):
    """After 600 tokens of context: from 512 on, ggml computes attention for a single token differently."""
    model = Model(quantized(kind))
    context = make_context(model, n_ctx=700, max_tokens=64, threads=2, cache_type=cache_type)
    text = text_of(640)
    for start in range(0, 600, 60):
        run(context.call(text[start : start + 60], n_logits=1))
    logits = {}
    for n in (1, 2, 5, 8):
        logits[n] = np.concatenate(
            [run(context.call(text[i : i + n], n_logits=n)).copy() for i in range(600, 640, n)]
        )
        context.truncate(600)
    for n in (2, 5, 8):
        assert (logits[n] == logits[1]).all()


@pytest.mark.parametrize(
    ("kind", "cache_type"),
    [*((kind, "f16") for kind in MODELS if kind != "F16"), ("Q4_K_M", "q8_0"), ("experts Q8_0", "q8_0")],
)
def test_logits_do_not_depend_on_how_a_prompt_is_divided_into_calls(
    quantized, make_context, kind, cache_type
):
    """Products of F16 weights with more than 64 tokens are left to llama.cpp."""
    text = text_of(600)
    context = make_context(
        Model(quantized(kind)), n_ctx=700, max_tokens=512, threads=2, cache_type=cache_type
    )
    logits = {}
    for size in (512, 1, 8, 64, 65, 96):
        context.truncate(0)
        for start in range(0, 600, size):
            last = run(context.call(text[start : start + size], n_logits=1))[-1].copy()
        logits[size] = last
    for size in (1, 8, 64, 65, 96):
        assert (logits[size] == logits[512]).all()


@pytest.mark.parametrize(
    ("kind", "temperature"), [("Q4_0", 1.0), ("Q4_K_M", 0.0), ("Q4_K_M", 1.0), ("Q8_0", 0.0)]
)
def test_a_seed_gives_the_same_text_with_and_without_a_draft(quantized, folder, kind, temperature):
    """On quantized models, too, and with trees. With llama.cpp's own kernels, near-ties can be exchanged."""
    draft = write_tiny_model(folder / "kernels-draft.gguf", n_embd=256, noise=0.05)
    usual = {"sampling": unfiltered(temperature=temperature), "max_tokens": 60, "proposer": "draft"}
    variants = [{"policy": "adaptive"}, *({"policy": "fixed", "draft_max": n} for n in (4, 7))]
    variants += [{"policy": "fixed", "verifier": "exact-match", "shape": shape} for shape in ("tree", "beam")]
    with Session.open(
        quantized(kind), draft, n_ctx=512, threads=2, branches=16, reproducible=True
    ) as session:
        assert session.main.pad_to == 1
        for seed in range(2):
            plain, *texts = (
                tokens_of(session.generate(text_of(20), GenerationSettings(**usual | how, seed=seed)))
                for how in ({"policy": "off"}, *variants)
            )
            assert len(plain) == 60
            assert texts == [plain] * len(variants)


@pytest.mark.parametrize(("kind", "sizes"), [("Q4_K_M", {24}), ("F16", {9}), ("experts Q4_K_M", {9, 24})])
def test_reproducible_output_needs_no_padding(quantized, limited, kind, sizes):
    """For an F32 router this narrow, llama.cpp may happen to add up as specdec does, above 9 tokens, too."""
    limited({"F16": 9, "F32": 9})
    with Session.open(quantized(kind), threads=1, reproducible=True) as session:
        assert session.main.pad_to == 1
        assert session.main.limits.max_tokens in sizes


def test_what_is_left_to_llama_cpp(quantized, make_context, limited):
    """As without the kernels, and only from a number of tokens on."""
    text = np.random.default_rng(4).integers(0, 300, 12).tolist()

    def last(kind, n):
        """The logits after the last token of a call of n tokens, all of which have logits."""
        context = make_context(Model(quantized(kind)), n_ctx=64)
        return run(context.call(text[:n], n_logits=n))[-1].copy()

    limited({"F16": 8})
    ours, theirs = last("F16", 8), last("F16", 9)
    limited({"F16": 0})
    assert (last("F16", 8) != ours).any()
    assert (last("F16", 9) == theirs).all()
    packed = last("Q4_K_M", 4)
    limited({"Q4_K": 0, "Q6_K": 0})
    left = last("Q4_K_M", 4)
    limited({})
    assert (last("Q4_K_M", 4) == packed).all()
    kernels.use("off")
    context = make_context(Model(quantized("Q4_K_M")), n_ctx=64)
    kernels.use("auto")  # attention and the other types are computed as before
    assert (run(context.call(text[:4], n_logits=4))[-1] == left).all()
    assert (left != packed).any()


def test_reproducible_trees_are_refused_where_attention_is_that_of_llama_cpp(quantized):
    """It adds up in the order of the cells, and those of a branch are others."""
    with pytest.raises(InvalidRequest, match="`shape=chain`"):
        Session.open(quantized("Q4_K_M"), threads=1, branches=8, cache_type="q4_0", reproducible=True)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_rows", [1, 8])
def test_trees_and_rows_have_the_logits_of_the_path_alone(quantized, make_context, n_rows, cache_type):
    """Bit for bit, after random steps: paths are committed, and rejected nodes leave gaps in the cache."""
    rng = random.Random(0)
    model = Model(quantized("Q4_K_M"))
    size = {"n_ctx": 200, "max_tokens": 64, "threads": 2, "cache_type": cache_type}
    rows = open_sequences(model, n_rows, max_branches=4, max_logits=64, **size)
    alone = make_context(model, **size)
    for _ in range(40):
        calls = []
        for row in rng.sample(rows, rng.randint(1, n_rows)):
            if len(row.cached) > 100 or rng.random() < 0.1:
                row.truncate(len(row.cached) // 2)
            parents = [rng.randint(max(-1, i - 2), i - 1) for i in range(rng.randint(1, 5))]
            tokens = [rng.randrange(5, 400) for _ in parents]
            calls.append(row.call(tokens, parents, len(tokens)))
        for call, logits in zip(calls, rows[0].context.decode(calls), strict=True):
            path = path_to(call.parents, len(call.tokens) - 1)
            text = [*call.sequence.cached, *(call.tokens[node] for node in path)]
            alone.truncate(0)
            for start in range(0, len(text), 60):
                expected = run(alone.call(text[start : start + 60], n_logits=1))
            assert np.array_equal(logits[path[-1]], expected[0])
            call.sequence.commit(path)
    rows[0].close()


def test_two_models_at_once(quantized, make_context):
    """Two models in two threads give the same results as each one alone."""
    contexts = [make_context(Model(quantized(kind)), threads=2) for kind in ("Q4_K_M", "experts Q8_0")]

    def work(context):
        rows = []
        for _ in range(10):
            rows += [run(context.call(text_of(n), n_logits=n)).copy() for n in (1, 3, 9)]
            context.truncate(0)
        return np.concatenate(rows)

    alone = [work(context) for context in contexts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for together, expected in zip(pool.map(work, contexts), alone, strict=True):
                assert (together == expected).all()


def test_states_captured_in_cpp_are_those_captured_in_python(tmp_path):
    """Of the layers in the given order, in calls of one and several tokens; "l_out-1" is not "l_out-12"."""
    write_tiny_model(tmp_path / "main.gguf", n_layers=14)
    hidden = HiddenStates((12, 1, 4))
    found = []
    with contextlib.closing(Model(tmp_path / "main.gguf")) as model:
        for mode in ("auto", "off"):
            kernels.use(mode)
            with contextlib.closing(open_sequence(model, n_ctx=64, threads=1, hidden=hidden)) as context:
                kernels.use("auto")
                for tokens in ([5, 6, 7], [8], [9, 10]):
                    run(context.call(tokens, n_logits=1))
                    found.append(context.states(range(len(tokens))))
    in_cpp, in_python = found[:3], found[3:]
    for a, b in zip(in_cpp, in_python, strict=True):
        assert np.array_equal(a, b)
        assert len({tuple(part) for part in np.split(a[0], 3)}) == 3  # the layers differ


def test_states_of_an_unexpected_size_end_the_call(tmp_path):
    write_tiny_model(tmp_path / "main.gguf", n_layers=4)
    with contextlib.closing(Model(tmp_path / "main.gguf")) as model:
        context = open_sequence(model, n_ctx=64, threads=1, hidden=HiddenStates((1,)))
        with contextlib.closing(context):
            capture = context.context._capture._native[1]
            for field, value in (("width", model.n_embd + 1), ("n_rows", 2)):
                usual = getattr(capture, field)
                setattr(capture, field, value)
                with pytest.raises(BackendError, match=r"layer 1 of main\.gguf have an unexpected size"):
                    run(context.call([5, 6, 7], n_logits=1))
                setattr(capture, field, usual)
            context.truncate(0)
            run(context.call([5, 6, 7], n_logits=1))
            assert context.states(range(3)).shape == (3, model.n_embd)
