"""The variants that a benchmark compares: plain first, then every combination."""

import pytest

from spec_local.bench.variants import PLAIN, parse_list, parse_sweep, variants
from spec_local.errors import InvalidRequest
from spec_local.settings import GenerationSettings

BASE = GenerationSettings(seed=3, max_tokens=9)


def test_plain_and_the_given_settings():
    plain, other = variants(BASE, {})
    assert (plain.name, plain.settings.proposer) == (PLAIN, "none")
    assert (other.name, other.settings) == ("speculative", BASE)
    assert (plain.settings.seed, plain.settings.max_tokens) == (3, 9)


def test_combinations_are_named_by_what_varies():
    found = variants(BASE, {"proposer": ["lookup", "draft"], "draft-max": [2, 4], "verifier": ["token"]})
    assert [w.name for w in found] == [
        PLAIN,
        "lookup draft-max=2",
        "lookup draft-max=4",
        "draft draft-max=2",
        "draft draft-max=4",
    ]
    assert [(w.settings.proposer, w.settings.draft_max) for w in found[1:]] == [
        ("lookup", 2),
        ("lookup", 4),
        ("draft", 2),
        ("draft", 4),
    ]
    assert {w.settings.verifier for w in found[1:]} == {"token"}


@pytest.mark.parametrize(
    ("varied", "what"),
    [
        ({"proposer": ["lookup", "none"]}, "plain decoding is always measured"),
        ({"proposer": ["oracle"]}, "oracle"),
        ({"draft-max": [2, 999]}, "999"),
    ],
)
def test_invalid_variants(varied, what):
    with pytest.raises(InvalidRequest, match=what):
        variants(BASE, varied)


def test_plain_decoding_only_is_refused():
    with pytest.raises(InvalidRequest, match="`no_spec`"):
        variants(GenerationSettings(proposer="none"), {})


def test_sweeps():
    assert parse_sweep("draft-max=1, 2,2,4") == ("draft-max", [1, 2, 4])
    assert parse_sweep("shape=chain,tree") == ("shape", ["chain", "tree"])


@pytest.mark.parametrize(
    "text", ["", "draft-max", "draft-max=", "draft-max=1,,2", "draft-max=x", "temp=1", "=1"]
)
def test_invalid_sweeps(text):
    with pytest.raises(InvalidRequest) as error:
        parse_sweep(text)
    assert "give" in str(error.value)


def test_lists():
    assert parse_list("b, a,b") == ["b", "a"]
    with pytest.raises(InvalidRequest):
        parse_list("a,")
