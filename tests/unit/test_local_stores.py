"""Models of ollama, LM Studio, llama.cpp and the Hub's cache, in a folder that stands for the home."""

import json
import os
import sys
from pathlib import Path

import pytest

from spec_local.errors import InvalidRequest
from spec_local.llama import gguf_header
from spec_local.models import catalog, ollama
from tests.stored_models import add_to_hub_cache, add_to_ollama, write_header

LLAMA = "registry.ollama.ai/library/llama3.2/3b"


@pytest.fixture(autouse=True)
def home(empty_home):
    return empty_home


@pytest.fixture
def models(home):
    """ollama's folder."""
    return home / ".ollama" / "models"


@pytest.fixture
def llama(home, models):
    return add_to_ollama(models, LLAMA, write_header(home / "m", name="Llama 3.2 3B Instruct", file_type=15))


def listed():
    return {model.name: model for model in catalog.stored_models()}


def check_each_name_finds_its_file():
    for name, model in listed().items():
        assert catalog.is_known(name)
        assert catalog.find(name).resolve() == model.path, name


def find(name):
    """The file of ollama that a name finds, without the link to it."""
    found = ollama.find(name)
    return found and found.resolve()


# ollama


def test_ollama_by_the_names_of_its_users(llama, models, home):
    latest = add_to_ollama(models, "registry.ollama.ai/library/phi4/latest", write_header(home / "m"))
    for name, path in {
        "llama3.2:3b": llama,
        "ollama:llama3.2:3b": llama,
        "phi4": latest,
        "phi4:latest": latest,
        "ollama:phi4": latest,
        "llama3.2": None,  # there is no latest
        "llama3.2:1b": None,
        "LLAMA3.2:3b:x": None,
    }.items():
        assert find(name) == path, name
        assert catalog.is_known(name) is (path is not None)
    assert set(listed()) == {"llama3.2:3b", "phi4:latest"}
    model = listed()["llama3.2:3b"]
    assert (model.program, model.path, model.size) == ("ollama", llama, llama.stat().st_size)
    assert gguf_header.describe(model.metadata) == "Llama 3.2 3B Instruct, Q4_K_M"
    check_each_name_finds_its_file()


def test_files_of_ollama_have_names(llama, models, home):
    """By a link, since the name of a blob says nothing."""
    link = ollama.find("llama3.2:3b")
    assert link == home / "cache" / "ollama" / "llama3.2:3b.gguf"
    assert ollama.find("ollama:llama3.2:3b") == link
    assert ollama.keeps(link)
    manifest = models / "manifests" / LLAMA
    new = add_to_ollama(models, "registry.ollama.ai/library/other/latest", write_header(home / "m"))
    manifest.write_bytes((models / "manifests/registry.ollama.ai/library/other/latest").read_bytes())
    assert ollama.find("llama3.2:3b") == link  # ollama pulled a new version
    assert link.resolve() == new
    assert [path.name for path in link.parent.iterdir()] == [link.name]
    assert ollama.find("other").name == "other:latest.gguf"
    link.unlink()
    link.mkdir()  # where no link can be made
    assert ollama.find("llama3.2:3b") == new


def test_names_with_a_namespace_do_not_clash_with_the_hub(models, home):
    own = add_to_ollama(models, "registry.ollama.ai/someone/tuned/q4", write_header(home / "m"))
    hub = add_to_ollama(models, "hf.co/org/Big-GGUF/Q4_K_M", write_header(home / "m"))
    assert ollama.find("someone/tuned:q4") is None
    assert find("ollama:someone/tuned:q4") == own
    assert find("hf.co/org/Big-GGUF:Q4_K_M") == hub
    assert set(listed()) == {"ollama:someone/tuned:q4", "hf.co/org/Big-GGUF:Q4_K_M"}
    check_each_name_finds_its_file()


