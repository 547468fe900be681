"""Prompts that are read again: which tokens, and where they part from an earlier prompt."""

import time

import numpy as np
import pytest

from spec_local.engine.events import Statistics
from spec_local.server.metrics import Metrics
from spec_local.server.supervision.events import Delta, Ended
from spec_local.server.supervision.read_again import KnownPrompt, ReadAgain, ReadAgainLog, read_again


def text(n, seed=0):
    """Invented tokens, some of them frequent, as in texts."""
    return np.minimum(np.random.default_rng(seed).zipf(1.2, n), 150_000).astype(np.int32)


def joined(*parts):
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def again(prompt, n_cached, *recent):
    return read_again(prompt, n_cached, [KnownPrompt.of(each.tolist()) for each in recent])


FIRST = text(5000)


def test_a_conversation_that_goes_on_reads_only_what_is_new():
    longer = joined(FIRST, text(3000, 1))
    assert again(longer, 5000, FIRST) is None
    assert again(longer, 4999, FIRST) is None
    assert again(FIRST, 4999, FIRST) is None
    assert again(longer, 0) is None


@pytest.mark.parametrize("position", [0, 3, 412, 4000])
def test_a_token_that_changes(position):
    changed = joined(FIRST[:position], [150_001], FIRST[position + 1 :])
    found = again(changed, position, text(5000, 1), FIRST, text(5000, 2))
    assert found.position == position
    assert 4999 - position - 15 <= found.n <= 5000 - position


@pytest.mark.parametrize("position", [0, 412])
def test_tokens_that_are_added_or_removed(position):
    for changed in (
        joined(FIRST[:position], [150_001, 5, 150_002], FIRST[position:]),
        joined(FIRST[:position], [150_001], FIRST[position + 100 :]),
    ):
        found = again(changed, position, FIRST)
        assert found.position == position
        assert found.n == pytest.approx(5000 - position, abs=120)
        assert found.n <= 5000 - position


def test_several_changes_count_once_each():
    changed = FIRST.copy()
    changed[[100, 200, 300, 2000]] = 150_001
    found = again(changed, 100, FIRST)
    assert found.position == 100
    assert 4900 - 5 * 8 <= found.n <= 4896


def test_a_prompt_that_the_cache_no_longer_has():
    longer = joined(FIRST, text(3000, 1))
    assert again(longer, 0, FIRST) == ReadAgain(5000, None)
    assert again(longer, 1000, FIRST) == ReadAgain(4000, None)
    changed = joined(FIRST[:4000], [150_001], FIRST[4001:])
    found = again(changed, 1000, FIRST)  # both: what was in the cache is the cause
    assert found.position is None
    assert 3980 <= found.n <= 4000
    found = again(changed, 3900, FIRST)  # nearly all is there
    assert found.position == 4000
    assert 1080 <= found.n <= 1100


def test_few_tokens_are_not_worth_telling():
    assert again(joined(FIRST[:4800], [150_001], FIRST[4801:]), 4800, FIRST) is None
    assert again(joined(FIRST, text(3000, 1)), 4800, FIRST) is None


def test_another_text_is_not_read_again_even_if_its_words_are_the_same():
    shared, rng = FIRST[:1000], np.random.default_rng(3)
    other = joined(shared, rng.permutation(FIRST[1000:]))
    assert again(other, 1000, FIRST) is None
    assert again(text(5000, 1), 0, FIRST) is None


def test_what_the_prompt_repeats_itself_is_new():
    """A file that is quoted once more: its first place is in the cache."""
    assert again(joined(FIRST, FIRST[1000:3000]), 5000, FIRST) is None


def test_the_prompt_that_is_continued_counts():
    """The one with the same beginning, or else with most of the same tokens."""
    changed = joined([150_001], FIRST[1:])
    other = joined([150_002], FIRST[1:2000], text(3000, 1))
    assert again(changed, 0, other, FIRST, other).position == 0
    assert again(changed, 0, other, FIRST, other).n > 4900
    side = joined(FIRST[:3000], text(100, 5))
    continued = joined(FIRST[:3000], [150_001], FIRST[3001:])
    assert again(continued, 3000, FIRST, side, side).position == 3000
    shuffled = np.random.default_rng(3).permutation(continued)
    assert again(continued, 3000, shuffled, FIRST).position == 3000


def test_prompts_without_a_block():
    assert again(text(300, 1), 0, text(5, 2)) is None
    assert again(text(300, 1), 296, FIRST) is None
    few = joined(text(3, 2), [9] * 400)
    assert again(few, 0, joined(text(3, 2))) is None


def test_it_takes_milliseconds():
    prompt = text(25_000)
    prompt[412] = 150_001
    recent = [KnownPrompt.of(joined(text(20_000), text(5000, i)).tolist()) for i in range(1, 33)]
    seconds = []
    for _ in range(9):
        started = time.thread_time()
        assert read_again(prompt, 412, recent).position == 412
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.02  # 2 to 4 ms of the processor


class Log:
    def __init__(self):
        self.now, self.lines = 0.0, []
        self.log = ReadAgainLog(lambda tokens: "".join(map(chr, tokens)), self.lines.append, lambda: self.now)

    def check(self, prompt, n_cached):
        self.now += 11
        return self.log.check(prompt, n_cached)


@pytest.fixture
def log():
    return Log()


LETTERS = [97 + i * i % 26 for i in range(1500)]


def changed_at(position):
    return [*LETTERS[:position], 10, *LETTERS[position + 1 :]]


def test_a_line_shows_the_text_where_prompts_part(log):
    log.log.add(LETTERS)
    n = log.check(changed_at(412), 412)
    before, after = ("".join(map(chr, LETTERS[a:b])) for a, b in ((396, 412), (413, 436)))
    assert log.lines == [
        f"reads {n:,} tokens again: parts from an earlier prompt at token 412: '…{before}\\n{after}…'"
    ]
    assert 1070 < n < 1089
    assert log.check(LETTERS, 0) == 1500
    assert log.lines[1:] == ["reads 1,500 tokens again: they were no longer in the cache"]
    assert log.check(changed_at(3), 3) > 1480
    assert "at token 3: '…" in log.lines[2]


def test_a_log_is_not_flooded(log):
    assert log.check(LETTERS, 0) == 0
    log.log.add([])
    log.log.add(LETTERS)
    for _ in range(3):
        assert log.check(changed_at(412), 412) > 1000
    assert len(log.lines) == 1
    for position in range(20, 30):
        log.now -= 10
        assert log.check(changed_at(position), position) > 1000
    assert len(log.lines) == 2
    for _ in range(12):  # 132 seconds
        assert log.check(LETTERS, 0) == 1500
    assert ["no longer" in line for line in log.lines] == [False, False, True, True]
    log.now += 60
    assert log.check(LETTERS, 0) == 1500
    log.now -= 10
    log.check(changed_at(700), 700)
    assert ["no longer" in line for line in log.lines[4:]] == [True]


def test_only_the_last_prompts_are_known(log):
    log.log.add(LETTERS)
    for n in range(32):
        assert log.log.check(LETTERS, 0) == 1500
        log.log.add([200 + n] * 300)
    assert log.log.check(LETTERS, 0) == 0


def test_they_are_counted():
    metrics = Metrics(lambda: 0, lambda: 0)
    metrics.observe(Ended(Delta(), "stop", Statistics(), n_reread=1200), 1.0)
    metrics.observe(Ended(Delta(), "stop", Statistics()), 1.0)
    assert "specdec:prompt_tokens_reread_total 1200.0" in metrics.text().decode()
