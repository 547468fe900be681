"""The key of a model's content."""

import pytest

from spec_local.llama.identity import content_key


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(range(256)) * 100_000)
    return path


def test_it_depends_on_the_content_only(model, tmp_path):
    copy = tmp_path / "b.gguf"
    copy.write_bytes(model.read_bytes())
    assert content_key(copy) == content_key(model)
    assert len(content_key(model)) == 16


@pytest.mark.parametrize("at", [0, 12_800_000, -1])
def test_it_changes_with_the_content(model, at):
    before, content = content_key(model), bytearray(model.read_bytes())
    start = min(at, len(content) - 40_000) if at > 0 else at
    for i in range(start, start + (500_000 if at > 0 else 1)):
        content[i] ^= 1
    model.write_bytes(content)
    assert content_key(model) != before


def test_it_changes_with_the_size(model):
    before = content_key(model)
    model.write_bytes(model.read_bytes() + b"\0")
    assert content_key(model) != before


def test_all_parts_of_a_split_model_count(tmp_path):
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(b"a")
    second.write_bytes(b"b")
    before = content_key(first)
    second.write_bytes(b"c")
    assert content_key(first) != before


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        content_key(tmp_path / "none.gguf")
