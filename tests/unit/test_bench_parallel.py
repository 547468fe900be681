"""Several answers at the same time, on a scripted session: the runs, and their report in all formats."""

import json

import pytest

from spec_local.bench import parallel_report
from spec_local.bench.parallel import CategoryOutcome, CategoryRun, check_prompts, measure, parse_rows
from spec_local.bench.parallel_report import ParallelResults
from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Difference, Run, TokenizedPrompt
from spec_local.bench.variants import variants
from spec_local.core.calls import run
from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Failed, Statistics
from spec_local.errors import BackendError, InvalidRequest
from spec_local.session import Done, NumberedEvent, Text
from spec_local.settings import GenerationSettings
from spec_local.testing import FakeModel
from tests.bench_record import RECORD, cells

NAMES = [("one", "x"), ("one", "y"), ("two", "z"), ("one", "w"), ("two", "v")]
PROMPTS = [TokenizedPrompt(Prompt(*name, "text"), [1, 2, i]) for i, name in enumerate(NAMES)]
SETTINGS = GenerationSettings(SamplingSettings(temperature=0), seed=10, max_tokens=20)
VARIANTS = variants(SETTINGS, {})


class Scripted:
    """A session that answers every prompt with the same tokens."""

    datastore = answer_store = draft = None

    def __init__(self, fails=(), answer=(3, 4, 5)):
        self.main, self.calls = FakeModel(), []
        self._fails, self._answer = fails, answer

    def generate_many(self, prompts, settings, *, n_parallel, totals, cancelled):
        each = [next(settings) for _ in prompts]
        seeds = [own.seed for own in each]
        self.calls.append((each[0].proposer, n_parallel, [p[-1] for p in prompts], seeds, each[0].max_tokens))
        assert not self.main.cached
        run(self.main.call([1], n_logits=0))
        totals.predicted_n = 3 * len(prompts)
        totals.predicted_s = 1.0
        for number in reversed(range(len(prompts))):
            if cancelled(number):
                yield NumberedEvent(number, Done("cancelled", Statistics()))
                continue
            if number in self._fails:
                yield NumberedEvent(number, Failed(BackendError("broken: repair it"), Statistics()))
                continue
            answer = list(self._answer) if each[0].proposer == "none" else [3, 4, 5]
            yield NumberedEvent(number, Text("abc", answer))
            statistics = Statistics(predicted_n=3, predicted_s=0.5, n_steps=3, first_token_s=0.1)
            yield NumberedEvent(number, Text("!"))  # what was held back
            yield NumberedEvent(number, Done("length", statistics))


def test_numbers_and_variants_alternate():
    session = Scripted()
    events = list(measure(session, PROMPTS, VARIANTS, [1, 3], runs=2))
    warm_up, counted = session.calls[:2], session.calls[2:]
    assert [(call[1], call[4]) for call in warm_up] == [(3, 16)] * 2
    one = [("none", 1), ("auto", 1), ("none", 3), ("auto", 3)] * 2
    two = [("auto", 1), ("none", 1), ("auto", 3), ("none", 3)] * 2
    assert [call[:2] for call in counted] == one + two
    assert [call[2] for call in counted] == [[0, 1, 3]] * 8 + [[2, 4]] * 8
    # the same seeds for both variants, and others in the next run
    assert [call[3] for call in counted[:8]] == [[11, 12, 13]] * 4 + [[12, 13, 14]] * 4
    batches = [event for event in events if isinstance(event, CategoryRun)]
    assert [(batch.category, batch.number) for batch in batches[:5]] == [("one", 1)] * 4 + [("one", 2)]
    assert batches[0].runs[2] == Run(
        PROMPTS[3].prompt,
        "plain",
        1,
        [3, 4, 5],
        "abc!",
        "length",
        Statistics(predicted_n=3, predicted_s=0.5, n_steps=3, first_token_s=0.1),
    )
    assert batches[0].tokens_per_second == pytest.approx(9 / batches[0].seconds)
    outcomes = [event for event in events if isinstance(event, CategoryOutcome)]
    assert [outcome.category for outcome in outcomes] == ["one", "two"]
    assert [len(each) for each in outcomes[0].batches.values()] == [2] * 4
    assert not any(outcomes[0].differences.values())


def test_answers_that_differ_from_those_of_plain_decoding():
    events = list(measure(Scripted(answer=(3, 4, 6)), PROMPTS[:1], VARIANTS, [1]))
    ((prompt, difference),) = events[-1].differences["speculative", 1]
    assert prompt == PROMPTS[0].prompt
    assert (difference.run, difference.at) == (1, 2)
    assert difference.gap >= 0


def test_the_error_of_an_answer_is_raised():
    with pytest.raises(BackendError, match="broken"):
        list(measure(Scripted(fails=[1]), PROMPTS, VARIANTS, [1]))


def test_cancelling_and_progress():
    progress = []
    session = Scripted()
    list(measure(session, PROMPTS, VARIANTS, [1, 2], on_progress=progress.append))
    assert sum(progress) == pytest.approx(len(PROMPTS) * len(VARIANTS) * 2)
    session = Scripted()
    assert list(measure(session, PROMPTS, VARIANTS, [1], cancelled=lambda: len(session.calls) > 4)) != []
    assert len(session.calls) == 5
    assert list(measure(Scripted(), PROMPTS, VARIANTS, [1], cancelled=lambda: True)) == []


