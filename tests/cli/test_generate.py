"""Test specdec generate: its output, errors and exit codes."""

import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import pexpect
import pytest

from spec_local.core.sampling import SamplingSettings
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings
from specdec_cli import terminal

GREEDY = ["--temp", "0", "--threads", "1", "--ctx", "256"]


def options(main, n=24):
    return ["generate", "--main", main, "-n", n, *GREEDY]


@pytest.fixture
def library_text(main, monkeypatch):
    """Generate the same answer with the library, as bytes."""
    monkeypatch.setattr("spec_local.answers.loading.check_model_file", lambda *args, **kwargs: None)

    def text(prompt, n):
        with Session.open(main, threads=1, n_ctx=256) as session:
            settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=n, proposer="none")
            events = session.generate(prompt, settings)
            answer = "".join(e.text for e in events if isinstance(e, (Text, Done)))
        return answer.encode("utf-8", "surrogateescape")

    return text


def test_stdout_is_the_answer_and_stderr_is_empty(specdec, main, library_text):
    done = specdec(*options(main), "--raw", "hello there")
    expected = library_text("hello there", 24)
    assert len(expected) > 24
    assert hashlib.sha256(done.stdout).hexdigest() == hashlib.sha256(expected).hexdigest()
    assert done.stderr == b""
    assert done.returncode == 0


def test_invalid_utf8_is_written_unchanged(specdec, main, library_text):
    # A long answer of the tiny model has all kinds of single bytes; the locale must not matter.
    expected = library_text("bytes", 200)
    with pytest.raises(UnicodeDecodeError):
        expected.decode("utf-8")
    done = specdec(*options(main, 200), "--raw", "bytes", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert done.stdout == expected


def test_statistics_name_the_proposers(inside, main, draft):
    def line(*arguments):
        return inside(*options(main), *arguments, "-v", "hello").stderr.decode().splitlines()[-1]

    fixed = line("--draft", draft, "--policy", "fixed")
    steps = int(fixed.split(" tokens in ")[1].split()[0])
    assert re.search(rf"· proposers: draft \d+ of {steps} steps$", fixed)
    assert "accepted" in fixed
    for arguments in (["--no-spec"], ["--draft", draft, "--policy", "off"]):
        assert "24 tokens in 24 steps" in line(*arguments)
        assert not re.search("proposers|draft tokens", line(*arguments))


def test_statistics_and_settings_go_to_stderr(inside, main):
    quiet = inside(*options(main), "hello")
    verbose = inside(*options(main), "hello", "-v", "--profile")
    assert verbose.stdout == quiet.stdout != b""
    notes = verbose.stderr.decode()
    for part in ("tokens/s", "first token", "24 tokens in", "main.gguf", "ms per step"):
        assert part in notes
    build = r"^llama\.cpp \(llama-cpp-python \d+(\.\d+)+\) · (?!OPENMP)[A-Z]+ · 1 thread · \w+( \w+)*$"
    assert re.search(build, notes, re.MULTILINE)
    assert "\x1b" not in notes


def test_the_first_use_reports_checking_and_measuring(fresh, main):
    first, second = (fresh(*options(main, 4), "x") for _ in range(2))
    assert first.stderr.splitlines() == [
        b"checking main.gguf (first use on this machine)",
        b"measuring main.gguf (first use with these settings)",
    ]
    assert second.stderr == b""
    assert first.stdout == second.stdout


def test_costs_are_measured_only_if_needed(fresh, main, draft):
    for arguments in (["--no-spec"], ["--policy", "off"], ["--policy", "fixed"], ["--draft-max", "0"]):
        assert b"measuring" not in fresh(*options(main, 4), "--draft", draft, *arguments, "x").stderr
    notes = fresh(*options(main, 4), "--draft", draft, "x").stderr.splitlines()
    assert sorted(notes) == [
        b"measuring %s (first use with these settings)" % name for name in (b"draft.gguf", b"main.gguf")
    ]


def test_an_unwritable_cache_folder(specdec, main):
    env = {"XDG_CACHE_HOME": "/dev/null/cache", "HOME": "/dev/null"}
    first, second = (specdec(*options(main, 4), "x", env=env) for _ in range(2))
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout != b""
    assert first.stderr == second.stderr  # checked and measured each time
    assert len(first.stderr.splitlines()) == 2


def test_a_shorter_trained_context_is_reported_only_with_a_larger_ctx(inside, tmp_path):
    path = write_tiny_model(tmp_path / "short.gguf", n_layers=1, n_ctx=128)
    arguments = ["generate", "--main", path, "--threads", 1, "-n", 4, "x"]
    inside(*arguments)  # checks it
    assert inside(*arguments).stderr == b""
    assert b"context: 128 tokens" in inside(*arguments, "--ctx", 4096).stderr


def test_piped_text_precedes_the_argument(inside, main, tmp_path):
    whole = inside(*options(main), "--raw", "some text\nof two lines\n\nand a question")
    piped = inside(*options(main), "--raw", "and a question", stdin=b"some text\nof two lines\n")
    assert piped.stdout == whole.stdout
    (tmp_path / "prompt.txt").write_bytes(b"some text\nof two lines\n")
    from_file = inside(*options(main), "--raw", "-f", tmp_path / "prompt.txt", "and a question")
    assert from_file.stdout == whole.stdout
    assert inside(*options(main), "--raw", "and a question").stdout != whole.stdout
    only_pipe = inside(*options(main), "--raw", stdin=b"some text\nof two lines\n\nand a question\n")
    assert only_pipe.stdout == whole.stdout


def test_system_message_and_template_change_the_answer(inside, main):
    answers = [
        inside(*options(main), *more, "hello").stdout for more in ([], ["--system", "Be brief."], ["--raw"])
    ]
    assert len(set(answers)) == 3
    error = inside.one_line(inside(*options(main), "--raw", "--system", "Be brief.", "hello"), 2)
    assert "--system" in error


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [([], b""), ([""], b""), ([" \n"], b"\n\n"), (["-f", os.devnull], b"unread")],
    ids=["none", "empty", "blank", "empty file"],
)
def test_no_prompt(inside, main, arguments, stdin):
    assert "no prompt" in inside.one_line(inside(*options(main), *arguments, stdin=stdin), 2)


