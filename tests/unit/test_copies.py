"""The list of what was made from kept answers, and clearing all of it."""

import os
import shutil
from pathlib import Path

import pytest

from spec_local.datastore import copies, datastore
from spec_local.datastore.answer_store import AnswerStore
from tests.unit.test_answer_store import Killed, add, kill_at

SECRET = b"\x01\x02\x03\x04" * 8


@pytest.fixture
def store(tmp_path):
    store = AnswerStore(tmp_path / "texts" / "a vocabulary" / "key.answers")
    for n in range(3):
        add(store, n)
    return store


def folder_of(tmp_path, name="head.gguf"):
    return tmp_path / f"{name}.training" / "own"


def copied(store, own):
    """A folder with copies, as a training makes it."""
    assert len(store.answers_to_copy(own)) == 3
    (own / "further").mkdir(exist_ok=True)
    (own / "further" / "00000.npz").write_bytes(SECRET)
    (own / "00000.states").write_bytes(SECRET)
    (own.parent / "checkpoint.pt").touch()
    return own


def test_a_folder_for_copies_is_only_the_owners_and_listed_before_it_exists(store, tmp_path, monkeypatch):
    own = folder_of(tmp_path)
    own.parent.mkdir()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("the folder") if own.exists() else None)
    store.answers_to_copy(own)
    assert (store.path.parent / copies.LIST).stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    store.answers_to_copy(own)
    assert own.stat().st_mode & 0o777 == 0o700
    assert copies.delete_all(store.path.parent).missing == []


@pytest.mark.parametrize("name", ["head.gguf", "two\nlines.gguf", os.fsdecode(b"\xff\xfe.gguf"), " "])
def test_clearing_deletes_copies_wherever_they_are(store, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    relative = folder_of(Path(), name)
    copied(store, relative)
    own = copied(store, folder_of(tmp_path / "elsewhere", name))
    made = datastore.clear(store.path.parent)
    assert made.deleted == [relative.absolute(), own]
    assert made.missing == made.failed == made.heads == []
    assert list(own.parent.iterdir()) == []
    assert not list(tmp_path.rglob("own*"))
    assert not store.path.parent.exists()


def test_the_list_is_deleted_after_what_it_lists_and_the_lock_last(store, tmp_path, monkeypatch):
    copied(store, folder_of(tmp_path))
    (store.path.parent / "zzz").touch()
    names, unlink = [], Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda path, **options: names.append(path.name) or unlink(path, **options)
    )
    datastore.clear(store.path.parent)
    assert names == ["checkpoint.pt", "key.answers", "zzz", copies.LIST, "lock"]


def test_a_training_that_has_ended_leaves_its_head_in_the_list(store, tmp_path):
    own, head = copied(store, folder_of(tmp_path)), tmp_path / "head.gguf"
    for _ in range(2):
        store.end_copy(own, head)
    assert not own.exists()
    head.touch()
    made = datastore.clear(store.path.parent)
    assert (made.heads, made.deleted, made.missing) == ([head], [], [])


def test_heads_that_are_gone_and_empty_folders_are_not_mentioned(store, tmp_path):
    store.answers_to_copy(folder_of(tmp_path))
    store.end_copy(folder_of(tmp_path, "other"), tmp_path / "other.gguf")
    assert datastore.clear(store.path.parent) == copies.Made()
    assert not folder_of(tmp_path).exists()


def test_a_folder_that_was_moved_is_named(store, tmp_path):
    own = copied(store, folder_of(tmp_path))
    own.parent.rename(tmp_path / "moved")
    assert datastore.clear(store.path.parent).missing == [own]


def test_a_folder_that_cannot_be_deleted_stays_in_the_list(store, tmp_path, monkeypatch):
    one, two = copied(store, folder_of(tmp_path, "one")), copied(store, folder_of(tmp_path, "two"))
    rmtree = shutil.rmtree

    def fails(path, *arguments, **options):
        if path.parent == one.parent:
            raise PermissionError
        rmtree(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        made = datastore.clear(store.path.parent)
    assert (made.failed, made.deleted) == ([one], [two])
    assert store.answers() == []
    assert datastore.clear(store.path.parent).deleted == [one]
    assert not list(tmp_path.rglob("own*"))


@pytest.mark.parametrize(
    "path", [b"/", b"own", b"/own", b"HOME", b"HOME/own", b"HOME/x.training", b"\xff\0\0/..", b""]
)
def test_a_damaged_list_deletes_nothing_else(store, tmp_path, path):
    home = tmp_path / "home"
    (home / "own").mkdir(parents=True)
    (home / "x.training").mkdir()
    own = copied(store, folder_of(tmp_path))
    path = path.replace(b"HOME", os.fsencode(home))
    (store.path.parent / copies.LIST).write_bytes(path + b"\0" + os.fsencode(own) + b"\0" + path)
    made = datastore.clear(store.path.parent)
    assert (made.deleted, made.failed) == ([own], [])
    assert sorted(home.iterdir()) == [home / "own", home / "x.training"]


def test_something_else_in_place_of_the_list(store, tmp_path):
    os.mkfifo(store.path.parent / copies.LIST)
    assert datastore.clear(store.path.parent) == copies.Made()
    assert not store.path.parent.exists()


def test_a_link_is_not_followed(store, tmp_path):
    own, other = copied(store, folder_of(tmp_path)), tmp_path / "other"
    own.rename(other)
    own.symlink_to(other)
    assert datastore.clear(store.path.parent).failed == [own]
    assert (other / "00000.states").exists()


def test_after_a_kill_at_any_moment_of_clearing_the_next_call_deletes_the_rest(store, tmp_path, monkeypatch):
    own = folder_of(tmp_path)
    for n in range(100):
        for i in range(3):
            add(store, i)
        copied(store, own)
        store.path.with_name(f"{store.path.name}.damaged-12345678").write_bytes(SECRET)
        with monkeypatch.context() as patch:
            kill_at(patch, n)
            try:
                done = bool(datastore.clear(store.path.parent))
            except Killed:
                done = False
        if not done:
            datastore.clear(store.path.parent)
        left = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert left == []
        if done:
            break
    assert 8 < n < 99


def test_a_store_that_is_damaged_or_unreadable_can_be_cleared(store):
    store.path.write_bytes(b"\0" + store.path.read_bytes()[1:])
    assert len(store.answers()) == 3
    add(store, 3)
    [aside] = datastore.set_aside(store.path.parent)
    store.path.unlink()
    os.mkfifo(store.path)
    assert store.answers() == []
    datastore.clear(store.path.parent)
    assert not aside.parent.exists()
