"""Find what drafts for a main model: files with nothing but a header and a vocabulary, in an empty home."""

import os
from pathlib import Path

import gguf
import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.llama import gguf_header
from spec_local.llama.devices import OFFLOADED
from spec_local.models import catalog
from spec_local.models.head_versions import HeadVersions
from spec_local.opening import drafters
from spec_local.policies.cost_model import CostModel
from tests.named_models import write_catalog
from tests.stored_models import add_to_hub_cache

TOKENS = [f"token{i}" for i in range(400)]
MB = 1_000_000
ALL = 1 << 60  # bytes of memory


def write(path, size, architecture="qwen2", *, tokens=TOKENS, width=64, numbers=(), **general):
    """Write a header, and zeros up to a size; general: metadata such as basename="…"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(width)
    for key, value in dict(numbers).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in general.items():
        writer.add_string(f"general.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    os.truncate(path, size)
    return path


@pytest.fixture(autouse=True)
def home(empty_home):
    return empty_home


@pytest.fixture
def main(home):
    return write(home / "m" / "Qwen2.5-7B-Instruct-Q4_K_M.gguf", 160 * MB, basename="Qwen2.5")


def conditions(path):
    return Conditions(path, OFFLOADED, 2, 4096)


def found(main, spare=ALL):
    return list(drafters.find_drafters(conditions(main), spare))


def names(main, spare=ALL):
    return [each.path.name for each in found(main, spare)]


def test_a_small_model_with_the_same_vocabulary(main):
    assert found(main) == []
    small = write(main.parent / "small.gguf", 20 * MB)
    assert found(main) == [drafters.Drafter(small, "same vocabulary, 1/8 of the size")]
    padded = write(main.parent / "padded.gguf", 10 * MB, tokens=[*TOKENS, *(f"[PAD{i}]" for i in range(128))])
    assert names(main) == [padded.name, small.name]


@pytest.mark.parametrize(
    "other",
    [
        {"size": 56 * MB},
        {"tokens": [*TOKENS[:300], "another", *TOKENS[301:]]},
        {"tokens": [*TOKENS, *map(str, range(129))]},
        {"architecture": "llama"},
        {"type": "adapter"},
        {"numbers": {"pooling_type": 1}},
        {"name": "small-00002-of-00002.gguf"},
    ],
    ids=["large", "another token", "more tokens", "another family", "adapter", "embeddings", "a part"],
)
def test_what_is_not_found(main, other):
    options = {"name": "small.gguf", "size": 20 * MB} | other
    write(main.parent / options.pop("name"), **options)
    assert found(main) == []


def test_no_file_on_the_disk_raises_an_error(main):
    folder = main.parent
    (folder / "empty.gguf").touch()
    (folder / "folder.gguf").mkdir()
    (folder / "loop.gguf").symlink_to("loop.gguf")
    (folder / "lost.gguf").symlink_to("nowhere")
    (folder / "same.gguf").symlink_to(main)
    os.mkfifo(folder / "pipe.gguf")
    (folder / "text.gguf").write_text("hello")
    whole = write(folder / "small.gguf", 20 * MB).read_bytes()[:20_000]
    for n in range(0, 6_000, 1000):  # the vocabulary ends after 6,500 bytes
        (folder / f"cut{n}.gguf").write_bytes(whole[:n])
    assert names(main) == ["small.gguf"]


def test_every_cut_of_a_vocabulary_is_noticed(home):
    whole = write(home / "whole.gguf", 20_000, tokens=TOKENS[:9])
    tokens, content = gguf_header.read_tokens(whole), whole.read_bytes()
    assert len(tokens) == 9
    end = content.index(b"token8") + len("token8")
    for n in range(end):
        whole.write_bytes(content[:n])
        assert gguf_header.read_tokens(whole) is None
    whole.write_bytes(content[:end])
    assert gguf_header.read_tokens(whole).between(8, 9).endswith(b"token8")


def test_the_most_promising_model_is_first(main):
    folder = main.parent
    write(folder / "a.gguf", 9 * MB, basename="Other", finetune="Instruct")
    write(folder / "b.gguf", 9 * MB, basename="Qwen2.5")
    write(folder / "c.gguf", 30 * MB, basename="Qwen2.5", finetune="Instruct")
    write(folder / "d.gguf", 20 * MB, basename="Qwen2.5", finetune="Instruct")
    write(folder / "e.gguf", 5 * MB, basename="Qwen2.5", finetune="Instruct")
    write(folder / "f.gguf", 9 * MB, basename="Qwen2.5", finetune="Instruct")
    assert names(main) == [f"{name}.gguf" for name in "fedcba"]  # below 1/16 the largest, then the smallest


def test_a_mixture_of_experts_reads_only_some_of_its_experts(home):
    numbers = {"expert_count": 8, "expert_used_count": 2}
    main = write(home / "m" / "large.gguf", 160 * MB, "qwen3moe", numbers=numbers)
    write(main.parent / "small.gguf", 15 * MB, "qwen3")
    assert names(main) == []
    write(main.parent / "small.gguf", 10 * MB, "qwen3")
    assert found(main)[0].why == "same vocabulary, 1/16 of the size"


def test_heads_come_first_and_among_them_those_with_the_models_name(main):
    folder = main.parent
    write(folder / "small.gguf", 20 * MB)
    write(folder / "A.eagle3.gguf", 90 * MB, "eagle3", tokens=[])
    write(folder / "Qwen2.5-7B-Instruct-DFlash-F16.gguf", 20 * MB, "dflash", tokens=[])
    write(folder / "wide.eagle3.gguf", 20 * MB, "eagle3", width=128)
    assert names(main) == ["Qwen2.5-7B-Instruct-DFlash-F16.gguf", "A.eagle3.gguf", "small.gguf"]
    assert found(main)[0].why == "a head beside the main model"


def test_the_head_that_has_learned_comes_first(main, home):
    beside = write(main.parent / f"{main.stem}.eagle3.gguf", 20 * MB, "eagle3", tokens=[])
    versions = HeadVersions(main)
    for number in (1, 2):
        versions.add(write(home / "new.gguf", number * MB, "eagle3", tokens=[]))
    first, second = map(versions.path, versions.all())
    assert found(main)[0] == drafters.Drafter(second, "a head that has learned from your answers")
    assert names(main) == [second.name, first.name, beside.name]  # loading rolls back those that are damaged
    drafters.reject(main, second, "damaged")
    assert names(main) == [first.name, beside.name]
    versions.rollback()
    assert names(main) == [first.name, beside.name]
    versions.rollback()
    assert names(main) == [beside.name]


def test_layers_for_multi_token_prediction_in_a_file_of_their_own(home):
    main = write(home / "m" / "large.gguf", 100 * MB, "glm4moe")
    layers = {"nextn_predict_layers": 1}
    write(main.parent / "mtp-large.gguf", 9 * MB, "glm4moe", numbers=layers)
    write(main.parent / "large-q2.gguf", 50 * MB, "glm4moe", numbers=layers)  # the whole model
    assert names(main) == ["mtp-large.gguf"]


def test_the_same_repository_at_another_commit(home):
    snapshots = home / "hub" / "models--user--repo" / "snapshots"
    main = write(snapshots / "one" / "large.gguf", 100 * MB)
    write(snapshots / "two" / "eagle3-large.gguf", 20 * MB, "eagle3")
    assert names(main) == ["eagle3-large.gguf"]


def test_models_of_specdec_and_of_other_programs(main, home):
    write(catalog.folder() / "own.gguf", 9 * MB)
    write(home / ".lmstudio" / "models" / "user" / "repo" / "studio.gguf", 8 * MB)
    write(home / ".cache" / "llama.cpp" / "user_repo-GGUF_cached.gguf", 7 * MB)
    write(home / "elsewhere.gguf", 9 * MB)
    assert names(main) == ["own.gguf", "studio.gguf", "user_repo-GGUF_cached.gguf"]
    write(home / ".lmstudio" / "models" / "user" / "repo" / "eagle3.gguf", 8 * MB, "eagle3")
    assert len(found(main)) == 3  # a head is for one model: only those beside it


@pytest.fixture
def pair(main, home):
    """A pair of models.toml with this main model; a function that returns the path of its draft, here now."""
    models = {
        name: {"repo": f"user/{name}", "file": file, "rounded_size": 3_000_000}
        for name, file in (("big", main.name), ("little", "little.gguf"))
    }
    write_catalog(home / "config", models, {"duo": ("big", "little")})
    return lambda: add_to_hub_cache(home / "hub", "user/little", "little.gguf")[0]


def test_the_draft_of_a_pair_may_be_large_and_have_another_vocabulary(main, pair):
    write(main.parent / "small.gguf", 20 * MB)
    assert names(main) == ["small.gguf"]
    write(pair(), 80 * MB, tokens=["other"])
    assert names(main) == ["little.gguf", "small.gguf"]
    assert found(main)[0].why == "the draft of the pair duo"
    assert found(main)[0].is_of_pair


def test_the_draft_of_a_pair_is_offered_unless_it_is_here(main, pair, home):
    pull = "run specdec models pull little (3.0 MB) to draft with one"
    assert drafters.offer(main, ALL) == f"no draft model for {main.name} is on this machine: {pull}"
    assert drafters.offer(main, 2 * MB) is None
    assert drafters.offer(home / "other.gguf", ALL) is None
    pair()
    assert drafters.offer(main, ALL) is None


def test_a_damaged_models_toml_does_not_hide_other_files(main, home):
    (home / "config").mkdir()
    (home / "config" / "models.toml").write_text("damaged")
    write(main.parent / "small.gguf", 20 * MB)
    write(main.parent / "eagle3.gguf", 20 * MB, "eagle3")
    assert names(main) == ["eagle3.gguf", "small.gguf"]
    assert drafters.offer(main, ALL) is None


def test_the_weights_have_to_fit_into_the_memory(main):
    write(main.parent / "small.gguf", 20 * MB)
    assert names(main, 20 * MB) == ["small.gguf"]
    assert names(main, 20 * MB - 1) == names(main, -1) == []


def test_measured_costs_decide(main):
    """At 70 % acceptance, a draft that takes half of the main model's time gains 1.13; 0.6 of it 1.06.

    Costs that were measured while other programs were busy do not; sizes decide then.
    """
    large = write(main.parent / "large.gguf", 70 * MB)
    small = write(main.parent / "small.gguf", 9 * MB)

    def measured(path, seconds, others=0.0):
        cost_store.save(conditions(path), CostModel({1: seconds, 16: seconds}), others=others)

    measured(main, 1.0)
    assert names(main) == ["small.gguf", "large.gguf"]  # by its size, as calls of several tokens are cheap
    measured(large, 0.6)
    assert names(main) == ["small.gguf"]
    measured(large, 0.5)
    measured(small, 0.6)
    assert names(main) == ["large.gguf"]
    measured(main, 1.0, others=64.0)
    measured(large, 0.5, others=64.0)
    measured(small, 0.6, others=64.0)
    assert names(main) == ["small.gguf"]


def test_vocabularies_are_compared_once(main):
    """Files that seem to be the same as before are not read again."""
    small = write(main.parent / "small.gguf", 20 * MB)
    other = write(main.parent / "other.gguf", 20 * MB, tokens=TOKENS[::-1])
    assert names(main) == ["small.gguf"]
    for path, tokens in ((small, TOKENS[::-1]), (other, TOKENS)):
        before = path.stat()
        write(path, 20 * MB, tokens=tokens)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert names(main) == ["small.gguf"]
    os.utime(other)
    assert sorted(names(main)) == ["other.gguf", "small.gguf"]


def test_many_vocabularies_are_compared_in_several_starts(main):
    for i in range(12):
        write(main.parent / f"other{i}.gguf", 9 * MB, tokens=TOKENS[::-1])
    write(main.parent / "small.gguf", 8 * MB)
    assert names(main) == []
    assert names(main) == ["small.gguf"]


def test_a_rejected_file_is_not_found_until_it_changes(main):
    small, head = main.parent / "small.gguf", main.parent / "eagle3.gguf"
    write(small, 20 * MB)
    write(head, 20 * MB, "eagle3")
    for path in (small, head):
        drafters.reject(main, path, "it does not work")
    assert found(main) == []
    write(head, 21 * MB, "eagle3")
    assert names(main) == ["eagle3.gguf"]


def test_without_a_cache_folder(main, home):
    Path(home / "cache").write_text("not a folder")
    small = write(main.parent / "small.gguf", 20 * MB)
    assert names(main) == ["small.gguf"]
    drafters.reject(main, small, "it does not work")
    assert names(main) == ["small.gguf"]
