"""A limit of the reasoning: the main model's distribution up to it, then the closing, whatever is drafted."""

import copy
from functools import partial

import numpy as np
import pytest

from spec_local.core.constraint import Constraint
from spec_local.core.sampling import Sampler
from spec_local.lookups.forced import ForcedTokens
from spec_local.policies.base import Policy
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst, Drawn
from spec_local.reasoning.markers import Splitter, markers_of, splitter_after
from spec_local.reasoning.thought import Thought, ThoughtTokens
from spec_local.testing import FakeModel, FakeState, enumerate_outcomes
from tests.unfiltered import unfiltered
from tests.unit.generation import generate

PIECES = [b"a", b"\n", b"</think>", b"<think>", b"<", b"/think>"]
A, LINE, CLOSE, OPEN, LESS, REST = range(6)
CLOSING = [LINE, CLOSE]


def limit(n, *prompt, answer=None, closing=CLOSING):
    splitter = splitter_after("{{ '</think>' }}", PIECES.__getitem__, prompt)
    splitter.feed("")
    return opened(n, splitter, answer=answer, closing=closing).start()


def opened(n, splitter=None, *, answer=None, closing=CLOSING, pieces=PIECES, end=None):
    """The limit in an answer; splitter: of its text; None: the prompt has opened the reasoning."""
    if not splitter:
        splitter = splitter_after("{{ '</think>' }}", PIECES.__getitem__, [OPEN])
        splitter.feed("")
    markers = markers_of("</think>")
    tokens = ThoughtTokens(markers, pieces.__getitem__, len(pieces), lambda token: token == end)
    return Thought(splitter, tokens, closing, n, answer)


def after(state, *tokens):
    for token in tokens:
        assert state.allows(np.array([token]))[0]
        state = state.after(token)
    return state


def choices(state):
    return state.allowed().nonzero()[0].tolist()


def test_the_closing_follows_the_last_token():
    state = after(limit(3, OPEN), A, LINE)
    assert (choices(state), state.forced(4)) == ([*range(6)], ())
    state = after(state, A)
    assert choices(state) == [LINE]
    assert state.forced(4) == [(LINE, 1.0), (CLOSE, 1.0)]
    assert state.forced(1) == [(LINE, 1.0)]
    assert state.n_allowed([LINE, CLOSE, A, A]) == 4
    assert state.n_allowed([LINE, A]) == 1
    assert limit(3, OPEN).n_allowed([A, A, A, A]) == 3
    assert after(state, LINE, CLOSE) is None


@pytest.mark.parametrize("tokens", [[CLOSE], [A, CLOSE], [LESS, REST]])
def test_reasoning_that_ends_before_is_free(tokens):
    assert after(limit(3, OPEN), *tokens) is None


def test_what_the_model_wrote_of_the_closing_is_not_written_again():
    assert choices(after(limit(2, OPEN), A, LINE)) == [CLOSE]
    assert choices(after(limit(2, OPEN), LINE, A)) == [LINE]


def test_the_model_may_open_the_reasoning_itself():
    assert choices(limit(0, OPEN)) == [LINE]
    assert choices(after(limit(0), OPEN)) == [LINE]
    assert choices(after(limit(1), LINE, OPEN, A)) == [LINE]
    for tokens in ([A], [LESS, A], [CLOSE]):
        assert after(limit(0), *tokens) is None
    assert limit(0, OPEN, CLOSE) is None


def test_an_answer_that_has_more_than_a_smaller_limit_allows_is_closed_at_once():
    for begun, next_token in (
        ([A, A, A], LINE),
        ([A, A, LINE], CLOSE),
        ([A, A, LINE, A], LINE),
        ([LINE, A, LINE, LINE], CLOSE),
    ):
        assert choices(opened(2).start(begun)) == [next_token]
    for begun in ([A, A, A, CLOSE], [A, A, A, LESS, REST], [A, A, LINE, CLOSE, A]):
        assert opened(2).start(begun) is None


