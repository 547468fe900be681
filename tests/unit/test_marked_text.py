"""The spans of an answer: their texts are its text, and each character has the mark of its token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.answers.marked import MarkedSpan, MarkedText
from spec_local.answers.text import Text, TextStream
from spec_local.core.proposal import Proposal

WORDS = [b"the", b" cat", b" sat", b"\xf0\x9f", b"\x98\x80", b"\xff", b" END", b"", b"<think>", b"\n"]
THE, CAT, SAT, HALF, REST, INVALID, END, CONTROL, MARKER, NEWLINE = range(len(WORDS))

piece = WORDS.__getitem__


def spans_of(steps, stops=()):
    """The spans of the steps (tokens, proposal, number of accepted tokens) and those at the end."""
    marked, stream = MarkedText(piece), TextStream(piece, stops)
    for tokens, proposal, n_accepted in steps:
        yield marked.feed(Text("".join(map(stream.feed, tokens)), tokens, proposal, n_accepted))
    yield marked.finish(stream.finish())


CHAIN, NONE = Proposal.chain, Proposal()
# " cat" is accepted; its children are " sat", followed by "the" or " cat", and "\n".
TREE = Proposal([CAT, SAT, THE, NEWLINE, CAT], [-1, 0, 1, 0, 1])
EXAMPLES = {  # steps, stop strings, spans
    "accepted, corrected and plain text": (
        [
            ([THE], NONE, 0),
            ([CAT, SAT, NEWLINE], CHAIN([CAT, SAT, THE, CAT]), 2),
            ([CAT, THE], CHAIN([CAT]), 1),
        ],
        [],
        [
            [MarkedSpan("the")],
            [MarkedSpan(" cat sat", "accepted"), MarkedSpan("\n", "corrected", ("the cat",))],
            [MarkedSpan(" cat", "accepted"), MarkedSpan("the")],
            [],
        ],
    ),
    "each branch of a tree": (
        [([CAT, THE], TREE, 1)],
        [],
        [[MarkedSpan(" cat", "accepted"), MarkedSpan("the", "corrected", (" satthe", "\n"))], []],
    ),
    "draft tokens that the end replaces": (
        [([CAT], CHAIN([CAT, SAT, THE]), 1)],
        [],
        [[MarkedSpan(" cat", "accepted"), MarkedSpan("", "corrected", (" satthe",))], []],
    ),
    "a character belongs to the token that completes it": (
        [([HALF], NONE, 0), ([REST, THE], CHAIN([REST]), 1)],
        [],
        [[], [MarkedSpan("😀", "accepted"), MarkedSpan("the")], []],
    ),
    "a rejection waits for the character": (
        [([HALF], CHAIN([CAT]), 0), ([REST, THE], CHAIN([REST]), 1)],
        [],
        [[], [MarkedSpan("😀", "corrected", (" cat",)), MarkedSpan("the")], []],
    ),
    "two rejections at the tokens of one character": (
        [([HALF], CHAIN([CAT]), 0), ([REST], CHAIN([SAT]), 0)],
        [],
        [[], [MarkedSpan("😀", "corrected", (" cat", " sat"))], []],
    ),
    "a rejection at a character that is never completed": (
        [([HALF], CHAIN([CAT]), 0)],
        [],
        [[], [MarkedSpan("\udcf0\udc9f", "corrected", (" cat",))]],
    ),
    "a rejection before a token without text": (
        [([CONTROL], CHAIN([CAT]), 0), ([SAT], CHAIN([CONTROL]), 0)],
        [],
        [[MarkedSpan("", "corrected", (" cat",))], [MarkedSpan(" sat")], []],
    ),
    "marks wait for text that may begin a stop string": (
        [([SAT, CAT], CHAIN([SAT, THE]), 1), ([THE], NONE, 0)],
        [" catalogue"],
        [
            [MarkedSpan(" sat", "accepted")],
            [MarkedSpan(" cat", "corrected", ("the",)), MarkedSpan("the")],
            [],
        ],
    ),
    "rejections one after the other, each at its place": (
        [([CAT], CHAIN([THE]), 0), ([SAT], CHAIN([THE]), 0)],
        [" cat saw"],
        [[], [MarkedSpan(" cat", "corrected", ("the",)), MarkedSpan(" sat", "corrected", ("the",))], []],
    ),
    "a rejection is reported once if its token is divided": (
        [([CAT], CHAIN([THE]), 0), ([SAT], NONE, 0)],
        ["tx"],
        [
            [MarkedSpan(" ca", "corrected", ("the",))],
            [MarkedSpan("t", "corrected"), MarkedSpan(" sa")],
            [MarkedSpan("t")],
        ],
    ),
    "what a stop string cuts off is not rejected": (
        [([CAT, END], CHAIN([CAT, END, THE]), 2)],  # the answer ends before "the" is looked at
        [" END"],
        [[MarkedSpan(" cat", "accepted")], []],
    ),
}


@pytest.mark.parametrize(("steps", "stops", "spans"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_spans(steps, stops, spans):
    assert list(spans_of(steps, stops)) == spans


def test_text_that_is_not_shown_is_skipped():
    marked = MarkedText(piece)
    marked.add(Text("", [MARKER, NEWLINE], Proposal(), 0))
    assert marked.take("") == []
    marked.add(Text("", [CAT, SAT], Proposal.chain([CAT]), 1))
    assert marked.take(" cat") == [MarkedSpan(" cat", "accepted")]
    marked.add(Text("", [MARKER, THE], Proposal.chain([MARKER]), 1))
    assert marked.take(" sat") == [MarkedSpan(" sat")]
    assert marked.take("the") == [MarkedSpan("the")]


def test_text_of_no_token_is_unmarked():
    marked = MarkedText(piece)
    marked.add(Text("", [CAT], Proposal.chain([CAT]), 1))
    assert marked.take("dog") == [MarkedSpan("dog")]
    assert marked.take(" cat") == [MarkedSpan(" cat", "accepted")]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=5),
            st.lists(st.integers(0, len(WORDS) - 1), max_size=3),
            st.integers(0, 5),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_the_spans_are_exactly_the_text(steps, stops):
    stops = [" END", "cats"] if stops else []
    stream, n_rejections = TextStream(piece, stops), 0
    taken = []
    for tokens, drafted, n in steps:
        n = min(n, len(tokens))
        taken.append((tokens, Proposal.chain([*tokens[:n], *drafted]), n))
        n_rejections += bool(drafted)
    *texts, last = spans_of(taken, stops)
    for (tokens, _, _), spans in zip(taken, texts, strict=True):
        assert "".join(span.text for span in spans) == "".join(map(stream.feed, tokens))
    assert "".join(span.text for span in last) == stream.finish()
    reported = sum(bool(span.rejected) for spans in (*texts, last) for span in spans)
    assert reported <= n_rejections


@pytest.mark.parametrize(("steps", "stops", "expected"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_rest_may_come_as_a_text_without_tokens(steps, stops, expected):
    """As a session yields it; the marks are those of `finish`."""
    marked, stream = MarkedText(piece), TextStream(piece, stops)
    spans = [
        marked.feed(Text("".join(map(stream.feed, tokens)), tokens, proposal, n))
        for tokens, proposal, n in steps
    ]
    if rest := stream.finish():
        spans.append(marked.feed(Text(rest)))
    assert [span for each in [*spans, marked.finish()] for span in each] == [
        s for each in expected for s in each
    ]
