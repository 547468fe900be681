"""The answer store: its content and bounds, access from several processes, and damage to its file."""

import dataclasses
import errno
import functools
import math
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from spec_local.datastore import answer_store as module
from spec_local.datastore import datastore
from spec_local.datastore.answer_store import AnswerStore
from tests.failing_calls import full_disk

PROMPT, ANSWER = list(range(100, 140)), list(range(200, 260))
KEY = "0123456789abcdef"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "texts" / "a vocabulary" / f"{KEY}.answers"


def opened(path, log=None, **options):
    return AnswerStore(path, model="main.gguf", log=([] if log is None else log).append, **options)


def texts(path):
    """The tokens of all answers of a store that logs no problem, the oldest first."""
    log = []
    found = [tuple(answer.tokens.tolist()) for answer in opened(path, log).answers()]
    assert log == []
    return found


def text(n, length=30):
    """The n-th of some different texts."""
    return tuple([n, *range(1000 + n, 1000 + n + length - 1)])


def add(store, n, length=30):
    store.add(text(n, length)[:10], text(n, length)[10:], 0.5)


# Content


def test_an_empty_store_has_nothing_and_creates_no_folder(path):
    store = opened(path)
    assert store.answers() == []
    assert store.count_after(0) == 0
    assert store.contents().n_answers == 0
    assert store.contents().first is None
    assert not path.parent.exists()


def test_an_answer_is_there_at_once_with_its_whole_prompt(path):
    before = time.time()
    opened(path).add(PROMPT, ANSWER, 0.8)
    [answer] = opened(path).answers()
    assert answer.tokens.tolist() == PROMPT + ANSWER
    assert answer.tokens.dtype == np.int32
    assert (answer.n_prompt, answer.temperature) == (len(PROMPT), 0.8)
    assert before <= answer.time <= time.time()


def test_an_answer_without_a_prompt(path):
    opened(path).add([], ANSWER, 0.0)
    [answer] = opened(path).answers()
    assert (answer.n_prompt, answer.tokens.tolist()) == (0, ANSWER)


@pytest.mark.parametrize("n", [0, 3])
def test_a_very_short_answer_is_not_kept(path, n):
    opened(path).add(PROMPT, ANSWER[:n], 0.0)
    assert opened(path).answers() == []


def test_a_repeated_answer_is_kept_once(path):
    store = opened(path)
    for prompt in (PROMPT, PROMPT, PROMPT[1:], PROMPT):
        store.add(prompt, ANSWER, 0.0)
    assert texts(path) == [(*PROMPT, *ANSWER), (*PROMPT[1:], *ANSWER)]
    store.add([*PROMPT, ANSWER[0]], ANSWER[1:], 0.0)  # the same tokens, but another prompt
    assert len(texts(path)) == 3


def test_numbers_ascend_and_are_counted(path):
    store = opened(path)
    for n in range(5):
        add(store, n)
    numbers = [answer.number for answer in store.answers()]
    assert numbers == sorted(set(numbers))
    assert [store.count_after(number) for number in (0, *numbers)] == [5, 4, 3, 2, 1, 0]


def test_numbers_are_not_used_again_after_the_store_was_cleared(path):
    store = opened(path)
    for n in range(3):
        add(store, n)
    last = store.answers()[-1].number
    datastore.clear(path.parent)
    add(store, 5)
    assert store.count_after(last) == 1


def test_numbers_of_dropped_answers_are_not_used_again(path):
    add(opened(path), 1)
    [first] = opened(path).answers()
    opened(path, max_tokens=20).add([], list(range(20)), 0.0)  # drops the other one
    [second] = opened(path).answers()
    assert second.number > first.number


def test_contents(path):
    store = opened(path)
    for n in range(3):
        add(store, n)
    found = opened(path).contents()
    times = [answer.time for answer in store.answers()]
    assert (found.path, found.n_answers, found.n_tokens, found.model) == (path, 3, 90, "main.gguf")
    assert (found.size, found.first, found.last) == (path.stat().st_size, times[0], times[-1])
    assert opened(path).key == KEY


