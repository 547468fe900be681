"""Several answers at the same time on llama.cpp: `Session.generate_many`."""

from collections import defaultdict
from dataclasses import replace
from itertools import count

import pytest

from spec_local import (
    Done,
    Failed,
    GenerationSettings,
    Prefilled,
    SamplingSettings,
    Session,
    Statistics,
    Text,
)
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.tiny import write_tiny_model
from tests.llama.answers import tokens_of
from tests.recorded_calls import record_calls
from tests.sequences import sequence_ends
from tests.unfiltered import unfiltered

pytestmark = pytest.mark.usefixtures("own_cache", "unchecked")

GREEDY = GenerationSettings(SamplingSettings(temperature=0), policy="fixed", max_tokens=24)
DRAWN = GenerationSettings(unfiltered(temperature=0.8), policy="fixed", max_tokens=24, seed=5)
PROMPTS = ["one two three", "four", "five six one two three one two", "seven eight nine", "ten"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """F32, which reduces rounding differences: greedy answers are the same in calls of different sizes."""
    folder = tmp_path_factory.mktemp("many")
    return [
        write_tiny_model(folder / name, tensor_type="F32", noise=noise)
        for name, noise in (("main.gguf", 0.0), ("draft.gguf", 0.05))
    ]


@pytest.fixture
def open_session(paths):
    opened = []

    def make(*, draft=True, **options):
        main_and_draft = paths if draft else paths[:1]
        opened.append(Session.open(*main_and_draft, threads=1, **{"n_ctx": 128, "parallel": 3} | options))
        return opened[-1]

    yield make
    for session in opened:
        session.close()


def collect(events):
    """Tokens and last event of each answer, and the numbers of the answers in the order of their ends.

    Tokens are in the order of the prompts.
    """
    tokens, last, order = defaultdict(list), {}, []
    for number, event in events:
        assert number not in last
        if isinstance(event, Text):
            tokens[number] += event.tokens
        elif isinstance(event, Done | Failed):
            last[number] = event
            order.append(number)
        else:
            assert isinstance(event, Prefilled)
    return [tokens[number] for number in sorted(last)], last, order


def alone(session, prompt, settings):
    return tokens_of(session.generate(prompt, settings))


def is_empty(session):
    """Return whether no sequence of either cache has tokens."""
    return {end for row in (session.main, session.draft) if row for end in sequence_ends(row)} == {-1}


@pytest.mark.parametrize("draft", [True, False])
def test_answers_are_those_of_the_prompts_one_by_one(open_session, draft):
    session = open_session(draft=draft)
    expected = [alone(session, prompt, GREEDY) for prompt in PROMPTS]
    totals, calls = Statistics(), record_calls(session.main)
    tokens, last, order = collect(session.generate_many(PROMPTS, GREEDY, totals=totals))
    assert tokens == expected
    assert sorted(order) == list(range(len(PROMPTS)))
    each = [event.statistics for event in last.values()]
    assert totals.predicted_n == sum(s.predicted_n for s in each)
    assert totals.draft_n == sum(s.draft_n for s in each) > 0
    assert len(calls) < 0.6 * sum(s.n_steps for s in each)
    assert is_empty(session)


@pytest.mark.parametrize(
    "settings", [GREEDY, DRAWN, replace(DRAWN, policy="adaptive")], ids=["greedy", "drawn", "adaptive"]
)
def test_reproducible_answers_are_the_same_alone_and_together(open_session, settings):
    session = open_session(reproducible=True)
    each = [replace(settings, max_tokens=20 + 3 * i, seed=i) for i in range(len(PROMPTS))]
    expected = [alone(session, prompt, own) for prompt, own in zip(PROMPTS, each, strict=True)]
    for n_parallel in (None, 2):
        tokens, _, _ = collect(session.generate_many(PROMPTS, each, n_parallel=n_parallel))
        assert tokens == expected


def test_answers_of_one_prompt_differ_by_their_seeds(open_session):
    session = open_session(reproducible=True)
    tokens, _, _ = collect(session.generate_many(["one two"] * 4, DRAWN))
    assert len(set(map(tuple, tokens))) == 4
    assert tokens[2] == alone(session, "one two", replace(DRAWN, seed=DRAWN.seed + 2))


@pytest.mark.parametrize(("n_parallel", "expected"), [(None, 3), (2, 2), (1, 1)])
def test_a_call_has_as_many_rows_as_allowed(open_session, n_parallel, expected):
    session = open_session()
    calls = record_calls(session.main)
    collect(session.generate_many(PROMPTS, GREEDY, n_parallel=n_parallel))
    assert max(call.n_parallel for call in calls) == expected


def test_answers_are_complete_in_the_order_in_which_they_end(open_session):
    session = open_session()
    lengths = [40, 5, 20]
    settings = [replace(GREEDY, max_tokens=n) for n in lengths]
    _, last, order = collect(session.generate_many(["one"] * 3, settings))
    assert [last[i].statistics.predicted_n for i in range(3)] == lengths
    assert order == [1, 2, 0]


@pytest.mark.parametrize("n_parallel", [None, 1])
def test_a_shared_beginning_is_read_once(open_session, n_parallel):
    session = open_session()
    beginning = session.main.model.vocabulary.tokenize(" ".join(["one two three four five"] * 4))
    assert len(beginning) > 20
    prompts = [[*beginning, token] for token in (300, 301, 302, 303)]
    _, last, _ = collect(session.generate_many(prompts, GREEDY, n_parallel=n_parallel))
    read = [last[i].statistics.prompt_n for i in range(4)]
    cached = [last[i].statistics.cached_n for i in range(4)]
    assert sum(read) < len(beginning) + 3 * 4
    # The last token is evaluated in the first step.
    assert {r + c for r, c in zip(read, cached, strict=True)} == {len(beginning)}
    expected = [alone(session, prompt, GREEDY) for prompt in prompts]
    tokens, _, _ = collect(session.generate_many(prompts, GREEDY, n_parallel=n_parallel))
    assert tokens == expected


def test_cancelling_one_answer_disturbs_no_other(open_session):
    session = open_session()
    expected = [alone(session, prompt, GREEDY) for prompt in PROMPTS]
    seen = defaultdict(int)

    def events():
        for number, event in session.generate_many(
            PROMPTS, GREEDY, cancelled=lambda i: i == 1 and seen[1] > 2
        ):
            seen[number] += isinstance(event, Text)
            yield number, event

    tokens, last, _ = collect(events())
    assert [last[i].reason for i in range(5)] == ["length", "cancelled", "length", "length", "length"]
    assert 0 < len(tokens[1]) < len(expected[1])
    assert tokens == [*expected[:1], expected[1][: len(tokens[1])], *expected[2:]]
    assert is_empty(session)


def test_the_error_of_one_answer_ends_that_answer_only(open_session):
    session = open_session()
    prompts = ["one", [5] * 500, "three", 7, [], [10**9]]
    settings = [GREEDY, GREEDY, replace(GREEDY, grammar="root ::= oops"), GREEDY, GREEDY, GREEDY]
    tokens, last, _ = collect(session.generate_many(prompts, settings))
    assert is_empty(session)
    assert tokens[0] == alone(session, "one", GREEDY)
    errors = {number: event.error for number, event in last.items() if isinstance(event, Failed)}
    assert set(errors) == {1, 2, 3, 4, 5}
    assert isinstance(errors[1], ContextOverflow)
    assert all(isinstance(errors[number], InvalidRequest) for number in (2, 3, 4, 5))
    assert all(str(error) and "\n" not in str(error) for error in errors.values())


def test_a_full_context_ends_one_answer_only(open_session):
    session = open_session()
    long = replace(GREEDY, max_tokens=None)
    _, last, _ = collect(session.generate_many([[300] * 100, "one"], [long, GREEDY]))
    assert last[0].reason == "context"
    assert last[0].statistics.predicted_n + 100 in (128, 129)
    assert last[1].statistics.predicted_n == 24


def test_a_session_is_usable_after_its_events_were_closed(open_session):
    session = open_session()
    expected = alone(session, "one", GREEDY)
    events = session.generate_many(PROMPTS, GREEDY)
    for _ in range(12):
        next(events)
    events.close()
    assert is_empty(session)
    assert alone(session, "one", GREEDY) == expected
    events = session.generate_many(PROMPTS, GREEDY)
    for _ in range(12):
        next(events)
    assert alone(session, "one", GREEDY) == expected  # a new answer ends those of before
    ends = [event for _, event in events]
    assert ends
    assert all(isinstance(event, Done) and event.reason == "cancelled" for event in ends)


def test_prompts_are_taken_when_there_is_room(open_session):
    session = open_session()
    taken = []

    def prompts():
        for i in count():
            taken.append(i)
            yield "one"

    events = session.generate_many(prompts(), replace(GREEDY, max_tokens=3))
    assert any(isinstance(event, Done) for _, event in events)
    events.close()
    assert len(taken) == 3


@pytest.mark.parametrize("parallel", [0, -1, 257, 10**6])
def test_a_number_of_rows_that_is_impossible(paths, parallel):
    with pytest.raises(InvalidRequest, match=rf"parallel is {parallel}: give 1 to 255"):
        Session.open(*paths, n_ctx=64, threads=1, parallel=parallel)


@pytest.mark.parametrize("n_parallel", [0, -1, 4])
def test_more_rows_than_the_session_has(open_session, n_parallel):
    with pytest.raises(InvalidRequest, match=rf"n_parallel is {n_parallel}: give 1 to 3, as the session"):
        open_session().generate_many(PROMPTS, GREEDY, n_parallel=n_parallel)


def test_too_little_memory_for_so_many(paths, free_memory):
    free_memory(1 << 20)
    message = (
        r"are needed for 200 answers at the same time, in contexts of 128 tokens, but only 1 MiB are free"
    )
    with pytest.raises(ContextOverflow, match=message):
        Session.open(paths[0], n_ctx=128, threads=1, parallel=200)


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 8), (80 << 10, 1)])
def test_the_number_of_rows_that_fit(paths, free_memory, free, expected):
    free_memory(free)
    with Session.open(paths[0], n_ctx=128, threads=1, parallel=None) as session:
        assert session.n_parallel == expected
        assert 1 <= session.best_parallel() <= expected


