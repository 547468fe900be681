"""Every output under a JSON schema parses strictly and is valid, according to an independent validator."""

import json
import math
import random
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.grammar.matcher import Grammar
from tests.byte_vocabulary import VOCABULARY, sample


def _names_are_unique(pairs):
    repeated = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    assert not repeated, f"{repeated[0]!r} is repeated"
    return dict(pairs)


def _finite(text):
    assert math.isfinite(float(text)), f"{text} is not finite"
    return float(text)


def _no_constant(text):
    raise AssertionError(f"{text} is not JSON")


def parse(text, *, number=_finite):
    """Parse JSON as the strictest parsers do."""
    value = json.loads(
        text, parse_constant=_no_constant, parse_float=number, object_pairs_hook=_names_are_unique
    )
    json.dumps(value, ensure_ascii=False, default=str).encode()  # no lone surrogate
    return value


def _multiple(validator, factor, value, schema):
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(factor)) != 0:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {factor}")


EXACT = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple})


def validate(text, schema):
    """Raise an error unless a text is valid under a schema, read with floats and with decimals."""
    EXACT(schema, format_checker=EXACT.FORMAT_CHECKER).validate(parse(text))
    decimals = json.loads(json.dumps(schema), parse_float=Decimal)
    EXACT(decimals).validate(parse(text, number=Decimal))


