"""Versions of a head that learns: which one is current, rollback, and kills at any time."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from spec_local.errors import ModelFileError, SpecLocalError
from spec_local.models.head_versions import HeadVersions, roll_back


@pytest.fixture(autouse=True)
def home(empty_home):
    return empty_home


@pytest.fixture
def main(home):
    path = home / "main.gguf"
    path.write_bytes(b"main" * 1000)
    return path


@pytest.fixture
def versions(main):
    return HeadVersions(main)


def head(home, content):
    path = home / "new.gguf"
    path.write_bytes(content)
    return path


def added(versions, content, **more):
    return versions.add(head(versions.folder.parents[2], content), **more)


def numbers(versions):
    return [version.number for version in versions.all()]


def files(versions):
    return sorted(path.name for path in versions.folder.glob("*.gguf"))


def test_versions_of_a_model_by_its_content(home, main, versions):
    assert versions.all() == []
    assert versions.current() is versions.rollback() is None
    assert not versions.folder.exists()
    new = head(home, b"one")
    first = versions.add(
        new, n_answers=60, last_answer=70, before={"user": 0.4}, after={"user": 0.5, "built_in": 0.45}
    )
    assert not new.exists()
    assert (first.number, first.n_answers, first.last_answer, first.size) == (1, 60, 70, 3)
    assert (first.before, first.after) == ({"user": 0.4}, {"user": 0.5, "built_in": 0.45})
    assert versions.path(first).read_bytes() == b"one"
    assert stat.S_IMODE(versions.folder.stat().st_mode) == 0o700
    elsewhere = main.rename(home / "renamed.gguf")
    assert HeadVersions(elsewhere).all() == [first]
    (home / "other.gguf").write_bytes(b"other")
    assert HeadVersions(home / "other.gguf").all() == []
    with pytest.raises(ModelFileError, match=r"none\.gguf cannot be read \(No such file"):
        HeadVersions(home / "none.gguf")


def test_the_newest_five_files_are_kept_and_all_entries(versions):
    for i in range(7):
        added(versions, b"head %d" % i)
    assert numbers(versions) == [1, 2, 3, 4, 5, 6, 7]
    assert files(versions) == [f"head-{i}.gguf" for i in range(3, 8)]
    for previous in (6, 5, 4, 3):
        assert versions.rollback().number == previous
    assert versions.rollback() is None  # the files of the first ones are gone
    assert added(versions, b"new").number == versions.current().number == 8
    assert versions.rollback() is None  # those that were rolled back stay so


def test_a_file_that_was_changed_is_not_current(versions):
    first, second = (added(versions, content) for content in (b"one", b"two"))
    versions.path(second).write_bytes(b"twenty")
    assert versions.current() == first
    versions.path(second).unlink()
    assert versions.current() == first
    versions.path(first).write_bytes(b"One")  # as long as before
    assert HeadVersions.current(versions) is None


def test_the_digest_is_checked_once(versions):
    first = added(versions, b"once")
    assert versions.current() == first
    path = versions.path(first)
    before = path.stat()
    path.write_bytes(b"Once")  # not to be seen from its size and its time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert versions.current() == first


def test_a_line_of_versions_belongs_to_the_head_with_which_it_began(home, main, versions):
    given, other = home / "given.gguf", home / "other.gguf"
    given.write_bytes(b"given")
    other.write_bytes(b"other head")
    first = added(versions, b"one", origin=given)
    second = added(versions, b"two", origin=versions.path(first))
    assert (first.origin, second.origin) == (str(given), str(versions.path(first)))
    assert [*versions.continuing(given)] == [second, first]
    assert [*versions.continuing(given.rename(home / "moved.gguf"))] == [second, first]
    assert [*versions.continuing(other)] == [*versions.continuing(None)] == []
    third = added(versions, b"three")
    assert [*versions.continuing(None)] == [third]
    assert [*versions.continuing(home / "moved.gguf")] == []
    assert [*versions.continuing(home / "none.gguf")] == []


def test_a_version_that_cannot_be_loaded(main, versions):
    first, second = added(versions, b"one"), added(versions, b"two")
    error, lines = ModelFileError("it is garbage"), []
    assert not roll_back(main, versions.path(first), error, lines.append)  # it is not the current one
    assert not roll_back(main.with_name("none.gguf"), versions.path(second), error, lines.append)
    assert versions.current() == second
    assert lines == []
    assert roll_back(main, versions.path(second), error, lines.append)
    assert versions.current() == first
    assert len(lines) == 1
    assert "garbage" in lines[0]


@pytest.mark.parametrize("content", [b"", b"{", b'{"versions": [{"number": 1}]}', b"\xff" * 100])
def test_a_damaged_list_counts_as_empty_and_heads_are_kept(main, versions, content):
    added(versions, b"one")
    list_ = versions.folder / "versions.json"
    list_.write_bytes(content)
    lines = []
    fresh = HeadVersions(main, lines.append)
    assert fresh.all() == []
    assert fresh.current() is None
    assert lines == [f"{list_} is damaged and is ignored; the heads beside it are kept"]
    assert added(fresh, b"two").number == 2
    assert files(fresh) == ["head-1.gguf", "head-2.gguf"]
    assert list_.with_suffix(".damaged").read_bytes() == content
    assert numbers(fresh) == [2]


def test_a_name_outside_the_folder_is_refused(versions):
    added(versions, b"one")
    list_ = versions.folder / "versions.json"
    found = json.loads(list_.read_text())
    found["versions"][0]["file"] = "../head-1.gguf"
    list_.write_text(json.dumps(found))
    assert versions.all() == []


def test_rounds_without_a_version(main, versions):
    assert versions.last_round == 0
    versions.end_round(20)
    versions.end_round(10)
    assert HeadVersions(main).last_round == 20
    added(versions, b"one", last_answer=35)
    assert versions.last_round == 35
    assert HeadVersions(main).all() == versions.all() != []


def test_another_process_that_holds_the_lock(main, versions):
    added(versions, b"one")
    versions = HeadVersions(main, lock_timeout=0.05)
    with (
        FileLock(versions.folder / "lock"),
        pytest.raises(SpecLocalError, match=r"another process has been changing .*: try again"),
    ):
        versions.end_round(5)
    assert versions.current().number == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(5))
def test_a_kill_between_any_two_steps(home, versions, monkeypatch, step):
    """The versions are those before or after, and the same call completes what was interrupted."""
    for i in range(5):
        added(versions, b"head %d" % i)
    new, n_steps = head(home, b"new head"), 0

    def killed_before(function):
        def wrapped(*arguments, **options):
            nonlocal n_steps
            n_steps += 1
            if n_steps == step + 1:
                raise Killed
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", killed_before(shutil.copyfile))
        patch.setattr(Path, "replace", killed_before(Path.replace))
        patch.setattr(Path, "unlink", killed_before(Path.unlink))
        with pytest.raises(Killed):
            versions.add(new)
    assert new.exists()
    assert versions.current().number in (5, 6)
    assert versions.path(versions.current()).read_bytes() in (b"head 4", b"new head")
    assert versions.add(new).number == versions.current().number == 6
    assert not new.exists()
    assert numbers(versions) == [1, 2, 3, 4, 5, 6]
    assert {"head-6.gguf", "head-5.gguf"} <= set(files(versions))


def test_two_processes_add_at_the_same_time(home, main, versions):
    script = (
        "import sys, platformdirs\n"
        "from pathlib import Path\n"
        "platformdirs.user_data_dir = lambda name: sys.argv[1]\n"
        "from spec_local.models.head_versions import HeadVersions\n"
        "for i in range(4):\n"
        "    new = Path(sys.argv[3] + str(i)); new.write_bytes(new.name.encode())\n"
        "    HeadVersions(Path(sys.argv[2])).add(new)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(home / "data"), str(main), str(home / name)])
        for name in ("a", "b")
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert numbers(versions) == list(range(1, 9))
    assert len(files(versions)) == 5