@pytest.mark.parametrize("policy", ["off", "fixed", "adaptive"])
def test_a_recurrent_model_answers_several_prompts(recurrent_path, policy):
    settings = replace(GREEDY, policy=policy)
    with Session.open(recurrent_path, n_ctx=128, threads=1, parallel=3) as session:
        expected = [alone(session, prompt, settings) for prompt in PROMPTS]
        tokens, _, _ = collect(session.generate_many(PROMPTS, settings))
        assert tokens == expected


def test_prompts_that_come_later(open_session):
    """An answer starts while others run, and after a time in which none did."""
    session = open_session(reproducible=True)
    expected = [alone(session, prompt, GREEDY) for prompt in PROMPTS[:3]]
    ended, asked = [], []

    def prompts():
        yield PROMPTS[0]
        while len(asked) < 3:  # the first answer goes on meanwhile
            asked.append(None)
            yield None
        assert not ended
        yield PROMPTS[1]
        while len(ended) < 2:
            yield None
        yield PROMPTS[2]

    tokens = defaultdict(list)
    for number, event in session.generate_many(prompts(), GREEDY):
        if isinstance(event, Text):
            tokens[number] += event.tokens
        elif isinstance(event, Done):
            ended.append(number)
    assert [tokens[i] for i in range(3)] == expected
    assert sorted(ended) == [0, 1, 2]
    assert ended[-1] == 2