NAMES = st.sampled_from(["a", "b", "ab", "\u0001", 'q"', "é", ""])
COUNTS = st.integers(0, 4)
NUMBERS = (
    st.integers(-3, 12)
    | st.sampled_from(
        [0.1, 0.5, -0.25, 1e-7, 1e22, 2.5e-10, 1e15, 1e300, 2**53, 2**53 + 1, -(2**63), -0.0, 1.0]
    )
    | st.decimals(-100, 100, places=3).map(float)
)
PATTERNS = st.sampled_from(
    ["a", "^a", "b$", "^[ab]$", "^a+$", "^(a|ab)$", "^.{2}$", "[^a]", "^\\d{2}-\\w$", "^$", "a|^b", "^é\\n$"]
)
FORMATS = st.sampled_from(
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "password"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | NAMES | st.sampled_from(["\ud800", "🙂", "a\nb", "\x7f"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/$defs/a/items", "#/properties/a", "#/anyOf/0"]
)


def _some(**optional):
    return st.fixed_dictionaries({}, optional=optional)


def _schemas(inner):
    lists = st.lists(inner, min_size=1, max_size=3)
    numbers = _some(
        type=st.sampled_from(["number", "integer", ["number", "null"]]), minimum=NUMBERS, maximum=NUMBERS,
        exclusiveMinimum=NUMBERS, exclusiveMaximum=NUMBERS,
        multipleOf=st.sampled_from([1, 2, 3, 7, 0.5, 0.01, 2.5, 1e-10, 1e6, 1.5]),
    )  # fmt: skip
    strings = _some(
        type=st.just("string"), minLength=COUNTS, maxLength=COUNTS, pattern=PATTERNS, format=FORMATS
    )
    arrays = _some(
        type=st.just("array"), items=inner, prefixItems=lists, minItems=COUNTS, maxItems=COUNTS,
        uniqueItems=st.booleans(), contains=inner,
    )  # fmt: skip
    objects = _some(
        type=st.just("object"), properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, max_size=2), additionalProperties=inner,
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
        propertyNames=_some(pattern=PATTERNS, enum=st.lists(NAMES), maxLength=COUNTS, minLength=COUNTS),
        minProperties=COUNTS, maxProperties=COUNTS,
    )  # fmt: skip
    combined = _some(
        type=TYPES, anyOf=lists, oneOf=lists, allOf=lists, enum=st.lists(VALUES, max_size=3), const=VALUES,
        properties=st.dictionaries(NAMES, inner, max_size=2), required=st.lists(NAMES, max_size=1),
        additionalProperties=inner, **{"$ref": REFERENCES},
    )  # fmt: skip
    unsupported = {"not": {}, "if": {}, "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False}
    rare = st.sampled_from([*unsupported.items(), ("x", 1)])
    plain = numbers | strings | arrays | objects | combined
    return plain | plain | plain | st.tuples(plain, rare).map(lambda pair: pair[0] | dict([pair[1]]))


LEAVES = (
    st.booleans()
    | st.just({})
    | TYPES.map(lambda kind: {"type": kind})
    | VALUES.map(lambda value: {"const": value})
    | st.lists(VALUES, max_size=3).map(lambda values: {"enum": values})
    | REFERENCES.map(lambda ref: {"$ref": ref})
)
SCHEMAS = st.builds(
    lambda schema, defs: schema | {"$defs": defs} if isinstance(schema, dict) else schema,
    st.recursive(LEAVES, _schemas, max_leaves=6),
    st.dictionaries(st.sampled_from(["a", "b"]), st.recursive(LEAVES, _schemas, max_leaves=3), max_size=2),
)


def outputs(schema, n, seed=0):
    """Random outputs under a schema; [] if it is refused."""
    try:
        grammar = Grammar.from_json_schema(VOCABULARY, json.dumps(schema))
    except InvalidRequest as error:
        message = str(error)
        if "\n" in message or len(message) > 400:
            raise AssertionError(message) from None
        return []
    rng = random.Random(seed)
    return [text for text in (sample(grammar, rng) for _ in range(n)) if text is not None]


@settings(max_examples=30)
@given(
    properties=st.dictionaries(NAMES, LEAVES.filter(lambda one: "$ref" not in str(one)), max_size=3),
    names=_some(pattern=PATTERNS, maxLength=COUNTS) | st.lists(NAMES, max_size=3).map(lambda n: {"enum": n}),
    more=_some(
        additionalProperties=st.booleans() | st.just({"type": "null"}), required=st.lists(NAMES, max_size=1)
    ),
)
def test_names_of_listed_and_other_properties(properties, names, more):
    schema = {"type": "object", "properties": properties, "propertyNames": names} | more
    for text in outputs(schema, 4):
        validate(text, schema)


@pytest.mark.slow
@settings(max_examples=80)
@given(SCHEMAS)
def test_every_output_under_a_random_schema_is_strict_json_and_valid(schema):
    for text in outputs(schema, 6):
        validate(text, schema)


@pytest.mark.parametrize(("above", "below"), [(0, 0.01), (-0.01, 0), (-2.5, -2), (10, 10.02), (0.1, 0.11)])
@pytest.mark.parametrize("grid", [{}, {"multipleOf": 0.005}])
def test_exclusive_bounds_that_are_less_than_1_apart(above, below, grid):
    """llguidance allows the one that is an integer."""
    schema = {"type": "number", "exclusiveMinimum": above, "exclusiveMaximum": below} | grid
    found = [text for seed in range(10) for text in outputs(schema, 4, seed)]
    assert found
    for text in found:
        validate(text, schema)


@pytest.mark.slow
@settings(max_examples=15)
@given(SCHEMAS, st.integers(0, 2**32))
def test_the_mask_contains_the_tokens_that_are_allowed_one_by_one(schema, seed):
    text = next(iter(outputs(schema, 1, seed)), "").encode()
    if not text:
        return
    state = Grammar.from_json_schema(VOCABULARY, json.dumps(schema)).start()
    for byte in text[:8]:
        mask = state.allowed().copy()
        state._allowed = None
        one_by_one = [state.allows(np.array([token]))[0] for token in range(VOCABULARY.n_tokens)]
        assert one_by_one == mask.tolist()
        for token in np.flatnonzero(~mask):
            assert state.after(int(token)) is None
        state = state.after(byte)


@pytest.mark.slow
@settings(max_examples=15)
@given(SCHEMAS, st.integers(0, 2**32))
def test_forced_tokens_are_allowed_and_begin_with_the_only_byte_that_may_follow(schema, seed):
    text = next(iter(outputs(schema, 1, seed)), "").encode()
    if not text:
        return
    state = Grammar.from_json_schema(VOCABULARY, json.dumps(schema)).start()
    for byte in text:
        tokens = [token for token, _ in state.forced(8) if not VOCABULARY.is_end(token)]
        assert state.n_allowed(tokens) == len(tokens)
        first = {VOCABULARY.piece(token)[:1] for token in np.flatnonzero(state.allowed()).tolist()}
        if tokens and len(first) == 1:
            assert VOCABULARY.piece(tokens[0])[:1] in first
        state = state.after(byte)
