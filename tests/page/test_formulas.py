"""Formulas in answers, drawn by KaTeX, and texts that only look like formulas."""

import pytest

from tests.page.test_markdown import STREAM, render
from tests.waiting import wait_until

FORMULAS = [
    ("Let $x^2 + y_1$ be", ["x^2 + y_1"]),
    (
        r"So \(a \le b\), and \[ \int_0^1 x\,dx = \tfrac12 \] holds.",
        [r"a \le b", r" \int_0^1 x\,dx = \tfrac12 "],
    ),
    ("$$\n\\begin{aligned}\na &= b \\\\[2pt]\n- c &= d\n\\end{aligned}\n$$\n", ["\\begin{aligned}\na &= b"]),
    ("\\[\nE = mc^2\n\\]", ["E = mc^2"]),
    ("- item $$\\sum_i i$$.", [r"\sum_i i"]),
    ("the $n$th of $ABC$ and $2\\pi r$, $*a*$", ["n", "ABC", r"2\pi r", "*a*"]),
    ("> $$\n> x = 1\n> $$", ["x = 1"]),
    ("| a | b |\n|-|-|\n| $x_1$ | $\\frac{1}{2}$ |", ["x_1", r"\frac{1}{2}"]),
]
TEXTS = [
    "It costs $5 and $6, or $5-$6, US$7, 5$ or 6$.",
    "$5/month and 6$/year",
    "`$x$ and $y$` ``$a$``",
    "```sh\necho $HOME $PATH$\n```",
    "    $a$ + $b$",
    "Set $HOME/$USER and $foo/$bar, or $PATH:$HOME",
    r"an escaped \$x\$ and \\(a\\)",
    "$$ and $$ are dollars, and $$$ many",
    "$$\n\n$$",
    "an open $x + y and \\(z",
    "I pay $20 and she pays 30$ for it",
]
DRAWN = "document.querySelectorAll('#turns .math .katex').length"
SOURCES = "[...document.querySelectorAll('#turns annotation')].map((each) => each.textContent)"


@pytest.mark.parametrize(("text", "sources"), FORMULAS)
def test_formulas_are_drawn(open_page, text, sources):
    page = open_page()
    render(page, [[text, "accepted", []]])
    wait_until(lambda: page.evaluate(DRAWN) == len(sources))
    found = page.evaluate(SOURCES)
    assert all(wanted.strip() in source for wanted, source in zip(sources, found, strict=True)), found


def test_prices_and_code_are_none(open_page):
    page = open_page()
    for text in TEXTS:
        render(page, [[text, "accepted", []]])
        assert page.locator("#turns .math").count() == 0, text
    assert page.evaluate("document.querySelector('link[href*=katex]')") is None  # nothing was loaded for them


def test_formulas_load_nothing_from_elsewhere_and_run_nothing(open_page):
    """What KaTeX would need trust for, what has styles of its own, and what it does not know."""
    page = open_page()
    text = "\n\n".join(
        [
            r"$\href{javascript:alert(1)}{x}$ $\includegraphics{https://example.com/x.png}$",
            r"$\htmlStyle{color:red}{x}$ $\unknowncommand{x}$ $\sqrt{\frac{a}{b}}$ $\cancel{x}$",
            r"$\def\a{\a\a}\a1$ $\boldsymbol{x}$ $\fcolorbox{red}{blue}{x}$ $\rule{999999em}{1em}1$",
            r"$\vec{v}$ $\pmb{x}$ $\oiint x$ $\begin{array}{c|c}1&2\end{array}$",
        ]
    )
    render(page, [[text, "accepted", []]])
    wait_until(lambda: page.evaluate(DRAWN) > 4)
    assert page.locator("#turns a[href], #turns img").count() == 0
    assert page.locator("#turns code:has-text('unknowncommand')").count() == 1  # its source
    wait_until(lambda: page.evaluate("[...document.fonts].some((font) => font.status === 'loaded')"))
    assert page.locator("#turns").evaluate("turns => turns.scrollWidth <= innerWidth")


def test_a_wide_formula_scrolls(open_page):
    page = open_page(viewport={"width": 360, "height": 640})
    render(page, [["$$" + "+".join(f"x_{{{i}}}" for i in range(60)) + "$$", "accepted", []]])
    wait_until(lambda: page.evaluate(DRAWN) == 1)
    assert page.locator(".formula").evaluate("box => box.scrollWidth > box.clientWidth")
    assert page.evaluate("document.getElementById('turns').scrollWidth") <= 360


def test_a_formula_that_grows(open_page):
    page = open_page()
    for text, _ in FORMULAS:
        different, _ = page.evaluate(STREAM, [f"{text}\n\nand *more* $x$.", 1, True])
        assert different == [], text
