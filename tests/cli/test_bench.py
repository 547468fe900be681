"""specdec bench: reports, files, errors and interrupts."""

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import os
import re
import signal
import sys
import time

import pytest

from spec_local.bench import runner
from spec_local.llama import runtime
from spec_local.system.machine import default_threads

IGNORED = re.compile("(checking|measuring) .* \\(first use|other programs use ")
"""Notes about a new machine, and about one that is busy with other tests."""
PROMPTS = """\
{"category": "lists", "name": "words", "text": "one two three one two three one two"}
{"category": "lists", "name": "letters", "text": "a b c d a b c d a b"}
{"category": "prose", "name": "water", "text": "the water was very long after the day"}
"""


@pytest.fixture(scope="module")
def prompts(home):
    path = home / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


@pytest.fixture
def arguments(main, draft, prompts):
    """A benchmark of a second, with a fixed policy: the adaptive one would stop drafting for tiny models.

    With one run: otherwise the noise of the machine would decide how many there are.
    """
    models = ["--main", main, "--draft", draft, "--policy", "fixed", "--threads", 1, "--ctx", 512]
    return ["bench", *models, "--prompts", prompts, "-n", 16, "--runs", 1]


def notes(done):
    """The lines of standard error that a user of a quiet machine sees."""
    return [line for line in done.stderr.decode().splitlines() if not IGNORED.match(line)]


def next_note(process):
    """The next such line."""
    while IGNORED.match(line := process.stderr.readline().decode()):
        pass
    return line


def cells(report, start):
    """The cells of the only row of a Markdown report that starts with a text."""
    (row,) = [line for line in report.splitlines() if line.startswith(f"| {start} ")]
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_models_may_be_arguments(inside, prompts, main, draft):
    models = [main, draft, "--policy", "fixed", "--threads", 1, "--ctx", 512]
    done = inside("bench", *models, "--prompts", prompts, "--category", "list", "-n", 4, "--runs", 1)
    assert done.returncode == 0, done
    report = done.stdout.decode()
    assert "main.gguf" in report
    assert "draft.gguf" in report
    assert "1 category" in report
    assert "absent.gguf" in inside.one_line(inside("bench", main, "absent.gguf", "--prompts", prompts), 1)


def test_the_report(inside, arguments, main):
    done = inside(*arguments)
    assert done.returncode == 0, done
    assert notes(done) == []
    report = done.stdout.decode()
    digest = hashlib.sha256(main.read_bytes()).hexdigest()
    assert digest[:12] in report
    for part in ("main.gguf", "draft.gguf", "3 prompts of 2 categories, 1 run", "temperature 0", "1 thread,"):
        assert part in report
    speeds = [float(cells(report, name)[1].split()[0]) for name in ("lists", "prose", "**all**")]
    assert all(0.01 < speed < 100 for speed in speeds)
    assert min(speeds) <= speeds[2] <= max(speeds)
    assert "speculative: identical for all 3 prompts." in report
    assert "\x1b" not in report
    assert "█" not in report  # bars are for terminals only


