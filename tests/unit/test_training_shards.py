"""Shards on disk: documents, their states, and damage."""

import errno
from dataclasses import fields

import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.errors import InvalidRequest
from spec_local.training import shards
from spec_local.training.shards import Document, Shard
from tests.training_data import chain, document


def same(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Document)
    )


def test_documents_are_read_as_they_were_written(tmp_path):
    first = [document([1, 2, 3, 9], 1, category="é"), document([4, 5], 1, held_out=True, temperature=0.5)]
    second = list(chain(3, 1))
    shards.write(tmp_path, 0, Shard(first, 7))
    shards.write(tmp_path, 1, Shard(second, 12))
    assert shards.next_number(tmp_path) == 2
    read = list(shards.read(tmp_path))
    assert [shard.next_prompt for shard in read] == [7, 12]
    for written, found in zip((first, second), read, strict=True):
        assert all(same(a, b) for a, b in zip(written, found.documents, strict=True))
        for each in found.documents:
            assert (each.states.dtype, each.states.shape[0]) == (np.uint16, len(each.tokens) - 1)


def test_states_without_an_archive_are_ignored_and_overwritten(tmp_path):
    """A run that is killed between the two files leaves them."""
    (tmp_path / "00000.states").write_bytes(b"odd")
    assert list(shards.read(tmp_path)) == []
    assert shards.next_number(tmp_path) == 0
    (written,) = chain(1, 1)
    shards.write(tmp_path, 0, Shard([written], 1))
    assert same(next(iter(shards.read(tmp_path))).documents[0], written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.npz", "00000.states"]


def test_states_are_written_before_their_archive(tmp_path, monkeypatch):
    def fails(*_, **__):
        assert [path.name for path in tmp_path.glob("*.states")] == ["00000.states"]
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(OSError, match="no space"):
        shards.write(tmp_path, 0, Shard(list(chain(1, 1)), 1))
    assert list(shards.read(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("00000.states", None, "its states are missing"),
        ("00000.states", b"", "empty file"),
        ("00000.states", -96, "its states are incomplete"),
        ("00000.states", -1, "."),
        ("00000.npz", -100, "."),
        ("00000.npz", b"", "."),
        ("00000.npz", b"nonsense", "."),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, name, damage, why):
    shards.write(tmp_path, 0, Shard(list(chain(4, 1)), 1))
    path = tmp_path / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else path.read_bytes()[:damage])
    with pytest.raises(InvalidRequest, match=rf"00000\.npz is damaged \(.*{why}.*\): delete it, and"):
        list(shards.read(tmp_path))


def test_bfloat16_rounds_to_the_nearest_value_and_to_even():
    values = np.array(
        [0, 1, -1, 1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1e38, 7e4], np.float32
    )
    expected = [0, 1, -1, 1 + 2**-7, 1, 1 + 2**-6, 1 + 2**-7, 1e38, 7e4]
    found = bfloat16.decode(bfloat16.encode(values))
    assert found[:7].tolist() == expected[:7]
    np.testing.assert_allclose(found, expected, rtol=2**-8)
    exact = np.random.default_rng(0).integers(0, 0x7F80, 1000).astype(np.uint16)
    assert np.array_equal(bfloat16.encode(bfloat16.decode(exact)), exact)
    assert bfloat16.encode(values.reshape(3, 3)).shape == (3, 3)
