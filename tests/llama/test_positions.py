"""A token's position is a number of its own, and not that of the tokens before it."""

import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.errors import InvalidRequest
from spec_local.testing import FakeModel

TEXT, FIRST = [5, 6, 7, 8, 9, 10], 1000
CLOSE = {"atol": 0.05, "rtol": 0}  # rotation by position is relative, up to rounding


@pytest.fixture
def sequence(make_context, tiny_model):
    """A sequence whose history begins at position `FIRST`."""
    made = make_context(tiny_model, max_branches=4)
    run(made.call(TEXT, n_logits=0, positions=range(FIRST, FIRST + len(TEXT))))
    return made


def test_what_follows_has_the_positions_after_it(sequence, fresh_logits, tiny_model):
    expected = fresh_logits(tiny_model, [*TEXT, 20, 21])
    np.testing.assert_allclose(run(sequence.call([20, 21])), expected[-2:], **CLOSE)
    assert sequence.context.length(sequence._seq_id) == FIRST + len(TEXT) + 2
    assert sequence.cached == [*TEXT, 20, 21]


def test_a_path_of_a_tree_and_a_rollback_keep_the_positions(sequence, fresh_logits, tiny_model):
    run(sequence.call([30, 31, 32, 33], [-1, -1, 1, 0]))
    sequence.commit([1, 2])
    assert sequence.cached == [*TEXT, 31, 32]
    expected = fresh_logits(tiny_model, [*TEXT, 31, 32, 40])[-1]
    np.testing.assert_allclose(run(sequence.call([40]))[0], expected, **CLOSE)
    sequence.truncate(3)
    assert sequence.context.length(sequence._seq_id) == FIRST + 3
    expected = fresh_logits(tiny_model, [*TEXT[:3], 50])[-1]
    np.testing.assert_allclose(run(sequence.call([50]))[0], expected, **CLOSE)


def test_a_text_at_other_positions_is_not_reused(sequence, fresh_logits, tiny_model):
    assert sequence.reuse([*TEXT, 1]) == 0
    np.testing.assert_allclose(run(sequence.call(TEXT)), fresh_logits(tiny_model, TEXT), **CLOSE)
    assert sequence.context.length(sequence._seq_id) == len(TEXT)
    assert sequence.reuse([*TEXT, 1]) == len(TEXT)


@pytest.mark.parametrize("positions", [[FIRST], [FIRST + 7], [-1], [1 << 40]])
def test_gaps_are_refused(sequence, positions):
    with pytest.raises(InvalidRequest, match="position"):
        sequence.call([1], positions=positions)
    assert sequence.cached == TEXT


def test_a_recurrent_model_has_no_positions(make_context, recurrent_model):
    with pytest.raises(InvalidRequest, match="positions"):
        make_context(recurrent_model).call([1], positions=[3])


def test_a_span_takes_several_positions_of_a_fake_model():
    model = FakeModel()
    run(model.call([1, 2, 3], positions=[0, 1, 9]))
    run(model.call([4, 5], [-1, 0]))
    model.commit([0, 1])
    assert (list(model.cached), model.positions) == ([1, 2, 3, 4, 5], [0, 1, 9, 10, 11])
    model.truncate(4)
    run(model.call([6]))
    assert model.positions == [0, 1, 9, 10, 11]
    with pytest.raises(InvalidRequest, match="ascend"):
        model.call([7], positions=[11])