def test_the_latest_name_of_the_model_is_shown(path):
    add(opened(path), 1)
    add(AnswerStore(path, model="renamed.gguf"), 2)
    AnswerStore(path).add([], ANSWER, 0.0)  # does not know it
    assert opened(path).contents().model == "renamed.gguf"
    add(AnswerStore(path, model="\udc80\x1b[2J"), 3)
    assert opened(path).contents().model == ""


# Bounds


def test_the_oldest_answers_are_dropped_first(path):
    store = opened(path, max_tokens=100)
    for n in range(10):
        add(store, n)
        assert texts(path) == [text(i) for i in range(max(0, n - 2), n + 1)]
    add(store, 50, length=80)
    assert texts(path) == [text(50, 80)]
    add(store, 60, length=101)  # more than the capacity
    assert texts(path) == [text(50, 80)]


def test_the_number_of_answers_is_bounded(path):
    store = opened(path, max_answers=3)
    for n in range(8):
        add(store, n)
    assert texts(path) == [text(n) for n in range(5, 8)]


def test_the_file_does_not_grow(path):
    store, sizes = opened(path, max_tokens=3000), []
    for n in range(60):
        store.add([], range(n, n + 1000), 0.0)
        sizes.append(path.stat().st_size)
    assert max(sizes[5:]) == max(sizes[:5])


def test_nothing_of_dropped_answers_is_in_the_file(path):
    store, added = opened(path, max_tokens=10_000), []
    for n in (6, 300, 6, 3000, 30, 1200, 3000, 3000, 6, 300, 3000, 30, 1200):
        added.append(tuple(range(5000 * len(added), 5000 * len(added) + n)))
        store.add([], added[-1], 0.0)
    kept, content = texts(path), path.read_bytes()
    assert 0 < len(kept) < len(added)
    for each in added:
        assert (np.array(each[:4], "<i4").tobytes() in content) == (each in kept)


# Files


def test_only_the_owner_may_read_the_files(path):
    previous = os.umask(0)
    try:
        store = opened(path, max_tokens=200)
        for n in range(10):
            add(store, n)
            seen = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
            assert seen == {path.name: 0o600, "lock": 0o600}
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_creating_it_says_whether_it_is_new(path):
    log = []
    assert opened(path, log).create()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not opened(path, log).create()
    assert opened(path, log).contents().model == "main.gguf"
    datastore.clear(path.parent)
    assert opened(path, log).create()
    assert log == []


def test_a_read_only_store_writes_nothing(path):
    store = opened(path)
    store.read_only = True
    add(store, 1)
    assert not path.parent.exists()


def test_a_store_that_was_cleared_is_created_again(path):
    ours, theirs = opened(path), opened(path)
    add(ours, 1)
    add(theirs, 2)
    datastore.clear(path.parent)
    assert not path.parent.exists()
    assert ours.answers() == []
    add(theirs, 3)
    add(ours, 4)
    assert texts(path) == [text(3), text(4)]


def test_an_addition_that_was_killed_leaves_the_other_answers(path):
    add(opened(path), 1)
    before = path.read_bytes()
    add(opened(path), 2)
    record = path.read_bytes()[len(before) :]
    for n in range(len(record)):
        path.write_bytes(before + record[:n])
        assert texts(path) == [text(1)]
        log = []
        add(opened(path, log), 3)
        assert (texts(path), log) == ([text(1), text(3)], [])


def test_a_damaged_file_leaves_only_itself_beside_the_new_one(path):
    add(opened(path), 1)
    path.write_bytes(b"something else" * 500)
    add(opened(path), 2)
    assert texts(path) == [text(2)]
    [aside] = datastore.set_aside(path.parent)
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock", aside.name}


def test_an_empty_file(path):
    path.parent.mkdir(parents=True)
    path.touch()
    assert texts(path) == []
    log = []
    store = opened(path, log)
    assert store.contents().n_answers == 0
    add(store, 1)
    assert log == []
    assert texts(path) == [text(1)]


