"""Damaged files of the prompt cache, and processes that are killed while they write."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_local.prompt_cache.entry_file import _MAGIC, Damaged, OtherVersion, _frame, read_entry
from tests.unit.test_prompt_cache import add_history, data_of, found_length, tokens_of
from tests.unit.test_prompt_cache_disk import BLOCK, SIZE, files, filled, history, opened, parts

ROUNDS = int(os.environ.get("PROMPT_CACHE_FUZZ", "26"))
KILLS = int(os.environ.get("PROMPT_CACHE_KILLS", "20"))
HISTORIES = [history(1, 4), [*history(1, 2), *history(2, 2), 5, 6], history(3, 2)]


def truncate(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(path, rng):
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 100])))


def flip(path, rng):
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 5])):
        at = rng.choice([rng.randrange(len(content)), rng.randrange(min(300, len(content)))])
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path, rng):
    at = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(min(rng.choice([1, 32, 512]), path.stat().st_size - at)))


def garbage(path, rng):
    path.write_bytes(rng.randbytes(rng.choice([0, 10, 1000])))


def another(path, rng):
    shutil.copyfile(rng.choice([*sorted(path.parent.glob("*.prompt")), __file__]), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def in_its_place(path, make):
    if not path.is_dir():
        path.unlink()
        make(path)


DAMAGES = {
    **{make.__name__: make for make in (truncate, extend, flip, zero, garbage, another)},
    "nothing": lambda path, rng: path.unlink(),
    "folder": lambda path, rng: in_its_place(path, Path.mkdir),
    "pipe": lambda path, rng: in_its_place(path, os.mkfifo),
    "endless device": lambda path, rng: in_its_place(path, lambda path: path.symlink_to("/dev/zero")),
    "link to itself": lambda path, rng: in_its_place(path, lambda path: path.symlink_to(path)),
    "link to nothing": lambda path, rng: in_its_place(path, lambda path: path.symlink_to("/none/such")),
    "unreadable": lambda path, rng: path.chmod(0),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    path = tmp_path_factory.mktemp("healthy") / "x"
    filled(path, *HISTORIES)
    cache, prompts = opened(path)
    for tokens in HISTORIES:
        prompts.add_state(tokens, data_of(tokens))
    cache.close()
    return path


def check_all(prompts):
    """Find and read everything; returns how many tokens have cells."""
    n = 0
    for tokens in HISTORIES:
        n += found_length(prompts, tokens)
        for entry, length in prompts.find(tokens).states:
            data = prompts.read(entry)
            assert data is None or tokens_of(data) == tokens[:length]
    return n


def damage_some(path, rng, kinds):
    for victim in rng.sample(files(path), rng.choice([1, 1, 3])):
        DAMAGES[rng.choice(kinds)](victim, rng)


@pytest.mark.parametrize("kind", [*DAMAGES, "any"])
def test_damaged_files_are_never_read_as_data(tmp_path, healthy, kind):
    kinds = list(DAMAGES) if kind == "any" else [kind]
    rng = random.Random(kind)
    complete = sum(len(tokens) for tokens in HISTORIES)
    for i in range(1 + ROUNDS // len(DAMAGES)):
        path, lines = tmp_path / str(i), []
        shutil.copytree(healthy, path)
        cache, prompts = opened(path, log=lines)
        if is_found_first := rng.random() < 0.5:
            for tokens in HISTORIES:
                prompts.find(tokens)
        damage_some(path, rng, kinds)
        check_all(prompts)
        assert len(lines) <= 2  # one for files that are listed, one for those that are read
        if kind == "nothing":
            assert lines == []
        if not is_found_first and kind in ("truncate", "garbage", "folder", "pipe"):
            assert len(lines) == 1
            assert "ignored" in lines[0]
        for _ in range(4):  # each finds one damaged file of a history, which is then replaced
            for tokens in HISTORIES:
                add_history(prompts, tokens, SIZE)
            assert check_all(prompts) <= complete
            cache.close()
            assert parts(path) == []
            cache, prompts = opened(path)
            n = check_all(prompts)
            if n == complete:
                break
        if kind not in ("folder", "unreadable", "any"):
            assert n == complete
        shutil.rmtree(path, ignore_errors=True)


def test_what_is_found_damaged_is_forgotten(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    lines = []
    cache, prompts = opened(tmp_path, log=lines)
    match = prompts.find(HISTORIES[0])
    for path in files(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])  # the header is right
    assert all(prompts.read(each.entry) is None for each in match.cells)
    assert prompts.lacking(HISTORIES[0]) == [(start, start + 32) for start in range(0, 128, 32)]
    assert len(lines) == 1
    assert "damaged" in lines[0]
    cache.close()


def test_a_folder_in_the_place_of_a_file(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    lines = []
    cache, prompts = opened(tmp_path, log=lines)
    entry = prompts.find(HISTORIES[2]).cells[1].entry
    (path,) = tmp_path.glob(f"*/{entry.key.hex()}.prompt")
    path.unlink()
    path.mkdir()
    assert prompts.read(entry) is None
    assert prompts.lacking(HISTORIES[2]) == [(32, 64)]
    add_history(prompts, HISTORIES[2], SIZE)
    add_history(prompts, history(9), SIZE)
    assert found_length(prompts, HISTORIES[2]) == 64
    cache.close()
    assert len(lines) == 1
    assert found_length(opened(tmp_path)[1], history(9)) == 96


def test_a_file_of_another_size_in_the_place_of_one_that_was_found(tmp_path):
    tokens = history(1, 1)
    for name, size in (("a", SIZE), ("b", 2 * SIZE)):
        cache, prompts = opened(tmp_path / name)
        prompts.add_cells(tokens, 0, data_of(tokens, size))
        cache.close()
    _, prompts = opened(tmp_path / "a")
    entry = prompts.find(tokens).cells[0].entry
    files(tmp_path / "b")[0].replace(files(tmp_path / "a")[0])
    assert prompts.read(entry) is None


def test_damage_is_seen_without_reading_the_data(tmp_path, healthy):
    """At each byte of the header and the tokens, in the size and in the name."""
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    path, other = files(tmp_path)[:2]
    facts = bytes.fromhex(path.parent.name), BLOCK
    content = path.read_bytes()
    n = len(_frame(read_entry(path, *facts), *facts))
    for damaged in [
        *(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(n)),
        *(content[:-1], content + b"x", other.read_bytes()),
    ]:
        path.write_bytes(damaged)
        with pytest.raises((Damaged, OtherVersion)):
            read_entry(path, *facts)
    path.write_bytes(content)
    assert read_entry(path, *facts).key.hex() == path.stem


def test_damaged_files_are_counted_in_one_line(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    for path in files(tmp_path)[:3]:
        path.write_bytes(b"")
    lines = []
    _, prompts = opened(tmp_path, log=lines)
    for _ in range(3):
        check_all(prompts)
    assert len(lines) == 1
    assert "3 damaged files are ignored" in lines[0]


def test_files_of_another_version_are_ignored_silently(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes().replace(_MAGIC, b"specdec prompt 2\n"))
    lines = []
    _, prompts = opened(tmp_path, log=lines)
    assert check_all(prompts) == 0
    assert lines == []


def test_left_over_files_are_removed(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    entry = files(tmp_path)[0]
    old, new = (entry.with_name(f".{entry.name}.{name}.part") for name in ("old", "new"))
    mine = entry.with_name(".mine.part")
    for path in (old, new, mine):
        path.write_bytes(b"x")
    for path in (old, mine):
        os.utime(path, (time.time() - 7200,) * 2)
    opened(tmp_path)
    assert set(parts(tmp_path)) == {new, mine}


KILLED = """
import os, random, signal, sys, time
import numpy as np
from pathlib import Path
from spec_local.prompt_cache.cache import PromptCache

