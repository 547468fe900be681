"""specdec bench: reports, files, errors and interrupts."""

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys

import pexpect
import pytest

from spec_local.bench import runner
from spec_local.system.machine import OtherPrograms
from specdec_cli import progress

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


@contextlib.contextmanager
def started(specdec, *arguments, **kwargs):
    """The running command; it is killed at the end of the block."""
    with specdec.start(*arguments, **kwargs) as process:
        try:
            yield process
        finally:
            process.kill()


def cells(report, start):
    """The cells of the only row of a Markdown report that starts with a text."""
    (row,) = [line for line in report.splitlines() if line.startswith(f"| {start} ")]
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_the_report(specdec, arguments, main):
    done = specdec(*arguments)
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


def test_one_line_per_prompt(specdec, arguments):
    done = specdec(*arguments, "-v")
    lines = notes(done)
    assert [line.split(":")[0] for line in lines] == [
        "1/3 lists/words",
        "2/3 lists/letters",
        "3/3 prose/water",
    ]
    assert all("plain" in line and " ×, identical)" in line for line in lines)


def test_json_output(specdec, arguments, main):
    whole = json.loads(specdec(*arguments, "--runs", 2, "--format", "json").stdout)
    assert whole["record"]["models"]["main"]["sha256"] == hashlib.sha256(main.read_bytes()).hexdigest()
    assert {"processor", "cores", "threads", "llama_cpp", "cpu_kernels", "specdec", "date"} <= set(
        whole["record"]
    )
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
    assert speculative["theory"] > 1 - 1e-9  # a quotient of sums: 1 may come out an ulp below
    assert 0 < speculative["acceptance"] <= 1
    assert sum(speculative["shares"].values()) == pytest.approx(1)


def test_variants_by_sweep_and_proposer(specdec, arguments):
    done = specdec(*arguments, "--proposers", "draft,lookup", "--sweep", "draft-max=1,3", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
    variants = [f"{who} draft-max={n}" for who in ("draft", "lookup") for n in (1, 3)]
    assert [row["variant"] for row in rows] == ["plain", *variants] * 3
    assert {row["identical"] for row in rows} == {"1"}
    by_variant = {row["variant"]: row for row in rows if row["name"] == "words"}
    assert int(by_variant["draft draft-max=1"]["steps"]) > int(by_variant["draft draft-max=3"]["steps"])


def test_policies(specdec, arguments):
    done = specdec(*arguments, "--policies", "adaptive,off", "--format", "json")
    whole = json.loads(done.stdout)
    _, adaptive, off = whole["variants"]
    assert [variant["name"] for variant in whole["variants"]] == ["plain", "adaptive", "off"]
    assert off["draft_n"] == 0
    assert off["theory"] == pytest.approx(1)
    assert adaptive["theory"] > 1 - 1e-9
    assert not adaptive["differences"]


def test_with_a_seed_speculation_gives_the_text_of_plain_decoding(specdec, arguments):
    done = specdec(*arguments, "--temp", 0.8, "--runs", 2, "--seed", 5, "--format", "json")
    whole = json.loads(done.stdout)
    assert whole["variants"][1]["differences"] == []
    runs = [run for prompt in whole["prompts"] for run in prompt["runs"] if run["variant"] == "plain"]
    assert len({run["text"] for run in runs}) == 6  # each run has another seed


def test_trees_can_be_compared_with_chains(specdec, arguments):
    done = specdec(*arguments, "--per-category", 1, "--sweep", "shape=chain,tree", "--sweep", "tree-nodes=6")
    assert done.returncode == 0, done
    assert "tree: identical for all 2 prompts." in done.stdout.decode()


def test_selection_and_skipped_prompts(specdec, arguments, tmp_path):
    done = specdec(*arguments, "--category", "lists", "--per-category", 1)
    assert "1 prompt of 1 category" in done.stdout.decode()
    lines = tmp_path / "lines.txt"
    lines.write_text("short\n" + "word " * 600 + "\n")
    done = specdec(*arguments, "--prompts", lines)
    assert notes(done) == [
        "skipped because an answer of 16 tokens would not fit into the context of 512 tokens: lines/line-2"
    ]
    assert "1 prompt of 1 category" in done.stdout.decode()
    lines.write_text("word " * 600 + "\n")
    assert "no prompt fits into the context" in specdec.one_line(specdec(*arguments, "--prompts", lines), 2)


def test_the_suffix_and_the_format(inside, arguments, tmp_path):
    """The suffix decides about the file; --format about standard output, and about files without a suffix."""
    some = [*arguments, "--per-category", 1]
    both = tmp_path / "both.csv"
    assert json.loads(inside(*some, "-o", both, "--format", "json").stdout)["prompts_done"] == 2
    assert both.read_text().startswith("category,name,variant")
    assert inside(*some, "-o", both, "--format", "csv").stdout.startswith(b"# specdec bench\n")
    (named := tmp_path / "csv").write_text("earlier content")
    (link := tmp_path / "link").symlink_to(named)
    assert inside(*some, "-o", link, "--format", "csv").stdout.startswith(b"# specdec bench\n")
    assert named.read_text().startswith("category,name,variant")
    assert link.is_symlink()
    home = tmp_path / "home"
    assert inside(*some, "--output=~/r.MD", env={"HOME": str(home)}).returncode == 0
    assert (home / "r.MD").read_text().startswith("# specdec bench\n")


def test_an_existing_file_with_the_name_of_a_format(inside, prompts, tmp_path):
    (tmp_path / "md").write_text("earlier content")
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, "-o", "md"]
    assert "the format of md is unknown" in inside.one_line(inside(*arguments, cwd=tmp_path), 2)


