"""`specdec generate --input`: many prompts, and interruptions and failures of a long run."""

import json
import os
import signal
import time

import pexpect
import pytest

PROMPTS = [f"what is number {n}" for n in range(6)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def run(specdec, main, prompts, tmp_path):
    common = ["--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "--seed", 3, "--input", prompts]

    def arguments(*more, n=8):
        return ["generate", *common, "-n", n, "-o", tmp_path / "answers.jsonl", *more]

    return arguments


def records(tmp_path):
    """The results by index; none occurs twice."""
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_bytes().splitlines()]
    assert len({record["index"] for record in found}) == len(found)
    return sorted(found, key=lambda record: record["index"])


def wait_for_lines(path, n):
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < n:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_are_those_of_single_runs(specdec, main, run, tmp_path):
    done = specdec(*run("--parallel", 2))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    found = records(tmp_path)
    assert [r["index"] for r in found] == list(range(6))
    alone = ["generate", "--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "-n", 8]
    (single,) = specdec(*alone, "--seed", found[4]["seed"], "--json", PROMPTS[4]).stdout.splitlines()
    assert json.loads(single)["content"] == found[4]["content"]
    again = specdec(*run("-v"))
    assert b"all 6 prompts are already answered in" in again.stderr
    assert records(tmp_path) == found


def test_kills_lose_and_repeat_no_answer(specdec, run, tmp_path):
    path = tmp_path / "answers.jsonl"
    resumable = ["--parallel", 2, "--reproducible"]
    before = b""
    for n in (1, 2, 4):
        with specdec.start(*run(*resumable, n=300)) as process:
            wait_for_lines(path, n)
            process.kill()
        now = path.read_bytes()
        assert now.startswith(before[: before.rfind(b"\n") + 1])
        before = now
        path.write_bytes(now + b'{"index": 5, "id": nu')  # as a kill during a write leaves it
    done = specdec(*run(*resumable, n=300))
    assert done.returncode == 0
    assert [r["index"] for r in records(tmp_path)] == list(range(6))
    resumed = [r["content"] for r in records(tmp_path)]
    path.unlink()
    assert specdec(*run(*resumable, n=300)).returncode == 0
    assert [r["content"] for r in records(tmp_path)] == resumed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_can_be_resumed(specdec, run, tmp_path, signum, code):
    path = tmp_path / "answers.jsonl"
    with specdec.start(*run("--parallel", 2, n=900)) as process:
        wait_for_lines(path, 2)
        process.send_signal(signum)
        _, err = process.communicate(timeout=20)
        assert process.returncode == code
    found = records(tmp_path)
    assert 2 <= len(found) < 6
    assert err.decode() == f"stopped after {len(found)} of 6 prompts; run the same command again to resume\n"
    kept = path.read_bytes()
    assert specdec(*run(n=900)).returncode == 0
    assert path.read_bytes().startswith(kept)
    assert len(records(tmp_path)) == 6


def test_failed_prompts_are_counted_and_retried(specdec, run, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 2000}) + "\n")
    for _ in range(2):
        output = specdec.one_line(specdec(*run()), 1)
        assert "1 of 7 prompts failed" in output
        assert [(r["index"], "error" in r) for r in records(tmp_path)] == [(n, n == 6) for n in range(7)]
    assert specdec(*run("--ctx", 8192)).returncode == 0
    assert records(tmp_path)[6]["id"] == "long"
    assert "error" not in records(tmp_path)[6]


def test_everything_is_checked_before_the_first_answer(specdec, run, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write("oops\n")
    output = specdec.one_line(specdec(*run("--main", "absent.gguf")), 1)
    assert "absent.gguf" in output
    output = specdec.one_line(specdec(*run()), 2)
    assert "prompts.jsonl, line 7: " in output
    assert not (tmp_path / "answers.jsonl").exists()


def test_changed_settings_and_other_files_are_refused(specdec, run, prompts, tmp_path):
    assert specdec(*run()).returncode == 0
    found = records(tmp_path)
    assert "written for another prompt 0" in specdec.one_line(specdec(*run("--seed", 4)), 2)
    assert "written for another prompt 0" in specdec.one_line(specdec(*run("--raw")), 2)
    assert records(tmp_path) == found
    before = prompts.read_bytes()
    assert "line 1 is not an answer" in specdec.one_line(specdec(*run("--output", prompts)), 2)
    assert prompts.read_bytes() == before


def test_pipes(specdec, main, prompts):
    arguments = ["generate", "--main", main, "--threads", 1, "--ctx", 1024, "--no-spec", "-n", 4]
    specdec(*arguments, "--input", "-", stdin=prompts.read_bytes())  # measures the costs, and says so
    done = specdec(*arguments, "--input", "-", stdin=prompts.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == list(range(6))
    assert "standard input has no prompts" in specdec.one_line(specdec(*arguments, "--input", "-"), 2)
    with specdec.start(*arguments[:-1], 900, "--input", prompts) as process:
        assert json.loads(process.stdout.readline())["index"] in range(6)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk(specdec, run):
    output = specdec.one_line(specdec(*run("--output", "/dev/full")), 1)
    assert output == "specdec: No space left on device: /dev/full"


def test_a_terminal_shows_progress_and_figures(specdec, run):
    command = [*specdec.command, *map(str, run(n=100))]
    child = pexpect.spawn(command[0], command[1:], env=specdec.environment, timeout=30, encoding="utf-8")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    output = specdec.plain(child.before)
    assert "answering" in output
    assert "/6" in output
    assert "time left" in output
    assert "6 answers in" in output.splitlines()[-1]


def contents(tmp_path):
    return [record["content"] for record in records(tmp_path)]


def test_answers_at_the_same_time_are_those_of_one_after_the_other(specdec, run, prompts, tmp_path):
    """And those that come first are written first, also if their prompts are the last ones."""
    lines = [{"prompt": text, "max_tokens": 60 if n == 0 else 8} for n, text in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "answers.jsonl"
    assert specdec(*run("--reproducible", "--parallel", 1)).returncode == 0
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == list(range(6))
    alone = contents(tmp_path)
    path.unlink()
    assert specdec(*run("--reproducible", "--parallel", 3)).returncode == 0
    order = [json.loads(line)["index"] for line in path.read_bytes().splitlines()]
    assert order.index(0) > order.index(1)
    assert contents(tmp_path) == alone


@pytest.mark.parametrize("value", [0, -1, 257, 10**9])
def test_an_invalid_number_of_answers_at_the_same_time(specdec, run, tmp_path, value):
    output = specdec.one_line(specdec(*run("--parallel", value)), 2)
    assert output == f"specdec: --parallel is {value}: give 1 to 256"
    assert not (tmp_path / "answers.jsonl").exists()


def test_parallel_is_for_several_answers(specdec, main):
    output = specdec.one_line(specdec("generate", "--main", main, "--parallel", 2, "hello"), 2)
    assert "--parallel is for several answers" in output
