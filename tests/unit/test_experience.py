"""State carried between answers."""

import pytest

from spec_local.policies.experience import Experience


def test_the_first_answer_has_the_expected_gain_and_length():
    known = Experience()
    known.start(0.4)
    assert (known.answers.gain, known.answers.length) == (0.4, 200.0)


def test_the_last_answers_length_weighs_three_tenths():
    known = Experience()
    known.start(0.4)
    known.n_tokens = 100
    known.start(0.4)
    assert known.answers.length == pytest.approx(170.0)
    assert known.n_tokens == 0


def test_the_last_answers_gain_weighs_a_quarter():
    known = Experience()
    known.start(0.4)
    known.n_tokens, known.gained = 100, 80.0
    known.start(0.4)
    assert known.answers.gain == pytest.approx(0.5)


def test_a_bad_record_fades_while_the_draft_model_is_not_asked():
    known = Experience()
    known.start(0.4)
    known.answers.gain = -0.6
    known.n_tokens = 100
    known.start(0.4)
    assert known.answers.gain == pytest.approx(-0.59)


def test_an_answer_without_tokens_teaches_nothing():
    known = Experience()
    known.start(0.4)
    known.start(0.9)
    assert (known.answers.gain, known.answers.length) == (0.4, 200.0)
