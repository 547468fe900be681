"""The spans of an answer: their texts are its text, and each character has the mark of its token."""

from hypothesis import given
from hypothesis import strategies as st

from spec_local.answers.marked import MarkedText, Span
from spec_local.answers.text import Text
from spec_local.core.proposal import Proposal
from spec_local.core.text import TextStream

WORDS = [b"the", b" cat", b" sat", b"\xf0\x9f", b"\x98\x80", b"\xff", b" END", b"", b"<think>", b"\n"]
THE, CAT, SAT, HALF, REST, INVALID, END, CONTROL, MARKER, NEWLINE = range(len(WORDS))

piece = WORDS.__getitem__


def spans_of(steps, stops=()):
    """The spans of the steps (tokens, proposal, number of accepted tokens) and those at the end."""
    marked, stream = MarkedText(piece), TextStream(piece, stops)
    for tokens, proposal, n_accepted in steps:
        yield marked.feed(Text("".join(map(stream.feed, tokens)), tokens, proposal, n_accepted))
    yield marked.finish(stream.finish())


def test_accepted_corrected_and_plain_text():
    steps = [
        ([THE], Proposal(), 0),
        ([CAT, SAT, NEWLINE], Proposal.chain([CAT, SAT, THE, CAT]), 2),
        ([CAT, THE], Proposal.chain([CAT]), 1),
    ]
    assert list(spans_of(steps)) == [
        [Span("the")],
        [Span(" cat sat", "accepted"), Span("\n", "corrected", ("the cat",))],
        [Span(" cat", "accepted"), Span("the")],
        [],
    ]


def test_each_branch_of_a_tree_is_reported():
    # " cat" is accepted; its children are " sat", followed by "the" or " cat", and "\n".
    tree = Proposal([CAT, SAT, THE, NEWLINE, CAT], [-1, 0, 1, 0, 1])
    steps = [([CAT, THE], tree, 1)]
    assert next(spans_of(steps)) == [
        Span(" cat", "accepted"),
        Span("the", "corrected", (" satthe", "\n")),
    ]


def test_draft_tokens_that_the_end_replaces():
    steps = [([CAT], Proposal.chain([CAT, SAT, THE]), 1)]
    assert next(spans_of(steps)) == [Span(" cat", "accepted"), Span("", "corrected", (" satthe",))]


def test_a_character_belongs_to_the_token_that_completes_it():
    steps = [([HALF], Proposal(), 0), ([REST, THE], Proposal.chain([REST]), 1)]
    assert list(spans_of(steps)) == [[], [Span("😀", "accepted"), Span("the")], []]


def test_a_rejection_waits_for_the_character():
    steps = [([HALF], Proposal.chain([CAT]), 0), ([REST, THE], Proposal.chain([REST]), 1)]
    assert list(spans_of(steps)) == [[], [Span("😀", "corrected", (" cat",)), Span("the")], []]


def test_two_rejections_at_the_tokens_of_one_character():
    steps = [([HALF], Proposal.chain([CAT]), 0), ([REST], Proposal.chain([SAT]), 0)]
    assert list(spans_of(steps)) == [[], [Span("😀", "corrected", (" cat", " sat"))], []]


def test_a_rejection_at_a_character_that_is_never_completed():
    steps = [([HALF], Proposal.chain([CAT]), 0)]
    assert list(spans_of(steps)) == [[], [Span("\udcf0\udc9f", "corrected", (" cat",))]]


def test_a_rejection_before_a_token_without_text():
    steps = [([CONTROL], Proposal.chain([CAT]), 0), ([SAT], Proposal.chain([CONTROL]), 0)]
    assert list(spans_of(steps)) == [[Span("", "corrected", (" cat",))], [Span(" sat")], []]


def test_marks_wait_for_the_text_that_may_begin_a_stop_string():
    steps = [([SAT, CAT], Proposal.chain([SAT, THE]), 1), ([THE], Proposal(), 0)]
    assert list(spans_of(steps, [" catalogue"])) == [
        [Span(" sat", "accepted")],
        [Span(" cat", "corrected", ("the",)), Span("the")],
        [],
    ]


def test_rejections_one_after_the_other_are_reported_each_at_its_place():
    steps = [([CAT], Proposal.chain([THE]), 0), ([SAT], Proposal.chain([THE]), 0)]
    held, spans, _ = spans_of(steps, [" cat saw"])
    assert held == []
    assert spans == [Span(" cat", "corrected", ("the",)), Span(" sat", "corrected", ("the",))]


def test_a_rejection_is_reported_once_if_its_token_is_divided():
    steps = [([CAT], Proposal.chain([THE]), 0), ([SAT], Proposal(), 0)]
    assert list(spans_of(steps, ["tx"])) == [
        [Span(" ca", "corrected", ("the",))],
        [Span("t", "corrected"), Span(" sa")],
        [Span("t")],
    ]


def test_what_a_stop_string_cuts_off_is_not_rejected():
    steps = [([CAT, END], Proposal.chain([CAT, END, THE]), 2)]  # the answer ends before "the" is looked at
    assert list(spans_of(steps, [" END"])) == [[Span(" cat", "accepted")], []]


def test_text_that_is_not_shown_is_skipped():
    marked = MarkedText(piece)
    marked.add(Text("", [MARKER, NEWLINE], Proposal(), 0))
    assert marked.take("") == []
    marked.add(Text("", [CAT, SAT], Proposal.chain([CAT]), 1))
    assert marked.take(" cat") == [Span(" cat", "accepted")]
    marked.add(Text("", [MARKER, THE], Proposal.chain([MARKER]), 1))
    assert marked.take(" sat") == [Span(" sat")]
    assert marked.take("the") == [Span("the")]


def test_text_of_no_token_is_unmarked():
    marked = MarkedText(piece)
    marked.add(Text("", [CAT], Proposal.chain([CAT]), 1))
    assert marked.take("dog") == [Span("dog")]
    assert marked.take(" cat") == [Span(" cat", "accepted")]


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
