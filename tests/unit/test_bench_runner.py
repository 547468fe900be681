"""Interleaved runs on a scripted session."""

import numpy as np
import pytest

from spec_local.bench.figures import achieved, best_error, best_speedup
from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Difference, Outcome, Run, TokenizedPrompt, measure
from spec_local.bench.variants import variants
from spec_local.core.calls import TimedCall, run
from spec_local.engine.events import Prefilled, Statistics
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.policies.cost_model import CostModel
from spec_local.session import Done, Text
from spec_local.settings import GenerationSettings
from spec_local.testing import FakeModel

PROMPTS = [TokenizedPrompt(Prompt("c", name, name), [1, 2, i]) for i, name in enumerate("xyz")]
ANSWER = [3, 4, 5, 6] * 5


class Scripted:
    """A session whose answers depend on proposer and prompt; a call takes a second, a draft token 0.25."""

    def __init__(self, answers, draft=None):
        self.main, self.draft, self.drafter, self._answers = FakeModel(), draft, draft, answers
        self.calls = []

    def generate(self, prompt, settings, *, cancelled):
        self.calls.append((settings.proposer, prompt[-1], settings.seed, settings.max_tokens))
        assert not self.main.cached
        assert not (self.draft and self.draft.cached)
        run(self.main.call(prompt, n_logits=0))
        if self.draft:
            run(self.draft.call(prompt, n_logits=0))
        answer = self._answers(settings.proposer, prompt[-1])[: settings.max_tokens]
        statistics = Statistics()
        yield Prefilled(statistics)
        for token in answer:
            if cancelled():
                yield Done("cancelled", Statistics())
                return
            statistics.predicted_n += 1
            statistics.predicted_s += 1.0
            statistics.n_steps += 1
            statistics.last_calls = [TimedCall("main model", 1, 1.0)]
            yield Text(chr(97 + token), [token])
        yield Text("!")  # what was held back
        yield Done("length", statistics)

    def proposers(self, settings):
        both = ["draft", "lookup"] if self.draft else ["lookup"]
        return both if settings.proposer == "auto" else [settings.proposer]

    datastore = answer_store = None

    def lookups(self, settings):
        return [PromptLookup(shortest=2)] if "lookup" in self.proposers(settings) else []

    def costs(self):
        main, draft = CostModel(), CostModel()
        for n in range(1, 66):
            main.observe(n, 1.0)
        draft.observe(1, 0.25)
        return main, draft if self.draft else None


def alike(proposer, prompt):
    return ANSWER


def compared(**varied):
    return variants(GenerationSettings(seed=10, max_tokens=20), varied)


def test_variants_alternate_and_their_order_rotates():
    session = Scripted(alike)
    events = list(measure(session, PROMPTS, compared(proposer=["auto", "lookup"]), runs=2))
    warm_up, counted = session.calls[:3], session.calls[3:]
    assert warm_up == [(proposer, 0, 10, 16) for proposer in ("none", "auto", "lookup")]
    order = [("none", "auto", "lookup"), ("auto", "lookup", "none"), ("lookup", "none", "auto")]
    assert counted == [
        (proposer, i, 10 + run, 20) for i in range(3) for run in (1, 2) for proposer in order[i]
    ]
    assert [type(event) for event in events] == ([Run] * 6 + [Outcome]) * 3
    runs, outcome = events[:6], events[6]
    assert [outcome.runs[variant] for variant in ("plain", "auto", "lookup")] == [
        runs[i::3] for i in range(3)
    ]
    assert runs[0].text == "".join(chr(97 + t) for t in ANSWER) + "!"
    assert (runs[5].number, runs[5].variant, list(runs[5].tokens)) == (2, "lookup", ANSWER)


def test_more_runs_of_an_earlier_benchmark():
    session = Scripted(alike)
    first = [event for event in measure(session, PROMPTS, compared()) if isinstance(event, Outcome)]
    session.calls.clear()
    events = list(measure(session, PROMPTS, compared(), runs=2, earlier=first))
    assert session.calls == [  # no warm-up; other seeds than the first run
        (proposer, i, 10 + run, 20)
        for i in range(3)
        for run in (2, 3)
        for proposer in (("none", "auto"), ("auto", "none"))[i % 2]
    ]
    outcomes = [event for event in events if isinstance(event, Outcome)]
    for earlier, outcome in zip(first, outcomes, strict=True):
        for variant in ("plain", "speculative"):
            assert [run.number for run in outcome.runs[variant]] == [1, 2, 3]
            assert outcome.runs[variant][0] is earlier.runs[variant][0]


def test_a_conversation_continues_the_first_plain_answer():
    whole = Prompt("c", "x", "one", ("two", "three"))

    def tokenized(n, tokens):
        def following(text, answer):
            assert text == "".join(chr(97 + t) for t in answer) + "!"
            return tokenized(n + 1, [*tokens, *answer, 6 + n])

        return TokenizedPrompt(whole.turn(n), tokens, following if n < 3 else None)

    answers = {"none": [3, 4], "auto": [5]}
    session, prompts = Scripted(lambda proposer, _: answers[proposer]), [tokenized(1, [1, 2]), *PROMPTS[:1]]
    given, generate = [], session.generate
    session.generate = lambda prompt, *args, **more: (
        given.append(list(prompt)),
        generate(prompt, *args, **more),
    )[1]
    turns = [[1, 2], [1, 2, 3, 4, 7], [1, 2, 3, 4, 7, 3, 4, 8], PROMPTS[0].tokens]
    first = [event for event in measure(session, prompts, compared(), runs=2) if isinstance(event, Outcome)]
    assert given[2:] == [turn for turn in turns for _ in range(2 * 2)]  # every variant and run has the same
    assert [str(outcome.prompt) for outcome in first] == ["c/x", "c/x turn 2", "c/x turn 3", "c/x"]
    given.clear()
    answers["none"] = [6]  # a later answer does not change the prompts
    later = [event for event in measure(session, prompts, compared(), earlier=first)]
    assert given == [turn for turn in turns for _ in range(2)]
    assert [len(event.runs["plain"]) for event in later if isinstance(event, Outcome)] == [3] * 4


