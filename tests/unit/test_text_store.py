"""The store of texts: what it keeps, who sees it, and everything that can happen to its files."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local.datastore import text_store
from spec_local.datastore.text_format import Text
from spec_local.datastore.text_store import Datastore
from spec_local.errors import SpecLocalError

VOCABULARY = 1000
FIRST, SECOND = list(range(100, 140)), list(range(200, 260))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "texts" / "a vocabulary"


def opened(folder, told=None, **kwargs):
    return Datastore(folder, VOCABULARY, log=(told if told is not None else []).append, **kwargs)


def knows(store, text):
    """Whether the end of a text is guessed from its beginning."""
    _, rows = store.find(text[:8], len(text) - 8)
    return any(row == text[8:] for row in rows.tolist())


def kept(folder):
    """The texts of a store that has nothing to complain of."""
    told = []
    store = opened(folder, told)
    assert told == []
    return {tuple(text.tokens.tolist()) for text in store._texts(())}


def test_an_empty_store_finds_nothing_and_makes_no_folder(folder):
    store = opened(folder)
    matches, rows = store.find([1, 2, 3, 4], 5)
    assert (len(matches), rows.shape) == (0, (0, 5))
    assert not folder.exists()
    assert store.contents().n_tokens == 0


def test_an_answer_is_known_at_once_and_later(folder):
    store = opened(folder)
    store.remember(FIRST[8:], FIRST[:8])
    assert knows(store, FIRST)
    assert knows(opened(folder), FIRST)
    assert not knows(store, SECOND)
    assert kept(folder) == {tuple(FIRST)}


def test_an_answer_of_next_to_nothing_is_not_kept(folder):
    store = opened(folder)
    store.remember([1, 2, 3], [5] * 8)
    assert store.contents().n_texts == 0


def test_what_is_said_twice_is_kept_once(folder):
    store = opened(folder)
    for merged in (False, True):
        for _ in range(2):
            store.remember(FIRST)
            assert store.contents().n_texts == 1
            assert (folder / "journal").exists() != merged
            assert len(store._journal) == (not merged)
        store.add([])


def test_a_merge_keeps_everything(folder):
    store = opened(folder)
    store.remember(FIRST)
    store.add([Text.of(SECOND)])
    assert not (folder / "journal").exists()
    store.remember(list(range(300, 350)))
    assert kept(folder) == {tuple(FIRST), tuple(SECOND), tuple(range(300, 350))}
    for each in (store, opened(folder)):
        assert knows(each, FIRST)
        assert knows(each, SECOND)
        assert each.contents().n_tokens == 150


def test_a_newer_state_of_a_file_takes_the_place_of_the_older(folder):
    store = opened(folder)
    store.add([Text.of(FIRST, "a.py"), Text.of(SECOND, "b.py")])
    store.add([Text.of(SECOND[:30], "a.py")])
    assert kept(folder) == {tuple(SECOND), tuple(SECOND[:30])}


def test_the_oldest_go_first(folder):
    store = opened(folder, most=100)
    store.add([Text.of(FIRST), Text.of(SECOND[:40])])
    store.add([Text.of(range(300, 330))])
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(300, 330))}
    store.add([Text.of(SECOND[:40])])  # which makes it the newest
    store.add([Text.of(range(400, 430))])
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(400, 430))}
    store.remember(range(500))  # more than there is room for
    assert kept(folder) == {tuple(SECOND[:40]), tuple(range(400, 430))}


def test_a_long_journal_is_merged(folder, monkeypatch):
    monkeypatch.setattr(text_store, "_JOURNAL_TOKENS", 200)
    store, texts = opened(folder), [[*range(n, n + 40)] for n in range(0, 900, 50)]
    for text in texts:
        store.remember(text)
        assert sum(len(t.tokens) for t in store._journal) <= 200
    assert kept(folder) == set(map(tuple, texts))


def test_the_longest_matches_of_both_files_come_first(folder):
    store = opened(folder)
    store.add([Text.of([*range(10, 20), 7, 7, 7])])
    store.remember([*range(14, 20), 8, 8, 8])
    matches, rows = store.find([*range(10, 20)], 3)
    assert (list(matches), rows.tolist()) == ([10, 6], [[7, 7, 7], [8, 8, 8]])


def test_another_session_sees_what_was_added(folder):
    ours, theirs = opened(folder), opened(folder)
    theirs.remember(FIRST)
    assert not knows(ours, FIRST)
    ours.refresh()
    assert knows(ours, FIRST)
    theirs.add([Text.of(SECOND)])
    ours.refresh()
    assert knows(ours, FIRST)
    assert knows(ours, SECOND)
    ours.remember(range(300, 350))
    theirs.refresh()
    assert knows(theirs, list(range(300, 350)))


def test_nobody_else_may_read_it(folder):
    store = opened(folder)
    store.remember(FIRST)
    store.used_by("main.gguf")
    store.add([Text.of(SECOND)])
    store.remember(SECOND[::-1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert {"index", "journal", "models"} <= names
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_store_that_does_not_learn(folder):
    store = opened(folder)
    store.learning = False
    store.remember(FIRST)
    assert not folder.exists()


def test_tokens_that_main_does_not_have_are_never_guessed(folder):
    text = [*range(10), VOCABULARY - 1, VOCABULARY, 5]
    for add in (lambda: opened(folder).remember(text), lambda: opened(folder).add([])):
        add()
        _, rows = opened(folder).find(range(10), 3)
        assert rows.tolist() == [[VOCABULARY - 1, -1, -1]]


def test_models_are_named(folder):
    store = opened(folder)
    for n in range(30):
        store.used_by(f"{n}.gguf")
        store.used_by(f"{n}.gguf")
    assert list(store.contents().models) == [f"{n}.gguf" for n in range(10, 30)]


def test_clear(folder):
    store = opened(folder)
    store.remember(FIRST)
    text_store.clear(folder)
    assert not folder.exists()
    store.refresh()
    assert not knows(store, FIRST)
    store.remember(SECOND)
    assert kept(folder) == {tuple(SECOND)}


# What can happen to the files


def test_a_cut_journal_loses_only_its_end(folder):
    store = opened(folder)
    store.remember(FIRST)
    whole = (folder / "journal").read_bytes()
    store.remember(SECOND)
    longer = (folder / "journal").read_bytes()
    for n in range(len(longer)):
        (folder / "journal").write_bytes(longer[:n])
        expected = {tuple(FIRST)} if n >= len(whole) else set()
        assert kept(folder) == expected, n  # and nothing is told: somebody may just be writing
        if n % 20 == 7:
            opened(folder).remember(range(300, 350))
            assert kept(folder) == expected | {tuple(range(300, 350))}


def test_a_cut_index_is_told_once_and_written_anew(folder):
    store = opened(folder)
    store.add([Text.of(FIRST)])
    whole = (folder / "index").read_bytes()
    for n in (1, 10, 40, 60, len(whole) - 1):
        (folder / "index").write_bytes(whole[:n])
        told = []
        damaged = opened(folder, told)
        damaged.refresh()
        assert damaged.find(FIRST[:8], 4)[0] == ()
        damaged.remember(SECOND)
        damaged.remember(range(300, 350))
        assert len(told) == 1
        assert str(folder / "index") in told[0]
        assert kept(folder) == {tuple(SECOND), tuple(range(300, 350))}
        (folder / "journal").unlink()


@pytest.mark.parametrize("name", ["index", "journal"])
def test_a_byte_that_has_changed(folder, name):
    store = opened(folder)
    store.add([Text.of(FIRST)])
    store.remember(SECOND)
    whole, other = (folder / name).read_bytes(), FIRST if name == "journal" else SECOND
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1
        (folder / name).write_bytes(content)
        left = {tuple(text.tokens.tolist()) for text in opened(folder)._texts(())}
        assert left == {tuple(other)}, at


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_what_is_corrupt_is_never_said(folder, data):
    for path in folder.glob("*"):
        path.unlink()
    store = opened(folder)
    store.add([Text.of(FIRST)])
    store.remember(SECOND)
    path = folder / data.draw(st.sampled_from(["index", "journal"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content))) :] = data.draw(st.binary(max_size=40))
    path.write_bytes(content)
    told = []
    store = opened(folder, told)
    assert len(told) <= 1
    known = {tuple(FIRST), tuple(SECOND)}
    assert {tuple(text.tokens.tolist()) for text in store._texts(())} <= known
    for text in (FIRST, SECOND):
        for row in store.find(text[:8], 60)[1].tolist():
            assert [t for t in row if t >= 0] == text[8:]
    store.remember(range(300, 350))
    assert knows(opened(folder), list(range(300, 350)))
    assert len(told) <= 1


def test_the_files_of_another_vocabulary_or_version_are_left_out(folder, tmp_path):
    other = opened(tmp_path / "texts" / "other")
    other.add([Text.of(FIRST)])
    other.remember(SECOND)
    for name in ("index", "journal"):
        for content in ((other.folder / name).read_bytes(), b"specdec texts 2\n" + bytes(100), b"\0" * 100):
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            told = []
            store = opened(folder, told)
            assert (len(told), store.contents().n_texts) == (1, 0)
            assert "version or vocabulary" in told[0]
            store.remember(SECOND)
            assert kept(folder) == {tuple(SECOND)}
            for path in folder.iterdir():
                path.unlink()


def test_numbers_that_fit_a_checksum_and_nothing_else(folder):
    """As if somebody else had written it."""
    store = opened(folder)
    store.add([Text.of(FIRST)])
    import zlib

    from spec_local.datastore import text_format

    content = (folder / "index").read_bytes()
    head, body = content[: text_format._INDEX.size], np.frombuffer(content[text_format._INDEX.size :], "<u4")
    for at, value in ((0, 5), (41 + 3, 2**31), (41 + 3, 0), (7, 0)):
        wrong = body.copy()
        wrong[at] = value
        new = head[:-4] + zlib.crc32(wrong.tobytes()).to_bytes(4, "little") + wrong.tobytes()
        (folder / "index").write_bytes(new)
        told = []
        assert opened(folder, told).find(FIRST[:8], 3)[0] == ()
        assert len(told) == 1


@pytest.mark.parametrize("name", ["index", "journal"])
def test_what_is_no_file(folder, name):
    opened(folder).add([Text.of(FIRST)])
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    told = []
    store = opened(folder, told)
    store.refresh()
    assert len(told) == 1
    store.remember(SECOND)
    store.find(SECOND[:8], 4)
    with pytest.raises(SpecLocalError, match="cannot be written"):
        store.add([Text.of(SECOND)])


def test_a_pipe_does_not_keep_anybody_waiting(folder):
    folder.mkdir(parents=True)
    os.mkfifo(folder / "index")
    told = []
    opened(folder, told)
    assert len(told) == 1


def test_a_huge_file_is_not_read(folder):
    folder.mkdir(parents=True)
    with (folder / "journal").open("wb") as file:
        file.truncate(1 << 40)
    told = []
    assert opened(folder, told).contents().n_texts == 0
    assert len(told) == 1


def test_a_full_disk_costs_what_is_new_and_is_told_once(folder):
    """A limit on the size of files, which the kernel enforces as it does a full disk."""
    opened(folder).remember(FIRST)
    told = []
    store = opened(folder, told)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "journal").stat().st_size + 20, limits[1]))
        store.remember(SECOND)
        store.remember(range(300, 350))
        assert len(told) == 1
        assert "not kept" in told[0]
        assert not store.learning
        with pytest.raises(SpecLocalError, match="mend that"):
            store.add([Text.of(range(400))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert knows(store, FIRST)
    assert kept(folder) == {tuple(FIRST)}
    assert not list(folder.glob("*.part"))
    opened(folder).remember(SECOND)
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}


def test_a_store_that_is_held_is_not_waited_for_for_ever(folder, monkeypatch):
    monkeypatch.setattr(text_store, "_PATIENCE", 0.05)
    opened(folder).remember(FIRST)
    told = []
    store = opened(folder, told)
    with FileLock(folder / "lock"):
        store.remember(SECOND)
        store.remember(range(300, 350))
        with pytest.raises(SpecLocalError, match="another process"):
            store.add([])
        with pytest.raises(SpecLocalError, match="another specdec"):
            text_store.clear(folder)
    assert len(told) == 1
    assert kept(folder) == {tuple(FIRST)}


WRITER = """
import sys
from pathlib import Path
from spec_local.datastore import text_store
from spec_local.datastore.text_store import Datastore
text_store._JOURNAL_TOKENS = 500
store = Datastore(Path(sys.argv[1]), 100_000)
first, n = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i in range(n):
    store.remember([first + i, *range(first + i, first + i + 30)])
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


