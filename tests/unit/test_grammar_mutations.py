"""Mutated grammars, patterns and schemas: each is used or refused with one line of error, in bounded time."""

import json
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.errors import SpecLocalError
from spec_local.grammar.matcher import Grammar
from tests.byte_vocabulary import VOCABULARY

SECONDS = 15
"""Each takes less than two seconds on a machine with nothing else to do."""
CORPUS = [
    'root ::= "yes" | "no"',
    'root ::= value\nvalue ::= "[" (value ("," value)*)? "]" | [0-9]+ | "\\"" [^"\\\\]* "\\""',
    'root ::= ("a" [b-d]){2,5} x-1* # comment\nx-1 ::= "\\x41" | "\\u00e9" | "\\U0001F642"',
    "root ::= <|control|> .* | !<[5]> root?",
    'root ::= e\ne ::= e "+" e | "(" e ")" | [a-z]{1,3}',
    'root ::= a{3} b{0,2} c{1,}\na ::= "x" | ""\nb ::= () | "y"\nc ::= [^\\]\\-x]\n\n',
]
PATTERNS = [
    "^[A-Z]{2}-\\d+$", "^(a|b)*c{2,4}$", "\\w+@\\w+\\.[a-z]{2,}", "^(?:x(?:y|z)?)+$", "[^\\s\"\\\\]{1,8}",
    "^a.b$", "(?i)x", "\\p{L}+", "^\\u0041$", "(?P<n>a)|b", "^(?s:.){0,20}$",
]  # fmt: skip
SCHEMAS = [
    '{"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}',
    '{"anyOf": [{"$ref": "#/$defs/a"}, {"minimum": -1.5}], "$defs": {"a": {"items": {"maxLength": 3}}}}',
    '{"oneOf": [{"const": 1e3}, {"format": "date"}], "title": ""}',
    '{"patternProperties": {"^a": true}, "minProperties": 1, "additionalProperties": {"multipleOf": 0.5}}',
]
PIECES = [
    *'()[]{}<>|"*+?.,!#^$-\\ \n', "::=", "root", "root ::= ", "{9}", "{0,99}", "{99999}", "{2,1}", "{,}",
    "\\x4", "\\uD800", "\\UFFFFFFFF", "[z-a]", "[]", "[^]", '""', "<[5]>", "<[99999999999999999999]>", "\0",
    "é", "🙂", "\ud800", "\u202e", "(?=a)", "(?!", "\\1", "\\b", "\\p{", "(?P<", "[[:alpha:]]", "&&", "~",
    "1e400", "-1", "NaN", "\\ud800", "99999999999999999999", '"#"', '"#/-1"', "null", "[{}]", '"$ref":',
]  # fmt: skip


@st.composite
def mutated(draw, corpus):
    """A text of the corpus with a few pieces inserted, deleted, repeated, replaced or swapped."""
    text = draw(st.sampled_from(corpus))
    rng = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(rng.randint(1, 5)):
        start, length = rng.randint(0, len(text)), rng.randint(0, 6)
        cut = text[start : start + length]
        new = rng.choice(
            [rng.choice(PIECES), "", cut * rng.choice([2, 3, 50]), rng.choice(corpus), f"({cut})"]
        )
        text = text[:start] + new + text[start + length :]
    return text


def use(make):
    """Use a grammar for some tokens; return whether it was accepted."""
    start = time.process_time()
    try:
        state = make().start()
        rng = random.Random(0)
        for _ in range(8):
            allowed = np.flatnonzero(state.allowed())
            following = state.after(int(rng.choice(allowed))) if len(allowed) else None
            if following is None:
                break
            state = following
        accepted = True
    except SpecLocalError as error:
        accepted, message = False, str(error)
        if not message.isprintable() or len(message) > 400:
            raise AssertionError(message) from None
    assert time.process_time() - start < SECONDS
    return accepted


@settings(max_examples=80)
@given(mutated(CORPUS))
def test_a_mutated_grammar_is_used_or_refused_in_one_line(text):
    use(lambda: Grammar.from_gbnf(VOCABULARY, text))


@settings(max_examples=60)
@given(mutated(PATTERNS), st.sampled_from(["pattern", "patternProperties", "propertyNames"]))
def test_a_mutated_pattern_is_used_or_refused_in_one_line(pattern, key):
    schema = {"pattern": {"pattern": pattern}, "patternProperties": {"patternProperties": {pattern: True}}}
    schema["propertyNames"] = {"propertyNames": {"pattern": pattern}}
    use(lambda: Grammar.from_json_schema(VOCABULARY, json.dumps(schema[key])))


