"""Forced tokens: what they are, and that drafting them changes no distribution."""

import json
from functools import partial

import numpy as np
import pytest

from spec_local.core.calls import run as run_call
from spec_local.core.constraint import Constraint
from spec_local.core.proposal import Limit, Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.grammar import matcher
from spec_local.grammar.forced_text import layout
from spec_local.grammar.matcher import Grammar
from spec_local.lookups.forced import ForcedTokens
from spec_local.policies.base import Policy
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Drawn
from spec_local.testing import FakeModel, FakeState, enumerate_outcomes
from tests.byte_vocabulary import VOCABULARY, after
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, generate

V = VOCABULARY.n_tokens


@pytest.fixture(autouse=True)
def _no_earlier_answers():
    matcher._tables_of(VOCABULARY).usual_layout.beginning = b""


def schema(*required, **properties):
    return json.dumps({"type": "object", "properties": properties, "required": list(required or properties)})


TEXT, NUMBER, UNIT = {"type": "string"}, {"type": "integer"}, {"enum": ["day", "week"]}
NESTED = schema(
    a={"type": "array", "items": {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}}
)
FORCED = [
    # schema, text so far, forced text, whether the answer then ends
    (schema(city=TEXT), "", '{"city": "', False),
    (schema(city=TEXT, unit=UNIT), '{"city": "A"', ', "unit": "', False),
    (schema(city=TEXT, unit=UNIT), '{"city":"A","u', 'nit":"', False),
    (schema(city=TEXT, unit=UNIT), '{\n    "city": "A"', ',\n    "unit": "', False),
    (schema(city=TEXT, unit=UNIT), '{\n    "city": "A",\n  ', '  "unit": "', False),
    (schema(city=TEXT, unit=UNIT), '{"city": "A', "", False),  # within a string
    (schema(city=TEXT, unit=UNIT), '{"city": "A", "unit": "d', 'ay"}', True),
    (schema(city=TEXT, unit=UNIT), '{\n  "city": "A",\n  "unit": "week"', "\n}", True),
    (schema(city=TEXT, unit=UNIT), '{\n\t"city": "A"', ',\n\t"unit": "', False),
    (schema(n=NUMBER), "", '{"n": ', False),
    (schema(n=NUMBER | {"minimum": 1}), '{"n"', ": ", False),
    (schema(n={"type": ["integer", "null"]}), '{"n"', ":", False),
    (schema(n=NUMBER), '{"n": 3', "", False),  # more digits may follow
    (schema("n", n=NUMBER, m=NUMBER), '{"n": 3 ', "", False),  # a comma or a brace
    (NESTED, '{"a": [{"b": "x"}', "", False),
    (NESTED, '{\n  "a": [\n    {', '\n      "b": "', False),
    (NESTED, '{\n  "a": [\n    {\n      "b": "x"', "\n    }", False),
    (NESTED, '{\n  "a": [\n    {"b": "x"', "}", False),
    (NESTED, '{\n  "a": [\n    {\n      "b": "x"\n    }\n  ]', "\n}", True),
    (json.dumps({"const": "é🙂"}), "", '"é🙂"', True),
]


@pytest.mark.parametrize(("text", "before", "expected", "ends"), FORCED)
def test_forced_text_and_its_tokens(text, before, expected, ends):
    state = after(Grammar.from_json_schema(VOCABULARY, text), before)
    mask = state.allowed().copy()
    found = state.forced(64)
    tokens = [token for token, _ in found]
    assert tokens == VOCABULARY.continuation(expected) + [VOCABULARY.turn] * ends
    assert all(0.5 < confidence < 1 for _, confidence in found)
    for n in range(1, 5):
        assert state.forced(n) == found[:n]
    np.testing.assert_array_equal(state.allowed(), mask)


def test_predicted_white_space_and_a_last_token_are_less_certain():
    state = after(Grammar.from_json_schema(VOCABULARY, schema(city=TEXT, unit=UNIT)), '{"city": "A"')
    by_text = {VOCABULARY.piece(token): confidence for token, confidence in state.forced(64)}
    assert by_text[b'"'] < by_text[b" "] < by_text[b"n"]