def test_kept_caches_serve_later_prompts(open_session):
    """Three conversations take turns, and each finds its own history; a fourth replaces the oldest one."""
    session = open_session()
    length, chats = 16, [[1, *range(10 * i, 10 * i + 12)] for i in range(1, 5)]
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=length)

    def ask(*numbers):
        """Ask one after another, and return how many tokens of each prompt were cached."""
        cached = []

        def prompts():
            for i in numbers:
                yield list(chats[i])
                while len(cached) < len(asked) + 1:
                    yield None
                asked.append(i)

        asked = []
        for number, event in session.generate_many(prompts(), settings, keep_caches=True):
            if isinstance(event, Text):
                chats[numbers[number]] += event.tokens
            elif isinstance(event, Done):
                cached.append(event.statistics.cached_n)
        return cached

    assert ask(0, 1, 2) == [0, 1, 1]  # the first token is shared
    before = [len(chat) for chat in chats]
    # All but the last token is in the cache, and the last token of a prompt is not counted as read.
    again = ask(0, 1, 2)
    assert again == [n - 1 for n in before[:3]]
    assert ask(3) == [1]  # in the row of chat 0, which was used least recently
    assert ask(1, 2) == [len(chats[1]) - length - 1, len(chats[2]) - length - 1]
    assert ask(0) == [len(chats[0]) - length - 1]  # which no row has any more, but the prompt cache