WORDS = st.sampled_from(
    """type properties required items prefixItems minItems maxItems enum const anyOf oneOf allOf $ref $defs
    format a minLength maxLength pattern additionalProperties patternProperties propertyNames minProperties
    maxProperties minimum exclusiveMaximum multipleOf object array string number integer boolean null # title
    #/$defs/a date
    """.split()  # noqa: SIM905
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100)
@given(mutated(SCHEMAS) | ANY.map(json.dumps))
def test_any_json_and_mutated_schemas_are_used_or_refused_in_one_line(text):
    use(lambda: Grammar.from_json_schema(VOCABULARY, text))


RULES = "".join(f'r{i} ::= root r{i} | "a"\n' for i in range(300))


def rules(n, line, last):
    """A grammar of n rules r0, r1, …; line: text of the i-th one."""
    return "root ::= r0\n" + "".join(f"r{i} ::= {line(i)}\n" for i in range(n)) + f"r{n} ::= {last}"


LARGE = {
    "alternatives": "root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)),
    "rules": rules(20_000, lambda i: f'"a" r{i + 1} | "b"', ""),
    "deep rules": rules(990, lambda i: f'"a" r{i + 1}?', '"a"'),
    "doubled alternatives": rules(60, lambda i: f"r{i + 1} | r{i + 1}", '"a"'),
    "doubled empty rules": rules(60, lambda i: f"r{i + 1} r{i + 1}", '"a"?'),
    "groups": "root ::= " + '("a" | "b") ' * 20_000,
    "deep groups": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "repeated groups": "root ::= " + '("a"{0,9} "b"?)* ' * 5000,
    "fewer repeated groups": "root ::= " + '("a"{0,9} "b"?)* ' * 400,
    "left recursion": "root ::= " + " | ".join(f"r{i}" for i in range(300)) + "\n" + RULES,
    "a circle": "root ::= root",
    "long repetitions": "root ::= " + '"a"{0,999} ' * 300,
    "repeated repetitions": 'root ::= ("a"{1,2000}){1,2000}',
    "nested repetitions": 'root ::= ((("a"{0,99}){0,99}){0,99}){0,99}',
    "repeated nothing": "root ::= (([a-z]?)*)*",
    "nullable": 'root ::= "a" |\nroot ::= ' + "root " * 4900,
    "nested nullable": "root ::= " + "(" * 200 + '"a"?' + ")*" * 200,
    "control characters": 'root ::= "\\\x1b[2J"',
    "invisible characters": 'root ::= "\\\u202e"',
    "ambiguous": "root ::= e\ne ::= " + " | ".join(["e e"] * 100) + ' | "a"',
    "sets": "root ::= " + "[a-z] " * 4900,
    "long set": "root ::= [" + "".join(chr(0x4E00 + 2 * i) for i in range(10_000)) + "]*",
    "repetition": "root ::= [a-z]{0,1000000000}",
    "long name": "root ::= " + "x" * 200_000 + "\n" + "x" * 200_000 + '::= "a"',
    "long literal": 'root ::= "' + "a" * 60_000 + '"',
    "quotes": "root ::= " + '"' * 200_000,
    "brackets": "root ::= " + "[" * 200_000,
    "angles": "root ::= " + "<" * 200_000,
    "braces": 'root ::= "a"' + "{1" * 100_000,
    "backslashes": 'root ::= "' + "\\" * 200_001,
    "comments": "#" * 200_000 + "\n" + "# \n" * 100_000 + 'root ::= "a"',
    "tokens": "root ::= " + "<|control|> " * 20_000,
    "undefined": "root ::= " + " ".join(f"u{i}" for i in range(4900)),
    "redefined": 'root ::= "a"\n' * 20_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
def test_a_large_grammar_is_used_or_refused_within_seconds_on_a_small_stack(text):
    failures = []

    def run():
        try:
            use(lambda: Grammar.from_gbnf(VOCABULARY, text))
        except BaseException as error:
            failures.append(error)

    previous = threading.stack_size(1 << 19)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(previous)
    thread.join(2 * SECONDS)
    assert not thread.is_alive()
    assert failures == []
