"""A text that is said again with changes: where it goes on, how much that says, and what is swapped in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.core.proposal import Limit
from spec_local.datastore.followed import Followed
from spec_local.datastore.lookup import DatastoreLookup
from spec_local.datastore.text_store import Datastore

TEXT = [*range(100, 160)]


def following(text=TEXT, match=8):
    followed = Followed()
    followed.found(match, text)
    return followed


def hear(followed, *tokens):
    for token in tokens:
        followed.said(token)
    return followed


def test_it_is_followed_to_its_end():
    followed = following([1, 2, 3, 4])
    assert (followed.match, list(followed.ahead(9))) == (8, [1, 2, 3, 4])
    hear(followed, 1, 2)
    assert (followed.match, list(followed.ahead(1))) == (10, [3])
    assert followed.is_followed
    assert not followed.is_changed  # a search finds as much
    hear(followed, 3, 4)
    assert (followed.match, list(followed.ahead(9))) == (0, [])
    assert not followed.is_followed


def test_too_short_a_match_is_not_followed():
    assert following(match=7).match == 0
    assert following(text=[]).match == 0
    assert hear(Followed(), 1, 2, 3).match == 0


@pytest.mark.parametrize(
    ("said", "goes_on", "match"),
    [
        ([9], None, 0),  # nothing says yet where
        ([9, 104], 105, 6),  # 9 for 103
        ([9, 104, 105], 106, 9),
        ([9, 104, 105, 106], 107, 10),
        ([9, 8, 7, 106], 107, 6),  # three for three
        ([9, 103], 104, 6),  # 9 was inserted
        ([9, 8, 7, 103], 104, 3),  # more were, and another text is as likely
        ([9, 8, 7, 103, 104], 105, 6),
        ([105], 106, 3),  # 103 and 104 were left out
        ([127], 128, 3),  # as many as may be
        ([128], None, 0),
        ([9, 8, 7, 6, 104, 5], None, 0),  # what agreed does so no more
    ],
)
def test_after_a_change_one_token_that_agrees_tells_where_it_goes_on(said, goes_on, match):
    followed = hear(following(), 100, 101, 102, *said)
    assert followed.match == match
    if match:
        assert followed.ahead(1) == [goes_on]
    assert followed.is_changed


def test_of_several_places_the_longest_agreement_wins_then_the_nearest():
    text = [1, 2, 3, 50, 4, 5, 50, 6, 51, 50, 7]
    followed = hear(following(text), 1, 2, 3, 40, 41, 50)
    assert followed.ahead(1) == [6]  # three said, four left out; elsewhere one, or seven
    assert hear(following(text), 1, 2, 3, 40, 51, 50).ahead(1) == [7]


def test_with_more_agreement_it_is_followed_again_and_surer_than_a_search():
    followed = hear(following(), 100, 9, 102, 103, 104)
    assert not followed.is_followed
    hear(followed, 105)
    assert followed.is_followed
    assert followed.is_changed
    assert followed.match == 11
    assert hear(followed, 106).match == 12
    away = hear(following(), 100, 120, 121, 122, 123)
    assert away.match == 8  # less sure than in its place


def test_after_long_without_agreement_it_is_forgotten():
    followed = hear(following(), 100, *[9] * 39, 130)
    assert followed.match == 3
    followed = hear(following(), 100, *[9] * 40, 130)
    assert followed.match == 0


def test_another_text_is_followed_if_it_says_more():
    followed = following(match=9)
    followed.found(9, [7, 7])
    assert followed.ahead(1) == [100]
    followed.found(10, [7, 7])
    assert (list(followed.ahead(9)), followed.match) == ([7, 7], 10)
    # After a change little says as much as a few tokens in their place.
    followed = hear(following(), 100, 9, 102, 103)
    followed.found(8, [7, 7])
    assert followed.ahead(1) == [104]
    followed.found(10, [7, 7])
    assert followed.ahead(1) == [7]
    assert followed.is_followed
    assert not followed.is_changed
    followed.found(40, [])
    assert followed.ahead(1) == [7]
    followed = hear(following(), 100, 9, 102, 103, 104, 105)
    followed.found(20, [7, 7])
    assert followed.match == 20


def test_of_the_same_text_more_is_taken():
    followed = hear(following([1, 2, 3]), 1, 2)
    followed.found(9, [3, 4, 5])  # as much context as agreed since is wanted
    assert list(followed.ahead(9)) == [3]
    followed.found(10, [3, 4, 5])
    assert (list(followed.ahead(9)), followed.match) == ([3, 4, 5], 10)


def test_what_was_said_instead_is_said_instead_again():
    a, the, ada, love, lace, is_, was = range(7)
    text = [the, ada, love, is_, 10, 11, 12, 13, the, ada, love, was, a, ada, love, 20, the, ada, lace]
    followed = hear(following(text), the, 30, 31, 32, is_, 10, 11, 12)
    # After the same token, and all of it.
    assert list(followed.ahead(99)) == [13, the, 30, 31, 32, was, a, ada, love, 20, the, ada, lace]
    assert hear(followed, 13, the, 30, 31, 32).ahead(1) == [was]
    followed.found(32, [20, the, ada, love, 21])
    assert list(followed.ahead(99)) == [20, the, 30, 31, 32, 21]


@pytest.mark.parametrize(
    "said", [[101, 102, 103, 104], [9, 100, 101, 102, 103, 104], [*range(30, 39), 105, 106, 107, 108]]
)
def test_nothing_is_learned_of_what_was_left_out_or_inserted_or_of_long_passages(said):
    followed = hear(following([7, *TEXT[:9]]), 7, *said)
    followed.found(40, [7, *TEXT])
    assert list(followed.ahead(99)) == [7, *TEXT]


def test_nothing_is_learned_of_the_first_token_since_what_came_before_is_not_known():
    followed = hear(following([1, 2, 3, 4, 5, 6]), 9, 2, 3, 4, 5)
    followed.found(40, [6, 1, 2])
    assert list(followed.ahead(99)) == [6, 1, 2]


def store(folder, *texts):
    found = Datastore(folder / "texts", 1000)
    for text in texts:
        found.remember(text)
    return found


def chain(lookup, history, depth=8):
    return list(lookup.find(history, Limit(depth, depth, 1)).tokens)


def test_copies_go_on_one_token_after_a_change(tmp_path):
    lookup, history = DatastoreLookup(store(tmp_path, TEXT)), TEXT[:12]
    assert chain(lookup, history)[:2] == [112, 113]
    history += [112, 9, 114]
    found = lookup.find(history, Limit(8, 8, 1))
    assert list(found.tokens) == [*range(115, 123)]
    assert list(found.parents) == [*range(-1, 7)]
    assert 0.6 < found.confidence[0] < 0.8
    # Who has not followed the text sees nothing.
    assert chain(DatastoreLookup(store(tmp_path, TEXT)), history[-3:]) == []
    history += [115, 116, 117, 118]
    assert lookup.find(history, Limit(8, 8, 1)).confidence[0] > 0.9


def first(lookup, history):
    return lookup.find(history, Limit(8, 8, 1)).confidence[0]


def test_a_followed_text_is_weighed_among_the_places_that_a_search_finds(tmp_path):
    kept = store(tmp_path, TEXT, [50, 51, 52, 130, 60, 61], [9, 158, 159, 77, 78])
    lookup, history = DatastoreLookup(kept), TEXT[:12]
    assert first(lookup, history) == pytest.approx(1 / (1 + 4 / 3 / 12))  # once, unless it has changed
    history += [9, 113, 114, 115]  # a search is sure of 3 tokens only
    assert first(lookup, history) == pytest.approx((1 + 0.5**7) / (1 + 0.5**7 + 14 / 100))
    # One that agrees elsewhere says less than four elsewhere.
    lookup, history = DatastoreLookup(kept), TEXT[:12]
    chain(lookup, history)
    history += [50, 51, 52, 130]
    assert chain(lookup, history)[:2] == [60, 61]
    assert first(lookup, history) == pytest.approx(1 / (1 + 0.5 + 14 / 16))
    # What has ended says nothing.
    lookup, history = DatastoreLookup(kept), TEXT[:57]
    chain(lookup, history)
    history += [9, 158, 159]
    assert chain(lookup, history) == [77, 78]


def test_another_history_is_another_text(tmp_path):
    lookup = DatastoreLookup(store(tmp_path, TEXT))
    chain(lookup, TEXT[:12])
    assert chain(lookup, [*TEXT[:1], 9, 113]) == []
    history = TEXT[:12]
    chain(lookup, history)
    history += [9, 113]
    assert chain(lookup, history)[:1] == [114]
    del history[2:]
    assert chain(lookup, history) == []


def test_what_differs_in_the_prompts_differs_in_the_answers(tmp_path):
    prompt, answer = [*range(200, 230)], [300, 301, 219, 220, 302, 303]
    lookup = DatastoreLookup(store(tmp_path, [*prompt, *answer]))
    history = [*prompt[:20], 9, 8, *prompt[21:]]
    assert chain(lookup, history) == [300, 301, 219, 9, 8, 302, 303]
    for n in (1, 2, 3):  # wherever a search begins
        assert chain(lookup, [5] * n + history) == [300, 301, 219, 9, 8, 302, 303]


def test_a_long_text_is_followed_on_beyond_what_was_found_first(tmp_path):
    text = [*range(100, 500)]
    lookup, history = DatastoreLookup(store(tmp_path, text)), text[:12]
    for end in range(12, 390, 3):
        history = history[:12] if end == 12 else history
        assert chain(lookup, history)[:1] == [text[end]]
        history += text[end : end + 3]
    history += [9, text[391 + 1]]
    assert chain(lookup, history)[:1] == [text[393]]


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    said=st.lists(st.integers(0, 3), max_size=120),
    again=st.lists(st.integers(0, 3), max_size=30),
)
def test_whatever_is_said_it_goes_on_with_what_is_known(text, said, again):
    followed = following(text)
    for i, token in enumerate(said):
        followed.said(token)
        if i % 16 == 15:
            followed.found(8 + i // 8, again)
        ahead = followed.ahead(5)
        assert len(ahead) <= 5
        assert {*ahead} <= {*text, *again, *said}
        assert (followed.match > 0) <= (len(ahead) > 0)
        assert not followed.is_followed or followed.match > 0
