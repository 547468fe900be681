"""The datastore: its content, access from several processes, and damage to its files."""

import errno
import os
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from spec_local.datastore import file_format
from spec_local.datastore.datastore import Datastore, clear
from spec_local.datastore.file_format import StoredText
from spec_local.errors import SpecLocalError
from tests.failing_calls import full_disk

VOCABULARY = 1000
FIRST, SECOND = list(range(100, 140)), list(range(200, 260))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "texts" / "a vocabulary"


def opened(folder, log=None, **kwargs):
    return Datastore(folder, VOCABULARY, log=([] if log is None else log).append, **kwargs)


def finds(datastore, text):
    """Return whether a search for the beginning of a text finds its end."""
    _, rows = datastore.find(text[:8], len(text) - 8)
    return any(row == text[8:] for row in rows.tolist())


def texts_of(datastore):
    """The tokens of all texts, the oldest first."""
    return [text.tokens.tolist() for text in datastore._texts(())]


def kept(folder):
    """The texts of a datastore that logs no fault."""
    log = []
    datastore = opened(folder, log)
    assert log == []
    return set(map(tuple, texts_of(datastore)))


def replace_files(folder, **contents):
    """Replace all files of a datastore by these."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_an_empty_datastore_finds_nothing_and_creates_no_folder(folder):
    datastore = opened(folder)
    matches, rows = datastore.find([1, 2, 3, 4], 5)
    assert (len(matches), rows.shape) == (0, (0, 5))
    assert not folder.exists()
    assert datastore.contents().n_tokens == 0


def test_an_answer_is_found_at_once_and_after_reopening(folder):
    datastore = opened(folder)
    datastore.add_answer(FIRST[8:], FIRST[:8])
    assert finds(datastore, FIRST)
    assert finds(opened(folder), FIRST)
    assert not finds(datastore, SECOND)
    assert kept(folder) == {tuple(FIRST)}


def test_a_very_short_answer_is_not_added(folder):
    datastore = opened(folder)
    datastore.add_answer([1, 2, 3], [5] * 8)
    assert datastore.contents().n_texts == 0


def test_a_repeated_answer_is_kept_once(folder):
    datastore = opened(folder)
    for merged in (False, True):
        for _ in range(2):
            datastore.add_answer(FIRST)
            assert datastore.contents().n_texts == 1
            assert (folder / "journal").exists() != merged
        datastore.add([])


def test_a_merge_keeps_everything(folder):
    datastore = opened(folder)
    datastore.add_answer(FIRST)
    datastore.add([StoredText.of(SECOND)])
    assert not (folder / "journal").exists()
    datastore.add_answer(list(range(300, 350)))
    assert kept(folder) == {tuple(FIRST), tuple(SECOND), tuple(range(300, 350))}
    for each in (datastore, opened(folder)):
        assert finds(each, FIRST)
        assert finds(each, SECOND)
        assert each.contents().n_tokens == 150


def test_a_newer_version_of_a_file_replaces_the_older(folder):
    datastore = opened(folder)
    datastore.add([StoredText.of(FIRST, "a.py"), StoredText.of(SECOND, "b.py")])
    datastore.add([StoredText.of(SECOND[:30], "a.py")])
    assert kept(folder) == {tuple(SECOND), tuple(SECOND[:30])}


def test_the_oldest_texts_are_dropped_first(folder):
    datastore = opened(folder, max_tokens=100)
    datastore.add([StoredText.of(FIRST), StoredText.of(SECOND[:40])])
    datastore.add([StoredText.of(range(300, 330))])
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(300, 330))}
    datastore.add([StoredText.of(SECOND[:40])])  # now the newest
    datastore.add([StoredText.of(range(400, 430))])
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(400, 430))}
    datastore.add_answer(range(500))  # more than the capacity
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(400, 430))}


def test_a_long_journal_is_merged(folder):
    datastore, texts = opened(folder, max_journal=200), [[*range(n, n + 40)] for n in range(0, 900, 50)]
    for text in texts:
        datastore.add_answer(text)
        assert not (folder / "journal").exists() or (folder / "journal").stat().st_size < 2 * 4 * 200
    assert kept(folder) == set(map(tuple, texts))


def test_the_longest_matches_of_both_files_come_first(folder):
    datastore = opened(folder)
    datastore.add([StoredText.of([*range(10, 20), 7, 7, 7])])
    datastore.add_answer([*range(14, 20), 8, 8, 8])
    matches, rows = datastore.find([*range(10, 20)], 3)
    assert (list(matches), rows.tolist()) == ([10, 6], [[7, 7, 7], [8, 8, 8]])


def test_a_refresh_reads_what_another_session_added(folder):
    ours, theirs = opened(folder), opened(folder)
    theirs.add_answer(FIRST)
    assert not finds(ours, FIRST)
    ours.refresh()
    assert finds(ours, FIRST)
    theirs.add([StoredText.of(SECOND)])
    ours.refresh()
    assert finds(ours, FIRST)
    assert finds(ours, SECOND)
    ours.add_answer(range(300, 350))
    theirs.refresh()
    assert finds(theirs, list(range(300, 350)))


def test_only_the_owner_may_read_the_files(folder):
    datastore = opened(folder)
    datastore.add_answer(FIRST)
    datastore.add_model("main.gguf")
    datastore.add([StoredText.of(SECOND)])
    datastore.add_answer(SECOND[::-1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert {"index", "journal", "models"} <= names
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_read_only_datastore_writes_nothing(folder):
    datastore = opened(folder)
    datastore.read_only = True
    datastore.add_answer(FIRST)
    assert not folder.exists()


def test_tokens_outside_the_vocabulary_are_never_proposed(folder):
    text = [*range(10), VOCABULARY - 1, VOCABULARY, 5]
    for add in (lambda: opened(folder).add_answer(text), lambda: opened(folder).add([])):
        add()
        _, rows = opened(folder).find(range(10), 3)
        assert rows.tolist() == [[VOCABULARY - 1, -1, -1]]


def test_the_latest_models_are_listed(folder):
    datastore = opened(folder)
    for n in range(30):
        datastore.add_model(f"{n}.gguf")
        datastore.add_model(f"{n}.gguf")
    assert list(datastore.contents().models) == [f"{n}.gguf" for n in range(10, 30)]


def test_clear(folder):
    datastore = opened(folder)
    datastore.add_answer(FIRST)
    clear(folder)
    assert not folder.exists()
    datastore.refresh()
    assert not finds(datastore, FIRST)
    datastore.add_answer(SECOND)
    assert kept(folder) == {tuple(SECOND)}


# Damage to the files


def test_a_damaged_index_is_logged_once_loses_no_journal_and_is_rewritten(folder):
    datastore = opened(folder)
    datastore.add([StoredText.of(FIRST)])
    datastore.add_answer(SECOND)
    whole = (folder / "index").read_bytes()
    truncated = [whole[:n] for n in (1, 10, 40, 60, len(whole) - 1)]
    for content in truncated:
        (folder / "index").write_bytes(content)
        log = []
        datastore = opened(folder, log)
        datastore.refresh()
        assert texts_of(datastore) == [SECOND], content
        assert len(log) == 1
        assert str(folder / "index") in log[0]
    datastore.add([StoredText.of(FIRST)])
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}


def test_a_damaged_byte_of_the_index_loses_only_the_answer_in_which_it_is(folder):
    """Files are lost, too: they are labelled by their names, and can be added again."""
    answers = [list(range(n, n + 20)) for n in range(100, 500, 100)]
    datastore = opened(folder)
    datastore.add(
        [*map(StoredText.of, answers[:2]), StoredText.of(SECOND, "a file"), *map(StoredText.of, answers[2:])]
    )
    whole = (folder / "index").read_bytes()
    n_lost = []
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ (0x01, 0x80, 0xFF)[at % 3]]) + whole[at + 1 :]
        (folder / "index").write_bytes(damaged)
        log = []
        datastore = opened(folder, log)
        found = texts_of(datastore)
        assert found == [answer for answer in answers if answer in found], at
        assert len(log) == 1
        n_lost.append(len(answers) - len(found))
        if at % 50 == 0:
            datastore.add_answer(NEW)
            assert kept(folder) == {tuple(text) for text in (*found, NEW)}
    assert max(n_lost[52:]) == 2  # a separator, or what is between two texts
    assert n_lost[48:52] == [0] * 4  # the checksum
    assert n_lost.count(1) > 300 < n_lost.count(0)


RECORDS = [list(range(n, n + 4 + n % 3)) for n in range(100, 900, 160)]
NEW = list(range(300, 350))


@pytest.fixture
def journal(folder):
    """The content of a journal with `RECORDS`, and the offset where each of them ends."""
    datastore, ends = opened(folder), []
    for record in RECORDS:
        datastore.add_answer(record)
        ends.append((folder / "journal").stat().st_size)
    return (folder / "journal").read_bytes(), ends


def check_damaged_journal(folder, content, expected, note, n_lines=1):
    """The expected texts can be read, and are still there after an answer is added and merged."""
    replace_files(folder, journal=content)
    log = []
    datastore = opened(folder, log)
    assert texts_of(datastore) == expected, note
    assert len(log) == n_lines, (note, log)
    datastore.add_answer(NEW)
    assert texts_of(datastore) == [*expected, NEW], note
    assert kept(folder) == {tuple(text) for text in (*expected, NEW)}, note
    assert len(log) == n_lines


def test_a_damaged_byte_of_the_journal_loses_only_its_record(folder, journal):
    content, ends = journal
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= (0x01, 0x80, 0xFF)[at % 3]
        lost = next(i for i, end in enumerate(ends) if at < end)
        last_may_be_incomplete = lost == len(RECORDS) - 1 and at < ends[-1] - 4 * len(RECORDS[-1])
        expected = RECORDS[:lost] + RECORDS[lost + 1 :]
        n_lines = 0 if last_may_be_incomplete and is_longer(damaged, content, ends) else 1
        check_damaged_journal(folder, damaged, expected, at, n_lines)


def is_longer(damaged, content, ends):
    """Return whether the damage makes the last record longer, so that it looks incomplete."""
    length = slice(ends[-2] + 8, ends[-2] + 12)
    return int.from_bytes(damaged[length], "little") > int.from_bytes(content[length], "little")


def test_a_journal_truncated_anywhere_loses_only_its_end(folder, journal):
    content, ends = journal
    for n in range(len(content)):
        check_damaged_journal(folder, content[:n], RECORDS[: sum(end <= n for end in ends)], n, 0)


@pytest.mark.parametrize("n", [1, 100])
def test_bytes_removed_from_or_added_to_the_journal(folder, journal, n):
    """As after a power loss, when a file system has lost or zeroed blocks."""
    content, ends = journal
    for at in range(0, len(content), 5):
        before = RECORDS[: sum(end <= at for end in ends)]
        for damaged, after in (
            (content[:at] + content[at + n :], at + n),
            (content[:at] + b"U" * n + content[at:], at),
        ):
            starts = [0, *ends[:-1]]
            after = [record for record, start in zip(RECORDS, starts, strict=True) if start >= after]
            replace_files(folder, journal=damaged)
            opened(folder).add_answer(NEW)
            assert kept(folder) == {tuple(text) for text in (*before, *after, NEW)}, at


@pytest.mark.parametrize("name", ["index", "journal"])
def test_a_file_that_cannot_be_read_is_not_overwritten(folder, name, monkeypatch):
    opened(folder).add([StoredText.of(FIRST)])
    opened(folder).add_answer(SECOND)
    before, open_file, log = (folder / name).read_bytes(), os.open, []

    def fail(path, *options, **more):
        if Path(path).name == name:
            raise OSError(errno.EIO, "Input/output error")
        return open_file(path, *options, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        datastore = opened(folder, log)
        datastore.add_answer(NEW)
        with pytest.raises(SpecLocalError, match=r"cannot write .*Input/output error"):
            datastore.add([StoredText.of(NEW)])
    assert (folder / name).read_bytes() == before
    assert len(log) == 2  # it cannot be read, and answers are not added
    datastore.refresh()
    assert finds(datastore, FIRST)
    assert finds(datastore, SECOND)


@pytest.mark.parametrize("name", ["index", "journal"])
@pytest.mark.parametrize("content", ["of another vocabulary", b"specdec texts 2\n" + bytes(100), b"\0" * 100])
def test_files_of_another_vocabulary_or_version_are_ignored(folder, tmp_path, name, content):
    if content == "of another vocabulary":
        other = opened(tmp_path / "texts" / "other")
        other.add([StoredText.of(FIRST)])
        other.add_answer(SECOND)
        content = (other.folder / name).read_bytes()
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    log = []
    datastore = opened(folder, log)
    assert (len(log), datastore.contents().n_texts) == (1, 0)
    assert "version or vocabulary" in log[0]
    datastore.add_answer(SECOND)
    assert kept(folder) == {tuple(SECOND)}


def test_inconsistent_content_with_a_valid_checksum_is_rejected(folder):
    """Another program could write such a file."""
    datastore = opened(folder)
    datastore.add([StoredText.of(FIRST)])
    content = (folder / "index").read_bytes()
    head, body = content[: file_format._INDEX.size], np.frombuffer(content[file_format._INDEX.size :], "<u4")
    for at, value in ((0, 5), (41 + 3, 2**31), (41 + 3, 0), (7, 0)):
        wrong = body.copy()
        wrong[at] = value
        new = head[:-4] + zlib.crc32(wrong.tobytes()).to_bytes(4, "little") + wrong.tobytes()
        (folder / "index").write_bytes(new)
        log = []
        assert texts_of(opened(folder, log)) in ([], [FIRST])
        assert len(log) == 1


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["index", "journal"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, make_huge], ids=["folder", "pipe", "huge file"])
def test_something_else_in_place_of_a_file_is_neither_read_nor_replaced(folder, name, make):
    folder.mkdir(parents=True)
    make(folder / name)
    log = []
    datastore = opened(folder, log)
    assert datastore.contents().n_texts == 0
    assert len(log) == 1
    datastore.add_answer(SECOND)
    assert not finds(datastore, SECOND)
    with pytest.raises(SpecLocalError, match="cannot write"):
        datastore.add([StoredText.of(SECOND)])


def test_a_full_disk_loses_only_new_texts_and_is_logged_once(folder):
    opened(folder).add_answer(FIRST)
    log = []
    datastore = opened(folder, log)
    with full_disk((folder / "journal").stat().st_size + 20):
        datastore.add_answer(SECOND)
        datastore.add_answer(range(300, 350))
        assert len(log) == 1
        assert "not added" in log[0]
        assert datastore.read_only
        with pytest.raises(SpecLocalError, match="fix this"):
            datastore.add([StoredText.of(range(400))])
    assert finds(datastore, FIRST)
    assert kept(folder) == {tuple(FIRST)}
    assert not list(folder.glob("*.part"))
    opened(folder).add_answer(SECOND)
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}


def test_waiting_for_the_lock_ends(folder):
    opened(folder).add_answer(FIRST)
    log = []
    datastore = opened(folder, log, lock_timeout=0.05)
    with FileLock(folder / "lock"):
        datastore.add_answer(SECOND)
        datastore.add_answer(range(300, 350))
        with pytest.raises(SpecLocalError, match="another process"):
            datastore.add([])
        with pytest.raises(SpecLocalError, match="another specdec"):
            clear(folder, 0.05)
    assert len(log) == 1
    assert kept(folder) == {tuple(FIRST)}


WRITER = """
import sys
from pathlib import Path
from spec_local.datastore.datastore import Datastore
datastore = Datastore(Path(sys.argv[1]), 100_000, max_journal=500)
first, n = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i in range(n):
    datastore.add_answer([first + i, *range(first + i, first + i + 30)])
    print(i, flush=True)
"""


def writer(folder, first, n):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(n)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def written(first, i):
    return (first + i, *range(first + i, first + i + 30))


def test_concurrent_writers_lose_nothing(folder):
    writers = {first: writer(folder, first, 60) for first in (10_000, 20_000)}
    for process in writers.values():
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in writers.values():
        process.communicate()
        assert process.returncode == 0
    assert kept(folder) == {written(first, i) for first in writers for i in range(60)}
    assert (folder / "index").exists()  # there was at least one merge


def test_a_kill_between_the_two_writes_of_a_merge(folder, monkeypatch):
    datastore = opened(folder)
    datastore.add_answer(FIRST)
    journal = (folder / "journal").read_bytes()
    datastore.add([StoredText.of(SECOND)])
    (folder / "journal").write_bytes(journal)
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}
    again = opened(folder)
    assert again.contents().n_texts == 2
    again.add([])
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}


def test_a_folder_that_cannot_be_written_to(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    log = []
    datastore = opened(folder, log)
    datastore.add_model("main.gguf")
    datastore.add_answer(FIRST)
    assert len(log) >= 1
    with pytest.raises(SpecLocalError):
        datastore.add([StoredText.of(FIRST)])