@pytest.mark.parametrize("form", ["csv", "json", "md"])
def test_a_file_and_a_report(specdec, arguments, tmp_path, form):
    out = tmp_path / "new" / f"result.{form}"
    done = specdec(*arguments, "--per-category", 1, "--output", out)
    assert done.returncode == 0, done
    assert done.stdout.startswith(b"# specdec bench\n")
    content = out.read_text()
    if form == "csv":
        assert len(content.splitlines()) == 1 + 2 * 2
    elif form == "json":
        assert json.loads(content)["prompts_done"] == 2
    else:
        assert content == done.stdout.decode()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("form", ["md", "jsonl"])
def test_the_file_is_complete_even_if_standard_output_fails(specdec, arguments, tmp_path, form):
    out = tmp_path / f"result.{form}"
    done = specdec.shell('"$@" > /dev/full', *arguments, "--per-category", 1, "-o", out)
    assert done.returncode == 1
    assert "No space left" in notes(done)[-1]
    assert "Conclusion" in out.read_text() or '"type": "summary"' in out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_jsonl_output(specdec, arguments, tmp_path):
    to_stdout = specdec(*arguments, "--format", "jsonl")
    kinds = [json.loads(line)["type"] for line in to_stdout.stdout.splitlines()]
    assert kinds == ["start", *["run", "run", "prompt"] * 3, "summary"]
    out = tmp_path / "result.jsonl"
    for repeat in (1, 2):
        done = specdec(*arguments, "--output", out)
        assert done.stdout.startswith(b"# specdec bench\n")
        assert [json.loads(line)["type"] for line in out.read_text().splitlines()] == kinds * repeat
    summary = json.loads(out.read_text().splitlines()[-1])
    assert [variant["name"] for variant in summary["variants"]] == ["plain", "speculative"]


def test_a_killed_run_loses_no_measurements(specdec, arguments, tmp_path):
    out = tmp_path / "result.jsonl"
    long = [*arguments, "--ctx", 20000, "-n", 600, "-v", "--output", out]
    with started(specdec, *long) as process:
        assert next_note(process).startswith("1/3 lists/words: ")
        process.kill()
    kinds = [json.loads(line)["type"] for line in out.read_text().splitlines()]
    assert kinds[:4] == ["start", "run", "run", "prompt"]
    assert "summary" not in kinds


def test_several_answers_at_the_same_time(specdec, arguments):
    done = specdec(*arguments, "--category", "lists", "--parallel", "2,1")
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


