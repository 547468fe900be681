"""The text of an answer, divided into what was drafted and what was not."""

import hypothesis.strategies as st
from hypothesis import given

from spec_local.answer_text import Text
from spec_local.core.proposal import Proposal
from spec_local.core.text import TextStream
from spec_local.marked_text import MarkedText, Span

PIECES = [b"the", b" cat", b" sat", b"\n", "é".encode()[:1], "é".encode()[1:], b"", b"\xff"]


def step(tokens, drafted=(), n_accepted=0, text=None):
    if text is None:
        text = b"".join(PIECES[t] for t in tokens).decode()
    return Text(text, tokens, Proposal.chain(list(drafted)), n_accepted)


def test_spans():
    marked = MarkedText(PIECES.__getitem__)
    assert marked.feed(step([0])) == [Span("the")]
    assert marked.feed(step([1, 2, 3], [1, 2, 0, 1], 2)) == [
        Span(" cat sat", "accepted"),
        Span("\n", "corrected", ("the cat",)),
    ]
    assert marked.finish() == []


def test_a_character_belongs_to_the_token_that_completes_it():
    marked = MarkedText(PIECES.__getitem__)
    assert marked.feed(step([4], text="")) == []
    assert marked.feed(step([5, 0], [5], 1, text="éthe")) == [Span("é", "accepted"), Span("the")]


def test_text_that_is_not_shown_is_skipped():
    """Such as the marker after which an answer begins."""
    marked = MarkedText(PIECES.__getitem__)
    marked.add(step([0, 3, 1], [0, 3], 2))
    assert marked.take(" cat") == [Span(" cat")]
    marked.add(step([0, 1], [0], 1))
    assert marked.take("the") == [Span("the", "accepted")]
    assert marked.take(" cat") == [Span(" cat")]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 4)), max_size=8),
    st.sampled_from([[], ["cat sat"], ["\n", "é"], ["the the"]]),
)
def test_the_spans_are_the_text(steps, stops):
    """Whatever is held back for stop strings, and wherever characters are divided."""
    stream, marked, text, spans = (
        TextStream(PIECES.__getitem__, stops),
        MarkedText(PIECES.__getitem__),
        "",
        [],
    )
    for tokens, n in steps:
        new = "".join(stream.feed(token) for token in tokens if not stream.stopped)
        spans += marked.feed(step(tokens, [*tokens[:n], 0], min(n, len(tokens)), text=new))
        text += new
        if stream.stopped:
            break
    else:
        rest = stream.finish()
        spans += marked.finish(rest)
        text += rest
    assert "".join(span.text for span in spans) == text