def test_stores_are_listed_by_folder(path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(path.parents[2]))
    assert module.answer_stores() == []
    other = path.parents[1] / "another" / "b.answers"
    for each in (path, other, other.with_name("c.answers")):
        add(opened(each), 1)
    assert [store.path.name for store in module.answer_stores()] == [path.name, "b.answers", "c.answers"]
    assert [store.path for store in module.answer_stores(path.parent)] == [path]
    assert datastore.has_answers(path.parent)
    assert not datastore.has_answers(path.parents[1])


# Damage


@functools.cache
def content_of(n):
    """The file of a store with n answers, and their texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v" / f"{KEY}.answers"
        store = opened(path)
        rng = random.Random(n)
        for i in range(n):
            tokens = rng.sample(range(1 << 17), 30 + 300 * (i % 3) + 3000 * (i % 8 == 7))
            store.add(tokens[:10], tokens[10:], 0.5)
        return path.read_bytes(), [tuple(answer.tokens.tolist()) for answer in store.answers()]


def filled(path, n=12):
    content, whole = content_of(n)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content, whole


def check_damaged(path, whole):
    """Nothing wrong is read, all of it stays in a file without faults, and the damaged one is kept."""
    damaged, log = path.read_bytes(), []
    found = [tuple(answer.tokens.tolist()) for answer in opened(path, log).answers()]
    assert set(found) <= set(whole)
    assert len(log) <= 1
    repairs = []
    add(opened(path, repairs), 5000)
    assert len(repairs) == len(log)
    assert texts(path) == [*found, text(5000)]
    kept = datastore.set_aside(path.parent)
    assert [each.read_bytes() for each in kept] == [damaged] * len(log)
    for each in kept:
        assert each.name in repairs[0]
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        each.unlink()
    return log, found


def span_of(answer, content):
    """Where the record of an answer is in a file, with what precedes its tokens."""
    raw = np.array(answer, "<i4").tobytes()
    at = content.index(raw)
    return at - 44, at + len(raw)


@given(st.data())
def test_damage_loses_only_the_answers_in_which_it_is(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("store") / "v" / f"{KEY}.answers"
    content, whole = filled(path, 24)
    damaged = bytearray(content)
    changes = st.tuples(st.integers(0, len(content) - 1), st.binary(min_size=1, max_size=64))
    for at, new in data.draw(st.lists(changes, max_size=6)):
        damaged[at : at + len(new)] = new
    damaged = damaged[: len(content) - data.draw(st.integers(0, len(content) // 2) | st.just(0))]
    path.write_bytes(damaged)
    log, found = check_damaged(path, whole)
    intact = [
        answer for answer in whole for a, b in [span_of(answer, content)] if damaged[a:b] == content[a:b]
    ]
    assert found == intact
    assert log or found == whole[: len(found)]  # the end may be missing, as after a kill


def test_the_first_addition_of_a_session_finds_damage(path):
    content, whole = filled(path)
    at = content.index(np.array(whole[4][:20], "<i4").tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    log = []
    store = opened(path, log)
    numbers = [answer.number for answer in opened(path).answers()]
    add(store, 5000)
    assert len(log) == 1
    assert "the 11 answers that can be read" in log[0]
    assert texts(path) == [*whole[:4], *whole[5:], text(5000)]
    assert [answer.number for answer in store.answers()][:-1] == numbers


def test_an_impossible_answer_is_damage(path):
    """Of another version, or of another program."""
    content, whole = filled(path)
    [first, *_] = opened(path).answers()
    for change in ({"n_prompt": 1000}, {"time": math.nan}, {"temperature": -1.0}):
        path.write_bytes(content + opened(path)._record(dataclasses.replace(first, **change)))
        log, found = check_damaged(path, whole)
        assert (len(log), found) == (1, whole)


def test_the_latest_three_damaged_files_are_kept(path):
    for n in range(5):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"something else %d" % n * 500)
        add(opened(path), n)
        (latest,) = (path for path in datastore.set_aside(path.parent) if path.stat().st_mtime > 1000)
        os.utime(latest, (n, n))  # one after another, however fast this is
    kept = {each.read_bytes()[:16] for each in datastore.set_aside(path.parent)}
    assert kept == {b"something else %d" % n for n in (2, 3, 4)}


class Killed(BaseException):
    pass


def kill_at(monkeypatch, n):
    """Raise `Killed` instead of the n-th and all later changes of files."""
    calls = iter(range(10**6))

    def wrapped(change):
        def wrapper(*arguments, **options):
            if next(calls) >= n:
                raise Killed
            return change(*arguments, **options)

        return wrapper

    for owner, names in ((Path, ("replace", "rename", "unlink")), (os, ("fsync", "rmdir", "unlink"))):
        for name in names:
            monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))


def test_a_kill_at_any_moment_of_a_repair_loses_nothing(path, monkeypatch):
    content, whole = filled(path)
    damaged = b"something else" + content
    for n in range(100):
        path.write_bytes(damaged)
        with monkeypatch.context() as patch:
            kill_at(patch, n)
            try:
                add(opened(path), 5000)
                is_done = True
            except Killed:
                is_done = False
        assert path.read_bytes() == damaged or texts(path) == [*whole, text(5000)]
        kept = [each.read_bytes() for each in datastore.set_aside(path.parent)]
        assert kept == [damaged] or path.read_bytes() == damaged
        if is_done:
            break
        add(opened(path), 5000)
        assert texts(path) == [*whole, text(5000)]
        assert [each.read_bytes() for each in datastore.set_aside(path.parent)] == [damaged]
    assert 3 < n < 99


def test_a_full_disk_keeps_a_damaged_file_as_it_is(path):
    content, whole = filled(path)
    path.write_bytes(damaged := b"something else" + content)
    log = []
    store = opened(path, log)
    with full_disk(100):
        add(store, 5000)
        assert len(store.answers()) == len(whole) == store.count_after(0)
        assert ["not kept" in line for line in log] == [True, False]
        assert "12 answers can be read" in log[1]
        assert path.read_bytes() == damaged
    assert [tuple(answer.tokens.tolist()) for answer in opened(path).answers()] == whole


@pytest.mark.parametrize("damage", [b"", b"something else"])
def test_a_read_only_disk(path, monkeypatch, damage):
    content, whole = filled(path)
    path.write_bytes(damage + content)

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", read_only)
    log = []
    store = opened(path, log)
    assert store.contents().n_answers == store.count_after(0) == len(whole)
    assert store.contents().model == "main.gguf"
    assert len(log) == bool(damage)
    add(store, 5000)
    assert len(log) == 1 + bool(damage)
    assert path.read_bytes() == damage + content


@pytest.mark.parametrize("n", [1, 50, 100, 1000, 4096, -1])
def test_a_truncated_file(path, n):
    content, whole = filled(path)
    path.write_bytes(content[:n])
    check_damaged(path, whole)


@pytest.mark.parametrize(
    "content", [b"something else" * 100, b"\0" * 5000, b"SQLite format 3\0" + b"\0" * 5000]
)
def test_another_file(path, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    log, found = check_damaged(path, [])
    assert found == []
    assert "is damaged: 0 answers can be read" in log[0]


def test_damage_while_the_store_is_open(path):
    store = opened(path)
    add(store, 1)
    path.write_bytes(b"something else" * 500)
    add(store, 2)
    assert texts(path) == [text(2)]


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.touch() or os.truncate(path, 1 << 40)]
)
def test_something_else_in_place_of_the_file_is_neither_read_nor_replaced(path, make):
    path.parent.mkdir(parents=True)
    make(path)
    before, log = path.stat(), []
    store = opened(path, log)
    assert store.answers() == []
    assert store.count_after(0) == 0
    add(store, 1)
    assert not store.create()
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mode) == (before.st_ino, before.st_size, before.st_mode)
    assert len(log) == 2  # it cannot be read, and answers are not kept


def test_a_folder_that_cannot_be_created(path):
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("a file")
    log = []
    store = opened(path, log)
    add(store, 1)
    assert store.answers() == []
    assert 1 <= len(log) <= 2


def test_a_full_disk_loses_only_new_answers_and_is_logged_once(path):
    _, whole = filled(path)
    log = []
    store = opened(path, log, pause=0.0)
    with full_disk(path.stat().st_size + 100):
        for n in range(3):
            add(store, 7000 + n, length=6000)
    assert len(log) == 1
    assert "not kept" in log[0]
    assert texts(path) == whole
    add(store, 5000)
    assert texts(path) == [*whole, text(5000)]


# Several threads and processes


def test_waiting_for_the_lock_ends_and_pauses(path, monkeypatch):
    add(opened(path), 1)
    log = []
    store = opened(path, log, add_timeout=0.1)
    with FileLock(path.parent / "lock"):
        add(store, 2)
        assert len(store.answers()) == 1  # readers need no lock
        started = time.monotonic()
        for n in range(100):
            add(store, 3 + n)
        assert time.monotonic() - started < 5  # instead of 10
    assert len(log) == 1
    assert "another process holds its lock" in log[0]
    add(store, 4)
    assert texts(path) == [text(1)]  # still in the pause
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
    add(store, 5)
    assert texts(path) == [text(1), text(5)]


def test_several_threads(path):
    log = []
    store = opened(path, log)
    start = threading.Barrier(4)

    def work(first):
        start.wait()
        for n in range(first, first + 15):
            add(store if first % 2 else opened(path, log), n)
            store.count_after(0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 4001, 1001)[:4]))
    assert log == []
    assert sorted(texts(path)) == sorted(
        text(n) for first in range(0, 4001, 1001)[:4] for n in range(first, first + 15)
    )


WRITER = """
import sys
from pathlib import Path
from spec_local.datastore.answer_store import AnswerStore
store = AnswerStore(Path(sys.argv[1]), log=lambda line: print("PROBLEM", line, flush=True))
n = int(sys.argv[2])
print("ready", flush=True)
while sys.stdin.readline():
    store.add(range(n, n + 50), range(n + 50, n + 200), 0.5)  # 2,436 of these are within the bounds
    print(n, flush=True)
    n += 1