def test_input_that_is_not_utf8(inside, main, tmp_path):
    latin = "Größe".encode("latin-1")
    error = inside.one_line(inside(*options(main), "x", stdin=latin), 2)
    assert "standard input is not UTF-8 (byte 2)" in error
    (tmp_path / "latin.txt").write_bytes(latin)
    error = inside.one_line(inside(*options(main), "-f", tmp_path / "latin.txt"), 2)
    assert "latin.txt is not UTF-8" in error


def test_an_unreadable_prompt_file(inside, main, tmp_path):
    assert "No such file" in inside.one_line(inside(*options(main), "-f", tmp_path / "absent"), 2)
    assert "larger than 16 MiB" in inside.one_line(inside(*options(main), "-f", "/dev/zero"), 2)
    assert "directory" in inside.one_line(inside(*options(main), "-f", tmp_path), 2)


def test_closed_stdout(specdec, main):
    assert "standard output is closed" in specdec.one_line(specdec.shell('"$@" >&-', *options(main), "x"), 1)


def test_closed_stderr_and_stdin_are_ignored(specdec, main):
    done = specdec.shell('"$@" 2>&- <&-', *options(main), "-v", "x")
    assert done.returncode == 0
    assert done.stdout == specdec(*options(main), "x").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_full_disk(specdec, main, more):
    done = specdec.shell('"$@" >/dev/full', *options(main), *more, "x")
    assert "No space left on device" in specdec.one_line(done, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_notes_that_cannot_be_written_are_ignored(specdec, main):
    done = specdec.shell('"$@" 2>/dev/full', *options(main), "-v", "x")
    assert done.returncode == 0
    assert done.stdout


def test_a_reader_that_closes_the_pipe(specdec, main):
    arguments = ["--main", main, "--threads", "1", "--ctx", "100000", "--no-spec", "x"]
    with specdec.start("generate", *arguments) as process:
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()  # as `| head -c 5` does
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0


def test_an_interrupt_keeps_the_answer_so_far(specdec, main):
    arguments = ["--main", main, "--temp", "0", "--threads", "1", "--ctx", "100000", "--no-spec", "x"]
    with specdec.start("generate", *arguments) as process:
        start = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        text = start + process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 130
    assert len(text) >= 5
    whole = specdec("generate", *arguments, "-n", len(text))  # a token has at least one byte
    assert whole.stdout.startswith(text)
    assert len(whole.stdout) > len(text) or len(text) < 20


def test_interrupt_while_a_model_is_checked(fresh, main, tmp_path):
    # A terminal's Ctrl-C also ends the checking child process, which is not the model's fault.
    env = fresh.sabotaged(
        tmp_path / "slow",
        "import sys, time\n"
        "if 'spec_local.llama.setup.probe' in sys.orig_argv:\n"
        "    print('started', file=open('started', 'w'))\n"
        "    time.sleep(60)\n",
    )
    with fresh.start(*options(main), "x", env=env, start_new_session=True) as process:
        deadline = time.monotonic() + 20
        while not (fresh.folder / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130
    assert out == b""
    assert err == b"checking main.gguf (first use on this machine)\n"


def truncated(path, main):
    path.write_bytes(main.read_bytes()[:20000])


def not_gguf(path, main):
    path.write_bytes(b"PK\x03\x04" + bytes(1000))


def header_only(path, main):
    path.write_bytes(b"GGUF")


def absurd_counts(path, main):
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**63 - 1).to_bytes(8, "little") * 2)


