"""State carried between answers: what an answer teaches."""

from spec_local.policies.experience import Experience


def after_an_answer(gain, n_tokens=100, gained=None):
    """The expected length, and the gain of a draft model with this gain, after another answer.

    A usual draft model gains 0.4 with three answers at the same time, and nothing with more or fewer.
    """
    known = Experience(n_running=3)
    known.answers.gains = {(3, 0): gain}
    known.start(lambda n_running, window: 0.4 if n_running == 3 else 0.0)
    known.n_tokens, known.gained = n_tokens, gained
    known.start(lambda n_running, window: 0.4 if n_running == 3 else 0.0)
    assert (known.n_tokens, known.gained) == (0, None)
    assert [*known.answers.gains] == [(3, 0)]  # nothing is learned about other numbers of answers
    return known.answers.length, known.answers.gains[3, 0]


def test_gain_and_length_move_towards_those_of_the_last_answer():
    usual, gain = after_an_answer(0.4, n_tokens=0)
    assert gain == 0.4
    length, gain = after_an_answer(0.4, n_tokens=100, gained=80.0)
    assert 0.4 < gain < 0.8
    assert 100 < length < usual


def test_a_bad_record_fades_while_the_draft_model_is_not_asked():
    assert -0.6 < after_an_answer(-0.6)[1] < 0.4