def test_json_output_and_one_line_per_prompt(inside, arguments, main):
    done = inside(*arguments, "--runs", 2, "--format", "json", "-v")
    names = ["1/3 lists/words", "2/3 lists/letters", "3/3 prose/water"]
    assert [line.split(":")[0] for line in notes(done)] == names
    assert all("plain" in line and " ×, identical)" in line for line in notes(done))
    whole = json.loads(done.stdout)
    assert whole["record"]["models"]["main"]["sha256"] == hashlib.sha256(main.read_bytes()).hexdigest()
    facts = {"processor", "cores", "threads", "device", "llama_cpp", "cpu_kernels", "specdec", "date"}
    assert facts <= set(whole["record"])
    assert whole["settings"]["plain"]["sampling"]["temperature"] == 0
    assert whole["peak_memory_bytes"] > 1e7
    runs = [run for prompt in whole["prompts"] for run in prompt["runs"]]
    assert [(run["variant"], run["run"]) for run in runs] == [
        (variant, number) for _ in range(3) for variant in ("plain", "speculative") for number in (1, 2)
    ]
    for run in runs:
        statistics = run["statistics"]
        assert statistics["predicted_n"] == len(run["tokens"]) == 16
        assert statistics["cached_n"] == 0 < statistics["prompt_n"]  # every run reads its prompt again
        assert (statistics["draft_n"] > 0) == (run["variant"] == "speculative")
    plain, speculative = whole["variants"]
    assert plain["speedup"]["value"] == 1
    assert 0 < speculative["achieved"] <= 1
    assert speculative["theory"] == pytest.approx(speculative["speedup"]["value"] / speculative["achieved"])
    assert speculative["theory_error"] >= 0
    assert 0 < speculative["acceptance"] <= 1
    assert sum(speculative["shares"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            ["--proposers", "draft,lookup", "--sweep", "draft-max=1,3"],
            [f"{proposer} draft-max={n}" for proposer in ("draft", "lookup") for n in (1, 3)],
        ),
        (["--policies", "adaptive,off"], ["adaptive", "off"]),
        (["--sweep", "shape=chain,tree", "--sweep", "tree-nodes=6"], ["chain", "tree"]),
        (["--temp", 0.8, "--runs", 2, "--seed", 5], ["speculative"]),
    ],
    ids=["proposers and lengths", "policies", "shapes", "seeds"],
)
def test_no_variant_changes_the_answers(inside, arguments, options, names):
    done = inside(*arguments, *options, "--format", "json")
    assert done.returncode == 0, done
    whole = json.loads(done.stdout)
    _, *variants = whole["variants"]
    assert [variant["name"] for variant in variants] == names
    assert [variant["differences"] for variant in variants] == [[]] * len(names)
    plain = [run for prompt in whole["prompts"] for run in prompt["runs"] if run["variant"] == "plain"]
    # Each run of a prompt has another seed.
    assert len({run["text"] for run in plain}) == (6 if "--seed" in options else 3)
    for variant in variants:
        assert variant["theory"] is None or 0 < variant["achieved"] <= 1
        assert variant["draft_n"] == 0 or variant["name"] != "off"


def test_selected_and_skipped_prompts(inside, arguments, tmp_path):
    done = inside(*arguments, "--category", "lists", "--per-category", 1)
    assert "1 prompt of 1 category" in done.stdout.decode()
    lines = tmp_path / "lines.txt"
    lines.write_text("short\n" + "word " * 600 + "\n")
    done = inside(*arguments, "--prompts", lines)
    assert notes(done) == [
        "skipped because an answer of 16 tokens would not fit into the context of 512 tokens: lines/line-2"
    ]
    assert "1 prompt of 1 category" in done.stdout.decode()
    lines.write_text("word " * 600 + "\n")
    assert "no prompt fits into the context" in inside.one_line(inside(*arguments, "--prompts", lines), 2)


def test_a_conversation(inside, arguments, tmp_path):
    path = tmp_path / "mt_bench.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["one two one two", "a b a b"], "x": 1}\n'
        '{"question_id": 82, "category": "", "turns": ["one two"]}\n'
    )
    done = inside(*arguments, "--prompts", path, "--format", "json", "-v")
    names = ["1/3 writing/81", "2/3 writing/81 turn 2", "3/3 mt_bench/82"]
    assert [line.split(":")[0] for line in notes(done)] == names
    whole = json.loads(done.stdout)
    assert (whole["prompts_done"], whole["prompts_wanted"]) == (3, 3)
    assert whole["variants"][1]["differences"] == []
    lengths = [[run["statistics"]["prompt_n"] for run in each["runs"]] for each in whole["prompts"]]
    assert all(len(set(each)) == 1 for each in lengths)  # plain and speculative have the same prompt
    assert lengths[1][0] > lengths[0][0] + 16  # the first turn, its answer, and the second turn
    some = inside(*arguments, "--prompts", path, "--ctx", 256, "-n", 120)
    assert notes(some)[0].endswith(" tokens: writing/81")  # the first turn alone would fit
    assert "1 prompt of 1 category" in some.stdout.decode()
    batch = inside(*arguments, "--prompts", path, "--ctx", 256, "-n", 120, "--parallel", 1)
    assert notes(batch) == ["--parallel measures the first turn of each conversation only"]
    assert "2 prompts of 2 categories" in batch.stdout.decode()


