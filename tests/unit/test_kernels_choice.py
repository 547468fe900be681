"""The choice between the kernels and llama.cpp's, from times of products."""

import pytest
from pydantic import ValidationError

from spec_local.kernels import Status
from spec_local.kernels.choice import (
    FLOAT_SIZES,
    SIZES,
    Times,
    describe,
    is_clear,
    limits,
    most_tokens,
    session_time,
)


def times(speeds, sizes=SIZES, growth=0.2):
    """Products that take longer with each token; the kernels' speed at a size is that of `speeds`, else 1."""
    theirs = [1 + growth * (n - 1) for n in sizes]
    ours = [t / speeds.get(n, 1.0) for n, t in zip(sizes, theirs, strict=True)]
    return Times(sizes=sizes, kernels=ours, llama_cpp=theirs)


def test_a_loss_at_one_token_does_not_outweigh_flat_calls():
    """Q6_K on a Zen 4 with AVX-512, which had been left to llama.cpp for what it lost at one token."""
    measured = dict(zip(SIZES, (0.63, 1.51, 1.89, 2.28, 3.17, 5.35, 3.11, 2.14, 1.42), strict=True))
    q6_k = times(measured, growth=0.9)
    assert most_tokens("Q6_K", q6_k) is None
    assert session_time(q6_k, 512) < 0.85
    speeds, share = "0.63 at one token, 5.35 at eight, 1.42 in prompts", session_time(q6_k, 512)
    assert describe(q6_k, None) == f"{speeds}: specdec's, {share:.2f} of the time"
    assert describe(q6_k, 0).endswith("llama.cpp's, 1.00 of the time")


@pytest.mark.parametrize(
    ("speeds", "growth", "most"),
    [
        ({}, 0.2, None),  # equal: results of the kernels do not depend on the size of a call
        ({1: 0.99}, 0.2, None),
        ({512: 0.5}, 0.0, None),  # llama.cpp reads a prompt in the time of one token
        ({512: 0.5}, 0.9, 0),  # here prompts are most of a session
        ({n: 0.9 for n in SIZES}, 0.2, 0),
        ({1: 0.8, 8: 2.0, 16: 4.0}, 0.2, None),  # steps of several tokens outweigh plain ones
        ({1: 0.5, 2: 0.5}, 1.0, 0),
    ],
)
def test_a_packed_type_is_used_for_all_sizes_or_none(speeds, growth, most):
    assert most_tokens("Q4_K", times(speeds, growth=growth)) == most


@pytest.mark.parametrize(
    ("speeds", "most"),
    [
        ({}, None),
        ({n: 0.7 for n in (16, 24, 32, 48, 64)}, 8),
        ({n: 0.7 for n in (24, 32, 48, 64)}, 16),  # sizes that sessions do not use
        ({n: 0.7 for n in FLOAT_SIZES}, 0),
        ({6: 0.7}, None),  # one slow size among faster ones does not end the use of the kernels
    ],
)
def test_a_floating_point_type_is_used_up_to_a_size(speeds, most):
    fast = dict.fromkeys(FLOAT_SIZES, 1.3)
    assert most_tokens("F16", times(fast | speeds, FLOAT_SIZES)) == most


def test_only_types_that_have_a_limit_are_listed():
    slow = times({n: 0.5 for n in SIZES})
    assert limits({"Q4_K": times({}), "Q5_K": slow, "F16": times({64: 0.5}, FLOAT_SIZES)}) == {
        "Q5_K": 0,
        "F16": 48,
    }


def test_the_time_of_a_session_is_relative_to_llama_cpp():
    faster = times(dict.fromkeys(SIZES, 2.0))
    assert session_time(faster, 0) == pytest.approx(1.0)
    assert 0.49 < session_time(faster, 512) < 0.56  # what a draft model costs is not halved
    slower = times({n: 0.5 for n in SIZES})
    assert is_clear("Q4_K", [faster, faster])
    assert not is_clear("Q4_K", [faster, slower])


def test_impossible_times_are_refused():
    for change in (
        {"sizes": SIZES[1:]},
        {"sizes": SIZES[::-1]},
        {"kernels": [0.0] * len(SIZES)},
        {"llama_cpp": [float("nan")] * len(SIZES)},
        {"kernels": [1.0]},
    ):
        with pytest.raises(ValidationError):
            Times.model_validate(times({}).model_dump() | change)


@pytest.mark.parametrize(
    ("types", "limits", "cache_type", "expected"),
    [
        ({"Q4_K", "Q6_K"}, {"F16": 8}, "q8_0", []),
        ({"Q4_K", "Q6_K"}, {"Q6_K": 0}, "f16", ["Q6_K weights"]),
        ({"IQ2_XS", "Q4_K"}, {}, "q4_0", ["IQ2_XS weights", "a q4_0 cache"]),
        ({"F16"}, {}, "f16", ["F16 in calls of more than 64 tokens"]),
        ({"F16", "Q8_0"}, {"F16": 8}, "f16", ["F16 in calls of more than 8 tokens"]),
        ({"F16"}, {"F16": 0}, "f16", ["F16 weights"]),
    ],
)
def test_what_makes_logits_depend_on_the_size_of_a_call(types, limits, cache_type, expected):
    assert Status("avx2", limits=limits).varying(types, cache_type) == expected
    assert Status(None, "not built").varying(types, cache_type) == ["llama.cpp's kernels"]
