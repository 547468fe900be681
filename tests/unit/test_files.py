"""Atomic writes, and files that a user names."""

import hashlib
import os
from pathlib import Path

import pytest

from spec_local.errors import InvalidRequest
from spec_local.system.files import (
    NotRegular,
    expanded,
    opened,
    read_bytes,
    read_text,
    reading,
    replacing,
    saving,
    sha256,
    write_atomically,
)


def test_expanded_replaces_home_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expanded("~/a b") == tmp_path / "a b"
    for plain in ("a/~", "/a", "", "a\0b"):
        assert expanded(plain) == Path(plain)
    unknown = "~nobody-of-this-name"
    with pytest.raises(InvalidRequest, match=rf"^{unknown}/x: no home directory is known for {unknown}: "):
        expanded(f"{unknown}/x")
    Path(unknown).touch()
    assert expanded(Path(unknown)) == Path(unknown)


def test_parent_directories_are_created(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_the_old_file_stays_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as part:
        part.write_bytes(b"new")
        assert part.parent == path.parent  # the same file system: no copy
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_the_file_is_flushed_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """A power loss cannot be tested, but the order of calls can."""
    path, flushed = tmp_path / "file", []
    path.write_bytes(b"old")

    def fsync(descriptor):
        known = os.fstat(descriptor)
        flushed.append((known.st_ino, known.st_size, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(path) as part:
        part.write_bytes(b"newer")
        part.chmod(0o400)  # as a copy of a read-only file
    assert flushed == [(path.stat().st_ino, 5, b"old")]
    write_atomically(path, b"newest")  # for caches: no flush
    assert len(flushed) == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failing_block_leaves_only_the_old_file(tmp_path, error, old):
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


def test_a_block_that_deletes_the_temporary_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError), replacing(path) as part:
        part.unlink()
    assert path.read_bytes() == b"old"


def test_concurrent_writers_use_separate_files(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as two:
        assert one != two
        one.write_bytes(b"1")
        two.write_bytes(b"2")
    assert path.read_bytes() == b"1"  # the outer block ends last
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_left_by_a_killed_writer_is_deleted(tmp_path):
    path = tmp_path / "file [1]"
    with replacing(path) as alive, replacing(path) as killed, replacing(tmp_path / "other") as another:
        for part in (killed, another):
            os.utime(part, (0, 0))
        write_atomically(path, b"new")
        assert not killed.exists()
        assert alive.exists()
        assert another.exists()
        killed.touch()


def test_read_text_and_its_errors(tmp_path):
    path = tmp_path / "text"
    for raw, text in ((b"caf\xc3\xa9", "café"), (b"\xef\xbb\xbfa", "a"), (b"", "")):
        path.write_bytes(raw)
        assert read_text(path, 8) == text
    for raw, why in ((b"caf\xe9", r"not UTF-8 \(byte 3\)"), (b"a" * 9, "larger than 0 MiB")):
        path.write_bytes(raw)
        with pytest.raises(InvalidRequest, match=why):
            read_text(path, 8)
    for wrong in (tmp_path, tmp_path / "absent", Path("a\0b")):
        with pytest.raises(InvalidRequest, match=r"cannot be (read|a file name)"):
            read_text(wrong, 8)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_opened(tmp_path, make):
    make(tmp_path / "file")
    for read in (opened, sha256, lambda path: read_bytes(path, 8)):
        with pytest.raises(NotRegular, match="not a regular file"):
            read(tmp_path / "file")
    with (
        pytest.raises(InvalidRequest, match="not a regular file: give another path"),
        reading(tmp_path / "file"),
    ):
        pass


def test_as_many_bytes_are_read_as_are_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_bytes(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(OSError, match="File too large"):
        read_bytes(tmp_path / "file", 7)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent", 7)


def test_sha256(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 9999)
    assert sha256(tmp_path / "file") == hashlib.sha256(bytes(range(256)) * 9999).hexdigest()


def test_an_error_without_a_number(tmp_path):
    """NumPy raises such a one if the disk is full."""
    why = r"a cannot be written \(9 requested and 5 written\): give another path"
    with pytest.raises(InvalidRequest, match=why), saving(tmp_path / "a"):
        raise OSError("9 requested and 5 written")