def test_two_writers_at_once_lose_nothing(folder):
    writers = {first: writer(folder, first, 60) for first in (10_000, 20_000)}
    for process in writers.values():
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in writers.values():
        process.communicate()
        assert process.returncode == 0
    assert kept(folder) == {written(first, i) for first in writers for i in range(60)}
    assert (folder / "index").exists()  # they have merged, too


def test_killed_writers_leave_all_that_they_had_finished(folder):
    rng = np.random.default_rng(0)
    finished = set()
    for round_ in range(12):
        first = 1000 * (round_ + 1)
        process = writer(folder, first, 900)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        said = process.communicate()[0].split()
        finished |= {written(first, int(i)) for i in said}
        texts = kept(folder)
        assert finished <= texts
        assert all(text[1:] == tuple(range(text[0], text[0] + 30)) for text in texts)
    assert len(finished) > 50


def test_killed_between_the_two_files_of_a_merge(folder, monkeypatch):
    store = opened(folder)
    store.remember(FIRST)
    journal = (folder / "journal").read_bytes()
    store.add([Text.of(SECOND)])
    (folder / "journal").write_bytes(journal)
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}
    again = opened(folder)
    assert again.contents().n_texts == 2
    again.add([])
    assert kept(folder) == {tuple(FIRST), tuple(SECOND)}


def test_a_folder_that_cannot_be_written_to(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    told = []
    store = opened(folder, told)
    store.used_by("main.gguf")
    store.remember(FIRST)
    assert len(told) >= 1
    with pytest.raises(SpecLocalError):
        store.add([Text.of(FIRST)])
