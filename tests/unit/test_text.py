"""Incremental detokenization: characters and stop strings split across tokens in every way."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from spec_local.answers.text import TextStream
from spec_local.text import counted, printable

# Few letters, so that stop strings occur, begin, and overlap.
TEXTS = st.text("abé🙂", max_size=40)
STOPS = st.lists(st.text("abé🙂", min_size=1, max_size=5), max_size=3)


def pieces(raw, splits):
    """The bytes, split at these offsets."""
    borders = sorted({0, len(raw), *(c % (len(raw) + 1) for c in splits)})
    return [raw[a:b] for a, b in itertools.pairwise(borders)]


def stream_of(parts, stops=()):
    """The text released by each piece and at the end, and the stream."""
    stream = TextStream(parts.__getitem__, stops)
    released = [stream.feed(i) for i in range(len(parts))]
    return released, stream.finish(), stream


def before_the_first_stop(text, stops):
    """The text before the first complete stop string, letter by letter; and whether there is one."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@given(text=TEXTS, stops=STOPS, splits=st.lists(st.integers(0, 200), max_size=60))
@example(text="abb", stops=["abb", "b"], splits=[])
@example(text="aab", stops=["ab"], splits=[1, 2])
def test_any_split_gives_the_text_before_the_first_stop_string(text, stops, splits):
    parts = pieces(text.encode(), splits)
    released, rest, stream = stream_of(parts, stops)
    expected, stopped = before_the_first_stop(text, stops)
    assert "".join(released) + rest == expected
    assert stream.stopped is stopped


@given(text=TEXTS, stops=STOPS, splits=st.lists(st.integers(0, 200), max_size=60))
@example(text="a🙂b", stops=[], splits=[3, 4])
@example(text="abéa", stops=["abéb"], splits=[2, 3])
def test_no_text_is_held_back_longer_than_necessary(text, stops, splits):
    parts = pieces(text.encode(), splits)
    stream = TextStream(parts.__getitem__, stops)
    out = ""
    for i in range(len(parts)):
        out += stream.feed(i)
        if stream.stopped:
            return
        sofar = b"".join(parts[: i + 1]).decode("utf-8", "ignore")  # without an incomplete character
        assert sofar.startswith(out)
        held = sofar[len(out) :]
        assert all(s not in sofar for s in stops)
        # Held text is the beginning of a stop string; released text cannot be.
        assert not held or any(s.startswith(held) and s != held for s in stops)
        longest = max((n for s in stops for n in range(len(s)) if sofar.endswith(s[:n])), default=0)
        assert len(held) == longest


@given(raw=st.binary(max_size=40), splits=st.lists(st.integers(0, 200), max_size=40))
@example(raw=b"\xf0\x9f\x99", splits=[1, 2])
@example(raw=b"\xe2\x28\xa1", splits=[1])
@example(raw=b"\xed\xa0\x80", splits=[1, 2])
def test_any_bytes_survive_decoding(raw, splits):
    released, rest, _ = stream_of(pieces(raw, splits))
    text = "".join(released) + rest
    assert text.encode("utf-8", "surrogateescape") == raw
    assert printable(text) == raw.decode("utf-8", "replace")


def test_a_stop_string_of_several_lines_and_an_empty_one():
    released, rest, stream = stream_of([b"a\n", b"\nUser", b":"], ["\n\nUser:", ""])
    assert ("".join(released) + rest, stream.stopped) == ("a", True)


def test_counted():
    assert [counted(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [counted(n, "category", "categories") for n in (1, 2)] == ["1 category", "2 categories"]
    assert counted(1234, "file", separator=",") == "1,234 files"
