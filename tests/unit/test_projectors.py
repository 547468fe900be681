"""Projectors are found beside their main models, and never paired with others; their headers are checked."""

import pytest

from spec_local.errors import InvalidRequest, ModelFileError
from spec_local.models import catalog, file_names, ollama
from spec_local.models.projectors import describe, find_projector, resolve_projector
from tests.stored_models import add_to_hub_cache, add_to_ollama, write_header, write_projector

MAIN = "gemma-3-4b-it-Q4_K_M.gguf"
DEEPSTACK = ["v.deepstack.5.fc2.weight", "v.deepstack.8.fc2.weight"]
SOUND = {"has_vision_encoder": False, "has_audio_encoder": True}


@pytest.fixture(autouse=True)
def home(empty_home):
    return empty_home


@pytest.fixture
def main(tmp_path):
    return write_header(tmp_path / "m" / MAIN, width=64, name="Gemma 3 4b It")


def found(main):
    projector = find_projector(main)
    return projector and projector.path.name


# Names


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", "gemma34bit"),
        ("mmproj-gemma-3-4b-it-f16.gguf", "gemma34bit"),
        ("google_gemma-3-4b-it-mmproj-bf16.gguf", "googlegemma34bit"),
        ("Qwen2.5-VL-3B.mmproj-Q8_0.gguf", "qwen25vl3b"),
        ("UD-Q4/Big-UD-Q4_K_XL-00001-of-00003.gguf", "big"),
        ("mmproj-model-f16.gguf", ""),
        ("mmproj-BF16.gguf", ""),
        ("MMPROJ.gguf", ""),
    ],
)
def test_the_model_in_a_name(name, series):
    assert file_names.series(name) == series


def test_the_projector_of_a_repository():
    names = ["toy-Q4_0.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"]
    for best in ("mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf", None):
        assert file_names.best_projector(names, "toy-Q4_0.gguf") == best
        names = [name for name in names if name != best]
    # That in the main model's folder, not in another one; its own name comes first.
    names = ["a/mmproj-F16.gguf", "b/mmproj-F16.gguf", "mmproj-F16.gguf"]
    assert file_names.best_projector(names, "b/toy.gguf") == "b/mmproj-F16.gguf"
    assert file_names.best_projector(names, "toy.gguf") == "mmproj-F16.gguf"
    assert file_names.best_projector(names[:2], "c/toy.gguf") is None
    names = ["mmproj-big-F16.gguf", "mmproj-small-Q8_0.gguf", "mmproj-F32.gguf"]
    assert file_names.best_projector(names, "small-Q4_0.gguf") == "mmproj-small-Q8_0.gguf"
    assert file_names.best_projector(names, "other-Q4_0.gguf") == "mmproj-F32.gguf"


# What a file says of itself


def test_facts(tmp_path):
    path = write_projector(tmp_path / "mmproj.gguf", kind="gemma3", name="Gemma", file_type=1, keys={
        "vision.image_size": 896, "vision.patch_size": 14, "vision.embedding_length": 1152,
        "vision.feed_forward_length": 4304,
    })  # fmt: skip
    facts = describe(path)
    assert (facts.path, facts.type, facts.name, facts.quantization) == (path, "gemma3", "Gemma", "F16")
    assert (facts.has_vision, facts.has_audio, facts.image_size) == (True, False, 896)
    assert facts.size == path.stat().st_size
    assert facts.buffers == 64 * 64 * (6 * 1152 + 4304) * 4
    assert facts.memory == facts.size + facts.buffers
    assert facts.description == "projector for images of 896 × 896 pixels (gemma3), F16, 0.0 MB"
    any_size = describe(write_projector(tmp_path / "any.gguf", kind="qwen2vl_merger"))
    assert any_size.buffers == 4 * 4096 * (6 * 48 + 96) * 4
    keys = SOUND | {"audio.projector_type": "ultravox"}
    sound = describe(write_projector(tmp_path / "sound.gguf", kind="", keys=keys))
    assert (sound.has_vision, sound.has_audio, sound.type) == (False, True, "ultravox")
    assert sound.description == "projector for sound (ultravox), 0.0 MB"


@pytest.mark.parametrize(
    ("kind", "tensors", "width"),
    [
        ("idefics3", {"mm.model.fc.weight": (32, 64)}, 64),
        ("internvl", {"mm.model.mlp.1.weight": (16, 32), "mm.model.mlp.3.weight": (32, 64)}, 64),
        ("gemma3", {"mm.input_projection.weight": (64, 32)}, 64),  # transposed
        ("gemma4v", {"mm.input_projection.weight": (32, 64)}, 64),
        ("qwen2.5vl_merger", {"mm.0.weight": (96, 96), "mm.2.weight": (96, 64), "mm.2.bias": (64,)}, 64),
        ("qwen3vl_merger", {"mm.2.bias": (64,), **dict.fromkeys(DEEPSTACK, (8, 64))}, 192),
        ("mlp", {"mm.0.weight": (32, 64), "mm.2.weight": (64, 64)}, 64),
        ("mlp", {"mm.2.weight": ()}, 768),
        ("unknown", {}, 768),  # as it is stated
    ],
    ids=str,
)  # fmt: skip
def test_the_width_of_its_vectors(tmp_path, kind, tensors, width):
    keys = {"vision.projection_dim": 768}  # as in old files, of CLIP itself
    assert (
        describe(write_projector(tmp_path / "m.gguf", kind=kind, tensors=tensors, keys=keys)).width == width
    )


