"""Test the views of an answer: no text is lost or added, however it is split into steps."""

import contextlib
import io
import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.answers.text import TextStream
from spec_local.core.proposal import Proposal
from spec_local.session import Text
from specdec_cli import answer_view, render
from specdec_cli.code_fences import Fences, code_blocks

WORDS = b"the| cat| sat|\n|\xe0\xb8|\x81|\xf0\x9f|\x98\x80|\xff| *x*| END".split(b"|")


class Screen(io.StringIO):
    """Standard output that is a terminal or not."""

    def __init__(self, terminal=True):
        super().__init__(newline="")
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@contextlib.contextmanager
def standard_output(screen):
    """Replace standard output in the modules under test, as pytest replaces sys.stdout itself."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (answer_view, render):
            patch.setattr(module, "sys", SimpleNamespace(stdout=screen))
        yield screen


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with standard_output(Screen()) as screen:
        yield screen


def piece(token):
    return WORDS[token]


def events(steps, stops=()):
    """Yield a session's events of steps: (tokens, proposal, number of accepted tokens)."""
    stream = TextStream(piece, stops)
    for tokens, proposal, n_accepted in steps:
        yield Text("".join(map(stream.feed, tokens)), tokens, proposal, n_accepted)
    yield stream.finish()


def shown(view, steps, stops=()):
    *texts, rest = events(steps, stops)
    for event in texts:
        view.show(event)
    view.end(rest)


GREEN, YELLOW, UNDERLINED, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[4m", "\x1b[0m"


@pytest.mark.parametrize(
    ("steps", "shown_as", "notes"),
    [
        (
            [
                ([0], Proposal(), 0),
                ([1, 2, 3], Proposal.chain([1, 2, 0, 1]), 2),  # " cat sat" is accepted, "the cat" rejected
                ([1], Proposal.chain([3]), 0),
            ],
            f"the{GREEN} cat sat{PLAIN}{YELLOW}\n{PLAIN}{YELLOW} cat{PLAIN}",
            ["rejected: “the cat” → “⏎” · “⏎” → “ cat”"],
        ),
        ([([1, 2, 0], Proposal.chain([1, 2]), 2)], f"{GREEN} cat sat{PLAIN}the", []),
        # The main model ended its answer where the draft continued; the end token is not part of the output.
        ([([1], Proposal.chain([1, 2, 0]), 1)], f"{GREEN} cat{PLAIN}", ["rejected: “ satthe” → the end"]),
        # " cat" is accepted; its children are " sat", followed by "the" or " cat", and "\n"; then " *x*"
        (
            [([1, 9], Proposal([1, 2, 0, 3, 1], [-1, 0, 1, 0, 1]), 1)],
            f"{GREEN} cat{PLAIN}{YELLOW} *x*{PLAIN}",
            ["rejected: “ satthe”, “⏎” → “ *x*”"],
        ),
    ],
    ids=["some rejected", "all accepted", "the end of the answer", "branches of a tree"],
)
def test_accepted_and_rejected_draft_tokens_are_marked(screen, steps, shown_as, notes):
    view = answer_view.DraftsView(piece)
    shown(view, steps)
    assert screen.getvalue() == shown_as
    assert view.notes() == notes


def test_colours_and_no_colour(screen, monkeypatch):
    steps = [([1, 0], Proposal.chain([1, 2]), 1)]
    shown(answer_view.view(piece, show_drafts=True), steps)
    assert screen.getvalue() == f"{GREEN} cat{PLAIN}{YELLOW}the{PLAIN}"
    monkeypatch.setenv("NO_COLOR", "1")
    shown(answer_view.view(piece, show_drafts=True), steps)
    assert screen.getvalue().endswith(f"{UNDERLINED} cat{PLAIN}\x1b[1mthe{PLAIN}")
    monkeypatch.setenv("TERM", "dumb")
    shown(answer_view.view(piece, show_drafts=True), steps)
    assert screen.getvalue().endswith(f"{PLAIN} catthe")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=5), st.integers(0, 5)),
        max_size=8,
    ),
    st.booleans(),
)
def test_without_marks_the_text_is_unchanged(steps, stops):
    tokens = [(step, Proposal.chain([*step[: min(n, len(step))], 0]), min(n, len(step))) for step, n in steps]
    stops = [" END"] if stops else []
    plain, marked = Screen(), Screen()
    for screen, make in ((plain, answer_view.PlainView), (marked, lambda: answer_view.DraftsView(piece))):
        with standard_output(screen):
            shown(make(), tokens, stops)
    assert re.sub("\x1b\\[[0-9]*m", "", marked.getvalue()) == plain.getvalue()


def test_off_a_terminal_an_answer_is_plain():
    with standard_output(Screen(terminal=False)):
        for marks in ({"show_drafts": True}, {"markdown": True}, {}):
            assert isinstance(answer_view.view(piece, **marks), answer_view.PlainView)