def test_a_control_run_shows_how_much_equal_runs_differ():
    session = Scripted(alike)
    many = [TokenizedPrompt(Prompt("c", f"p{i}", "p"), [1, 2, i]) for i in range(6)]
    outcomes = [event for event in measure(session, many, compared()) if isinstance(event, Outcome)]
    assert [bool(outcome.control) for outcome in outcomes] == [True, False, False, False, True, False]
    again = [call for call in session.calls[2:] if call[:2] == ("none", 4)]
    assert again == [("none", 4, 11, 20)] * 2  # with the same seed
    assert outcomes[0].control.variant == "plain"
    assert len(outcomes[0].runs["plain"]) == 1  # no part of the speed-up
    session.calls.clear()
    later = list(measure(session, many, compared(), earlier=outcomes))
    assert len(session.calls) == 6 * 2  # several runs of every prompt need none
    assert [event.control for event in later if isinstance(event, Outcome)] == [o.control for o in outcomes]


def test_differences_and_their_gaps():
    other = [*ANSWER[:5], 9, *ANSWER[6:]]
    shorter = ANSWER[:7]

    def answers(proposer, prompt):
        return {("lookup", 1): other, ("lookup", 2): shorter}.get((proposer, prompt), ANSWER)

    session = Scripted(answers)
    events = measure(session, PROMPTS, compared(proposer=["lookup"]))
    same, differs, ends = [event.differences["speculative"] for event in events if isinstance(event, Outcome)]
    assert same is None
    logits = FakeModel().logits([1, 2, 1, *ANSWER[:5]])
    assert differs == Difference(1, 5, pytest.approx(logits.max() - min(logits[ANSWER[5]], logits[9])))
    assert ends.at == 7
    second, best = np.sort(FakeModel().logits([1, 2, 2, *ANSWER[:7]]))[-2:]
    assert ends.gap == pytest.approx(best - second)


def test_a_difference_in_the_second_run_counts():
    turns = iter(range(100))

    def answers(proposer, prompt):
        return ANSWER if next(turns) != 5 else [7]  # warm-up: 0 and 1, first run: 2 and 3, second: 4 and 5

    events = list(measure(Scripted(answers), PROMPTS[:1], compared(), runs=2))
    difference = events[-1].differences["speculative"]
    assert (difference.run, difference.at) == (2, 0)


def test_the_best_speedup_depends_on_the_proposers():
    # the end of the prompt occurs nowhere else: the lookup finds nothing before the answer repeats itself
    draft = FakeModel(seed=5)
    names = ["lookup", "draft", "auto"]
    *_, outcome = measure(Scripted(alike, draft), PROMPTS[:1], compared(proposer=names))
    assert set(outcome.hindsight) == set(names)
    best = {name: best_speedup(outcome, name) for name in names}
    # after 3 4 5 6 3 4 5 it proposes the remaining 13 tokens, first only 4 as no more have followed yet
    assert best["lookup"] > 1.5
    assert 1.0 <= best["draft"] < best["lookup"] <= best["auto"]
    assert [achieved(outcome, name) for name in names] == pytest.approx([1 / best[name] for name in names])
    assert [best_error(outcome, name) for name in names] == [0, 0, 0]


def test_more_runs_are_added_in_hindsight():
    session = Scripted(alike)
    first = [event for event in measure(session, PROMPTS, compared()) if isinstance(event, Outcome)]
    events = measure(session, PROMPTS, compared(), runs=2, earlier=first)
    for earlier, outcome in zip(first, (e for e in events if isinstance(e, Outcome)), strict=True):
        assert outcome.hindsight["speculative"][:1] == earlier.hindsight["speculative"]
        assert len(outcome.hindsight["speculative"]) == 3


def test_trees_and_empty_answers_have_no_best_speedup():
    session = Scripted(alike, FakeModel())
    *_, outcome = measure(session, PROMPTS[:1], compared(shape=["chain", "tree"]))
    assert set(outcome.hindsight) == {"chain"}
    assert best_speedup(outcome, "tree") is None
    *_, outcome = measure(Scripted(lambda *_: []), PROMPTS[:1], compared())
    assert outcome.hindsight == {}


def test_cancelling_ends_the_benchmark():
    seen = []
    events = measure(Scripted(alike), PROMPTS, compared(), cancelled=lambda: len(seen) >= 4, delay=0.0)
    for event in events:
        seen.append(event)
    assert [type(event) for event in seen] == [Run, Run, Outcome, Run]


def test_progress_adds_up_when_answers_end_early():
    shares = []
    list(measure(Scripted(lambda *_: ANSWER[:3]), PROMPTS, compared(), runs=2, on_progress=shares.append))
    assert sum(shares) == pytest.approx(3 * 2 * 2)
    assert max(shares) == pytest.approx(1 - 3 / 20)


def test_pause_before_each_run(monkeypatch):
    slept = []
    clock = iter(np.arange(0, 1000, 0.25))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr("time.sleep", slept.append)
    list(measure(Scripted(alike), PROMPTS[:1], compared(), delay=1.0))
    assert len(slept) == 3 * 3  # two variants and the control, in three pieces each
    assert max(slept) <= 0.1  # so that Ctrl-C is not delayed