def crashing(path, main):
    write_tiny_model(path, n_layers=0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path, main: None, "does not exist"),
        (lambda path, main: path.touch(), "is empty"),
        (lambda path, main: path.mkdir(), "is a folder"),
        (not_gguf, "is not a GGUF file"),
        (truncated, "cannot be loaded"),
        (header_only, "cannot be loaded"),
        (absurd_counts, "cannot be loaded"),
        (crashing, "crashes llama.cpp"),
    ],
    ids=["missing", "empty", "folder", "not GGUF", "truncated", "header only", "absurd counts", "crashing"],
)
def test_an_unusable_model_file(specdec, main, tmp_path, make, what):
    make(tmp_path / "bad.gguf", main)
    error = specdec.one_line(specdec("generate", "--main", tmp_path / "bad.gguf", "x"), 1)
    assert "bad.gguf" in error
    assert what in error


def test_an_unusable_draft_file(specdec, main, tmp_path):
    truncated(tmp_path / "bad.gguf", main)
    error = specdec.one_line(specdec("generate", "--main", main, "--draft", tmp_path / "bad.gguf", "x"), 1)
    assert "bad.gguf" in error


def test_an_invalid_file_name(specdec):
    error = specdec.one_line(specdec("generate", "--main", "x" * 300, "hi"), 2)
    assert "there is no model or file" in error
    assert "too long" in specdec.one_line(specdec("generate", "--main", "x" * 300 + ".gguf", "hi"), 1)


def test_a_missing_starter_is_named(fresh):
    assert "specdec models pull starter" in fresh.one_line(fresh("generate", "hi"), 1)