"""


class Writer:
    """A process that adds an answer for each line that it gets, and prints its number when `add` returns."""

    def __init__(self, path, first):
        self.first = first
        command = [sys.executable, "-c", WRITER, str(path), str(first)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n"

    def ask(self, n):
        self.process.stdin.write(b"\n" * n)
        self.process.stdin.flush()

    def acknowledged(self):
        """End its input; the numbers that it has printed."""
        self.process.stdin.close()
        lines = self.process.stdout.read().splitlines()
        self.process.stdout.close()
        self.process.wait()
        return [int(line) for line in lines if line]


@pytest.mark.slow
def test_no_acknowledged_answer_is_lost_when_a_writer_is_killed(path):
    """Two processes write at the same time; one of them is killed at a random moment, many times."""
    rng = random.Random(1)
    expected, lasting = set(), Writer(path, 1_000_000)
    for i in range(12):
        killed = Writer(path, 10_000 * (i + 1))
        lasting.ask(3)
        killed.ask(200)
        time.sleep(rng.uniform(0, 0.3))
        killed.process.kill()
        expected |= set(killed.acknowledged())
    n_lasting = len(found := lasting.acknowledged())
    assert found == list(range(1_000_000, 1_000_036))
    expected |= set(found)
    kept = {answer[0] for answer in texts(path)}
    assert expected <= kept
    assert len(kept - expected) <= 12  # committed, but not acknowledged
    assert all(answer == tuple(range(answer[0], answer[0] + 200)) for answer in texts(path))
    assert len(expected) > n_lasting + 20
