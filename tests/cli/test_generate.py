"""Test specdec generate: its output, errors and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from spec_local.core.sampling import SamplingSettings
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Session, Text
from spec_local.settings import GenerationSettings
from specdec_cli.terminal import Prose
from tests.cli.conftest import Specdec, folders
from tests.named_models import write_catalog
from tests.waiting import wait_until

GREEDY = ["--temp", "0", "--threads", "1", "--ctx", "256"]


def options(main, n=24):
    return ["generate", "--main", main, "-n", n, *GREEDY]


@pytest.fixture
def library_text(home, main, monkeypatch):
    """Generate the same answer with the library, as bytes."""
    for name, value in folders(home).items():
        monkeypatch.setenv(name, value)  # where the model is known to be usable

    def text(prompt, n):
        with Session.open(main, threads=1, n_ctx=256) as session:
            settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=n, proposer="none")
            events = session.generate(prompt, settings)
            answer = "".join(e.text for e in events if isinstance(e, Text))
        return answer.encode("utf-8", "surrogateescape")

    return text


def test_stdout_is_the_answer_and_stderr_is_empty(specdec, main, library_text):
    """Also where the answer is not UTF-8, in any locale."""
    expected = library_text("bytes", 200)
    with pytest.raises(UnicodeDecodeError):
        expected.decode("utf-8")
    done = specdec(*options(main, 200), "--raw", "bytes", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, specdec.notes(done)) == (0, expected, b"")


def test_one_of_something_is_no_plural(inside, main):
    notes = inside(*options(main, 1), "-v", "hello").stderr.decode()
    assert "1 token in 1 step (1.00 per step)" in notes
    assert "cut at 1 token: " in notes
    assert not re.search(r"(?<![\d.])1 (tokens|steps|threads|prompts|answers)\b", notes)
    (inside.folder / "one.txt").write_text("hello")
    batch = inside(*options(main, 1), "-v", "--input", "one.txt", "--output", "one.jsonl").stderr.decode()
    assert batch.startswith("1 answer in ")
    again = inside(*options(main, 1), "-v", "--input", "one.txt", "--output", "one.jsonl").stderr
    assert again == b"the prompt is already answered in one.jsonl\n"


def test_an_answer_that_is_cut_says_so(inside, main):
    cut = b"cut at 7 tokens: for the rest, give a larger -n, or leave it out\n"
    assert inside(*options(main, 7), "hello").stderr == cut
    assert inside(*options(main, 7), "--answers", 2, "hello").stderr.endswith(cut)
    assert inside(*options(main, 7), "--json", "hello").stderr == b""  # the object has it
    assert inside("run", main, "hello", "-n", 7, "-t", 1, "-c", 256).stderr == cut
    assert inside(*options(main, 7), "--json-schema", '{"const": 1}', "hello").stderr == b""  # it ended


def test_a_note_in_the_place_of_the_answer_begins_a_line(specdec, main):
    arguments = [*options(main, 7), "hello", "--no-newline"]
    cut = b"cut at 7 tokens: for the rest, give a larger -n, or leave it out\n"
    apart = specdec(*arguments)
    assert apart.stdout
    assert not apart.stdout.endswith(b"\n")
    assert apart.stderr == cut
    for script in ('"$@" 2>&1 | cat', '"$@" > both 2>&1; cat both', '"$@" > both 2>> both; cat both'):
        assert specdec.shell(script, *arguments).stdout == apart.stdout + b"\n" + cut
    assert specdec.shell('"$@" 2> note | cat; cat note', *arguments).stdout == apart.stdout + cut
    several = [*options(main, 7), "hello", "--answers", 2]
    lines = specdec.shell('"$@" 2>&1 | cat', *several).stdout  # which end their lines
    assert lines.endswith(b"\n" + cut)
    assert not lines.endswith(b"\n\n" + cut)


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


def test_the_first_use_reports_checking(fresh_inside, main):
    """And leaves no files in the working folder."""
    work = fresh_inside.folder / "work"
    work.mkdir()
    first, second = (fresh_inside(*options(main, 4), "x", cwd=work) for _ in range(2))
    assert fresh_inside.notes(first) == b"checking main.gguf (first use on this machine)\n"
    assert fresh_inside.notes(second) == b""
    assert first.stdout == second.stdout
    assert list(work.iterdir()) == []
    (result,) = fresh_inside.folder.rglob("checked-models/*")
    assert result.is_file()


def test_costs_are_kept_only_if_needed(unmeasured, main, draft):
    for arguments in (["--no-spec"], ["--policy", "off"], ["--policy", "fixed"], ["--draft-max", "0"]):
        assert not unmeasured.notes(unmeasured(*options(main, 4), "--draft", draft, *arguments, "x"))
        assert not list(unmeasured.folder.rglob("costs/*.json"))
    assert not unmeasured.notes(unmeasured(*options(main, 4), "--draft", draft, "x"))
    assert len(list(unmeasured.folder.rglob("costs/*.json"))) == 2


def test_an_unwritable_cache_folder(inside, main):
    done = inside(*options(main, 4), "x", env={"XDG_CACHE_HOME": "/dev/null/cache", "HOME": "/dev/null"})
    assert (done.returncode, done.stdout) == (0, inside(*options(main, 4), "x").stdout)
    assert len(inside.notes(done).splitlines()) == 1  # checked


NO_HOME = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""


@pytest.mark.parametrize(
    "arguments",
    [["config", "path"], ["models", "list", "--local"], ["generate", "--main", "main.gguf", "x"], ["chat"]],
    ids=lambda arguments: arguments[0],
)
def test_a_user_without_a_home_directory(specdec, main, tmp_path, arguments):
    """As in a container whose user id is not in its passwd file."""
    kept = {name: value for name, value in specdec.environment.items() if not name.startswith("XDG_")}
    without = kept | specdec.sabotaged(tmp_path / "site", NO_HOME) | {"TMPDIR": str(tmp_path)}
    del without["HOME"]
    work = tmp_path / "work"
    work.mkdir()
    os.link(main, work / "main.gguf")
    if arguments[0] == "chat":
        arguments = [*arguments, "--main", "main.gguf"]
    short = [] if arguments[0] in ("config", "models") else ["-n", 4, *GREEDY]
    done = Specdec(work, without)(*arguments, *short, stdin=b"hello\n")
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done
    assert done.stdout
    assert [path.name for path in work.iterdir()] == ["main.gguf"]
    private = tmp_path / f"specdec-{os.getuid()}"
    if arguments[0] == "config":
        assert done.stdout.decode() == f"{private}/config/config.toml\n"
    if arguments[0] == "generate":
        assert list((private / "cache/checked-models").iterdir())


def test_a_shorter_trained_context_is_reported_only_with_a_larger_ctx(inside, tmp_path):
    path = write_tiny_model(tmp_path / "short.gguf", n_layers=1, n_ctx=128)
    arguments = ["generate", "--main", path, "--threads", 1, "-n", 4, "x"]
    inside(*arguments)  # checks it
    assert inside.notes(inside(*arguments)) == b""
    assert b"context: 128 tokens" in inside(*arguments, "--ctx", 4096).stderr


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


LATIN = "Größe".encode("latin-1")


@pytest.mark.parametrize(
    ("file", "stdin", "why"),
    [
        (None, LATIN, "standard input is not UTF-8 (byte 2)"),
        (None, "Größe".encode("utf-16"), "standard input is UTF-16: save it as UTF-8"),
        ("latin.txt", b"", "latin.txt is not UTF-8"),
        ("absent", b"", "No such file"),
        ("/dev/zero", b"", "larger than 16 MiB"),
        (".", b"", "directory"),
    ],
    ids=["stdin not UTF-8", "stdin UTF-16", "file not UTF-8", "missing", "endless", "folder"],
)
def test_a_prompt_that_cannot_be_read(inside, main, tmp_path, file, stdin, why):
    (tmp_path / "latin.txt").write_bytes(LATIN)
    source = ["-f", tmp_path / file] if file else ["x"]
    assert why in inside.one_line(inside(*options(main), *source, stdin=stdin), 2)


def test_closed_stdout(specdec, main):
    assert "standard output is closed" in specdec.one_line(specdec.shell('"$@" >&-', *options(main), "x"), 1)


def test_closed_stderr_and_stdin_are_ignored(specdec, inside, main):
    done = specdec.shell('"$@" 2>&- <&-', *options(main), "-v", "x")
    assert done.returncode == 0
    assert done.stdout == inside(*options(main), "x").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_disk(specdec, main):
    done = specdec.shell('"$@" >/dev/full', *options(main), "--json", "x")
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
        wait_until((fresh.folder / "started").exists)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    assert err == b"checking main.gguf (first use on this machine)\n"


UNUSABLE = {
    "missing": (lambda path, main: None, "does not exist"),
    "empty": (lambda path, main: path.touch(), "is empty"),
    "folder": (lambda path, main: path.mkdir(), "is a folder"),
    "not GGUF": (lambda path, main: path.write_bytes(b"PK\x03\x04" + bytes(1000)), "is not a GGUF file"),
    "truncated": (lambda path, main: path.write_bytes(main.read_bytes()[:20000]), "cannot be loaded"),
    "crashing": (lambda path, main: write_tiny_model(path, n_layers=0), "crashes llama.cpp"),
}


@pytest.mark.parametrize(
    ("role", "kind"),
    [*(("main", kind) for kind in UNUSABLE), ("draft", "missing"), ("draft", "truncated")],
)
def test_an_unusable_model_file(inside, main, tmp_path, role, kind):
    make, what = UNUSABLE[kind]
    make(tmp_path / "bad.gguf", main)
    arguments = ["--main", main, f"--{role}", tmp_path / "bad.gguf", "x"]  # the last of two --main counts
    error = inside.one_line(inside("generate", *arguments), 1)
    assert "bad.gguf" in error
    assert what in error


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["generate", "x"], 1, "specdec models pull starter"),
        (["generate", "x", "--main", "x" * 300], 2, "there is no model or file"),
        (["generate", "x", "--main", "x" * 300 + ".gguf"], 1, "too long"),
        (["chat", "--main", "qwen2.5-coder-7B", "--draft", "llama3"], 2, "names are qwen2.5-coder-7b"),
    ],
    ids=["no starter", "long name", "long path", "similar name"],
)
def test_a_model_that_is_not_here(inside, arguments, code, what):
    assert what in inside.one_line(inside(*arguments), code)


def starter_pair(folder, main, draft):
    """Environment variables of a user whose starter pair has been downloaded, and is these models."""
    data, models = folder / "data/specdec/models", {}
    data.mkdir(parents=True)
    for name, path in (("starter", main), ("starter-draft", draft)):
        (data / f"{name}.gguf").symlink_to(path)
        models[name] = {
            "file": f"{name}.gguf",
            "pypi": "toy==1",
            "size": path.stat().st_size,
            "sha256": "0" * 64,
        }
    write_catalog(folder / "config/specdec", models)
    return {"XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}


def test_without_a_model_the_starter_pair_is_used(inside, main, draft, tmp_path):
    command = ["generate", "hi", "--raw", "-n", "8", "--temp", "0", "--policy", "fixed", "--json"]
    done = inside(*command, env=starter_pair(tmp_path, main, draft))
    assert done.returncode == 0
    assert json.loads(done.stdout)["timings"]["steps_by"].get("draft")


def test_draft_model_with_a_different_vocabulary(inside, main, tmp_path):
    write_tiny_model(tmp_path / "a.gguf", n_layers=1, extra_tokens=["wine"])
    write_tiny_model(tmp_path / "b.gguf", n_layers=1, extra_tokens=["beer"])
    arguments = ["--main", tmp_path / "a.gguf", "--draft", tmp_path / "b.gguf", "hi"]
    arguments += ["--temp", "0", "-n", "12"]
    plain = inside("generate", *arguments, "--no-spec")
    assert plain.returncode == 0
    assert b"vocabulary" not in plain.stderr  # a draft model that is not used is not loaded
    done = inside("generate", *arguments, "--policy", "fixed", "-v")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert b"draft model: different vocabulary, which covers" in done.stderr
    assert b"proposers: draft" in done.stderr
    again = inside("generate", *arguments, "--policy", "fixed", "-v")
    assert b"different vocabulary" not in again.stderr  # said once
    assert b"proposers: draft" in again.stderr


def test_no_word_about_the_vocabulary_of_a_pair_that_was_chosen_by_its_name(inside, tmp_path):
    for name, extra in (("a", "wine"), ("b", "beer")):
        write_tiny_model(tmp_path / f"{name}.gguf", n_layers=1, extra_tokens=[extra])
    env = starter_pair(tmp_path, tmp_path / "a.gguf", tmp_path / "b.gguf")
    done = inside("generate", "hi", "-n", "8", "--temp", "0", "--policy", "fixed", "-v", env=env)
    assert done.returncode == 0
    assert b"proposers: draft" in done.stderr
    assert b"vocabulary, which" not in done.stderr


def test_one_line_about_a_draft_that_cannot_help(inside, main, tmp_path):
    write_tiny_model(tmp_path / "larger.gguf", n_layers=9)
    run = ["generate", "--main", main, "-n", 8, "--threads", 1, "--ctx", 256, "hi"]
    for draft, expected in (
        (
            main,
            "main and draft are the same file, so that drafting gains nothing: give a smaller draft, or none",
        ),
        (tmp_path / "larger.gguf", "is larger than the main model main.gguf"),
    ):
        done = inside(*run, "--draft", draft)
        assert done.returncode == 0
        assert done.stderr.decode().count(expected) == 1, done


def test_a_full_context_is_reported(inside, main):
    done = inside("generate", "--main", main, "--ctx", "64", "--threads", "1", "--raw", "x")
    assert done.returncode == 0
    assert b"the context of 64 tokens is full" in done.stderr
    assert done.stdout


def test_a_crashing_build_is_not_reported_as_a_bad_model(fresh_inside, main, tmp_path):
    env = fresh_inside.sabotaged(
        tmp_path / "sabotage",
        "import os, signal, sys\n"
        "if 'spec_local.llama.setup.probe' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n",
    )
    error = fresh_inside.one_line(fresh_inside(*options(main), "x", env=env), 1)
    assert "SIGILL" in error
    assert "specdec doctor" in error


def test_modules_in_the_working_folder_are_not_imported(specdec, main, tmp_path):
    for name in ("json", "numpy", "spec_local"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    # Like the installed script, without the working folder on the path.
    command = [sys.executable, "-P", *specdec.command[1:], *map(str, options(main, 4)), "x"]
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True}
    done = subprocess.run(command, env=specdec.environment, cwd=tmp_path, check=False, **streams)
    assert (done.returncode, specdec.notes(done)) == (0, b"")


LOOKUPS = {"none", "suffix", "recycling"}
TREE = ["--tree-nodes", 12, "--draft-max", 6]


@pytest.mark.parametrize(
    ("arguments", "proposers"),
    [
        (["--policy", "fixed"], LOOKUPS),
        (["--policy", "fixed", "--verifier", "token", "--draft"], {"draft"}),
        (["--policy", "confidence", "--draft-p-min", "0.3", "--draft"], {"draft"}),
        (["--policy", "fixed", "--shape", "beam", *TREE, "--draft"], {"draft"}),
        (["--policy", "adaptive", "--shape", "auto", *TREE, "--draft"], LOOKUPS | {"draft", "tree"}),
    ],
    ids=["lookups", "verifier token", "confidence", "beam", "adaptive"],
)
def test_speculation_does_not_change_the_answer_at_temperature_0(inside, main, draft, arguments, proposers):
    def run(*more):
        answer = json.loads(inside(*options(main, 40), *more, "--json", "a b a b a b").stdout)
        return answer["content"], answer["timings"]

    expected, plain = run("--no-spec")
    assert (plain["draft_n"], plain["steps_n"], plain["steps_by"]) == (0, 40, {"none": 40})
    content, timings = run(*arguments, *([draft] if arguments[-1] == "--draft" else []))
    assert content == expected
    assert set(timings["steps_by"]) <= {"none"} | proposers
    assert sum(timings["steps_by"].values()) == timings["steps_n"]
    assert timings["steps_n"] + timings["draft_n_accepted"] == timings["predicted_n"] == 40
    if proposers == {"draft"}:  # with such models drafting does not pay; lookups may
        assert 0 < timings["draft_n_accepted"] < timings["draft_n"]


def test_an_answer_in_a_pipe_ends_with_a_newline(inside, main):
    exact = inside(*options(main), "hello", "--no-newline")
    assert exact.returncode == 0
    assert exact.stdout
    assert not exact.stdout.endswith(b"\n")
    assert inside(*options(main), "hello").stdout == exact.stdout + b"\n"
    assert inside("run", main, "hello", *options(main)[3:]).stdout == exact.stdout + b"\n"
    echoed = inside(*options(main), "hello", "--echo").stdout
    assert echoed == b"hello\n\n" + exact.stdout + b"\n"
    # Text that goes on is exact, also with its beginning before it.
    continued = inside(*options(main), "--raw", "hello").stdout
    assert continued == inside(*options(main), "--raw", "hello", "--no-newline").stdout
    assert inside(*options(main), "--raw", "hello", "--echo").stdout == b"hello" + continued
    for more in ("--json", "--jsonl", "--answers=2", "--input=x"):
        line = inside.one_line(inside(*options(main), "--no-newline", more), 2)
        assert line.startswith("specdec: --no-newline has no effect here")


def test_no_second_newline(inside, main):
    """Where the answer itself ends with one, which a grammar can force."""
    (inside.folder / "newline.gbnf").write_text(r'root ::= "of\n"')
    done = inside(*options(main), "hello", "--grammar-file", "newline.gbnf")
    assert (done.returncode, done.stdout) == (0, b"of\n")
    assert inside(*options(main), "hello", "--grammar-file", "newline.gbnf", "--answers", 2).stdout == (
        b"of\n---\nof\n"
    )


def test_a_loop_that_reads_lines(specdec, main):
    """As in docs/generate.md: each answer is a line."""
    script = 'printf "a\\nb\\n" | while read -r line; do "$@" "Translate: $line" < /dev/null; done'
    lines = specdec.shell(script, *options(main, 2)).stdout.splitlines()
    one = specdec(*options(main, 2), "Translate: a").stdout.splitlines()
    assert len(lines) == 2 * len(one)
    assert lines[: len(one)] == one


def test_an_interrupted_answer_ends_its_line(specdec, main):
    process = specdec.start("generate", "--main", main, "--ctx", 65536, "hello")
    start = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert start
    assert out.endswith(b"\n")


def test_a_wait_for_standard_input_is_explained(specdec, main):
    """After a second, in all commands that read it; not where text comes at once, and not twice."""
    waits = b"waiting for the end of standard input: add < /dev/null if nothing is piped in\n"
    (specdec.folder / "hello.txt").write_text("hello")
    for arguments in (
        ["generate", "--main", main, "hi"],
        ["generate", "--main", main, "--file", "-", "hi"],
        ["generate", "--main", main, "--input", "-"],
        ["run", main, "hi"],
    ):
        command = [*specdec.command, *map(str, arguments), "-n", "1", "-t", "1", "-c", "256"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=specdec.environment,
            cwd=specdec.folder,
        )
        assert specdec.wait_for(process, b"waiting") == waits
        out, notes = process.communicate(b"more", timeout=30)
        assert (process.returncode, bool(out)) == (0, True)
        assert b"waiting" not in notes
    assert b"waiting" not in specdec(*arguments, "-n", 1, "-t", 1, "-c", 256, stdin=b"more").stderr


def test_typed_text_is_asked_for(terminal, main):
    person = terminal("--main", main, "--file", "-", "-n", 1, "-t", 1, "-c", 256, command="generate")
    person.until("waiting for the end of standard input: type the text, then press Ctrl-D")


def test_json_is_one_object(inside, main):
    text = inside(*options(main), "hello", "--no-newline").stdout
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


def test_seeds(inside, main, draft):
    def answer(seed, *more):
        sampled = ["generate", "--main", main, "--threads", 1, "--ctx", 256, "-n", 24, "--temp", 1.5]
        return inside(*sampled, "--seed", seed, *more, "x").stdout

    plain = answer(1, "--no-spec")
    assert answer(2, "--no-spec") != plain
    fixed = ["--draft", draft, "--policy", "fixed"]
    drafting = [[], ["--draft", draft], fixed, [*fixed, "--draft-max", 9], [*fixed[:3], "confidence"]]
    for more in drafting:  # the same output with and without speculation
        assert answer(1, *more) == plain, more


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


def test_logit_bias_forbids(inside, main):
    """Each run forbids the tokens that those before it chose."""
    chosen = []
    for _ in range(3):
        forbidden = [word for token in chosen for word in ("--logit-bias", f"{token}=-inf")]
        answer = json.loads(inside(*options(main, 1), *forbidden, "--json", "--raw", "x").stdout)
        chosen += answer["tokens"]
    assert len(set(chosen)) == 3


@pytest.mark.parametrize("colour", [True, False], ids=["colour", "NO_COLOR"])
def test_terminal(inside, main, colour):
    """Notes are dim unless NO_COLOR is set."""
    env = {} if colour else {"NO_COLOR": "1"}
    code, screen = inside.on_terminal(*options(main), "-v", "hello", env=env)
    assert code == 0
    assert ("\x1b[2m" in screen) is colour
    assert "\x1b" not in screen.replace("\x1b[2m", "").replace("\x1b[0m", "")
    answer = inside(*options(main), "hello").stdout.decode("utf-8", "surrogateescape")
    shown = Prose()(answer).replace("\n", "\r\n")
    assert shown in screen.replace("\x1b[2m", "")
    assert "tokens/s" in inside.plain(screen)


@pytest.mark.starter
def test_the_starter_answers(inside, starter_path):
    arguments = ["--main", starter_path, "--temp", "0", "-n", "4", "--threads", "1", "--raw"]
    done = inside("generate", *arguments, "The capital of France is")
    assert done.returncode == 0
    assert done.stdout.startswith(b" Paris")