def test_whether_it_fits_a_main_model(tmp_path):
    projector = describe(write_projector(tmp_path / "mmproj.gguf", 64))
    main = {"general.architecture": "llama", "llama.embedding_length": 64}
    assert projector.fits(main)
    assert projector.mismatch(main | {"llama.embedding_length": 96}) == (
        "it gives vectors of 64 numbers, and the model reads 96"
    )
    assert not projector.fits(main | {"llama.n_deepstack_layers": 3})
    assert projector.fits({})  # unknown: llama.cpp decides


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(b"GGU"), "is not a GGUF file"),
        (lambda path: path.write_bytes(b"GGUF" + b"\xff" * 100), "is not a projector"),
        (lambda path: write_header(path, "llama"), r"is not a projector \(its architecture is llama\): give"),
        (lambda path: write_header(path, "clip"), r"is not a projector \(it encodes nothing\)"),
    ],
    ids=["missing", "a folder", "no GGUF", "damaged", "a model", "empty"],
)
def test_what_is_no_projector(tmp_path, main, write, reason):
    path = tmp_path / "mmproj.gguf"
    write(path)
    for use in (describe, lambda path: resolve_projector(main, path)):
        with pytest.raises(ModelFileError, match=reason) as error:
            use(path)
        assert "\n" not in str(error.value)