GBNF = [
    ('root ::= "abcd" [0-9] "xyz"', "", "abc"),  # de is a token: the d may be a part of it
    ('root ::= "abcd" [0-9] "xyz"', "abcd1", "xyz"),
    ('root ::= "(" [a-z]+ ")"', "", "("),
    ('root ::= "(" [a-z]+ ")"', "(a", ""),
    ("root ::= <|control|>", "", ""),
    ('root ::= "a" | "b"', "", ""),
    ('root ::= ":" " "? "xy"', ":", ""),  # not a word of JSON
    ('root ::= ":" " "? "tx"', ":", " tx"),
]


@pytest.mark.parametrize(("text", "before", "expected"), GBNF)
def test_forced_text_of_a_grammar(text, before, expected):
    tokens = [token for token, _ in after(Grammar.from_gbnf(VOCABULARY, text), before).forced(64)]
    assert b"".join(map(VOCABULARY.piece, tokens)).decode() == expected


@pytest.mark.parametrize(
    ("before", "word", "expected"),
    [
        ("", "{", "{"),
        ('{"a":', '"', ' "'),
        ('{"a":"x","b":', '"', '"'),
        ('{"a": 1,"b": 2,', '"', '"'),
        ('{"a, \\"b":1,"b": 2,', '"', '"'),
        ('{\n  "a": [1,', "2", " 2"),
        ('{\n  "a": [', "1", "\n    1"),
        ('{\n  "a": [', "]", "]"),
        ('{\n  "a": [1, 2', "]", "]"),
        ('{\n  "a": [\n    1', "]", "\n  ]"),
        ("{\n", '"', '  "'),
        ("{ ", '"', ""),
    ],
)
def test_white_space_follows_the_layout_of_the_text(before, word, expected):
    assert layout(before.encode(), word.encode()).decode() == expected


def test_an_answer_probably_begins_as_the_one_before():
    """Also under another schema."""
    for before, beginning in [("", "{"), ('{\n "city"', "{\n "), ('{"city"', "{")]:
        after(Grammar.from_json_schema(VOCABULARY, schema(city=TEXT)), before).forced(8)
        tokens = [t for t, _ in Grammar.from_json_schema(VOCABULARY, schema(no=TEXT)).start().forced(64)]
        assert b"".join(map(VOCABULARY.piece, tokens)).decode() == beginning + '"no": "'


JSON = schema(city=TEXT, tags={"type": "object", "additionalProperties": NUMBER})
ALLOWED = [
    (JSON, "", '{"city": 3', '{"city": '),
    (JSON, '{"c', 'ity":"x","tags":{}}', 'ity":"x","tags":{}}'),
    (JSON, '{"city":"x","tags":{"a":1', ',"b":2,"a":3}}', ',"b":2,"a'),  # no name twice
    (JSON, '{"city":"x","tags":{}}', "}", "}"),  # complete: nothing is known of what may follow
]


@pytest.mark.parametrize(("text", "before", "candidate", "allowed"), ALLOWED)
def test_the_beginning_of_a_candidate_that_is_allowed(text, before, candidate, allowed):
    state = after(Grammar.from_json_schema(VOCABULARY, text), before)
    assert state.n_allowed(list(candidate.encode())) == len(allowed)


class Fixed:
    """A lookup with the same candidate everywhere."""

    name, needs_logits = "fixed", False

    def find(self, history, limit):
        return Proposal.chain([1, 2, 3, 4], source=self.name, confidence=[0.9] * 4).first(limit.depth)


@pytest.mark.parametrize(("allowed", "n"), [({1, 2, 3, 4}, 4), ({1, 2, 4}, 2), ({2, 3}, 0)])
def test_candidates_end_before_a_token_that_the_constraint_forbids(allowed, n):
    constraint = Constraint(FakeState(9, lambda answer: allowed))
    constraint.commit([7])
    proposer = CombinedProposer(Policy(), lookups=[Fixed()], constraint=constraint)
    assert list(run_call(proposer.propose([7], Limit(8, 8, 1), SeededRng(1))).tokens) == [1, 2, 3, 4][:n]


