"""The kept states of a recurrent model, and when its last tokens can be removed."""

import pytest

from spec_local.core.kept_states import KeptStates


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
    assert states.lacks(5, "usual")
    states.checkpoints["usual"] = 5
    assert not states.lacks(5, "usual")
    assert states.lacks(6, "usual")
    assert states.lacks(5, "lasting")  # either may move
    states.checkpoints |= {"lasting": 5, "usual": 8}
    assert states.lacks(5, "usual")
    assert not states.lacks(0, "usual")


def test_the_nearest_checkpoint(states):
    states.checkpoints |= {"usual": 8, "lasting": 5}
    assert states.nearest(9) == "usual"
    assert states.nearest(8) == "usual"
    assert states.nearest(7) == "lasting"
    assert states.checkpoints == {"lasting": 5}  # the other one is of another history from now on
    assert states.nearest(4) is None
    assert not states.checkpoints


def test_removed_tokens_take_later_checkpoints_with_them(states):
    states.checkpoints |= {"usual": 8, "lasting": 5}
    states.on_evaluated(4)
    states.on_removed(7)
    assert states.checkpoints == {"lasting": 5}
