"""The common beginning of two sequences of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from spec_local.core.sequence import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(start=TOKENS, first=TOKENS, second=TOKENS)
def test_the_common_prefix_is_what_comparing_token_by_token_finds(start, first, second):
    a, b = [*start, *first], [*start, *second]
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n
    assert common_prefix(tuple(a), b) == n  # a cache may be a tuple