@pytest.mark.parametrize(
    ("text", "expected"), [("1", [1]), ("4, 2,1", [1, 2, 4]), ("2,2", [2]), ("255", [255])]
)
def test_numbers_of_answers(text, expected):
    assert parse_rows(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,", "1.5", "0", "-1", "257", "1,999999999999"])
def test_impossible_numbers_of_answers(text):
    with pytest.raises(InvalidRequest, match=r"parallel is .*: give "):
        parse_rows(text)


def test_each_category_needs_enough_prompts():
    prompts = [each.prompt for each in PROMPTS]
    check_prompts(prompts, [1, 2])
    with pytest.raises(InvalidRequest, match=r"'two' has too few prompts \(2\) for 3 .* `parallel` up to 2"):
        check_prompts(prompts, [1, 3])


def batch(category, variant, n_parallel, seconds, **statistics):
    prompts = [each.prompt for each in PROMPTS if each.prompt.category == category]
    one = {"predicted_n": 10, "predicted_s": seconds, "n_steps": 10, "first_token_s": 0.25}
    runs = [Run(p, variant, 1, [1], "a|b", "length", Statistics(**(one | statistics))) for p in prompts]
    totals = sum((run.statistics for run in runs), Statistics())
    return CategoryRun(category, variant, n_parallel, 1, seconds, totals, runs)


DRAFTING = {"draft_n": 8, "draft_n_accepted": 5, "tested_at": [4, 4], "accepted_at": [3, 2], "n_steps": 5}


def results(**changes):
    seconds = {("plain", 1): 3.0, ("speculative", 1): 2.0, ("plain", 4): 1.0, ("speculative", 4): 1.0}
    outcomes = []
    for category, faster in (("one", 1.0), ("two", 2.0)):
        batches = {
            key: [batch(category, *key, s / (faster if key[0] == "speculative" else 1.0))]
            if key[0] == "plain"
            else [batch(category, *key, s / faster, **DRAFTING)]
            for key, s in seconds.items()
        }
        differences = {key: [] for key in seconds if key[0] != "plain"}
        if category == "two":
            differences["speculative", 4] = [(PROMPTS[2].prompt, Difference(1, 7, 0.0125))]
        outcomes.append(CategoryOutcome(category, batches, differences))
    values = {
        "record": RECORD,
        "variants": VARIANTS,
        "rows": [1, 4],
        "outcomes": outcomes,
        "n_categories": 2,
        "runs": 1,
        "peak_memory": 123_000_000,
        "other_programs": 0.0,
    }
    return ParallelResults(**(values | changes))


def test_figures():
    plain, speculative, *_ = figures = results().figures()
    assert [(each.variant, each.n_parallel) for each in figures] == [
        (variant, n) for n in (1, 4) for variant in ("plain", "speculative")
    ]
    assert plain.speedup.value == pytest.approx(1.0)
    assert speculative.by_category == pytest.approx({"one": 1.5, "two": 3.0})
    assert speculative.speedup.value == pytest.approx((1.5 * 3.0) ** 0.5)
    assert plain.tokens_per_second == pytest.approx(50 / 6.0)
    assert speculative.tokens_per_second == pytest.approx(50 / 3.0)
    assert speculative.seconds_per_token == pytest.approx(0.2)  # three of 2 s, two of 1 s
    assert speculative.tokens_per_step == 2.0
    assert plain.system_efficiency == 1.0
    assert speculative.system_efficiency == pytest.approx(10 / (5 + 8))
    assert [each.n_different for each in figures] == [0, 0, 0, 1]


def test_markdown():
    report = parallel_report.markdown(results())
    assert cells(report, "answers at the same time") == [["answers at the same time", "plain", "speculative"]]
    assert cells(report, "one") == [["one", "1.50", "1.00"]]
    assert cells(report, "two") == [["two", "3.00", "2.00"]]
    assert cells(report, "**all**")[0][1].startswith("2.12 [")
    assert cells(report, "speculative")[0][2:] == ["200.0 ms", "0.25 s", "2.00", "62% of 40", "77%"]
    assert "speculative, 1 at the same time: identical for 5 of 5 prompts." in report
    assert "identical for 4 of 5 prompts; the others differ where the logits" in report
    assert "at most 0.0125 apart." in report
    assert "5 prompts of 2 categories, 1 run of each variant" in report
    assert "interrupted" not in report
    assert "speculative, 1 at the same time: 2.12 times as fast as plain decoding [1.50, 3.00]" in report
    assert "categories; use 6 or more" in report
    assert "speculative, 4 at the same time: no difference" in report  # the lower end is 1
    assert max(map(len, parallel_report.markdown(results(), width=60).splitlines())) <= 60
    assert "Do not rely on" not in report
    assert "other programs used 50.0 of" in parallel_report.markdown(results(other_programs=50.0))
    assert "**interrupted: 2 of 3 categories**" in parallel_report.markdown(results(n_categories=3))


def test_json_and_lines():
    whole = json.loads(parallel_report.as_json(results()))
    assert whole["parallel"] == [1, 4]
    assert whole["record"] == RECORD
    assert [each["speedup"]["value"] for each in whole["figures"]] == pytest.approx(
        [1.0, 4.5**0.5, 1.0, 2.0**0.5]
    )
    assert [len(each["batches"]) for each in whole["categories"]] == [4, 4]
    assert whole["categories"][1]["differences"] == [
        {"variant": "speculative", "parallel": 4, "name": "z", "run": 1, "at": 7, "gap": 0.0125}
    ]
    outcome = results().outcomes[0]
    kind, line = parallel_report.line(outcome.batches["speculative", 4][0])
    assert (kind, line["parallel"], len(line["answers"])) == ("batch", 4, 3)
    assert line["statistics"]["draft_n"] == 24
    kind, line = parallel_report.line(outcome)
    assert (kind, line["category"]) == ("category", "one")
    json.dumps(line)