ANSWER = """# A title

Some *words* and `code`, and [red]brackets[/red].

```python
def f(x):
    return x  # ```
~~~

```
- one
- two

Last.
"""


@pytest.fixture
def rendered(screen):
    """Return what is shown for a text, without styles; a function."""

    def rendered(*parts):
        view = answer_view.MarkdownView()
        for part in parts[:-1]:
            view.show(Text(part))
        view.end(parts[-1])
        return re.sub("\x1b\\[[0-9;]*m", "", screen.getvalue())

    return rendered


def test_markdown_is_rendered_and_no_text_is_lost(rendered):
    seen = rendered(ANSWER, "")
    parts = [
        "A title",
        "Some words and code",
        "[red]brackets[/red]",
        "\n\ndef f(x):\n",
        "\n    return x  # ```\n",
    ]
    for part in [*parts, "~~~", "• one", "Last."]:
        assert part in seen, seen
    assert "*words*" not in seen
    assert "```python" not in seen


@pytest.mark.parametrize("cut", range(len(ANSWER)))
def test_an_answer_that_is_continued_shows_the_rest_as_what_it_is(screen, cut):
    """Lines of code as code, wherever the answer was cut."""
    view = answer_view.view(piece, markdown=True, begun=ANSWER[:cut])
    view.show(Text(ANSWER[cut:]))
    view.end("")
    seen = re.sub("\x1b\\[[0-9;]*m", "", screen.getvalue())
    for line in ("def f(x):", "    return x  # ```", "~~~"):
        at = ANSWER.index(f"{line}\n")
        if cut <= at + len(line):
            rest = line[max(0, cut - at) :]
            assert f"{rest}\n" in seen
    if cut > ANSWER.index("```python"):
        assert "python" not in seen  # the rest of the fence is none of the code


def test_lines_of_code_are_not_broken_where_an_answer_is_continued(screen, monkeypatch):
    code = "x = 1 " * 60
    write = answer_view.view(piece, wrap=True, begun="Here:\r\n  ```pyth")
    write.show(Text(f"on\n{code}\n  ```\n{code}\n"))
    write.end("")
    assert screen.getvalue().startswith(f"on\n{code}\n")
    assert code not in screen.getvalue().removeprefix(f"on\n{code}")


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\n```py\nx\n\ny\n```\nb\n~~~\nz\n~~~", ["x\n\ny", "z"]),
        ("```\n~~~\n``\n```x\n    ```\n````  \n```", ["~~~\n``\n```x\n    ```", ""]),
        ("   ````\n```\nx", ["```\nx"]),
        ("    ```\n``` a `b` ```\n``", []),
        ("", []),
    ],
)
def test_blocks_of_code(text, blocks):
    assert code_blocks(text) == blocks


@given(st.lists(st.sampled_from(["```", "~~~", "````", "x", " ", "\n", "\n", "`"]), max_size=20), st.data())
def test_fences_are_the_same_wherever_a_text_is_cut(parts, data):
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    whole, rest = Fences(), Fences(text[:cut])
    kinds = [whole.read(line) for line in text.split("\n")]
    assert [rest.read(line) for line in text[cut:].split("\n")] == kinds[text[:cut].count("\n") :]


def test_markdown_with_invalid_utf8(rendered):
    assert "caf� and more" in rendered("caf\udce9 and", " more")


def test_markdown_has_no_padding_that_could_wrap(rendered):
    seen = rendered("# A title\n\nwords\n\n- one\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> said\n\nlast", "")
    lines = seen.removesuffix("\n").split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines.count("") == 5  # one between two blocks


def test_markdown_keeps_the_paragraphs_of_a_list_item_in_the_list(screen, rendered):
    seen = rendered("1. one\n2. two\n\n   more of two\n3. three\n\nafter\n", "")
    assert seen == " 1 one\n 2 two\n   more of two\n 3 three\n\nafter\n"
    answer_view.MarkdownView().show(Text("- an item with a line after it\n\n- the next\n"))
    assert "an item" in screen.getvalue()  # shown before the end of the list


@given(st.lists(st.integers(1, len(ANSWER)), max_size=20), st.integers(0, len(ANSWER)))
def test_markdown_only_appends(cuts, end):
    """However the text is split into steps, the final screen is the same, and earlier output stays."""
    screens = []
    for borders in ([0, end], sorted({0, end, *(c for c in cuts if c < end)})):
        with standard_output(Screen()) as screen:
            view, before = answer_view.MarkdownView(), ""
            for a, b in itertools.pairwise(borders):
                view.show(Text(ANSWER[a:b]))
                assert screen.getvalue().startswith(before)
                before = screen.getvalue()
            view.end("")
            screens.append(screen.getvalue())
    assert screens[0] == screens[1]
    assert not re.search("\x1b\\[[0-9;]*[A-HJKSTfsu]|\r", screens[0])  # no cursor movement or erasing