def test_files_with_several_answers_at_the_same_time(specdec, arguments, tmp_path):
    out = tmp_path / "result.jsonl"
    some = [*arguments, "--category", "lists", "--parallel", "1,2", "--runs", 2]
    done = specdec(*some, "--output", out, "-v")
    assert done.stdout.startswith(b"# specdec bench: answers at the same time\n")
    assert len(notes(done)) == 2 * 2 * 2
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["start", *["batch"] * 8, "category", "summary"]
    for batch in lines[1:9]:
        statistics = batch["statistics"]
        assert statistics["predicted_n"] == sum(len(answer["tokens"]) for answer in batch["answers"]) == 32
        assert (statistics["draft_n"] > 0) == (batch["variant"] == "speculative")
    whole = json.loads(specdec(*some, "--format", "json").stdout)
    assert [(each["variant"], each["parallel"]) for each in whole["figures"]] == [
        (name, n) for n in (1, 2) for name in ("plain", "speculative")
    ]
    rows = list(csv.DictReader(io.StringIO(specdec(*some, "--format", "csv").stdout.decode())))
    assert [(row["variant"], row["parallel"], row["answers"]) for row in rows] == [
        (name, n, "2") for n in "12" for name in ("plain", "speculative")
    ]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--category", "verse"], "'verse': give lists, prose"),
        (["--sweep", "temp=1,2"], "temp=1,2"),
        (["--sweep", "draft-max=a"], "draft-max=a"),
        (["--sweep", "draft-max=1,100"], "draft-max is 100"),
        (["--proposers", "oracle"], "oracle"),
        (["--proposers", "lookup,"], "empty part"),
        (["--no-spec"], "--no-spec"),
        (["--runs", "0"], "runs is 0"),
        (["--tokens", "0"], "tokens is 0"),
        (["--per-category", "0"], "per-category is 0"),
        (["--delay", "-1"], "delay is -1"),
        (["--delay", "nan"], "delay is nan"),
        (["--prompts", os.devnull], "has no prompts"),
        (["--temp", "-1"], "temperature"),
        (["--output", "."], "not a regular file"),
        (["--output", "md"], "--output md names a file, not a format: give --format md, or a file such as "),
        (["-o", "jsonl"], "give --format jsonl"),
        (
            ["-o", "result.txt"],
            "the format of result.txt is unknown: let its name end in .md, .csv, .json or",
        ),
        (["--plot", os.devnull], "not a regular file"),
        (["--parallel", "1,2,x"], "parallel is '1,2,x': give numbers"),
        (["--parallel", "0"], "parallel is 0: give 1 to 256"),
        (["--parallel", "1,900"], "parallel is 900: give 1 to 256"),
        (["--parallel", "2"], "'prose' has too few prompts (1) for 2 answers at the same time"),
        (["--parallel", "1", "--plot", "p.png"], "--plot"),
    ],
)
def test_invalid_options_are_reported_before_a_model_is_loaded(specdec, prompts, more, what):
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, *more]
    assert what in specdec.one_line(specdec(*arguments), 2)


@pytest.mark.parametrize("name", ["result.md", "result.jsonl", "plot.png"])
def test_a_file_that_cannot_be_written(inside, prompts, tmp_path, name):
    if name == "plot.png":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    target = tmp_path / "file" / name
    option = "--plot" if name == "plot.png" else "--output"
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, option, target]
    error = inside.one_line(inside(*arguments), 2)
    assert "cannot be written (" in error
    assert error.endswith("): give another path")


def test_a_missing_draft_model(specdec, prompts):
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, "--proposers", "draft,lookup"]
    assert "--draft FILE" in specdec.one_line(specdec(*arguments), 2)


def test_missing_matplotlib_is_reported_immediately(specdec, prompts, tmp_path):
    env = specdec.sabotaged(tmp_path / "without", "import sys\nsys.modules['matplotlib'] = None\n")
    plot = tmp_path / "p.png"
    arguments = ["bench", "--main", "absent.gguf", "--prompts", prompts, "--plot", plot]
    assert "pip install 'spec-local[plot]'" in specdec.one_line(specdec(*arguments, env=env), 1)
    assert not plot.exists()