path, n, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(7)
LIMIT = 40_000_000 + 3_000_000 * n  # what killed processes leave counts, too

def history(i):
    return [1] * 64 + [i] * 192

def write_for_ever(seed):
    try:
        cache = PromptCache(40_000_000, folder=path, limit=LIMIT)
        prompts = cache.prompts("model", 64)
        for k in range(30):
            for j, each in enumerate(prompts.find(history(k)).cells):
                data = prompts.read(each.entry)
                assert data is None or (data == (j and k)).all()
        for i in range(seed, 10**9):
            tokens = history(i % 30)
            for start, end in prompts.lacking(tokens):
                prompts.add_cells(tokens[:end], start, np.full(3_000_000, start and i % 30, np.uint8))
            while cache.n_unwritten:
                time.sleep(0.0001)
    finally:
        os._exit(1)

left = 0
for i in range(n):
    child = os.fork()
    if not child:
        write_for_ever(rng.randrange(30))
    time.sleep(rng.uniform(0.005, 0.12))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left += len(list(path.glob("*/.*")))
cache = PromptCache(40_000_000, folder=path, limit=LIMIT)
prompts = cache.prompts("model", 64)
read = [prompts.read(each.entry) for k in range(30) for each in prompts.find(history(k)).cells]
assert None not in [None if each is None else 0 for each in read]
print(left, len(read))
"""


def test_killed_processes_leave_no_wrong_data(tmp_path):
    """Each reads what those before it wrote, and is killed at a random moment."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "x", str(KILLS)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    n_left, n_read = map(int, done.stdout.split())
    print(f"{n_left} temporary files were left, {n_read} entries were read")
    assert n_read > 0


def test_the_histories_of_these_tests_have_blocks_and_tails():
    assert {len(tokens) % BLOCK for tokens in HISTORIES} == {0, 2}
