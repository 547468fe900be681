"""specdec tune: what it shows and keeps, what it refuses, and how it judges."""

import json
import re

import pytest

from spec_local.calibration.tuning import SIZES, chain_plans, thread_choices
from spec_local.llama.tiny import write_tiny_model
from spec_local.policies.cost_model import CostModel
from spec_local.policies.planner import expected_tokens

SMALL = ["--threads", 1, "--ctx", 256, "--rounds", 2]


def numbers(report, start):
    """The cells of the first row of a table that starts so."""
    row = next(line for line in report.splitlines() if re.match(rf"\s+{re.escape(start)}\s", line))
    return row.split()


def test_tables(fresh, main, draft):
    done = fresh("tune", main, draft, *SMALL)
    assert done.returncode == 0, done
    said = done.stdout.decode()
    titles = [line.split(":")[0] for line in said.splitlines() if re.match(r"\S.*: ", line)]
    assert titles[:2] == ["main", "draft"]
    assert {"draft model", "copied text"} <= set(titles)
    costs = numbers(said, "1")
    assert len(costs) == 1 + 10 + 1  # threads, ten sizes, the prompt
    assert all(0 <= float(ms) < 1000 for ms in costs[1:-1])
    assert float(costs[-1]) > 0
    share = float(re.search(r"A call of the draft takes (\d+\.\d+) of main's", said)[1])
    assert 0.1 < share < 10  # models of one size
    _, guesses, gain = numbers(said, "0.99")
    assert guesses == "none" or 1 <= int(guesses) <= 63
    assert float(gain) >= 1.0
    assert "\x1b" not in said
    assert done.stderr.decode().splitlines() == [
        "checking main.gguf (first use on this machine)",
        "checking draft.gguf (first use on this machine)",
        "measuring main.gguf with 1 thread",
        "measuring draft.gguf with 1 thread",
    ]


def test_without_a_draft(inside, main):
    done = inside("tune", main, *SMALL)
    assert done.returncode == 0
    assert b"copied text" in done.stdout
    assert b"draft" not in done.stdout


def test_sessions_go_by_what_was_tuned(fresh, main, draft):
    assert fresh("tune", main, draft, *SMALL).returncode == 0
    files = sorted(fresh.folder.rglob("costs/*.json"))
    known = {(content := json.loads(path.read_text()))["model"]: content["seconds"] for path in files}
    assert sorted(known) == ["draft.gguf", "main.gguf"]
    for seconds in known.values():
        assert {int(size) for size in seconds} == set(SIZES)
    answer = ["generate", "--main", main, "--threads", 1, "-n", 4, "x"]
    for more in ([], ["--draft", draft]):
        assert fresh(*answer, "--ctx", 256, *more).stderr == b""
    assert sorted(fresh.folder.rglob("costs/*.json")) == files
    assert b"measuring main.gguf" in fresh(*answer, "--ctx", 128).stderr  # another session, other costs


def test_several_numbers_of_threads(inside, main):
    done = inside("tune", main, "--threads", 2, "--threads", 1, "--threads", 2, "--ctx", 256, "--rounds", 1)
    assert done.stderr.decode().splitlines() == [
        "measuring main.gguf with 1 thread",
        "measuring main.gguf with 2 threads",
    ]
    said = done.stdout.decode()
    assert said.count("←") == 1
    assert numbers(said, "1")
    assert numbers(said, "2")


def test_the_usual_numbers_of_threads():
    choices = thread_choices()
    assert choices == sorted(set(choices))
    assert 1 <= choices[0] <= choices[-1] <= 4096


def test_files_that_cannot_be_tuned(inside, main, tmp_path):
    recurrent = write_tiny_model(tmp_path / "mamba.gguf", n_layers=1, architecture="mamba")
    (tmp_path / "bad.gguf").write_bytes(main.read_bytes()[:20000])
    for arguments, code, what in [
        ([tmp_path / "absent.gguf"], 1, "absent.gguf does not exist"),
        ([main, tmp_path / "absent.gguf"], 1, "absent.gguf does not exist"),  # and main is not measured first
        ([tmp_path / "bad.gguf"], 1, "bad.gguf cannot be loaded"),
        ([recurrent], 1, "mamba.gguf is a recurrent model"),
        ([main, recurrent], 1, "mamba.gguf is a recurrent model"),
        ([main, "--threads", 0], 2, "threads is 0: give 1 to 512"),
        ([main, "--threads", 1, "--threads", 513], 2, "threads is 513: give 1 to 512"),
        ([main, "--ctx", 0], 2, "ctx is 0: give 1"),
    ]:
        said = inside.one_line(inside("tune", *arguments), code)
        assert what in said, arguments


@pytest.mark.parametrize(
    "arguments", [[], ["--rounds", "0"], ["--rounds", "many"], ["--cache-type", "f8"], ["--fly"]], ids=str
)
def test_wrong_usage(inside, main, arguments):
    done = inside("tune", *[main] * bool(arguments), *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr


def test_a_tiny_context(inside, main):
    done = inside("tune", main, "--threads", 1, "--ctx", 1, "--rounds", 1)
    assert done.returncode == 0, done
    assert numbers(done.stdout.decode(), "0.99")[1:] == ["none", "1.00"]  # no room to guess


def table(seconds):
    return CostModel(seconds)


def test_plans_weigh_what_guesses_bring_and_cost():
    chances = (0.0, 0.5, 0.8, 0.95)
    main, draft = table({1: 1.0, 17: 2.0, 64: 5.0}), table({1: 0.1, 17: 0.2})
    plans = chain_plans(main, draft, chances)
    lengths = [len(plan.parents) for plan in plans]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[3] <= 16
    for chance, plan, n in zip(chances, plans, lengths, strict=True):
        assert plan.is_chain
        assert plan.tokens_per_step == pytest.approx(sum(chance**i for i in range(n + 1)))
        assert plan.tokens_per_step == pytest.approx(expected_tokens((chance,), plan.parents))
        assert plan.seconds == pytest.approx(main.seconds(n + 1) + n * 0.1)
        others = (sum(chance**i for i in range(k + 1)) / (main.seconds(k + 1) + k * 0.1) for k in range(17))
        assert plan.speed == pytest.approx(max(others))


def test_copies_cost_nothing_and_may_be_long():
    main = table({1: 1.0, 64: 1.5})
    copied, drafted = (
        [len(p.parents) for p in chain_plans(main, draft, (0.9, 0.999))] for draft in (None, table({1: 0.1}))
    )
    assert copied[1] == 63
    assert drafted[1] == 16
    assert copied[0] > drafted[0]
    assert [p.parents for p in chain_plans(table({1: 1.0, 64: 64.0}), table({1: 0.01}), (0.5, 0.99))] == [
        (),
        (),
    ]
