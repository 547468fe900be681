"""The files of the prompt cache: restarts, limits, several processes, full disks, busy times."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spec_local.prompt_cache import entry_file, folder
from spec_local.prompt_cache.cache import PromptCache
from tests.unit.test_prompt_cache import add_history, data_of, found_length, tokens_of
from tests.waiting import wait_until

BLOCK = 32
SIZE = 1000
FILE = 1500  # a file of SIZE bytes has fewer
PLENTY = 1 << 24


def history(number, n_blocks=3):
    return [number] * BLOCK * n_blocks


def opened(path, limit=PLENTY, log=None, memory=PLENTY, name="", **options):
    lines = [] if log is None else log
    cache = PromptCache(memory, folder=path, limit=limit, log=lines.append, **options)
    return cache, cache.prompts("model", BLOCK, name)


def files(path):
    return sorted(path.glob("*/*.prompt"))


def parts(path):
    return list(path.glob("*/.*"))


def written(cache):
    wait_until(lambda: cache.n_unwritten == 0)


def filled(path, *histories, limit=PLENTY, **options):
    cache, prompts = opened(path, limit, **options)
    for tokens in histories:
        assert add_history(prompts, tokens, SIZE) == -(-len(tokens) // BLOCK)
    cache.close()


def test_a_restart_finds_and_reads_the_same(tmp_path):
    tokens = [*history(1, 4), 5, 6]
    cache, prompts = opened(tmp_path / "a" / "b")
    assert add_history(prompts, tokens, SIZE) == 5
    assert prompts.add_state(tokens[:100], data_of(tokens[:100]))
    match = prompts.find(tokens)
    expected = [prompts.read(each.entry).tobytes() for each in [*match.cells, *match.states]]
    cache.close()
    assert cache.n_unwritten == 0
    cache, prompts = opened(tmp_path / "a" / "b")
    assert prompts.lacking(tokens) == []
    assert prompts.has_state(tokens[:100])
    assert prompts.find(tokens) == match
    for _ in range(2):
        found = [prompts.read(each.entry) for each in [*match.cells, *match.states]]
        assert [each.tobytes() for each in found] == expected
        assert not any(each.flags.writeable for each in found)
    assert cache._memory.n_bytes == 0  # the system keeps files in memory
    assert cache.n_unwritten == 0


def test_only_the_user_can_read_the_files(tmp_path):
    filled(tmp_path / "new", history(1))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert {mode for name, mode in modes.items() if "." not in name} == {0o700}
    assert {mode for name, mode in modes.items() if "." in name} == {0o600}
    assert len(modes) == 3 + 1 + 1


def test_without_a_limit_nothing_is_written(tmp_path):
    filled(tmp_path / "x", history(1), limit=0)
    cache, prompts = opened(tmp_path / "x")
    prompts.find(history(1))
    cache.close()
    assert not (tmp_path / "x").exists()


def test_short_histories_stay_in_memory(tmp_path):
    cache, prompts = opened(tmp_path)
    tokens = history(1, 1)
    assert prompts.add_cells(tokens[:20], 0, data_of(tokens[:20]))
    assert prompts.add_state(tokens, data_of(tokens))
    cache.close()
    assert files(tmp_path) == []
    assert found_length(prompts, tokens) == 20
    assert prompts.has_state(tokens)


def test_a_longer_tail_replaces_the_file_of_a_shorter_one(tmp_path):
    tokens = history(1, 3)
    filled(tmp_path, tokens[:70])
    assert len(files(tmp_path)) == 3
    filled(tmp_path, tokens[:80])
    assert len(files(tmp_path)) == 3
    _, prompts = opened(tmp_path)
    assert found_length(prompts, tokens) == 80


def test_a_tail_that_is_replaced_while_it_waits_is_not_written(tmp_path):
    cache, prompts = opened(tmp_path)
    cache.set_busy(True)
    tokens = history(1, 3)
    for n in (70, 80, 90):
        add_history(prompts, tokens[:n], SIZE)
    assert cache.n_unwritten == 3 * SIZE
    cache.close()
    assert len(files(tmp_path)) == 3


def test_the_limit_holds_and_the_least_recently_used_end_goes_first(tmp_path):
    filled(tmp_path, history(1), history(2), limit=6 * FILE)
    cache, prompts = opened(tmp_path, 6 * FILE)
    prompts.find(history(1))
    add_history(prompts, history(3, 2), SIZE)
    cache.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 6 * FILE
    _, prompts = opened(tmp_path)
    lengths = [found_length(prompts, history(i)) // BLOCK for i in (1, 2, 3)]
    assert lengths[0] == 3
    assert lengths[2] == 2
    assert 1 <= lengths[1] < 3


def test_a_history_longer_than_the_limit_keeps_its_beginning(tmp_path):
    filled(tmp_path, history(1, 8), limit=4 * FILE)
    _, prompts = opened(tmp_path)
    n = found_length(prompts, history(1, 8)) // BLOCK
    assert 4 <= n < 8
    assert len(files(tmp_path)) == n


def test_an_entry_larger_than_the_limit_stays_in_memory(tmp_path):
    cache, prompts = opened(tmp_path, 4 * FILE)
    assert add_history(prompts, history(1, 1), 4 * FILE) == 1
    assert cache.n_unwritten == 0
    cache.close()
    assert files(tmp_path) == []
    assert found_length(prompts, history(1)) == BLOCK


def test_finding_marks_files_as_used_at_most_once_a_minute(tmp_path):
    filled(tmp_path, history(1))
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    cache, prompts = opened(tmp_path)
    prompts.find(history(1))
    wait_until(lambda: all(path.stat().st_mtime > 0 for path in files(tmp_path)))
    match = prompts.find(history(1))
    times = [
        next(tmp_path.glob(f"*/{each.entry.key.hex()}.prompt")).stat().st_mtime_ns for each in match.cells
    ]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    prompts.find(history(1))
    cache.close()
    assert all(path.stat().st_mtime == 0 for path in files(tmp_path))


def test_two_caches_share_a_folder(tmp_path):
    limit = 12 * FILE
    lines = []
    first, ours = opened(tmp_path, limit, lines)
    second, theirs = opened(tmp_path, limit, lines)
    for i in range(12):
        for cache, prompts in [(first, ours), (second, theirs)]:
            tokens = history(i if i % 3 else 100 + i % 2)
            found_length(prompts, tokens)
            add_history(prompts, tokens, SIZE)
            written(cache)
            assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    add_history(ours, history(500), SIZE)
    written(first)
    assert theirs.lacking(history(500)) == []
    assert found_length(theirs, history(500)) == 3 * BLOCK
    for path in files(tmp_path):
        path.unlink()
    fresh = history(501)
    assert [found_length(prompts, fresh) for prompts in (ours, theirs)] == [0, 0]
    first.close()
    second.close()
    assert lines == []


def test_a_file_that_vanishes_between_finding_and_reading_is_gone(tmp_path):
    filled(tmp_path, history(1))
    lines = []
    _, prompts = opened(tmp_path, log=lines)
    entry = prompts.find(history(1)).cells[1].entry
    for path in files(tmp_path):
        path.unlink()
    assert prompts.read(entry) is None
    assert prompts.lacking(history(1)) == [(0, 32), (32, 64), (64, 96)]
    assert lines == []


def test_a_full_memory_keeps_what_is_still_to_be_written(tmp_path):
    cache, prompts = opened(tmp_path, memory=4 * SIZE)
    cache.set_busy(True)
    assert add_history(prompts, history(1, 2), SIZE) == 2
    assert add_history(prompts, history(2, 2), SIZE) == 2
    assert cache.n_unwritten == 4 * SIZE
    # History 2 was used after history 1 and is not on disk, so that it is not dropped in favor of it.
    tokens = history(1, 3)
    assert not prompts.add_cells(tokens, 64, data_of(tokens, SIZE))
    cache.set_busy(False)
    written(cache)
    assert prompts.add_cells(tokens, 64, data_of(tokens, SIZE))
    assert cache._memory.n_bytes <= 4 * SIZE
    cache.close()
    assert [found_length(prompts, history(i)) for i in (1, 2)] == [96, 64]


def test_a_new_history_goes_before_older_ones_that_wait(tmp_path):
    cache, prompts = opened(tmp_path, memory=4 * SIZE)
    cache.set_busy(True)
    assert add_history(prompts, history(1, 4), SIZE) == 4
    assert add_history(prompts, history(2, 5), SIZE) == 4
    assert found_length(prompts, history(1)) == 0
    assert cache.n_unwritten == 4 * SIZE
    cache.close()
    assert len(files(tmp_path)) == 4


def test_what_is_on_disk_is_dropped_from_memory_first(tmp_path):
    cache, prompts = opened(tmp_path, memory=4 * SIZE)
    add_history(prompts, history(1, 2), SIZE)
    written(cache)
    cache.set_busy(True)
    add_history(prompts, history(2, 2), SIZE)
    prompts.find(history(1))
    assert add_history(prompts, history(3, 2), SIZE) == 2
    assert cache.n_unwritten == 4 * SIZE
    cache.close()
    assert [found_length(prompts, history(i, 2)) for i in (1, 2, 3)] == [64] * 3


def test_what_waits_is_not_dropped_for_a_copy_of_a_file(tmp_path):
    filled(tmp_path, history(1))
    cache, prompts = opened(tmp_path, memory=2 * SIZE)
    cache.set_busy(True)
    assert add_history(prompts, history(2, 2), SIZE) == 2
    assert found_length(prompts, history(1)) == 96
    assert cache.n_unwritten == 2 * SIZE
    cache.close()
    assert found_length(prompts, history(2)) == 64


def test_the_folder_is_listed_again_only_if_it_changed(tmp_path, monkeypatch):
    filled(tmp_path, history(1))
    files(tmp_path)[0].write_bytes(b"")
    (identity,) = tmp_path.iterdir()
    listed, read = [], []
    monkeypatch.setattr(os, "listdir", lambda path, f=os.listdir: listed.append(path) or f(path))

    def open_file(path, flags, *rest, f=os.open):
        if str(path).endswith(".prompt"):
            read.append(path)
        return f(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_file)
    _, prompts = opened(tmp_path)
    now = time.time()
    for age in (20, 20, 10, 10):
        os.utime(identity, (now - age, now - age))
        prompts.find(history(1))
    assert len(listed) == 2
    assert len(read) == 3  # the damaged one, too, only once
    filled(tmp_path, history(1), history(2))
    assert prompts.lacking(history(1)) == prompts.lacking(history(2)) == []


def test_nothing_is_written_while_busy(tmp_path):
    cache, prompts = opened(tmp_path)
    cache.set_busy(True)
    add_history(prompts, history(1), SIZE)
    time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    assert cache.n_unwritten == 3 * SIZE
    cache.set_busy(False)
    written(cache)
    assert len(files(tmp_path)) == 3
    cache.close()


class Writing:
    """Writes files in chunks, and calls `act` after each of them with the number of writes so far."""

    def __init__(self, act=lambda n: None, chunk_bytes=entry_file._CHUNK):
        self.act, self.n, self._chunk_bytes = act, 0, chunk_bytes

    def __call__(self, *arguments):
        *what, checkpoint = arguments

        def check():
            self.n += 1
            self.act(self.n)
            checkpoint()

        entry_file.write(*what, check, chunk_bytes=self._chunk_bytes)


def test_a_file_in_progress_waits_while_busy(tmp_path):
    stopped = threading.Event()

    def stop(n):
        if n == 3:
            cache.set_busy(True)
            stopped.set()

    writing = Writing(stop, chunk_bytes=100)
    cache, prompts = opened(tmp_path, write=writing)
    add_history(prompts, history(1, 1), SIZE)
    assert stopped.wait(20)
    time.sleep(0.05)
    assert writing.n == 3
    assert len(parts(tmp_path)) == 1
    cache.set_busy(False)
    written(cache)
    assert len(files(tmp_path)) == 1
    assert writing.n == 1 + SIZE // 100  # and the hash
    cache.close()
    assert parts(tmp_path) == []
    assert entry_file._CHUNK <= 4 << 20


def test_closing_writes_what_there_is_time_for_even_while_busy(tmp_path):
    cache, prompts = opened(tmp_path)
    cache.set_busy(True)
    add_history(prompts, history(1), SIZE)
    cache.close(0)
    cache.close()
    assert files(tmp_path) == parts(tmp_path) == []
    assert cache.n_unwritten == 0
    add_history(prompts, history(2), SIZE)  # in memory only
    assert cache.n_unwritten == 0
    assert found_length(prompts, history(2)) == 96
    cache, prompts = opened(tmp_path)
    cache.set_busy(True)
    add_history(prompts, history(1), SIZE)
    cache.close(20)
    assert len(files(tmp_path)) == 3
    assert not cache._writer._thread.is_alive()


def test_a_request_that_arrives_while_closing_does_not_hold_it_up(tmp_path):
    cache, prompts = opened(tmp_path, write=Writing(lambda n: cache.set_busy(True)))
    cache.set_busy(True)
    add_history(prompts, history(1), SIZE)
    cache.close(20)
    assert len(files(tmp_path)) == 3


def test_a_tail_that_is_replaced_while_it_is_written_is_abandoned(tmp_path):
    tokens = history(1, 3)
    filled(tmp_path, tokens[:64])
    writing = Writing(lambda n: n == 1 and add_history(prompts, tokens[:80], SIZE), chunk_bytes=100)
    cache, prompts = opened(tmp_path, write=writing)
    add_history(prompts, tokens[:70], SIZE)
    wait_until(lambda: writing.n > 1)
    cache.close()
    assert writing.n == 1 + 11
    assert len(files(tmp_path)) == 3
    assert found_length(opened(tmp_path)[1], tokens) == 80


def test_the_folder_is_cleared_while_a_file_is_written(tmp_path):
    lines = []
    cache, prompts = opened(tmp_path, log=lines, write=Writing(lambda n: n == 1 and folder.clear(tmp_path)))
    add_history(prompts, history(1, 1), SIZE)
    written(cache)
    assert files(tmp_path) == []
    add_history(prompts, history(2), SIZE)
    cache.close()
    assert len(files(tmp_path)) == 3
    assert lines == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_cannot_be_written_is_left_alone(tmp_path, code):
    def fail(n):
        raise OSError(code, os.strerror(code))

    lines = []
    cache, prompts = opened(tmp_path, log=lines, write=Writing(fail))
    cache.set_busy(True)
    add_history(prompts, history(1), SIZE)
    cache.set_busy(False)
    written(cache)
    wait_until(lambda: lines)
    add_history(prompts, history(2), SIZE)
    assert cache.n_unwritten == 0
    cache.close()
    assert len(lines) == 1
    assert os.strerror(code) in lines[0]
    assert files(tmp_path) == parts(tmp_path) == []
    assert [found_length(prompts, history(i)) for i in (1, 2)] == [96, 96]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "x").write_text("")
    lines = []
    filled(tmp_path / "x", history(1), log=lines)
    assert len(lines) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can write everywhere")
def test_a_folder_without_permission(tmp_path):
    filled(tmp_path, history(1))
    (identity,) = tmp_path.iterdir()
    identity.chmod(0o500)
    try:
        lines = []
        cache, prompts = opened(tmp_path, log=lines)
        assert found_length(prompts, history(1)) == 96
        add_history(prompts, history(2), SIZE)
        cache.close()
        assert len(lines) == 1
    finally:
        identity.chmod(0o700)


FULL_DISK = """
import os, sys
import numpy as np
from pathlib import Path
from spec_local.prompt_cache.cache import PromptCache
path, lines = Path(sys.argv[1]), []
cache = PromptCache(1 << 24, folder=path / "x", limit=1 << 30, log=lines.append)
prompts = cache.prompts("model", 64)
tokens = [1] * 64 * 20
for end in range(64, len(tokens) + 1, 64):
    assert prompts.add_cells(tokens[:end], end - 64, np.full(100_000, end // 64, np.uint8))
cache.close()
assert len(lines) == 1 and "No space left" in lines[0], lines
assert not list(path.rglob("*.part"))
cache = PromptCache(1 << 24, folder=path / "x", limit=1 << 30)
prompts = cache.prompts("model", 64)
found = prompts.find(tokens).cells
assert 5 <= len(found) < 11, len(found)
assert all((prompts.read(each.entry) == i + 1).all() for i, each in enumerate(found))
print("passed")
"""


def test_a_disk_that_is_really_full(tmp_path):
    """On a file system of 1 MB, in a name space where a user may mount one."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        if subprocess.run([*alone, mount], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    script = tmp_path.with_suffix(".py")
    script.write_text(FULL_DISK)
    done = subprocess.run(
        [*alone, f"{mount} && {sys.executable} {script} {tmp_path}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout == "passed\n", done.stderr


def test_show_and_clear(tmp_path):
    assert folder.usage(tmp_path / "none") == []
    assert folder.clear(tmp_path / "none") == 0
    filled(tmp_path, history(1), name="starter")
    cache = PromptCache(PLENTY, folder=tmp_path, limit=PLENTY)
    add_history(cache.prompts("other", BLOCK), history(1, 2), SIZE)
    cache.close()
    (tmp_path / "notes.txt").write_text("mine")
    n_bytes = sum(path.stat().st_size for path in files(tmp_path))
    shown = folder.usage(tmp_path)
    assert {(each.name, each.n_files) for each in shown} == {("starter", 3), ("", 2)}
    assert sum(each.n_bytes for each in shown) == n_bytes
    assert all(abs(each.last_used - time.time()) < 60 for each in shown)
    assert folder.clear(tmp_path) == n_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_cache_is_cleared_while_it_is_used(tmp_path):
    lines = []
    cache, prompts = opened(tmp_path, log=lines)
    add_history(prompts, history(1), SIZE)
    written(cache)
    folder.clear(tmp_path)
    assert found_length(prompts, history(1)) == 0
    add_history(prompts, history(2), SIZE)
    cache.close()
    assert len(files(tmp_path)) == 3
    assert lines == []


def test_the_default_limit_is_a_share_of_the_free_space(tmp_path, monkeypatch):
    for free, limit in [(1 << 30, (1 << 30) // 20), (1 << 40, 2 << 30)]:
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: os_usage(path, free))
        assert folder.default_limit(tmp_path / "not" / "there") == limit
    assert folder.default_folder().name == "prompts"


def os_usage(path, free):
    if not Path(path).exists():
        raise FileNotFoundError(path)
    return type("", (), {"free": free})


def test_a_file_holds_its_history(tmp_path):
    filled(tmp_path, history(1, 1))
    (path,) = files(tmp_path)
    content = path.read_bytes()
    assert content.startswith(b"specdec prompt 1\n")
    assert len(content) < FILE
    assert tokens_of(data_of(history(1, 1))) == history(1, 1)