KINDS = ["start", *["run", "run", "prompt"] * 2, "summary"]
FORMATS = {
    "md": lambda text: "## Conclusion" in text,
    "csv": lambda text: len(text.splitlines()) == 1 + 2 * 2,
    "json": lambda text: json.loads(text)["prompts_done"] == 2,
    "jsonl": lambda text: [json.loads(line)["type"] for line in text.splitlines()] == KINDS,
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats_of_a_file_and_of_standard_output(inside, arguments, tmp_path, form):
    some = [*arguments, "--per-category", 1]
    assert FORMATS[form](inside(*some, "--format", form).stdout.decode())
    out = tmp_path / "new" / f"result.{form}"
    done = inside(*some, "--output", out)
    assert done.returncode == 0, done
    assert done.stdout.startswith(b"# specdec bench\n")
    assert FORMATS[form](out.read_text())
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_json_lines_are_appended_to_a_file(inside, arguments, tmp_path):
    for _ in range(2):
        inside(*arguments, "--per-category", 1, "-o", tmp_path / "result.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == KINDS * 2
    assert [variant["name"] for variant in lines[-1]["variants"]] == ["plain", "speculative"]


def test_the_suffix_decides_about_the_file(inside, arguments, tmp_path):
    """--format about standard output, and about files without a suffix, also behind a link."""
    some = [*arguments, "--per-category", 1]
    both = tmp_path / "both.csv"
    assert json.loads(inside(*some, "-o", both, "--format", "json").stdout)["prompts_done"] == 2
    assert both.read_text().startswith("category,name,variant")
    (named := tmp_path / "csv").write_text("earlier content")
    (link := tmp_path / "link").symlink_to(named)
    assert inside(*some, "-o", link, "--format", "csv").stdout.startswith(b"# specdec bench\n")
    assert named.read_text().startswith("category,name,variant")
    assert link.is_symlink()
    assert inside(*some, "--output=~/r.MD", env={"HOME": str(tmp_path / "home")}).returncode == 0
    assert (tmp_path / "home" / "r.MD").read_text().startswith("# specdec bench\n")
    error = inside.one_line(inside(*some, "-o", "csv", cwd=tmp_path), 2)
    assert "the format of csv is unknown" in error  # not taken for a format, as the file exists


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_the_file_is_complete_even_if_standard_output_fails(specdec, arguments, tmp_path):
    out = tmp_path / "result.md"
    done = specdec.shell('"$@" > /dev/full', *arguments, "--per-category", 1, "-o", out)
    assert done.returncode == 1
    assert "No space left" in notes(done)[-1]
    assert "what was complete is kept; free some space" in notes(done)[-1]
    assert "Conclusion" in out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_several_answers_at_the_same_time(inside, arguments):
    done = inside(*arguments, "--category", "lists", "--parallel", "2,1")
    assert done.returncode == 0, done
    assert notes(done) == []
    report = done.stdout.decode()
    assert "2 prompts of 1 category, 1 run" in report
    numbers = [cells(report, f"{n:>24}") for n in (1, 2)]
    assert [row[0] for row in numbers] == ["1", "2"]
    speeds = [float(speed) for row in numbers for speed in row[1:]]
    speedups = [speeds[1] / speeds[0], speeds[3] / speeds[2]]
    # the printed figures are rounded
    assert [float(x) for x in cells(report, "lists")[1:]] == pytest.approx(speedups, rel=0.05, abs=0.01)
    assert "speculative, 1 at the same time: identical for 2 of 2 prompts." in report


def test_files_with_several_answers_at_the_same_time(inside, arguments, tmp_path):
    out = tmp_path / "result.jsonl"
    some = [*arguments, "--category", "lists", "--parallel", "1,2", "--runs", 2]
    done = inside(*some, "--output", out, "-v")
    assert done.stdout.startswith(b"# specdec bench: answers at the same time\n")
    assert len(notes(done)) == 2 * 2 * 2
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["start", *["batch"] * 8, "category", "summary"]
    for batch in lines[1:9]:
        statistics = batch["statistics"]
        assert statistics["predicted_n"] == sum(len(answer["tokens"]) for answer in batch["answers"]) == 32
        assert (statistics["draft_n"] > 0) == (batch["variant"] == "speculative")
    rows = list(csv.DictReader(io.StringIO(inside(*some, "--format", "csv").stdout.decode())))
    assert [(row["variant"], row["parallel"], row["answers"]) for row in rows] == [
        (name, n, "2") for n in "12" for name in ("plain", "speculative")
    ]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--category", "verse"], "'verse': give lists, prose"),
        (["--sweep", "temp=1,2"], "temp=1,2"),
        (["--proposers", "oracle"], "oracle"),
        (["--no-spec"], "--no-spec"),
        (["--runs", "0"], "runs is 0"),
        (["--tokens", "0"], "tokens is 0"),
        (["--per-category", "0"], "per-category is 0"),
        (["--delay", "nan"], "delay is nan"),
        (["--prompts", os.devnull], "has no prompts"),
        (["--temp", "-1"], "temperature"),
        (["--output", "."], "not a regular file"),
        (["--output", "md"], "--output md names a file, not a format: give --format md, or a file such as "),
        (["-o", "a.txt"], "the format of a.txt is unknown: let its name end in .md, .csv, .json or"),
        (["-o", f"{os.devnull}/a.md"], "cannot be written ("),
        (["-o", f"{os.devnull}/a.jsonl"], "cannot be written ("),
        (["--plot", f"{os.devnull}/a.png"], "cannot be written ("),
        (["--plot", os.devnull], "not a regular file"),
        (["--parallel", "0"], "parallel is 0: give 1 to 255"),
        (["--parallel", "2"], "'prose' has too few prompts (1) for 2 answers at the same time"),
        (["--parallel", "1", "--plot", "p.png"], "--plot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_reported_before_a_model_is_loaded(inside, prompts, more, what):
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, *more]
    assert what in inside.one_line(inside(*arguments), 2)


def test_missing_matplotlib_is_reported_immediately(inside, prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = tmp_path / "p.png"
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, "--plot", plot]
    line = inside.one_line(inside(*arguments), 1)
    assert line.startswith("specdec: --plot needs matplotlib: run ")
    assert "pip install 'matplotlib>=" in line
    assert not plot.exists()


def test_plot(inside, arguments, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    plot = tmp_path / "p.png"
    # With an empty folder matplotlib would list all fonts, which takes seconds.
    done = inside(*arguments, "--plot", plot, env={"MPLCONFIGDIR": matplotlib.get_cachedir()})
    assert done.returncode == 0, done
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000
    assert done.stdout.startswith(b"# specdec bench\n")


@pytest.mark.parametrize(
    ("signum", "code", "form"),
    [(signal.SIGINT, 130, "csv"), (signal.SIGTERM, 143, "jsonl")],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupt_reports_the_finished_prompts(specdec, arguments, tmp_path, signum, code, form):
    out = tmp_path / f"result.{form}"
    with specdec.start(*arguments, "--ctx", 20000, "-n", 400, "-v", "-o", out) as process:
        assert next_note(process).startswith("1/3 lists/words: ")
        lines = out.read_text().splitlines() if form == "jsonl" else []
        process.send_signal(signum)
        report, rest = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"**interrupted: 1 of 3 prompts**" in report
    assert rest == b""
    if form == "csv":
        assert len(out.read_text().splitlines()) == 1 + 2
    else:  # already in the file: a kill would have lost no measurements
        assert [json.loads(line)["type"] for line in lines][:4] == ["start", "run", "run", "prompt"]


def test_an_early_interrupt_leaves_files_unchanged(inside, arguments, tmp_path, monkeypatch):
    """The signal comes with the first call of a model."""
    lib = runtime.library()
    decode = lib.llama_decode

    def interrupted(*arguments):
        monkeypatch.setattr(lib, "llama_decode", decode)
        signal.raise_signal(signal.SIGINT)
        return decode(*arguments)

    monkeypatch.setattr(lib, "llama_decode", interrupted)
    out = tmp_path / "result.md"
    out.write_text("earlier content")
    done = inside(*arguments, "-o", out)
    assert (done.returncode, done.stdout) == (130, b"")
    assert notes(done) == ["interrupted before the first prompt was finished: nothing to report"]
    assert [(path.name, path.is_file()) for path in tmp_path.glob("*res*")] == [("result.md", True)]
    assert out.read_text() == "earlier content"


def test_unclear_results_are_measured_again_unless_runs_are_given(inside, arguments, monkeypatch, others_use):
    """Runs have other speeds than they have here, as on a quiet machine."""
    run, speeds = runner._run, {("plain", 1): 10, ("plain", 2): 20, ("plain", 3): 15}

    def timed(session, prompt, variant, number, *rest):
        made = run(session, prompt, variant, number, *rest)
        speed = speeds.get((variant.name, number), 20 if prompt.prompt.name == "water" else 10)
        seconds = made.statistics.predicted_n / speed
        return dataclasses.replace(made, statistics=dataclasses.replace(made.statistics, predicted_s=seconds))

    monkeypatch.setattr(runner, "_run", timed)
    others_use(0)
    assert notes(inside(*arguments)) == []
    del arguments[-2:]  # --runs
    done = inside(*arguments)
    repeated = [f"no difference is shown yet: measuring again ({n} of at most 3)" for n in (2, 3)]
    assert notes(done) == repeated
    assert b"3 prompts of 2 categories, 3 runs" in done.stdout
    assert b"Do not rely on these figures: " in done.stdout
    assert b"plain runs of the same prompt differ by 27% from their median" in done.stdout  # the control, too


def test_the_draft_proposer_needs_a_draft_model(inside, main, prompts):
    """Known only when the models are loaded: without --draft, one may be found."""
    none = ["--draft", "none", "--proposers", "draft,lookup"]
    done = inside("bench", "--main", main, "--prompts", prompts, "--ctx", 256, "--threads", 1, *none)
    assert "needs a draft model: give --draft FILE" in inside.one_line(done, 2)


def test_a_busy_machine_is_reported(inside, arguments, others_use):
    cores = default_threads()  # with many more, a moment between the two clocks would show
    others_use(cores)
    done = inside(*arguments)
    assert done.stderr.decode().startswith(f"other programs use {cores}.0 of ")
    # Beside other tests, the machine may be uneven, too, which is said first.
    assert b"Do not rely on these figures: " in done.stdout
    assert f"other programs used {cores}.0 of ".encode() in done.stdout
    others_use(0)
    done = inside(*arguments)
    assert b"other programs" not in done.stderr
    assert b"other programs used" not in done.stdout


@pytest.mark.parametrize(
    ("columns", "more"),
    [(60, ["--proposers", "draft,lookup"]), (60, ["--parallel", "1"]), (100, [])],
    ids=["60", "60 parallel", "100"],
)
def test_the_report_fits_the_terminal(inside, arguments, columns, more):
    _, screen = inside.on_terminal(*arguments, *more, env={"COLUMNS": ""}, width=columns)
    report = inside.plain(screen).partition("# specdec bench")[2]
    assert "## Conclusion" in report
    lines = report.splitlines()
    assert columns - 25 < max(map(len, lines)) <= columns
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    (digest,) = set(re.findall(r"[0-9a-f]{12}…", report[: report.index("draft.gguf")]))
    assert digest in report


def test_a_pipe_gets_the_whole_report(inside, arguments):
    report = inside(*arguments, env={"COLUMNS": "20"}).stdout.decode()
    (row,) = [line for line in report.splitlines() if line.startswith("| main ")]
    assert "main.gguf" in row
    assert "SHA-256" in row
    (rates,) = [line for line in report.splitlines() if "tokens/s" in line and "steps by" in line]
    assert rates.endswith("|")


def test_lines_of_progress_elsewhere(inside, arguments, monkeypatch):
    """As if each token took half a minute."""
    now = itertools.count(step=30.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    lines = inside(*arguments).stderr.decode().splitlines()
    found = [line for line in lines if line.startswith("measuring: ")]
    assert re.fullmatch(r"measuring: [0-6] of 6 · [\d:]+ left", found[0])
    assert found[-1] == "measuring: 6 of 6 · 0:00 left"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_progress_and_bars_on_a_terminal(terminal, arguments):
    opened = terminal(*arguments[1:], "--ctx", "20000", "-n", "600", command="bench", width=140)
    opened.until("measuring", "time left")
    opened.child.expect(r"(4|5|6)\d%")  # two of six runs are finished
    opened.type("\x03")
    seen = opened.rest()
    assert opened.leaves_with() == 130
    report = seen[seen.index("# specdec bench") :]
    assert "**interrupted: " in report
    bars = [line for line in report.splitlines() if "│" in line]
    assert bars[0].startswith("    lists ")
    assert bars[-1].startswith("    all ")
    assert "█" in bars[0]