def test_no_damaged_header_is_another_error(tmp_path):
    whole = write_projector(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "mmproj.gguf"
    for i in range(0, len(whole) - 8192, 7):
        for content in (whole[:i], whole[:i] + b"\xff" * 8 + whole[i + 8 :]):
            path.write_bytes(content)
            try:
                describe(path)
            except ModelFileError:
                continue


# What is given


def test_what_is_given(main, tmp_path):
    path = write_projector(tmp_path / "eyes.gguf", 64)
    other = write_projector(tmp_path / "other.gguf", 96)
    sound = write_projector(
        tmp_path / "s.gguf", keys={"has_vision_encoder": False, "has_audio_encoder": True}
    )
    assert resolve_projector(main, str(path)) == resolve_projector(main, path) == describe(path)
    assert resolve_projector(main, "none") is resolve_projector(main, "auto") is None
    with pytest.raises(
        InvalidRequest, match=rf"other.gguf is the projector of another model than {MAIN} \(it"
    ):
        resolve_projector(main, other)
    with pytest.raises(ModelFileError, match="for sound of the type idefics3, which is not supported"):
        resolve_projector(main, sound)
    beside = write_projector(main.parent / "mmproj-F16.gguf", 64)
    assert resolve_projector(main, "auto") == describe(beside)
    assert resolve_projector(main, "none") is None
    assert resolve_projector(main.with_name("missing.gguf"), "auto") is None


# Beside a main model


@pytest.mark.parametrize(
    "name",
    [
        "mmproj-model-f16.gguf", "mmproj-F16.gguf", "mmproj-gemma-3-4b-it-f16.gguf", "MMPROJ.gguf",
        "gemma-3-4b-it.mmproj-Q8_0.gguf", "gemma-3-4b-mmproj.gguf",
    ],
)  # fmt: skip
def test_usual_names(main, name):
    assert found(main) is None
    write_projector(main.parent / name, 64)
    assert found(main) == name


def test_the_best_of_several(main):
    quants = {"F16": 1, "BF16": 32, "F32": 0, "Q8_0": 7, "Q4_K_M": 15}
    for quant, number in quants.items():
        write_projector(main.parent / f"mmproj-{'x' if quant == 'F16' else quant}.gguf", 64, file_type=number)
    (main.parent / "mmproj-x.gguf").rename(main.parent / "mmproj-gguf.gguf")  # the header tells it, too
    for best in ("gguf", "BF16", "F32", "Q8_0", "Q4_K_M"):
        assert found(main) == f"mmproj-{best}.gguf"
        find_projector(main).path.unlink()
    # One that does not fit, one for sound, and files that are none, are passed over.
    write_projector(main.parent / "mmproj-F16.gguf", 96)
    write_projector(
        main.parent / "mmproj-F32.gguf", keys={"has_vision_encoder": False, "has_audio_encoder": True}
    )
    write_header(main.parent / "mmproj-BF16.gguf", width=64)
    (main.parent / "mmproj-Q8_0.gguf").write_bytes(b"GGUF")
    (main.parent / "mmproj.gguf").mkdir()
    assert found(main) is None
    write_projector(main.parent / "mmproj-model-f32.gguf", 64)
    write_projector(main.parent / "mmproj-gemma-3-4b-it-Q8_0.gguf", 64)
    assert found(main) == "mmproj-gemma-3-4b-it-Q8_0.gguf"  # with the main model's name


def test_the_projector_of_another_model_is_not_taken(main):
    folder = main.parent
    other = write_header(folder / "SmolVLM-Q8_0.gguf", width=64)
    write_header(folder / "gemma-3-4b-it-Q8_0.gguf", width=64)  # the same model
    write_projector(folder / "mmproj-SmolVLM-f16.gguf", 64)
    assert (found(main), found(other)) == (None, "mmproj-SmolVLM-f16.gguf")
    write_projector(folder / "mmproj-gemma-3-4b-it-f32.gguf", 64)
    assert (found(main), found(other)) == ("mmproj-gemma-3-4b-it-f32.gguf", "mmproj-SmolVLM-f16.gguf")
    for path in folder.glob("mmproj-*"):
        path.unlink()
    # Without a name, it could be of either one.
    nameless = write_projector(folder / "mmproj-F16.gguf", 64)
    assert found(main) is found(other) is None
    write_projector(nameless, 64, name="gemma 3 4B it")
    assert (found(main), found(other)) == ("mmproj-F16.gguf", None)
    write_projector(nameless, 64)
    write_header(other, width=96)
    assert (found(main), found(other)) == ("mmproj-F16.gguf", None)  # it fits one of them only
    write_header(folder / "mtp-gemma-3-4b-it-Q8_0.gguf", width=64)  # a head is no other model
    write_header(folder / "embed.gguf", "bert", width=64)
    assert found(main) == "mmproj-F16.gguf"


def test_a_projector_has_no_projector(main):
    path = write_projector(main.parent / "mmproj-F16.gguf", 64)
    write_projector(main.parent / "mmproj-F32.gguf", 64)
    assert find_projector(path) is None


def test_the_cache_of_the_hub(home):
    paths = add_to_hub_cache(
        home / "hub", "u/toy-GGUF", "toy-Q4_0.gguf", "sub/toy-Q8_0.gguf", "mtp-toy-Q8_0.gguf"
    )
    folder = paths[0].parent
    assert found(paths[0]) is None
    # A repository has one model, whatever its projector's name.
    write_projector(folder / "mmproj-Other-f16.gguf", 64)
    write_projector(folder / "elsewhere" / "mmproj-F16.gguf", 64)
    assert [found(path) for path in paths[:2]] == ["mmproj-Other-f16.gguf"] * 2
    write_projector(folder / "sub" / "mmproj-F32.gguf", 64)
    assert [found(path) for path in paths[:2]] == ["mmproj-Other-f16.gguf", "mmproj-F32.gguf"]
    new = write_header(folder.parent / ("d" * 40) / "toy-Q5_0.gguf")  # a later commit
    assert find_projector(new).path == folder / "mmproj-Other-f16.gguf"
    other = add_to_hub_cache(home / "hub", "u/other-GGUF", "other-Q4_0.gguf")[0]
    assert found(other) is None


def test_ollama(home):
    folder = home / ".ollama" / "models"
    see = "registry.ollama.ai/library/llava/7b"
    blob = add_to_ollama(folder, see, write_header(home / "m", width=64), write_projector(home / "p", 64))
    add_to_ollama(folder, "registry.ollama.ai/library/blind/1b", write_header(home / "m", width=64))
    link = ollama.find("llava:7b")
    assert find_projector(blob, link=False).path.name.startswith("sha256-")
    assert [path.name for path in link.parent.iterdir()] == [link.name]
    for main in (link, blob):
        projector = find_projector(main)
        assert projector.path == link.with_name("llava:7b.mmproj.gguf")
        assert projector.width == 64
    assert find_projector(ollama.find("blind:1b")) is None
    assert {model.name for model in catalog.stored_models()} == {"llava:7b", "blind:1b"}
    projector.path.resolve().unlink()
    assert find_projector(link) is None


def test_lm_studio(home):
    folder = home / ".lmstudio" / "models" / "u" / "toy-GGUF"
    main = write_header(folder / "toy-Q4_0.gguf", width=64)
    write_projector(folder / "mmproj-Other-f16.gguf", 64)
    write_projector(folder.parent / "other-GGUF" / "mmproj-F16.gguf", 64)
    assert found(main) == "mmproj-Other-f16.gguf"


def test_llama_cpp(home, monkeypatch):
    folder = home / "llama"
    monkeypatch.setenv("LLAMA_CACHE", str(folder))
    mains = [
        write_header(folder / f"u_{name}-GGUF_{name}-Q4_0.gguf", width=64) for name in ("toy", "toy2", "b")
    ]
    path = write_projector(folder / "u_toy-GGUF_mmproj-model-f16.gguf", 64)
    write_projector(folder / "u_other-GGUF_mmproj-model-f16.gguf", 64)
    assert list(map(found, mains)) == [path.name, None, None]


def test_a_projector_is_no_model(home):
    folder = add_to_hub_cache(home / "hub", "u/toy-GGUF", "toy-Q4_0.gguf")[0].parent
    write_projector(folder / "mmproj-F16.gguf", 64)
    assert [model.name for model in catalog.stored_models()] == ["u/toy-GGUF:Q4_0"]
