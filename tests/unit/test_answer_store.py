"""The answer store: its content and bounds, access from several processes, and damage to its file."""

import errno
import functools
import os
import random
import sqlite3
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
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.datastore import answer_store as module
from spec_local.datastore import datastore
from spec_local.datastore.answer_store import AnswerStore
from tests.failing_calls import full_disk

PROMPT, ANSWER = list(range(100, 140)), list(range(200, 260))
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def not_flushed(monkeypatch):
    """Do not wait for the disk, which takes most of the time: no test is about a power loss."""

    class Unflushed(sqlite3.Connection):
        def execute(self, statement, *more):
            is_flushing = statement.startswith("PRAGMA synchronous")
            return super().execute("PRAGMA synchronous = OFF" if is_flushing else statement, *more)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Unflushed))


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
    """Also where pages of the tree have been merged; without the tree, only kept answers are found."""
    rng = random.Random(5)
    store, added = opened(path, max_tokens=10_000), []
    for _ in range(120):
        added.append([rng.randrange(1 << 17) for _ in range(rng.choice([6, 30, 300, 1200, 3000]))])
        store.add([], added[-1], 0.0)
    kept, content = texts(path), path.read_bytes()
    assert [tuple(answer.tokens.tolist()) for answer in module._recovered(content)] == kept
    for each in added:
        raw = np.array(each, "<i4").tobytes()
        found = any(raw[at : at + 16] in content for at in range(0, len(raw) - 15, 200))
        assert found == (tuple(each) in kept)


def test_a_long_answer_that_was_dropped_is_not_in_the_file(path):
    secret = list(range(500_000, 501_500))  # longer than a page
    raw = np.array(secret[700:720], "<i4").tobytes()
    store = opened(path, max_tokens=2000)
    store.add([], secret, 0.0)
    assert raw in path.read_bytes()
    store.add([], range(1000), 0.0)
    assert len(store.answers()) == 1
    assert raw not in path.read_bytes()


# Files


def test_only_the_owner_may_read_the_files_while_one_is_written(path, monkeypatch):
    previous = os.umask(0)
    try:
        store, seen, connect = opened(path), {}, sqlite3.connect

        def look(statement):
            if statement == "COMMIT":  # which ends the transaction
                seen.update({each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()})

        def observed(*arguments, **options):
            connection = connect(*arguments, **options)
            connection.set_trace_callback(look)
            return connection

        monkeypatch.setattr(sqlite3, "connect", observed)
        for n in range(3):
            add(store, n, length=5000)
    finally:
        os.umask(previous)
    assert seen.keys() == {path.name, f"{path.name}-journal", "lock"}
    assert set(seen.values()) == {0o600}
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


def unfinished_journal(path):
    """Write an answer; the journal of a transaction that was killed when it had written to the file."""
    add(opened(path), 1, length=20_000)
    with module._connection(module._uri(path)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM answers")
        connection.execute("CREATE TABLE more AS SELECT zeroblob(100000)")
        return path.with_name(f"{path.name}-journal").read_bytes(), path.read_bytes()


def test_a_transaction_that_was_killed_is_rolled_back(path):
    journal, content = unfinished_journal(path)
    path.write_bytes(content)
    assert opened(path).answers() == []
    path.write_bytes(content)
    path.with_name(f"{path.name}-journal").write_bytes(journal)
    assert texts(path) == [text(1, 20_000)]


def test_a_journal_of_an_earlier_file_is_not_restored(path):
    """As after a kill during `datastore clear`."""
    journal, _ = unfinished_journal(path)
    path.unlink()
    path.with_name(f"{path.name}-journal").write_bytes(journal)
    add(opened(path), 2)
    assert texts(path) == [text(2)]


def test_a_damaged_file_leaves_only_itself_beside_the_new_one(path):
    add(opened(path), 1)
    path.write_bytes(b"something else" * 500)
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).write_bytes(b"something else" * 500)
    add(opened(path), 2)
    assert texts(path) == [text(2)]
    [aside] = datastore.set_aside(path.parent)
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock", aside.name}


def test_an_empty_file(path):
    """As after a kill between its creation and the first transaction."""
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
    store = opened(path, log)
    found = [tuple(answer.tokens.tolist()) for answer in store.answers()]
    assert set(found) <= set(whole)
    store.count_after(0)
    store.contents()
    add(store, 5000)
    assert len(log) <= 1
    assert texts(path) == [*found, text(5000)]
    kept = datastore.set_aside(path.parent)
    assert [each.read_bytes() for each in kept] == [damaged] * len(log)
    for each in kept:
        assert each.name in log[0]
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        each.unlink()
    return log, found


