"""specdec tune: its tables, the costs it stores, and its errors."""

import itertools
import json
import re
import time

import pytest

from spec_local.calibration.tuning import SIZES
from spec_local.llama import runtime

SMALL = ["--threads", 1, "--ctx", 256, "--rounds", 2]
NOISE = ("the times of ", "equal calls ", "calls of ", "other programs used ")
"""Beginnings of notes that depend on what else the machine does."""


def notes(done):
    return [line for line in done.stderr.decode().splitlines() if not line.startswith(NOISE)]


def rows(report, title):
    """The cells of a table below a heading, without its head."""
    lines = report.partition(f"## {title}")[2].splitlines()[2:]
    body = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in body][2:]


def test_tables(unmeasured, main, draft):
    done = unmeasured("tune", main, draft, *SMALL)
    assert done.returncode == 0, done
    report = done.stdout.decode()
    titles = re.findall("^## ([^:\n]*)", report, re.MULTILINE)
    assert titles == ["Main model", "Draft model", "Draft model", "Prompt lookup"]
    costs = rows(report, "Main model: milliseconds per call")
    assert [row[0] for row in costs] == ["1", "2", "3", "4", "5", "8", "12", "16", "32", "64"]
    assert all(0 <= float(ms) < 1000 for _, ms in costs)
    assert float(re.search(r"Prompts, in tokens/s: (\d+) with 1 thread\.", report)[1]) > 0
    share = float(re.search(r"A call of the draft model takes (\d+\.\d+) times as long", report)[1])
    assert share > 0
    *_, (rate, draft_length, gain) = rows(report, "Prompt lookup: expected speed-up")
    assert rate == "0.99"
    assert draft_length == "none" or 1 <= int(draft_length) <= 63
    assert float(gain) >= 1.0
    assert "\x1b" not in report
    measuring = [f"measuring {model}.gguf with 1 thread" for model in ("main", "draft")]
    assert notes(done) == measuring


def succeeded(done):
    assert done.returncode == 0, done
    return done.stdout.decode()


MANY = [word for n in range(1, 7) for word in ("--threads", n)]