def test_the_proposal_of_a_lookup_keeps_to_its_limit_and_the_constraint():
    constraint = Constraint(FakeState(9, lambda answer: {len(answer)} if len(answer) < 5 else {1, 2}))
    constraint.commit([7])
    lookup = ForcedTokens(constraint)
    assert lookup.find([7], Limit(9, 3, 1)).tokens == (0, 1, 2)
    assert lookup.find([7], Limit(9, 9, 1)).tokens == (0, 1, 2, 3, 4)
    assert lookup.find([7, 0, 1], Limit(9, 9, 1)).tokens == (2, 3, 4)
    assert not lookup.find([7, 5], Limit(9, 9, 1)).tokens  # not allowed, so that anything may follow


class Texts(FakeModel):
    """A fake model of text: only a few tokens are probable, so that enumeration is fast."""

    def __init__(self, seed, noise=0.0):
        super().__init__(V, seed=seed, noise=noise, scale=1.0, max_tokens=64, max_logits=64)


ANSWERS = 'root ::= "{" ("\\"ab\\":" | "\\"de\\":1,\\"a\\":") [34] ws "}"\nws ::= | " "'
PROPOSERS = {
    "forced, exact-match": (None, "exact-match"),
    "forced, block": (None, "block"),
    "drawn, token": (Chain, "token"),
    "drawn, block": (Chain, "block"),
    "coupled, exact-match": (partial(Chain, "coupled"), "exact-match"),
    "tree, traversal": (partial(Drawn, "without replacement", 3, 2), "traversal"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), PROPOSERS.values(), ids=PROPOSERS.keys())
def test_answers_under_a_grammar_have_exactly_the_main_distribution(shape, rule):
    grammar, how, n_drafted = Grammar.from_gbnf(VOCABULARY, ANSWERS), unfiltered(), 0

    def run(rng, drafting=True):
        nonlocal n_drafted
        constraint = Constraint(grammar.start())
        sampler, forced, draft = Sampler(how, constraint), ForcedTokens(constraint), None
        if shape:
            draft = DraftModel(Texts(3, 0.5), sampler, shape(), n_vocab=V, lookups=[forced], n_staged=3)
        proposer = CombinedProposer(Policy(), draft, [forced]) if drafting else None
        limits = {"draft_max": 3, "max_tokens": 5, "is_end": VOCABULARY.is_end}
        tokens, end = generate(Texts(3), [65, 66], proposer, how, rng, rule, constraint, **limits)
        n_drafted += end.statistics.draft_n_accepted
        return tuple(tokens)

    plain = enumerate_outcomes(partial(run, drafting=False))
    assert n_drafted == 0
    drafted = enumerate_outcomes(run)
    assert n_drafted > len(plain)
    assert drafted.keys() == plain.keys()
    assert all(abs(drafted[answer] - plain[answer]) < 1e-12 for answer in plain)


def test_steps_are_saved_with_and_without_a_draft_model():
    text = schema(city={"const": "ab"}, unit=UNIT, note={"type": "null"})
    grammar = Grammar.from_json_schema(VOCABULARY, text)
    answers, steps, calls = set(), [], []
    for drafts, staged in ((False, None), (True, None), (True, 0), (True, 8)):
        constraint, small = Constraint(grammar.start()), Texts(5)
        sampler, forced = Sampler(GREEDY, constraint), ForcedTokens(constraint)
        draft = DraftModel(small, sampler, Chain(), n_vocab=V, lookups=[forced], n_staged=staged or 0)
        lookups = [forced] if drafts and staged is None else []
        proposer = CombinedProposer(Policy(), None if staged is None else draft, lookups)
        options = {"draft_max": 8, "max_tokens": 60, "is_end": VOCABULARY.is_end}
        tokens, end = generate(Texts(5), [65], proposer, GREEDY, constraint=constraint, **options)
        answers.add(tuple(tokens))
        steps.append(end.statistics.n_steps)
        calls.append(len(small.calls))
    assert len(answers) == 1
    plain, alone, unstaged, with_draft = steps
    assert alone < 0.6 * plain
    assert with_draft == unstaged < 0.3 * plain
    assert calls[3] < 0.6 * calls[2]


def test_a_text_without_an_end_is_forced_in_parts():
    """llguidance would return ten million bytes of it, after eight seconds."""
    state = Grammar.from_gbnf(VOCABULARY, 'root ::= "ab" root').start()
    assert len(state.forced(8)) == 8
    assert len(state._forcing.deep_copy().compute_ff_bytes()) < 5_000
