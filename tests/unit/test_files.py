"""Files appear whole or not at all."""

import hashlib
import os
from pathlib import Path

import pytest

from spec_local.errors import InvalidRequest
from spec_local.files import expanded, read_text, replacing, sha256, write_atomically


def test_a_home_folder_is_what_a_person_means_by_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expanded("~/a b") == tmp_path / "a b"
    for plain in ("a/~", "/a", "", "a\0b"):
        assert expanded(plain) == Path(plain)
    unknown = "~nobody-of-this-name"
    with pytest.raises(InvalidRequest, match=rf"^{unknown}/x: no home folder is known for {unknown}: "):
        expanded(f"{unknown}/x")
    Path(unknown).touch()
    assert expanded(Path(unknown)) == Path(unknown)


def test_it_appears_with_its_folders(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_the_old_one_is_there_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as part:
        part.write_bytes(b"new")
        assert part.parent == path.parent  # or replacing would copy
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_it_is_on_the_disk_before_it_takes_the_place(tmp_path, monkeypatch):
    """Of a loss of power only the order of calls can be tested."""
    path, flushed = tmp_path / "file", []
    path.write_bytes(b"old")

    def fsync(descriptor):
        known = os.fstat(descriptor)
        flushed.append((known.st_ino, known.st_size, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(path) as part:
        part.write_bytes(b"newer")
        part.chmod(0o400)  # who copies a file that nobody may write to
    assert flushed == [(path.stat().st_ino, 5, b"old")]
    write_atomically(path, b"newest")  # for caches, which nobody waits for
    assert len(flushed) == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_block_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, error, old):
    path = tmp_path / "file"
    if old:
        path.write_bytes(old)

    def fail():
        with replacing(path) as part:
            part.write_bytes(b"ne")
            raise error

    with pytest.raises(error):
        fail()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"file": b"old"} if old else {})


def test_a_block_that_removes_its_part_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError), replacing(path) as part:
        part.unlink()
    assert path.read_bytes() == b"old"


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as two:
        assert one != two
        one.write_bytes(b"1")
        two.write_bytes(b"2")
    assert path.read_bytes() == b"1"  # the outer block ends last
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_is_removed(tmp_path):
    path = tmp_path / "file [1]"
    with replacing(path) as alive, replacing(path) as killed, replacing(tmp_path / "other") as another:
        for part in (killed, another):
            os.utime(part, (0, 0))
        write_atomically(path, b"new")
        assert not killed.exists()
        assert alive.exists()
        assert another.exists()
        killed.touch()


def test_a_text_of_a_person(tmp_path):
    path = tmp_path / "text"
    for raw, text in ((b"caf\xc3\xa9", "café"), (b"\xef\xbb\xbfa", "a"), (b"", "")):
        path.write_bytes(raw)
        assert read_text(path, 8) == text
    for raw, why in ((b"caf\xe9", r"not UTF-8 \(byte 3\)"), (b"a" * 9, "larger than 0 MiB")):
        path.write_bytes(raw)
        with pytest.raises(InvalidRequest, match=why):
            read_text(path, 8)
    for wrong in (tmp_path, tmp_path / "absent", Path("a\0b")):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            read_text(wrong, 8)


def test_sha256(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 9999)
    assert sha256(tmp_path / "file") == hashlib.sha256(bytes(range(256)) * 9999).hexdigest()