# A character of four bytes, and some that are parts of none.
BYTES = [b"\xf0", b"\x9f", b"\x98\x80", b"a\xf0", b"</think>"]
LEAD, MORE, LAST, NEXT, END = range(5)


@pytest.mark.parametrize(
    ("tokens", "n_free"),
    [
        ([LEAD, MORE, LAST], 3),  # the limit is two
        ([LAST, LEAD, MORE, LAST], 4),
        ([LEAD, LEAD, MORE, LAST], 4),  # the first byte is not of a character
        ([MORE, MORE], 2),
        ([MORE, NEXT, MORE, LAST], 4),
        ([LEAD, NEXT, NEXT, NEXT, NEXT], 5),  # no character ends: three more tokens at most
    ],
)
def test_the_closing_follows_a_whole_character(tokens, n_free):
    state = opened(2, closing=[END], pieces=BYTES).start()
    for token in tokens[:n_free]:
        assert len(choices(state)) == len(BYTES)
        assert state.forced(1) == ()
        state = state.after(token)
    assert choices(state) == [END]
    assert state.forced(2) == [(END, 1.0)]


def test_reasoning_may_end_where_a_character_is_not_complete():
    assert opened(1, closing=[END], pieces=BYTES).start([LEAD, END]) is None


def test_a_state_does_not_change():
    state = limit(2, OPEN)
    before = copy.deepcopy(state.splitter.__dict__)
    for token in range(6):
        state.after(token)
    assert state.splitter.__dict__ == before


def test_the_answers_constraint_begins_after_the_closing():
    answer = FakeState(6, lambda answer: {A, LINE, CLOSE} if len(answer) < 3 else {LESS})
    state = limit(1, OPEN, answer=answer)
    assert choices(state) == [*range(6)]
    state = after(state, A)
    assert choices(state) == [LINE]
    last = after(state, LINE, CLOSE)
    assert (last.answer, choices(last)) == ((), [A, LINE, CLOSE])
    assert state.n_allowed([LINE, CLOSE, A, A, A, LESS, A]) == 6


def test_every_model_that_reasons_has_a_closing():
    for name in ("</think>", "<|start|>assistant<|channel|>final<|message|>", "<channel|>"):
        markers = markers_of(name)
        assert markers.closed.strip().endswith(markers.closings[0])


def answer(state, rng, rule="exact-match", shape=None, *, drafting=False, n=4, begun=()):
    """The tokens of an answer, and the number of draft tokens accepted.

    The models have three tokens, so that all outcomes can be enumerated: a, the line break, the marker.
    """
    constraint = Constraint(state) if state else None
    sampler = Sampler(unfiltered(), constraint)
    draft = DraftModel(FakeModel(3, seed=9), sampler, shape, n_vocab=3) if drafting and shape else None
    lookups = [ForcedTokens(constraint)] if drafting and constraint else []
    proposer = CombinedProposer(Policy(), draft, lookups, constraint=constraint) if drafting else None
    options = {"draft_max": 2, "max_tokens": n, "sampler": sampler}
    tokens, end = generate(FakeModel(3, seed=1), [0, 1, *begun], proposer, rng=rng, rule=rule, **options)
    return tuple(tokens), end.statistics.draft_n_accepted


every_rule = pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("exact-match", None),
        ("token", Chain("drawn")),
        ("block", Chain("drawn")),
        ("exact-match", Chain("coupled")),
        ("exact-match", BestFirst(3)),
        ("traversal", Drawn("without replacement", 3)),
    ],
    ids=["forced", "token", "block", "coupled", "best first", "traversal"],
)