def test_without_a_model_the_starter_pair_is_used(inside, main, draft, monkeypatch):
    found = {"starter": main, "starter-draft": draft}
    monkeypatch.setattr("spec_local.models.catalog.find", found.get)
    done = inside("generate", "hi", "--raw", "-n", "8", "--temp", "0", "--policy", "fixed", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["timings"]["steps_by"].get("draft")


def test_an_unknown_name_gets_similar_ones(specdec):
    error = specdec.one_line(specdec("chat", "--main", "qwen2.5-coder-7B", "--draft", "llama3"), 2)
    assert "similar names are qwen2.5-coder-7b" in error


def test_draft_model_with_a_different_vocabulary(inside, main, tmp_path):
    write_tiny_model(tmp_path / "a.gguf", n_layers=1, extra_tokens=["wine"])
    write_tiny_model(tmp_path / "b.gguf", n_layers=1, extra_tokens=["beer"])
    arguments = ["--main", tmp_path / "a.gguf", "--draft", tmp_path / "b.gguf", "hi"]
    arguments += ["--temp", "0", "-n", "12"]
    plain = inside("generate", *arguments, "--no-spec")
    assert plain.returncode == 0
    assert b"vocabulary" not in plain.stderr  # a draft model that is not used is not loaded
    done = inside("generate", *arguments, "--policy", "fixed", "-v")
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    assert b"draft model: different vocabulary, which covers" in done.stderr
    assert b"proposers: draft" in done.stderr


def test_prompt_longer_than_the_context(inside, main):
    error = inside.one_line(inside("generate", "--main", main, "--ctx", "32", "word " * 100), 1)
    assert "the context only 32" in error


def test_a_full_context_is_reported(inside, main):
    done = inside("generate", "--main", main, "--ctx", "64", "--threads", "1", "--raw", "x")
    assert done.returncode == 0
    assert b"the context of 64 tokens is full" in done.stderr
    assert done.stdout


def test_a_crashing_build_is_not_reported_as_a_bad_model(fresh, main, tmp_path):
    env = fresh.sabotaged(
        tmp_path / "sabotage",
        "import os, signal, sys\n"
        "if 'spec_local.llama.setup.probe' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n",
    )
    error = fresh.one_line(fresh(*options(main), "x", env=env), 1)
    assert "SIGILL" in error
    assert "specdec doctor" in error


def test_modules_in_the_working_folder_are_not_imported(fresh, main, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("json", "numpy", "spec_local"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    # like the installed script, without the working folder on the path
    command = [sys.executable, "-P", *fresh.command[1:], *map(str, options(main, 4)), "x"]
    done = _run(command, fresh, folder)
    assert done.returncode == 0, done.stderr
    assert b"wrong module" not in done.stderr


def _run(command, specdec, folder):
    return subprocess.run(
        command,
        env=specdec.environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def test_speculation_does_not_change_the_answer_at_temperature_0(inside, main, draft):
    plain_run = inside(*options(main, 40), "--no-spec", "--json", "a b a b a b")

    def run(*arguments, policy="fixed"):
        return inside(*options(main, 40), "--policy", policy, *arguments, "--json", "a b a b a b")

    runs = {
        "lookup": run(),
        "draft": run("--draft", draft),
        "token": run("--draft", draft, "--verifier", "token"),
        "confidence": run("--draft", draft, "--draft-p-min", "0.3", policy="confidence"),
        "adaptive": run("--draft", draft, policy="adaptive"),
        "adaptive lookup": run(policy="adaptive"),
    }
    for shape in ("tree", "beam", "auto"):
        arguments = ["--draft", draft, "--shape", shape, "--tree-nodes", 12, "--draft-max", 6]
        runs[shape] = run(*arguments, policy="adaptive" if shape == "auto" else "fixed")
    expected = json.loads(plain_run.stdout)
    assert expected["timings"]["draft_n"] == 0
    assert expected["timings"]["steps_n"] == 40
    for name, run in runs.items():
        answer = json.loads(run.stdout)
        assert answer["content"] == expected["content"], name
        if name not in ("lookup", "adaptive", "adaptive lookup", "auto"):
            assert answer["timings"]["draft_n"] > 0, name
        steps_by = answer["timings"]["steps_by"]
        assert sum(steps_by.values()) == answer["timings"]["steps_n"]
        # With such models drafting does not pay; lookups may.
        lookups = (
            {"suffix", "recycling"} if name in ("lookup", "adaptive", "adaptive lookup", "auto") else set()
        )
        drafts = (
            set() if "lookup" in name else {"draft", "tree"} if name in ("adaptive", "auto") else {"draft"}
        )
        assert set(steps_by) <= {"none"} | lookups | drafts
    assert expected["timings"]["steps_by"] == {"none": 40}
    timings = json.loads(runs["draft"].stdout)["timings"]
    assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
    assert timings["steps_n"] + timings["draft_n_accepted"] == timings["predicted_n"] == 40


def test_json_is_one_object(inside, main):
    text = inside(*options(main), "hello").stdout
    done = inside(*options(main), "--json", "hello")
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1
    assert done.stdout.endswith(b"}\n")
    answer = json.loads(done.stdout)
    assert answer["content"] == text.decode("utf-8", "replace")
    assert answer["model"] == "main.gguf"
    assert answer["stop_type"] == "limit"
    timings = answer["timings"]
    assert timings["predicted_n"] == 24
    assert timings["prompt_n"] > 0
    assert timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(24e3 / timings["predicted_ms"])
    assert timings["first_token_ms"] >= timings["prompt_ms"]


def test_json_of_an_interrupted_answer(specdec, main):
    arguments = ["--main", main, "--threads", "1", "--ctx", "100000", "--json", "-v", "x"]
    with specdec.start("generate", *arguments) as process:
        specdec.wait_for(process, b"llama.cpp")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 130
    assert json.loads(out)["stop_type"] == "none"


def test_seeds(inside, main, draft):
    def answer(seed, *options):
        arguments = [
            "generate",
            "--main",
            main,
            "--threads",
            "1",
            "--ctx",
            "256",
            "-n",
            "24",
            "--temp",
            "1.5",
        ]
        return inside(*arguments, "--seed", seed, *options, "x").stdout

    assert answer(1) == answer(1) != answer(2)
    assert answer(1, "--draft", draft) == answer(1, "--draft", draft)
    for seed in (1, 2):  # the same output with and without speculation
        plain = answer(seed, "--no-spec")
        assert plain == answer(seed) == answer(seed, "--draft", draft)
        for policy in ("fixed", "confidence"):
            assert answer(seed, "--draft", draft, "--policy", policy) == plain
        assert answer(seed, "--draft", draft, "--policy", "fixed", "--draft-max", 9) == plain


def test_reproducible_output_is_the_same_with_any_draft(inside, main, draft):
    def answer(*options):
        done = inside(
            "generate", "--main", main, "--reproducible", "--seed", 3, "-n", 30, *options, "Once upon a time"
        )
        assert done.returncode == 0, done
        return done.stdout

    plain = answer("--no-spec")
    assert answer("--draft", draft, "--policy", "fixed") == plain
    assert answer("--proposer", "suffix", "--draft-max", 9) == plain
    done = inside("generate", "--main", main, "--reproducible", "--verifier", "block", "x")
    assert "verifier exact-match" in inside.one_line(done, 2)


def test_stop_strings(inside, main, draft):
    whole = inside(*options(main, 60), "--raw", "stop here").stdout.decode("utf-8", "surrogateescape")
    letters = [i for i in range(20, len(whole) - 3) if whole[i : i + 3].isascii()]
    at = next(i for i in letters if whole.find(whole[i : i + 3]) == i)
    stop = whole[at : at + 3]
    for more in (["--no-spec"], ["--draft", draft, "--policy", "fixed", "--draft-max", "8"], []):
        done = inside(*options(main, 60), *more, "--raw", "--stop", "never this", "--stop", stop, "stop here")
        assert done.stdout.decode("utf-8", "surrogateescape") == whole[:at]
        assert done.stderr == b""


def test_logit_bias_forbids(inside, main):
    answer = json.loads(inside(*options(main, 1), "--json", "--raw", "x").stdout)["content"]
    banned = []
    while len(banned) < 3:  # forbid the most probable token each time
        with Session.open(main, threads=1, n_ctx=64) as session:
            settings = GenerationSettings(
                SamplingSettings(temperature=0, logit_bias={t: float("-inf") for t in banned}), max_tokens=1
            )
            (token,) = [t for e in session.generate("x", settings) if isinstance(e, Text) for t in e.tokens]
        banned.append(token)
    assert len(set(banned)) == 3
    biased = inside(*options(main, 1), "--raw", f"--logit-bias={banned[0]}=-inf", "--json", "x")
    assert json.loads(biased.stdout)["content"] != answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("colour", [True, False])
def test_terminal(specdec, main, colour):
    """The output ends with a newline on a terminal, and notes are dim unless NO_COLOR is set."""
    env = specdec.environment | ({} if colour else {"NO_COLOR": "1"})
    arguments = [*specdec.command[1:], *map(str, options(main)), "-v", "hello"]
    child = pexpect.spawn(specdec.command[0], arguments, env=env, cwd=str(specdec.folder), timeout=20)
    screen = child.read()
    child.close()
    assert child.exitstatus == 0
    assert (b"\x1b[2m" in screen) is colour
    assert (b"\x1b" in screen.replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b"")) is False
    answer = specdec(*options(main), "hello").stdout.decode("utf-8", "surrogateescape")
    shown = terminal.Prose()(answer + "\n").replace("\n", "\r\n")
    assert shown.encode() in screen.replace(b"\x1b[2m", b"")
    assert "tokens/s" in specdec.plain(screen.decode("utf-8", "replace"))


def test_no_files_are_left_in_the_working_folder(fresh, main, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    assert fresh(*options(main, 4), "x", cwd=work).returncode == 0
    assert list(work.iterdir()) == []
    results = list(tmp_path.glob("cache/specdec/checked-models/*")) or list(
        tmp_path.rglob("checked-models/*")
    )
    assert len(results) == 1
    assert stat.S_ISREG(results[0].stat().st_mode)


@pytest.mark.starter
def test_the_starter_answers(specdec):
    from spec_local.models import catalog

    starter = catalog.find("starter")
    assert starter, "the starter model is missing: run specdec models pull starter"
    arguments = ["--main", starter, "--temp", "0", "-n", "4", "--threads", "1", "--raw"]
    done = specdec("generate", *arguments, "The capital of France is", timeout=300)
    assert done.returncode == 0
    assert done.stdout.startswith(b" Paris")