def test_plot(specdec, arguments, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    plot = tmp_path / "p.png"
    # With an empty folder matplotlib would list all fonts, which takes seconds.
    done = specdec(*arguments, "--plot", plot, env={"MPLCONFIGDIR": matplotlib.get_cachedir()})
    assert done.returncode == 0, done
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000
    assert done.stdout.startswith(b"# specdec bench\n")


def test_an_interrupt_reports_the_finished_prompts(specdec, arguments, tmp_path):
    out = tmp_path / "result.csv"
    long = [*arguments, "--ctx", 20000, "-n", 600, "-v", "-o", out]
    with started(specdec, *long) as process:
        assert next_note(process).startswith("1/3 lists/words: ")
        process.send_signal(signal.SIGINT)
        report, rest = process.communicate(timeout=20)
        assert process.returncode == 130
    assert b"**interrupted: 1 of 3 prompts**" in report
    assert rest == b""
    assert len(out.read_text().splitlines()) == 1 + 2


def test_an_early_interrupt_leaves_files_unchanged(specdec, arguments, tmp_path):
    out = tmp_path / "result.md"
    out.write_text("earlier content")
    endless = [*arguments, "--ctx", 100000, "-n", 20000, "-o", out]
    env = specdec.sabotaged(
        tmp_path / "site",
        "import sys\n"
        "if 'bench' in sys.argv or 'bench' in sys.orig_argv:\n"
        "    import spec_local.bench.runner as r\n"
        "    old = r._run\n"
        "    def run(*a):\n"
        "        print('started', file=sys.stderr, flush=True)\n"
        "        return old(*a)\n"
        "    r._run = run\n",
    )
    with started(specdec, *endless, env=env) as process:
        for _ in range(3):  # two warm-ups, then the first run
            assert next_note(process) == "started\n"
        process.send_signal(signal.SIGINT)
        report, rest = process.communicate(timeout=20)
        assert process.returncode == 130
    assert report == b""
    assert rest == b"interrupted before the first prompt was finished: nothing to report\n"
    assert [(path.name, path.is_file()) for path in tmp_path.glob("*res*")] == [("result.md", True)]
    assert out.read_text() == "earlier content"


@pytest.fixture
def results_of(monkeypatch):
    """Give the runs of a benchmark other speeds than they have, as on a quiet machine: a function of prompt,
    variant and number."""
    monkeypatch.setattr(OtherPrograms, "cores", lambda self: 0.0)

    def results_of(rate):
        run = runner._run

        def timed(session, prompt, variant, number, *rest):
            made = run(session, prompt, variant, number, *rest)
            statistics = dataclasses.replace(
                made.statistics, predicted_s=made.statistics.predicted_n / rate(prompt, variant.name, number)
            )
            return dataclasses.replace(made, statistics=statistics)

        monkeypatch.setattr(runner, "_run", timed)

    return results_of


def conclusion(done):
    return done.stdout.decode().partition("## Conclusion\n\n")[2].splitlines()[0]


def test_unclear_results_are_measured_again(inside, arguments, results_of):
    del arguments[-2:]  # --runs
    results_of(lambda prompt, variant, number: 10.0)
    done = inside(*arguments)
    assert notes(done) == []
    assert conclusion(done).startswith("speculative: as fast as plain decoding, within 0% [1.00, 1.00]")

    def first_is_disturbed(prompt, variant, number):
        slow = prompt.prompt.name == "water" and variant == "speculative" and number == 1
        return 10.0 * (1.5 if variant == "speculative" else 1.0) / (2 if slow else 1)

    results_of(first_is_disturbed)
    done = inside(*arguments, "--format", "json")
    assert notes(done) == ["no difference is shown yet: measuring again (2 of at most 3)"]
    whole = json.loads(done.stdout)
    assert [len(prompt["runs"]) for prompt in whole["prompts"]] == [4, 4, 4]
    explicit = inside(*arguments, "--runs", 1)
    assert notes(explicit) == []
    assert conclusion(explicit).startswith("speculative: no difference from plain decoding shown")


def test_repetitions_are_bounded(inside, arguments, results_of):
    del arguments[-2:]  # --runs
    speeds = {("plain", 1): 10, ("plain", 2): 20, ("plain", 3): 15}

    def noisy(prompt, variant, number):
        return speeds.get((variant, number), 20 if prompt.prompt.name == "water" else 10)

    results_of(noisy)
    done = inside(*arguments)
    repeated = [f"no difference is shown yet: measuring again ({n} of at most 3)" for n in (2, 3)]
    assert notes(done) == repeated
    assert b"3 prompts of 2 categories, 3 runs" in done.stdout
    assert b"The machine was noisy: " in done.stdout
    assert b"plain runs of the same prompt differ by 33% from their median" in done.stdout


def test_a_busy_machine_is_reported(inside, arguments, monkeypatch):
    monkeypatch.setattr(OtherPrograms, "cores", lambda self: 64.0)
    done = inside(*arguments)
    assert done.stderr.decode().startswith("other programs use 64.0 of ")
    assert b"The machine was noisy: other programs used 64.0 of " in done.stdout
    monkeypatch.setattr(OtherPrograms, "cores", lambda self: 0.0)
    done = inside(*arguments)
    assert b"other programs" not in done.stderr + done.stdout


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("more", [[], ["--parallel", "1"], ["--proposers", "draft,lookup"]], ids=str)
def test_the_report_fits_the_terminal(terminal, arguments, columns, more):
    seen = terminal(*arguments[1:], *more, command="bench", env={"COLUMNS": ""}, width=columns).rest()
    report = seen[seen.index("# specdec bench") :]
    assert "## Conclusion" in report
    lines = report.splitlines()
    assert max(map(len, lines)) <= columns
    assert columns - 25 < max(map(len, lines))
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    (digest,) = set(re.findall(r"[0-9a-f]{12}…", report[: report.index("draft.gguf")]))
    assert digest in report


@pytest.mark.parametrize("columns", [20, 300])
def test_a_pipe_gets_the_whole_report(inside, arguments, columns):
    report = inside(*arguments, env={"COLUMNS": str(columns)}).stdout.decode()
    (row,) = [line for line in report.splitlines() if line.startswith("| main ")]
    assert "main.gguf" in row
    assert "SHA-256" in row
    (rates,) = [line for line in report.splitlines() if "tokens/s" in line and "steps by" in line]
    assert rates.endswith("|")


def test_lines_of_progress_elsewhere(inside, arguments, monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0)
    lines = inside(*arguments).stderr.decode().splitlines()
    found = [line for line in lines if line.startswith("measuring: ")]
    assert re.fullmatch(r"measuring: [0-6] of 6 · \d:\d\d left", found[0])
    assert found[-1] == "measuring: 6 of 6 · 0:00 left"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_progress_and_bars_on_a_terminal(specdec, arguments):
    child = pexpect.spawn(
        specdec.command[0],
        [*specdec.command[1:], *map(str, arguments), "--ctx", "20000", "-n", "600"],
        env=specdec.environment,
        cwd=str(specdec.folder),
        timeout=20,
        dimensions=(60, 140),
        encoding="utf-8",
    )
    child.expect_exact("measuring")
    child.expect_exact("time left")
    child.expect(r"(4|5|6)\d%")  # two of six runs are finished
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    seen = specdec.plain(child.before)
    report = seen[seen.index("# specdec bench") :]
    assert "**interrupted: " in report
    bars = [line for line in report.splitlines() if "│" in line]
    assert bars[0].startswith("    lists ")
    assert bars[-1].startswith("    all ")
    assert "█" in bars[0]


def test_help_is_fast_and_complete(specdec):
    script = (
        "import runpy, sys\n"
        "sys.argv = ['specdec', 'bench', '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'llama_cpp', 'numpy', 'gguf', 'jinja2', 'matplotlib', 'rich.progress', 'psutil'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    environment = specdec.environment | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for option in (
        "--main",
        "--prompts",
        "--category",
        "--per-category",
        "--sweep",
        "--proposers",
        "--policies",
    ):
        assert option in done.stdout
    for option in ("--output", "--format", "--plot", "--delay", "--tokens", "--runs", "--temp", "--seed"):
        assert option in done.stdout
    assert "default: 128" in done.stdout
