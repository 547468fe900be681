"""The kept states of a recurrent model, and when its last tokens can be removed."""

import pytest

from spec_local.llama.rollback import KeptStates


@pytest.fixture
def states():
    return KeptStates(max_rollback=3)


@pytest.mark.parametrize(("n", "removable"), [(1, 0), (2, 1), (4, 3), (9, 3)])
def test_the_state_before_a_call_is_not_kept(states, n, removable):
    states.on_evaluated(n)
    assert [states.can_remove(i) for i in range(6)] == [0 < i <= removable for i in range(6)]


def test_tokens_are_removed_once_after_a_call(states):
    states.on_evaluated(4)
    states.on_removed(10)
    assert states.has_rolled_back
    assert not any(map(states.can_remove, range(6)))
    states.on_evaluated(2)
    assert not states.has_rolled_back
    assert states.can_remove(1)


def test_after_a_call_that_failed_nothing_can_be_removed(states):
    states.on_evaluated(4)
    states.on_removed(10)
    states.on_call()
    assert not any(map(states.can_remove, range(6)))
    assert states.has_rolled_back  # the state is still a kept one


def test_a_state_that_a_copy_shares_is_not_changed(states):
    states.on_evaluated(4)
    states.on_copied()
    assert not any(map(states.can_remove, range(6)))
    assert not states.has_rolled_back  # another copy is possible
    states.on_evaluated(4)
    assert states.can_remove(3)


def test_another_state_has_none_before_it(states):
    states.on_evaluated(4)
    states.on_removed(10)
    states.on_replaced()
    assert not states.has_rolled_back
    assert not any(map(states.can_remove, range(6)))


def test_a_checkpoint_is_copied_once(states):
    assert states.lacks(5)
    states.checkpoint = 5
    assert not states.lacks(5)
    assert states.lacks(6)
    assert not states.lacks(0)


def test_the_nearest_checkpoint(states):
    states.checkpoint = 8
    assert states.nearest(9) == 8
    assert states.nearest(8) == 8
    assert states.nearest(7) == 0
    assert states.checkpoint is None  # it is of another history from now on


@pytest.mark.parametrize(("length", "left"), [(7, None), (8, 8)])
def test_removed_tokens_take_a_later_checkpoint_with_them(states, length, left):
    states.checkpoint = 8
    states.on_evaluated(4)
    states.on_removed(length)
    assert states.checkpoint == left
