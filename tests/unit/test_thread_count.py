"""The number of threads on a simulated machine, whose cores other programs use, too."""

import os
from types import SimpleNamespace

import psutil
import pytest

from spec_local.llama.thread_count import ThreadCount, Threads

CALL = 0.05  # seconds


class Machine:
    """Cores that are shared by all that runs, in equal parts."""

    def __init__(self, n_cores: int, most: int | None = None) -> None:
        self.n_cores = n_cores
        self.n_others = 0
        self.count = ThreadCount(most or n_cores, lambda: self.n_others * self.share())

    def share(self) -> float:
        return min(1.0, self.n_cores / (self.count.n + self.n_others))


def cores(simulated: Machine) -> float:
    """Cores that threads get; they sleep if they wait briefly."""
    count, share = simulated.count, simulated.share()
    return count.n * share * (0.99 if count.state != "shared" else 0.85 if share == 1.0 else 0.7)


def run(simulated: Machine, n_others: int, start: float = 0.0, seconds: float = 60.0) -> list[int]:
    """Make calls one after the other; returns the number of threads of each."""
    simulated.n_others = n_others
    count, used = simulated.count, []
    for i in range(int(seconds / CALL)):
        count.begin(start + i * CALL)
        used.append(count.n)
        count.observe(start + (i + 1) * CALL, CALL, CALL * cores(simulated))
    return used


@pytest.mark.parametrize("n_cores", [1, 2, 4, 8, 16, 64])
def test_all_threads_on_an_idle_machine(n_cores):
    simulated = Machine(n_cores)
    assert set(run(simulated, 0)) == {n_cores}
    assert simulated.count.state == "own"


@pytest.mark.parametrize(
    ("n_cores", "n_others", "n"), [(2, 1, 1), (4, 1, 3), (4, 2, 2), (8, 1, 7), (8, 3, 5), (16, 6, 10)]
)
def test_as_many_threads_as_cores_are_left(n_cores, n_others, n):
    used = run(Machine(n_cores), n_others)
    assert used.count(n) > 0.7 * len(used)


@pytest.mark.parametrize(("n_cores", "n_others"), [(2, 2), (2, 5), (4, 4), (8, 8), (8, 6)])
def test_all_threads_where_others_use_all_cores(n_cores, n_others):
    simulated = Machine(n_cores)
    used = run(simulated, n_others)
    assert used.count(n_cores) > 0.75 * len(used)
    assert simulated.count.state != "own"


@pytest.mark.parametrize("n_others", [1, 2])
@pytest.mark.parametrize("seconds", [5.0, 6.0, 7.0])
def test_all_threads_at_once_when_the_others_have_ended(n_others, seconds):
    simulated = Machine(2)
    run(simulated, n_others, seconds=seconds)
    assert simulated.count.state != "own"
    assert set(run(simulated, 0, seconds)[int(0.3 / CALL) :]) == {2}
    assert simulated.count.state == "own"


@pytest.mark.parametrize("used_by_others", [0.0, 0.15])
def test_threads_that_lack_time_without_other_programs_stay(used_by_others):
    """The host of a virtual machine takes it, or they sleep for some other reason."""
    count = ThreadCount(4, lambda: used_by_others)
    for i in range(100):
        count.observe(i * CALL, CALL, 2 * CALL)
        assert count.n == 4
    assert count.state == "own"


def test_a_small_program_does_not_take_one_of_two_threads():
    """Half of the speed, where waiting for it costs less."""
    count = ThreadCount(2, lambda: 0.35)
    for i in range(100):
        count.observe(i * CALL, CALL, 1.6 * CALL)
        assert count.n == 2


def test_threads_that_always_sleep_a_lot_are_tried_with_long_waits():
    simulated = Machine(4)
    run(simulated, 4, seconds=5.0)
    count = simulated.count
    for i in range(int(40 / CALL)):
        count.observe(5 + i * CALL, CALL, CALL * count.n * (0.6 if count.state == "shared" else 0.99))
    assert (count.n, count.state) == (4, "own")


def test_the_first_call_after_a_pause_waits_briefly():
    """Whether other programs are busy now is not known, and the call of a long prompt could take a minute."""
    simulated = Machine(2)
    run(simulated, 0, seconds=5.0)
    assert simulated.count.state == "own"
    simulated.count.begin(100.0)
    assert (simulated.count.n, simulated.count.state) == (2, "shared")


def test_threads_that_all_have_other_cores_are_enough():
    """More cores than threads, as with hyper-threading: others that use the rest do not matter."""
    assert set(run(Machine(16, most=8), 8)) == {8}


def test_other_programs_are_counted_since_the_last_time(monkeypatch):
    used = iter([10.0] + 4 * [11.5])
    monkeypatch.setattr(os, "times", lambda: (0.0, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=next(used)))
    threads = Threads(2)
    threads._other_programs._start -= 1.0
    assert threads.count._others() == pytest.approx(1.5, rel=0.1)
    assert threads.count._others() == 0.0