def test_tables_fit_the_terminal(inside, main, draft):
    """Six numbers of threads do not fit into one table at 60 columns."""
    few = ["--ctx", 128, "--rounds", 1]
    _, screen = inside.on_terminal("tune", main, draft, *MANY, *few, env={"COLUMNS": ""}, width=60)
    seen = inside.plain(screen)
    report = seen[seen.index("# specdec tune") :]
    tables = [line for line in report.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert max(map(len, tables)) <= 60
    assert not [line for line in tables if "1 thread" in line and "6 threads" in line]
    assert all(f"{n} threads" in "".join(tables) for n in range(2, 7))
    wide = [line for line in report.splitlines() if len(line) > 60]
    assert all(line.startswith(("    specdec draft quantize ", "measuring ", *NOISE)) for line in wide)


def test_a_pipe_gets_whole_tables(inside, main):
    done = inside("tune", main, *MANY, "--ctx", 128, "--rounds", 1, env={"COLUMNS": "20"})
    (head,) = [line for line in done.stdout.decode().splitlines() if line.startswith("| tokens")]
    assert re.findall(r"\d threads?", head) == ["1 thread", *(f"{n} threads" for n in range(2, 7))]


def test_impossible_costs_are_reported_and_not_stored(unmeasured, main, monkeypatch):
    """Calls of 8 tokens, and no others, take 0.2 s more."""
    lib = runtime.library()
    decode = lib.llama_decode

    def slower(context, batch):
        time.sleep(0.2 if batch.n_tokens == 8 else 0.0)
        return decode(context, batch)

    monkeypatch.setattr(lib, "llama_decode", slower)
    lines = unmeasured("tune", main, *SMALL).stderr.decode().splitlines()
    assert (
        len([line for line in lines if re.match("the times of [0-9]+ of 19 call sizes are unclear", line)])
        == 3
    )
    impossible = "calls of (.*) tokens still seem slower than calls of twice as many, which is impossible"
    (found,) = filter(None, (re.match(impossible, line) for line in lines))
    assert "8" in found[1].split(", ")
    (path,) = unmeasured.folder.rglob("costs/*.json")
    seconds = json.loads(path.read_text())["seconds"]
    assert seconds["8"] <= seconds["16"] < 0.2


def test_sessions_use_the_costs_of_tune(unmeasured, main, draft):
    assert unmeasured("tune", main, draft, *SMALL).returncode == 0
    files = sorted(unmeasured.folder.rglob("costs/*.json"))
    stored = {(content := json.loads(path.read_text()))["model"]: content["seconds"] for path in files}
    assert sorted(stored) == ["draft.gguf", "main.gguf"]
    for seconds in stored.values():
        assert {int(size) for size in seconds} == set(SIZES)
    answer = ["generate", "--main", main, "--threads", 1, "-n", 4, "x"]
    for more in ([], ["--draft", draft]):
        assert unmeasured.notes(unmeasured(*answer, "--ctx", 256, *more)) == b""
    assert sorted(unmeasured.folder.rglob("costs/*.json")) == files
    assert unmeasured(*answer, "--ctx", 128).returncode == 0  # other settings, other costs
    (other,) = {*unmeasured.folder.rglob("costs/*.json")} - {*files}
    estimated = [bool(json.loads(path.read_text())["estimates"]) for path in (*files, other)]
    assert estimated == [False, False, True]


def test_all_devices_are_measured(unmeasured, main, draft, a_gpu):
    report = succeeded(unmeasured("tune", main, draft, *SMALL))
    assert re.findall("^# (.*)", report, re.MULTILINE) == ["specdec tune: metal", "specdec tune: cpu"]
    costs = sorted(unmeasured.folder.rglob("costs/*.json"))
    assert len(costs) == 4
    plain, drafts = report.partition("## Device\n")[2].replace("\n", " ").split(". ")[:2]
    assert plain.strip().startswith("Plain decoding is fastest on ")
    assert drafts.strip().startswith("With drafts: ")
    answer = ["--main", main, "--draft", draft, "--threads", 1, "-n", 2, "x"]
    assert b"measuring" not in unmeasured("generate", "--ctx", 256, *answer).stderr
    assert sorted(unmeasured.folder.rglob("costs/*.json")) == costs
    first_use = (
        f"measuring {main.name} and {draft.name} on metal and on the CPU (first use with these settings)"
    )
    assert first_use in unmeasured("generate", "--ctx", 128, *answer).stderr.decode()
    for device in ("cpu", "metal"):
        done = unmeasured("generate", "--ctx", 64, "--device", device, *answer)
        assert b"measuring" not in done.stderr
    for given in (["--device", "cpu"], ["--device", "gpu"], ["--gpu-layers", -1]):
        report = succeeded(unmeasured("tune", main, *given, *SMALL))
        assert re.findall("^#+ (Device|specdec.*)", report, re.MULTILINE) == ["specdec tune"]


def test_several_numbers_of_threads_without_a_draft(inside, main):
    done = inside("tune", main, "--threads", 2, "--threads", 1, "--threads", 2, "--ctx", 256, "--rounds", 1)
    assert notes(done) == ["measuring main.gguf with 1 thread", "measuring main.gguf with 2 threads"]
    report = done.stdout.decode()
    assert report.count("←") == 1
    assert {len(row) for row in rows(report, "Main model: milliseconds per call")} == {3}
    assert "Prompt lookup" in report
    assert "Draft model" not in report


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ("absent.gguf", 1, "absent.gguf does not exist"),
        ("main.gguf absent.gguf", 1, "absent.gguf does not exist"),  # before the main model is measured
        ("bad.gguf", 1, "bad.gguf cannot be loaded"),
        ("main.gguf --threads 0", 2, "threads is 0: give 1 to 512"),
        ("main.gguf --threads 1 --threads 513", 2, "threads is 513: give 1 to 512"),
        ("main.gguf --ctx 0", 2, "ctx is 0: give 1"),
    ],
)
def test_what_cannot_be_tuned(inside, main, tmp_path, arguments, code, what):
    (tmp_path / "main.gguf").symlink_to(main)
    (tmp_path / "bad.gguf").write_bytes(main.read_bytes()[:20000])
    assert what in inside.one_line(inside("tune", *arguments.split(), cwd=tmp_path), code)


def test_a_tiny_context(inside, main):
    done = inside("tune", main, "--threads", 1, "--ctx", 1, "--rounds", 1)
    assert done.returncode == 0, done
    last = rows(done.stdout.decode(), "Prompt lookup: expected speed-up")[-1]
    assert last == ["0.99", "none", "1.00"]  # no room for draft tokens