@functools.cache
def pages_of(answer, content):
    """The numbers of the pages in which a part of an answer is."""
    raw = np.array(answer, "<i4").tobytes()
    pieces = (raw[at : at + 12] for at in range(0, len(raw), 12))  # some are in two pages
    return {content.find(piece) // 4096 for piece in pieces if piece in content}


@settings(deadline=None)
@given(st.data())
def test_damage_loses_only_the_answers_in_damaged_pages(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("store") / "v" / f"{KEY}.answers"
    content, whole = filled(path, 24)
    damaged = bytearray(content)
    changes = st.tuples(st.integers(0, len(content) - 1), st.binary(min_size=1, max_size=64))
    near_the_start = st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8))
    for at, new in data.draw(st.lists(changes | near_the_start, max_size=4)):
        damaged[at : at + len(new)] = new
    pages = st.tuples(st.integers(0, len(content) // 4096 - 1), st.binary())
    for at, new in data.draw(st.lists(pages, max_size=3)):
        damaged[4096 * at : 4096 * (at + 1)] = (new * 4096)[:4096].ljust(4096, b"\0")
    damaged = damaged[: len(content) - data.draw(st.integers(0, len(content) // 2) | st.just(0))]
    path.write_bytes(damaged)
    log, found = check_damaged(path, whole)
    wrong = {
        n for n in range(len(content) // 4096) if content[4096 * n :][:4096] != damaged[4096 * n :][:4096]
    }
    assert {answer for answer in whole if not wrong & pages_of(answer, content)} <= set(found)
    assert log or len(found) == len(whole)


def test_damage_of_the_header_loses_nothing(path):
    """One changed byte, or all of them; so does a file of which the first page is lost."""
    content, whole = filled(path)
    changed = (0, 16, 20, 28, 100, 101, 105)
    for damaged in (
        *(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :] for at in changed),
        bytes(100) + content[100:],
        bytes(4096) + content[4096:],
    ):
        path.write_bytes(damaged)
        log, found = check_damaged(path, whole)
        assert (found, len(log)) == (whole, 1)


def test_a_page_that_was_cut_off_loses_its_answers(path):
    content, whole = filled(path, 200)
    path.write_bytes(content[:-4096])
    log, found = check_damaged(path, whole)
    assert len(whole) - len(found) <= 2
    assert f"the {len(found)} answers that can be read" in log[0]


def test_the_first_addition_of_a_session_finds_damage(path):
    content, whole = filled(path)
    at = content.index(np.array(whole[4][:20], "<i4").tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    log = []
    store = opened(path, log)
    add(store, 5000)
    assert "the 11 answers that can be read" in log[0]
    assert texts(path) == [*whole[:4], *whole[5:], text(5000)]


def test_a_damaged_number_is_replaced(path):
    """Numbers are not covered by digests; those that are too high would leave none for later answers."""
    filled(path)
    with module._connection(module._uri(path)) as connection:
        connection.execute(
            "UPDATE answers SET number = ? WHERE number = (SELECT min(number) FROM answers)", [2**55]
        )
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    store = opened(path)
    before = time.time() * 1e6
    numbers = [answer.number for answer in store.answers()]
    assert len(set(numbers)) == 12
    assert max(numbers) <= before
    add(store, 5000)
    assert max(numbers) < store.answers()[-1].number < before + 60e6


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


@pytest.mark.parametrize("model", ["main.gguf", ""])
def test_a_kill_at_any_moment_of_a_repair_loses_nothing(path, monkeypatch, model):
    content, whole = filled(path)
    damaged = b"\0" + content[1:]
    for n in range(100):
        path.write_bytes(damaged)
        with monkeypatch.context() as patch:
            kill_at(patch, n)
            try:
                found = AnswerStore(path, model=model).answers()
            except Killed:
                found = None
        assert path.read_bytes() == damaged or texts(path) == whole
        kept = [each.read_bytes() for each in datastore.set_aside(path.parent)]
        assert kept == [damaged] or path.read_bytes() == damaged
        if found:
            break
        assert [tuple(answer.tokens.tolist()) for answer in opened(path).answers()] == whole
        assert [each.read_bytes() for each in datastore.set_aside(path.parent)] == [damaged]
    assert 3 < n < 99


def test_a_full_disk_keeps_a_damaged_file_as_it_is(path):
    content, whole = filled(path)
    path.write_bytes(b"\0" + content[1:])
    log = []
    store = opened(path, log)
    with full_disk(100):
        add(store, 5000)
        assert len(store.answers()) == len(whole) == store.count_after(0)
        assert ["not kept" in line for line in log] == [True, False]
        assert "12 answers can be read" in log[1]
        assert path.read_bytes() == b"\0" + content[1:]
    assert [tuple(answer.tokens.tolist()) for answer in opened(path).answers()] == whole


@pytest.mark.parametrize("damage", [False, True])
def test_a_read_only_disk(path, monkeypatch, damage):
    content, whole = filled(path)
    path.write_bytes(b"\0" * damage + content[damage:])

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", read_only)
    log = []
    store = opened(path, log)
    assert store.contents().n_answers == store.count_after(0) == len(whole)
    assert store.contents().model == ("" if damage else "main.gguf")
    assert len(log) == damage
    add(store, 5000)
    assert len(log) == 1 + damage
    assert path.read_bytes() == b"\0" * damage + content[damage:]


ENDLESS = "SELECT * FROM (WITH RECURSIVE n(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM n)"


@pytest.mark.parametrize(
    "statements",
    [
        [f"CREATE VIEW answers AS {ENDLESS} SELECT number, 0.0 AS time, 0 AS tokens FROM n)"],
        [module._SCHEMA[1], f"CREATE VIEW meta AS {ENDLESS} SELECT * FROM n)"],
        [*module._SCHEMA, "CREATE TRIGGER more AFTER INSERT ON answers BEGIN SELECT 1; END"],
    ],
)
def test_a_file_with_another_schema_is_not_queried(path, statements):
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    log, found = check_damaged(path, [])
    assert (len(log), found) == (1, [])


def test_a_statement_that_takes_too_long_ends(path):
    filled(path)
    with (
        module._connection(module._uri(path), max_steps=1000) as connection,
        pytest.raises(sqlite3.OperationalError, match="interrupted") as caught,
    ):
        connection.execute(f"{ENDLESS} SELECT number FROM n LIMIT 100000)").fetchall()
    assert opened(path)._shows_damage(caught.value)


@pytest.mark.slow
def test_each_damaged_byte_of_the_header_and_the_first_pages(path):
    content, whole = filled(path)
    for at in (*range(110), *range(110, len(content), 397)):
        for value in (0, 0x81):
            damaged = bytearray(content)
            damaged[at] ^= value or damaged[at]
            path.write_bytes(damaged)
            check_damaged(path, whole)


@pytest.mark.parametrize("n", [1, 50, 100, 1000, 4096, 5000, 12_288, -1])
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
    assert "the 0 answers that can be read" in log[0]


def test_another_database(path):
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE answers (number TEXT, tokens TEXT)")
        connection.execute("INSERT INTO answers VALUES ('a', 'b')")
    connection.close()
    check_damaged(path, [])


def test_damaged_tokens_lose_their_answer_only_and_are_logged_once(path):
    content, whole = filled(path)
    at = content.index(np.array(whole[4][:20], "<i4").tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with module._connection(module._uri(path)) as connection:
        numbers = [number for (number,) in connection.execute("SELECT number FROM answers ORDER BY number")]
    log = []
    store = opened(path, log)
    rest = [*whole[:4], *whole[5:]]
    for _ in range(2):
        assert [tuple(answer.tokens.tolist()) for answer in store.answers()] == rest
    assert len(log) == 1
    assert "the 11 answers that can be read" in log[0]
    assert [answer.number for answer in store.answers()] == [*numbers[:4], *numbers[5:]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_page_loses_only_the_answers_in_it(path):
    content, whole = filled(path, 200)
    damaged = bytearray(content)
    middle = len(content) // 2 // 4096 * 4096
    damaged[middle : middle + 4096] = os.urandom(4096)
    path.write_bytes(damaged)
    _, found = check_damaged(path, whole)
    assert len(found) > 190


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
    store = opened(path, log, add_timeout=0.1, read_timeout=0.1)
    with FileLock(path.parent / "lock"):
        add(store, 2)
        assert store.answers() == []
        started = time.monotonic()
        for n in range(100):
            add(store, 3 + n)
        assert time.monotonic() - started < 5  # instead of 10
    assert [line for line in log if "another process holds its lock" in line] == log
    assert len(log) == 2
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
