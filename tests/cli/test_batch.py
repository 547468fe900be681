"""`specdec generate --input`: many prompts, and interruptions and failures of a long run."""

import json
import os
import signal

import pytest

from tests.waiting import wait_until

PROMPTS = [f"what is number {n}" for n in range(6)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def arguments(main, prompts, tmp_path):
    common = ["--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "--seed", 3, "--input", prompts]
    return ["generate", *common, "-n", 8, "-o", tmp_path / "answers.jsonl"]


def records(tmp_path):
    """The results by index; none occurs twice."""
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_bytes().splitlines()]
    assert len({record["index"] for record in found}) == len(found)
    return sorted(found, key=lambda record: record["index"])


def contents(tmp_path):
    return [record["content"] for record in records(tmp_path)]


def test_answers_are_those_of_single_runs(inside, main, arguments, tmp_path):
    done = inside(*arguments, "--parallel", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    found = records(tmp_path)
    assert [r["index"] for r in found] == list(range(6))
    alone = ["generate", "--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "-n", 8]
    (single,) = inside(*alone, "--seed", found[4]["seed"], "--json", PROMPTS[4]).stdout.splitlines()
    assert json.loads(single)["content"] == found[4]["content"]
    again = inside(*arguments, "-v")
    assert b"all 6 prompts are already answered in" in again.stderr
    assert records(tmp_path) == found


def test_kills_lose_and_repeat_no_answer(specdec, inside, arguments, tmp_path):
    path = tmp_path / "answers.jsonl"
    resumable = [*arguments, "--parallel", 2, "--reproducible", "-n", 120]
    before = b""
    for n in (1, 3):
        with specdec.start(*resumable) as process:
            wait_until(lambda n=n: path.exists() and path.read_bytes().count(b"\n") >= n)
            process.kill()
        now = path.read_bytes()
        assert now.startswith(before[: before.rfind(b"\n") + 1])
        before = now
        path.write_bytes(now + b'{"index": 5, "id": nu')  # as a kill during a write leaves it
    assert inside(*resumable).returncode == 0
    assert [r["index"] for r in records(tmp_path)] == list(range(6))
    resumed = contents(tmp_path)
    path.unlink()
    assert inside(*resumable).returncode == 0
    assert contents(tmp_path) == resumed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


def test_a_stopped_run_can_be_resumed(specdec, inside, arguments, tmp_path):
    """Stopped by one signal, and after some more answers by another one."""
    path = tmp_path / "answers.jsonl"
    kept = b""
    for signum, code, n in ((signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 3)):
        with specdec.start(*arguments, "-n", 800, "--parallel", 2) as process:
            wait_until(lambda n=n: path.exists() and path.read_bytes().count(b"\n") >= n)
            process.send_signal(signum)
            _, err = process.communicate(timeout=20)
        assert process.returncode == code
        n_found = len(records(tmp_path))
        assert n <= n_found < 6
        again = "run the same command again to resume"
        assert err.decode() == f"stopped after {n_found} of 6 prompts; {again}\n"
        assert path.read_bytes().startswith(kept)
        kept = path.read_bytes()
    assert inside(*arguments, "-n", 800).returncode == 0
    assert path.read_bytes().startswith(kept)
    assert len(records(tmp_path)) == 6


def test_prompts_in_utf_16(inside, arguments, prompts):
    prompts.write_bytes(prompts.read_text().encode("utf-16"))
    assert inside.one_line(inside(*arguments), 2).endswith("prompts.jsonl is UTF-16: save it as UTF-8")


def test_failed_prompts_are_counted_and_retried(inside, arguments, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 2000}) + "\n")
    for _ in range(2):
        assert "1 of 7 prompts failed" in inside.one_line(inside(*arguments), 1)
        assert [(r["index"], "error" in r) for r in records(tmp_path)] == [(n, n == 6) for n in range(7)]
    assert inside(*arguments, "--ctx", 8192).returncode == 0
    assert records(tmp_path)[6]["id"] == "long"
    assert "error" not in records(tmp_path)[6]


def test_everything_is_checked_before_the_first_answer(inside, arguments, prompts, tmp_path):
    for value in (0, 257):
        output = inside.one_line(inside(*arguments, "--parallel", value), 2)
        assert output == f"specdec: --parallel is {value}: give 1 to 255"
    with prompts.open("a") as file:
        file.write("oops\n")
    assert "absent.gguf" in inside.one_line(inside(*arguments, "--main", "absent.gguf"), 1)
    assert "prompts.jsonl, line 7: " in inside.one_line(inside(*arguments), 2)
    assert not (tmp_path / "answers.jsonl").exists()


def test_changed_settings_and_other_files_are_refused(inside, arguments, prompts, tmp_path):
    assert inside(*arguments).returncode == 0
    found, before = records(tmp_path), prompts.read_bytes()
    for more in (["--seed", 4], ["--raw"]):
        assert "written for another prompt 0" in inside.one_line(inside(*arguments, *more), 2)
    assert "line 1 is not an answer" in inside.one_line(inside(*arguments, "--output", prompts), 2)
    assert records(tmp_path) == found
    assert prompts.read_bytes() == before


def test_pipes(specdec, inside, main, prompts):
    options = ["generate", "--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "--input"]
    done = inside(*options, "-", "-n", 4, stdin=prompts.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == list(range(6))
    assert "standard input has no prompts" in inside.one_line(inside(*options, "-"), 2)
    with specdec.start(*options, prompts, "-n", 300) as process:
        assert json.loads(process.stdout.readline())["index"] in range(6)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk(inside, arguments):
    output = inside.one_line(inside(*arguments, "--output", "/dev/full"), 1)
    assert output.startswith("specdec: No space left on device: /dev/full: the disk is full, and what was")


def test_a_terminal_shows_progress_and_figures(inside, arguments):
    code, screen = inside.on_terminal(*arguments, "-n", 100)
    assert code == 0
    output = inside.plain(screen)
    for part in ("answering", "/6", "time left"):
        assert part in output
    assert "6 answers in" in output.splitlines()[-1]


def test_answers_at_the_same_time_are_those_of_one_after_the_other(inside, arguments, prompts, tmp_path):
    """And those that come first are written first, also if their prompts are the last ones."""
    lines = [{"prompt": text, "max_tokens": 60 if n == 0 else 8} for n, text in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "answers.jsonl"
    assert inside(*arguments, "--reproducible", "--parallel", 1).returncode == 0
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == list(range(6))
    alone = contents(tmp_path)
    path.unlink()
    assert inside(*arguments, "--reproducible", "--parallel", 3).returncode == 0
    order = [json.loads(line)["index"] for line in path.read_bytes().splitlines()]
    assert order.index(0) > order.index(1)
    assert contents(tmp_path) == alone