@every_rule
def test_the_output_distribution_is_that_of_plain_decoding(rule, shape):
    n_drafted = 0

    def run(rng, drafting, n=4, budget=2):
        nonlocal n_drafted
        state = limit(budget, OPEN) if budget else None
        tokens, n_accepted = answer(state, rng, rule, shape, drafting=drafting, n=n)
        n_drafted += n_accepted
        return tokens

    plain = enumerate_outcomes(partial(run, drafting=False))
    drafted = enumerate_outcomes(partial(run, drafting=True))
    assert n_drafted
    assert drafted.keys() == plain.keys()
    assert all(abs(drafted[answer] - plain[answer]) < 1e-12 for answer in plain)
    free = enumerate_outcomes(partial(run, drafting=False, n=2, budget=None))
    for first, probability in free.items():
        found = {answer: p for answer, p in plain.items() if answer[:2] == first}
        assert abs(sum(found.values()) - probability) < 1e-12
        if CLOSE not in first:
            closing = CLOSING[first[-1:] == (LINE,) :]
            assert all(list(answer[2 : 2 + len(closing)]) == closing for answer in found)


@every_rule
def test_the_output_distribution_where_the_limit_would_split_a_character(rule, shape):
    """The main model's up to the end of the character, then the closing."""
    pieces, end = [b"\xc3", b"\xa9", b"</think>"], 2

    def run(rng, drafting, n=4):
        state = opened(1, closing=[end], pieces=pieces).start() if n == 4 else None
        return answer(state, rng, rule, shape, drafting=drafting, n=n)[0]

    def n_free(tokens):
        """Number of tokens before the closing; all if the reasoning ends before."""
        text = [b"".join(pieces[token] for token in tokens[:n]) for n in range(len(tokens) + 1)]
        whole = (n for n in range(1, 5) if end in tokens[:n] or text[n][-1:] != b"\xc3")
        return next(whole, 4)

    plain = enumerate_outcomes(partial(run, drafting=False))
    drafted = enumerate_outcomes(partial(run, drafting=True))
    assert drafted.keys() == plain.keys()
    assert all(abs(drafted[tokens] - plain[tokens]) < 1e-12 for tokens in plain)
    assert {n_free(tokens) for tokens in plain} == {1, 2, 3, 4}
    for tokens in plain:
        n = n_free(tokens)
        assert n == 4 or end in tokens[:n] or tokens[n] == end
    for n in (1, 2, 3):
        free = enumerate_outcomes(lambda rng, n=n: run(rng, drafting=False, n=n))
        for first, probability in free.items():
            if n_free(first + (0,) * (4 - n)) >= n:  # the limit has forced none of them
                found = sum(p for tokens, p in plain.items() if tokens[:n] == first)
                assert abs(found - probability) < 1e-12


@pytest.mark.parametrize("begun", [[A], [LINE], [A, LINE], [A, A], [A, A, LINE], [A, A, LINE, CLOSE]])
@every_rule
def test_an_answer_that_is_read_again_goes_on_as_before(rule, shape, begun):
    """Its tokens count, the closing goes on where it was, and nothing is forced after the reasoning."""
    whole = enumerate_outcomes(lambda rng: answer(limit(2, OPEN), rng, n=len(begun) + 2)[0])
    same = {tokens[len(begun) :]: p for tokens, p in whole.items() if tokens[: len(begun)] == tuple(begun)}

    def rest(rng):
        state = opened(2).start(begun)
        return answer(state, rng, rule, shape, drafting=True, n=2, begun=begun)[0]

    continued = enumerate_outcomes(rest)
    total = sum(same.values())
    assert continued.keys() == same.keys()
    assert all(abs(p - same[tokens] / total) < 1e-12 for tokens, p in continued.items())


def test_the_text_that_an_answer_begins_with_may_open_the_reasoning():
    """The tokens of the prompt alone do not show it: a question may have the same text."""
    splitter = Splitter(markers_of("</think>"))
    splitter.skip("<think>Hm")
    assert choices(opened(0, splitter).start()) == [LINE]
    splitter.skip(", well.</think>")
    assert opened(0, splitter).start() is None
