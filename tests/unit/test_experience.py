"""State carried between answers: what an answer teaches."""

from spec_local.policies.experience import Experience


def after_an_answer(gain, n_tokens=100, gained=None):
    """What is known of a draft model with this gain after another answer; a usual one gains 0.4."""
    known = Experience()
    known.start(0.4)
    known.answers.gain = gain
    known.n_tokens, known.gained = n_tokens, gained
    known.start(0.4)
    assert (known.n_tokens, known.gained) == (0, None)
    return known.answers


def test_gain_and_length_move_towards_those_of_the_last_answer():
    unchanged = after_an_answer(0.4, n_tokens=0)
    assert unchanged.gain == 0.4
    learned = after_an_answer(0.4, n_tokens=100, gained=80.0)
    assert 0.4 < learned.gain < 0.8
    assert 100 < learned.length < unchanged.length


def test_a_bad_record_fades_while_the_draft_model_is_not_asked():
    assert -0.6 < after_an_answer(-0.6).gain < 0.4
