"""Test that no text of a model, a file, a server or a user controls the terminal."""

import ast
import io
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec_cli
from spec_local.session import Text
from specdec_cli import answer_view, progress, render, terminal
from tests import hostile

# Text that has no effect on a terminal, in languages that need invisible characters, and emoji.
HARMLESS = {
    "emoji": "👩‍👩‍👧 ❤️ 🏳️‍🌈 👍🏽 1️⃣",
    "Persian": "می‌خواهم",
    "lines": "a\n\tb\n",
    "markup": hostile.MARKUP,
}
IN_PROSE = HARMLESS | {
    "Hebrew": "‏שלום‎ \u2067abc\u2069 \u202bdef\u202c",
    "Thai": "สวัสดี\u200bครับ",
    "flag": "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
}


NULL = os.open(os.devnull, os.O_WRONLY)


class Stream(io.TextIOWrapper):
    """A standard stream, as Python opens it; `seen` is what was written."""

    def __init__(self, on_terminal=True):
        super().__init__(io.BytesIO(), "utf-8", "backslashreplace", newline="\n", write_through=True)
        self.on_terminal = on_terminal

    def fileno(self):
        return NULL

    def isatty(self):
        return self.on_terminal

    @property
    def seen(self):
        return self.written.decode()

    @property
    def written(self):
        return self.buffer.getvalue()


@given(st.text(), st.lists(st.integers(0, 40)))
def test_prose_is_the_same_in_any_parts(text, cuts):
    text = text + hostile.ALL[: len(text)]
    whole = terminal.Prose()(text)
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = terminal.Prose()
    assert "".join(parts(text[a:b]) for a, b in itertools.pairwise(borders)) == whole
    assert hostile.forbidden(whole, prose=True) == []


@given(st.text(st.characters() | st.sampled_from(hostile.ALL)))
def test_nothing_invisible_remains(text):
    shown = terminal.visible(text)
    assert hostile.forbidden(shown) == []
    assert terminal.visible(shown) == shown
    assert [c for c in shown if c.isalnum() and not c.isascii()] == [
        c for c in text if c.isalnum() and not c.isascii()
    ]


@pytest.mark.parametrize("text", IN_PROSE.values(), ids=IN_PROSE.keys())
def test_harmless_text_is_unchanged(text):
    assert terminal.Prose()(text) == text
    if text in HARMLESS.values():
        assert terminal.visible(text) == text


def test_what_is_shown_instead():
    assert terminal.visible("\x1b[1m\x9b\x07\u202e\u2066\u200b\udcff") == (
        "\\u001b[1m\\u009b\\u0007\\u202e\\u2066\\u200b\\udcff"
    )
    assert terminal.visible("a\r\nb\rc") == "a\nb\\u000dc"
    assert terminal.Prose()("\x1b[1m\x9b\u202e") == "\\u001b[1m\\u009b\\u202e"
    assert terminal.Prose()("a\r\nb\rc\udcff") == "a\nb\nc�"
    assert json.loads(terminal.visible('"\U000e0067\x7f"')) == "\U000e0067\x7f"


def test_an_answer_is_exact_unless_it_goes_to_a_terminal(monkeypatch):
    for on_terminal in (False, True):
        raw = Stream(on_terminal)
        monkeypatch.setattr(sys, "stdout", raw)
        terminal.protect()
        render.prepare_stdout()
        render.answer(hostile.ALL + "\r")
        render.answer("\n\udcff")
        sys.stdout.buffer.write("\x1bé".encode()[:2])
        sys.stdout.buffer.write("\x1bé".encode()[2:])
        sys.stdout.flush()
        written = raw.written
        if on_terminal:
            assert hostile.forbidden(written.decode(), prose=True) == []
            assert written.decode().endswith("def\n�\\u001bé")
        else:
            assert written == hostile.ALL.encode() + b"\r\n\xff\x1b\xc3\xa9"


def test_notes_and_errors_are_one_line_also_in_a_file(monkeypatch):
    for on_terminal in (False, True):
        raw = Stream(on_terminal)
        monkeypatch.setattr(sys, "stderr", raw)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "10000")  # on a narrow terminal, notes are broken between words
        terminal.protect()
        render.note(hostile.ALL + "\nspecdec: a false line")
        render.error(hostile.ALL + "\nspecdec: a false line")
        sys.stderr.write(hostile.ALL + "\n")  # a library, or a warning of Python
        assert hostile.forbidden(raw.seen) == []
        assert len(raw.seen.splitlines()) == 3
        assert raw.seen.count(hostile.MARKUP) == 3


@pytest.mark.parametrize("kind", ["drafts", "markdown"])
def test_the_views_of_an_answer(monkeypatch, kind):
    raw = Stream()
    monkeypatch.setattr(sys, "stdout", raw)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal.protect()
    pieces = {i: char.encode() for i, char in enumerate(hostile.ALL)}
    view = answer_view.view(pieces.__getitem__, show_drafts=kind == "drafts", markdown=kind == "markdown")
    text = hostile.ALL + "\n\n```\x1b[2J\n" + hostile.ALL + "\n```\n[a](http://x\x1b]8;;y) &#8238; &#27;"
    if kind == "drafts":
        from spec_local.core.proposal import Proposal

        for i in pieces:
            view.show(Text(pieces[i].decode(), [i], Proposal.chain([i, i]), 1))
        view.end("")
    else:
        for char in text:
            view.show(Text(char))
        view.end("")
    assert "\x1b[" in raw.seen  # styles
    assert hostile.forbidden(hostile.STYLES.sub("", raw.seen), prose=True) == []
    assert "\x1b[31mred" not in raw.seen
    assert "\r" not in raw.seen
    if kind == "markdown":
        assert "http://x" in raw.seen  # the address of a link is not hidden


@pytest.mark.parametrize("description", ["x", None])
def test_output_above_a_progress_bar(monkeypatch, description):
    raw = Stream()
    monkeypatch.setattr(sys, "stderr", raw)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal.protect()
    status = render.console(sys.stderr).status("")
    with progress.bar(description, 3) if description else progress.live(status):
        render.note(hostile.ALL)
        sys.stderr.write(hostile.ALL + "\n")  # llama.cpp's log
    seen = hostile.STYLES.sub("", raw.seen)
    assert hostile.forbidden(seen) == []
    assert "\x1b[31m" not in raw.seen
    assert "\x1b]" not in raw.seen
    assert seen.count("[red]x[/red]") == 2


def test_all_output_passes_through_two_modules():
    """So that a new message cannot bypass them."""
    writing = {"print", "typer.echo", "typer.secho", "click.echo", "Console", "rich.print", "console.Console"}
    found = set()
    for file in Path(specdec_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in writing or name.endswith(("stdout.write", "stderr.write", "__.write")):
                    found.add((file.stem, name))
    assert found == {("render", "sys.stdout.write"), ("render", "Console")}
