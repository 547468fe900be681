"""The number of threads on a simulated machine, whose cores other programs use, too."""

import pytest

from spec_local.llama.thread_count import ThreadCount

CALL = 0.05  # seconds


def cores(count: ThreadCount, n_cores: int, n_others: int) -> float:
    """Cores that threads get if all that runs has an equal share, and they sleep if they wait briefly."""
    share = min(1.0, n_cores / (count.n + n_others))
    return count.n * share * (0.99 if count.state != "shared" else 0.85 if share == 1.0 else 0.7)


def run(
    count: ThreadCount, n_cores: int, n_others: int, start: float = 0.0, seconds: float = 60.0
) -> list[int]:
    """Make calls one after the other; returns the number of threads of each."""
    used = []
    for i in range(int(seconds / CALL)):
        count.begin(start + i * CALL)
        used.append(count.n)
        count.observe(start + (i + 1) * CALL, CALL, CALL * cores(count, n_cores, n_others))
    return used


@pytest.mark.parametrize("n_cores", [1, 2, 4, 8, 16, 64])
def test_all_threads_on_an_idle_machine(n_cores):
    count = ThreadCount(n_cores)
    assert set(run(count, n_cores, 0)) == {n_cores}
    assert count.state == "own"


@pytest.mark.parametrize(
    ("n_cores", "n_others", "n"), [(2, 1, 1), (4, 1, 3), (4, 2, 2), (8, 1, 7), (8, 3, 5), (16, 6, 10)]
)
def test_as_many_threads_as_cores_are_left(n_cores, n_others, n):
    count = ThreadCount(n_cores)
    used = run(count, n_cores, n_others)
    assert used.count(n) > 0.7 * len(used)


@pytest.mark.parametrize(("n_cores", "n_others"), [(2, 2), (2, 5), (4, 4), (8, 8), (8, 6)])
def test_all_threads_where_others_use_all_cores(n_cores, n_others):
    count = ThreadCount(n_cores)
    used = run(count, n_cores, n_others)
    assert used.count(n_cores) > 0.75 * len(used)
    assert count.state != "own"


@pytest.mark.parametrize("n_others", [1, 2])
@pytest.mark.parametrize("seconds", [5.0, 6.0, 7.0])
def test_all_threads_once_the_others_have_ended(n_others, seconds):
    count = ThreadCount(2)
    run(count, 2, n_others, seconds=seconds)
    assert count.state != "own"
    assert set(run(count, 2, 0, seconds)[int(3 / CALL) :]) == {2}
    assert count.state == "own"


def test_threads_that_always_sleep_a_lot_are_tried_with_long_waits():
    count = ThreadCount(4)
    run(count, 4, 4, seconds=5.0)
    for i in range(int(40 / CALL)):
        count.observe(5 + i * CALL, CALL, CALL * count.n * (0.6 if count.state == "shared" else 0.99))
    assert (count.n, count.state) == (4, "own")


def test_the_first_call_after_a_pause_waits_briefly():
    """Whether other programs are busy now is not known, and the call of a long prompt could take a minute."""
    count = ThreadCount(2)
    run(count, 2, 0, seconds=5.0)
    assert count.state == "own"
    count.begin(100.0)
    assert (count.n, count.state) == (2, "shared")


def test_threads_that_all_have_other_cores_are_enough():
    """More cores than threads, as with hyper-threading: others that use the rest do not matter."""
    count = ThreadCount(8)
    assert set(run(count, 16, 8)) == {8}
