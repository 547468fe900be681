"""Test the line of statistics: what drafts gained, in words."""

from types import SimpleNamespace

import pytest

from spec_local.answers.gain import gain_of
from spec_local.engine.events import Statistics
from spec_local.settings import GenerationSettings
from specdec_cli import facts


def session(plain=0.1, has_draft=False, is_asked=True):
    def gain(settings, made):
        return gain_of(made, plain, settings.policy, is_asked=is_asked, has_draft=has_draft)

    return SimpleNamespace(gain=gain)


def statistics(seconds, n=100, draft_n=50):
    return Statistics(predicted_n=n, predicted_s=seconds, n_steps=n, draft_n=draft_n)


@pytest.mark.parametrize(
    ("made", "opened", "words"),
    [
        (statistics(5.0), session(), "about 2.0 times as fast as without drafts"),
        (statistics(10.2), session(), "about as fast as without drafts"),
        (statistics(14.0), session(), "slower than usual: the machine may be busy or hot"),
        (statistics(10.0, draft_n=0), session(), "no drafts (no draft model, and no earlier text recurred)"),
        (statistics(10.0, draft_n=0), session(has_draft=True), "no drafts (none promised a gain)"),
        (statistics(10.0), session(is_asked=False), ""),  # none were asked for
        (statistics(5.0), session(plain=None), ""),
        (statistics(0.5, n=10), session(), ""),
    ],
)
def test_gain(made, opened, words):
    assert facts.gain(opened, GenerationSettings(), made) == words


def test_only_a_policy_that_bounds_losses_blames_the_machine():
    line = facts.gain(session(), GenerationSettings(policy="fixed"), statistics(14.0))
    assert line == "slower than without drafts: policy adaptive drafts only where it pays"


def test_the_plain_line():
    made = Statistics(predicted_n=96, predicted_s=4.8, n_steps=40, draft_n=90, draft_n_accepted=71)
    line = "96 tokens in 4.8 s (20.0 tokens/s), so fast, 71 of 96 tokens drafted"
    assert facts.plain_statistics(made, "so fast") == line
    assert facts.plain_statistics(statistics(5.0, draft_n=0)) == "100 tokens in 5.0 s (20.0 tokens/s)"


def test_the_gain_follows_the_speed():
    assert facts.statistics_line(statistics(5.0), "so fast").startswith(
        "20.0 tokens/s · so fast · 100 tokens"
    )
    assert facts.statistics_line(statistics(5.0)).startswith("20.0 tokens/s · 100 tokens")


def test_what_drafting_saved():
    causes = {"searching": -0.1, "draft": 1.6, "reading": -0.4, "suffix": 0.2, "measuring": -0.0001}
    made = Statistics(prompt_s=0.5, predicted_s=4.5, n_steps=9, profile={"main model": 4.5}, saved_s=causes)
    line = "drafting saved 1.30 s of the 6.30 s of plain decoding: draft 1.60, suffix 0.20, searching −0.10, "
    assert facts.profile_lines(made)[1:] == [line + "reading −0.40"]
    made.saved_s = {"reading": -0.4}
    assert (
        facts.saved_line(made) == "drafting lost 0.40 s against the 4.60 s of plain decoding: reading −0.40"
    )
    made.saved_s = {"searching": -0.0001}  # too little to show
    assert facts.saved_line(made) == "drafting lost 0.00 s against the 5.00 s of plain decoding"
    made.saved_s = {}
    assert len(facts.profile_lines(made)) == 1