def test_where_ollama_keeps_its_models(llama, models, home, monkeypatch):
    assert find("llama3.2:3b") == llama
    models.rename(home / "moved")
    assert ollama.find("llama3.2:3b") is None
    monkeypatch.setenv("OLLAMA_MODELS", "~/moved")
    assert find("llama3.2:3b") == home / "moved" / "blobs" / llama.name
    monkeypatch.setenv("OLLAMA_MODELS", "~nobody/moved")  # no such user
    assert ollama.find("llama3.2:3b") is None
    (home / "moved").rename(home / "service")
    assert set(listed()) == {"llama3.2:3b"}


def test_a_name_of_models_toml_comes_first(models, home, monkeypatch):
    add_to_ollama(models, "registry.ollama.ai/library/starter/latest", write_header(home / "m"))
    assert catalog.find("starter") is None  # that of models.toml is not downloaded
    assert set(listed()) == {"starter:latest"}


def layer(**fields):
    return json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model"} | fields]})


MANIFESTS = {
    "empty": "",
    "not JSON": "{",
    "a list": "[]",
    "null": "null",
    "no list of layers": '{"layers": 3}',
    "no layers": '{"layers": [3, null]}',
    "no digest": layer(),
    "no text as digest": layer(digest=3),
    "a digest that leaves the folder": layer(digest="sha256:../../x"),
    "an absent blob": layer(digest=f"sha256:{'1' * 64}"),
    "deep": "[" * 100_000,
    "large": "x" * (2 << 20),
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_damaged_manifest_is_left_out(llama, models, text):
    manifest = models / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    assert ollama.find("bad") is None
    assert set(listed()) == {"llama3.2:3b"}
    manifest.write_bytes(b"\xff" + text.encode())
    assert ollama.find("bad") is None


def test_pipes_loops_and_stray_files_are_left_out(llama, models, home):
    library = models / "manifests" / "registry.ollama.ai" / "library"
    (library / "pipe").mkdir()
    os.mkfifo(library / "pipe" / "latest")
    (library / "loop").symlink_to(library)
    (library / "self").symlink_to(library / "self")
    (library / ".DS_Store").touch()
    (library / "llama3.2" / "folder").mkdir()
    (library / "a b\n\x1b[31m").mkdir()
    (library / "a b\n\x1b[31m" / "latest").write_text((library / "llama3.2" / "3b").read_text())
    outside = ("../library/llama3.2:3b", "..:..")
    for name in ("pipe", "loop", "self", "llama3.2:folder", "loop:llama3.2", *outside):
        assert ollama.find(name) is None, name
    assert set(listed()) == {"llama3.2:3b"}
    llama.unlink()
    os.mkfifo(llama)
    assert ollama.find("llama3.2:3b") is None


def test_what_does_not_generate_text_is_not_listed(models, home):
    for name, header in {
        "nomic-embed-text": {"architecture": "nomic-bert"},
        "lora": {"type": "adapter"},
        "projector": {"architecture": "clip", "type": "mmproj"},
        "head": {"architecture": "eagle3"},
    }.items():
        add_to_ollama(models, f"registry.ollama.ai/library/{name}/latest", write_header(home / "m", **header))
    (home / "m").write_text("not a model")
    add_to_ollama(models, "registry.ollama.ai/library/text/latest", home / "m")
    assert set(listed()) == {"head:latest"}
    assert ollama.find("lora")  # but by its name it is found, and what reads it explains what it is


# Repositories: LM Studio, llama.cpp and the Hub's cache


def test_lm_studio(home):
    repo = home / ".lmstudio" / "models" / "org" / "Toy-GGUF"
    for name in (
        "Toy-Q4_K_M.gguf",
        "toy-f16.gguf",
        "toy-bf16.gguf",
        "Toy-Q8_0-00001-of-00002.gguf",
        "Toy-Q8_0-00002-of-00002.gguf",
        "Toy-Q6_K-00001-of-00002.gguf",  # the second part is missing
        "mmproj-Toy-Q4_K_M.gguf",
        "eagle3-Toy-Q4_K_M.gguf",
        "plain.gguf",
    ):
        write_header(repo / name)
    (repo / "Toy-Q5_K_M.gguf.part").touch()
    write_header(home / ".lmstudio" / "models" / "too" / "deep" / "in" / "x-Q4_0.gguf")
    assert {name: model.path.name for name, model in listed().items()} == {
        "org/Toy-GGUF:Q4_K_M": "Toy-Q4_K_M.gguf",
        "org/Toy-GGUF:f16": "toy-f16.gguf",
        "org/Toy-GGUF:bf16": "toy-bf16.gguf",
        "org/Toy-GGUF:Q8_0": "Toy-Q8_0-00001-of-00002.gguf",
        "org/Toy-GGUF:eagle3-Toy-Q4_K_M": "eagle3-Toy-Q4_K_M.gguf",
        "org/Toy-GGUF:plain": "plain.gguf",
    }
    split = listed()["org/Toy-GGUF:Q8_0"]
    assert split.size == sum((repo / f"Toy-Q8_0-0000{i}-of-00002.gguf").stat().st_size for i in (1, 2))
    assert catalog.program("org/Toy-GGUF:Q8_0") == "LM Studio"
    check_each_name_finds_its_file()
    with pytest.raises(InvalidRequest, match="matches several files"):
        catalog.find("org/Toy-GGUF:toy")


@pytest.mark.parametrize(
    ("pointer", "settings", "folder"),
    [
        ("", "", ".lmstudio/models"),
        ("", "", ".cache/lm-studio/models"),
        ("{home}/elsewhere\n", "", "elsewhere/models"),
        ("", '{"downloadsFolder": "{home}/disk"}', "disk"),
        ("", '{"downloadsFolder": "~/disk"}', "disk"),
        ("", '{"downloadsFolder": 3}', ".lmstudio/models"),
        ("", "[]", ".lmstudio/models"),
        ("\x00", "{", ".lmstudio/models"),
        ("~nobody/x", '{"downloadsFolder": "\\u0000"}', ".lmstudio/models"),
    ],
)
def test_where_lm_studio_keeps_its_models(home, pointer, settings, folder):
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio-home-pointer").write_text(pointer.replace("{home}", str(home)))
    (home / ".lmstudio" / "settings.json").write_text(settings.replace("{home}", str(home)))
    path = write_header(home / folder / "org" / "toy" / "toy-Q4_0.gguf")
    assert catalog.find("org/toy:Q4_0") == path
    assert set(listed()) == {"org/toy:Q4_0"}


def test_llama_cpp(home, monkeypatch):
    folder = home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "llama.cpp"
    path = write_header(folder / "ggml-org_gemma_3-1b-it-GGUF_gemma-3-1b-it-Q4_K_M.gguf")
    write_header(folder / "my-own.gguf")  # of no repository
    (folder / "ggml-org_gemma_3-1b-it-GGUF_gemma-3-1b-it-Q4_K_M.gguf.json").touch()
    assert {name: model.program for name, model in listed().items()} == {
        "ggml-org/gemma_3-1b-it-GGUF:Q4_K_M": "llama.cpp"
    }
    check_each_name_finds_its_file()
    monkeypatch.setenv("LLAMA_CACHE", str(home / "other"))
    assert listed() == {}
    folder.rename(home / "other")
    assert listed()["ggml-org/gemma_3-1b-it-GGUF:Q4_K_M"].path == home / "other" / path.name


def test_the_cache_of_the_hub(home):
    toy, small = add_to_hub_cache(home / "hub", "org/toy-GGUF", "toy-Q4_0.gguf", "deep/toy-Q8_0.gguf")
    add_to_hub_cache(home / "hub", "org/data", "readme.md")
    add_to_hub_cache(home / "hub", "gpt2", "gpt2-Q4_0.gguf")  # a repository without a user has no name here
    (home / "hub" / "models--broken--repo").touch()
    assert {name: model.path for name, model in listed().items()} == {
        "org/toy-GGUF:Q4_0": toy,
        "org/toy-GGUF:Q8_0": small,
    }
    assert catalog.program("org/toy-GGUF:Q4_0") is None  # `remove` may delete it
    check_each_name_finds_its_file()


def test_the_cache_of_the_hub_comes_first(home):
    (cached,) = add_to_hub_cache(home / "hub", "org/toy-GGUF", "toy-Q4_0.gguf")
    other = write_header(home / ".lmstudio" / "models" / "org" / "toy-GGUF" / "toy-Q4_0.gguf")
    assert catalog.find("org/toy-GGUF:Q4_0") == cached
    assert len(listed()) == 1
    cached.unlink()
    assert catalog.find("org/toy-GGUF:Q4_0") == other


def test_a_model_of_models_toml_is_found_in_other_programs(home):
    """And is listed by its own name only."""
    entry = catalog.entry("qwen3-4b")
    path = write_header(home / ".lmstudio" / "models" / entry.repo / entry.file)
    assert catalog.find("qwen3-4b") == path
    assert catalog.program("qwen3-4b") == "LM Studio"
    assert listed() == {}
    sized = catalog.entry("gemma3-270m")
    write_header(home / ".lmstudio" / "models" / sized.repo / sized.file)
    assert catalog.find("gemma3-270m") is None  # has another size than in models.toml


def test_models_of_other_programs_need_no_download_and_are_not_deleted(home, llama):
    path = write_header(home / ".lmstudio" / "models" / "org" / "toy-GGUF" / "toy-Q4_0.gguf")
    for name, file, program in (("llama3.2:3b", llama, "ollama"), ("org/toy-GGUF:Q4_0", path, "LM Studio")):
        assert catalog.pull(name, offline=True).resolve() == file
        for delete in (catalog.remove, catalog.size_on_disk):
            with pytest.raises(InvalidRequest, match=f"{name} belongs to {program}: delete it there"):
                delete(name)
        assert file.exists()


@pytest.mark.parametrize(("module", "function"), [(Path, "stat"), (os, "open")], ids=["stat", "open"])
def test_files_that_cannot_be_read(llama, home, monkeypatch, module, function):
    write_header(home / ".lmstudio" / "models" / "org" / "toy-GGUF" / "toy-Q4_0.gguf")
    add_to_hub_cache(home / "hub", "org/other-GGUF", "toy-Q4_0.gguf")
    assert len(listed()) == 3

    original = getattr(module, function)

    def refuse(given, *args, **kwargs):
        path = Path(os.fsdecode(given))
        if path.is_relative_to(home) and (path.suffix == ".gguf" or path.parent.name == "blobs"):
            raise PermissionError(13, "Permission denied")
        return original(given, *args, **kwargs)

    monkeypatch.setattr(module, function, refuse)
    assert listed() == {}


# GGUF headers


def test_a_header(home):
    path = write_header(home / "m.gguf", "qwen2", name="A\nB\t C", size_label="1.5B", file_type=7)
    metadata = gguf_header.read_metadata(path)
    assert metadata["general.size_label"] == "1.5B"
    assert gguf_header.describe(metadata) == "A B C, Q8_0"
    nameless = write_header(home / "n.gguf", "qwen2", size_label="1.5B", file_type=10**6)
    assert gguf_header.describe(gguf_header.read_metadata(nameless)) == "qwen2 1.5B"


def test_no_damaged_header_is_an_error(home):
    raw = write_header(home / "m.gguf", name="toy", type="model", file_type=7).read_bytes()
    path = home / "damaged.gguf"
    for place in range(len(raw)):
        for value in (9, 255):
            path.write_bytes(raw[:place] + bytes([value]) + raw[place + 1 :])
            metadata = gguf_header.read_metadata(path)
            gguf_header.describe(metadata)
            gguf_header.generates_text(metadata)
        path.write_bytes(raw[:place])
        gguf_header.read_metadata(path)
