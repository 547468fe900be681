"""Draw `specdec chat --show-drafts` as an SVG, from a real session in a pseudo-terminal.

    python docs/images/make_chat_picture.py --main MAIN.gguf --draft DRAFT.gguf

docs/images/chat.svg shows Qwen2.5-Coder 1.5B with its 0.5B sibling, both in Q4_K_M.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pexpect
from rich.console import Console
from rich.style import Style
from rich.text import Text

QUESTION = "Write a Python function that returns the n-th Fibonacci number. Code only, no comments."
COLUMNS = 92
WIDTH, HEIGHT = 8.4, 19  # of a character and a line, in pixels
PROMPT = ">\x08\x1b\\[2C"  # the line editor writes the space of "> " by moving the cursor
OTHER_THAN_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[^\[]|\r")
STYLE = """\
svg { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
rect { fill: #f6f8fa; stroke: #d1d9e0 } text { fill: #1f2328 }
.note { fill: #59636e } .bold { font-weight: bold }
.accepted { fill: #1a7f37 } .rejected { fill: #cf222e; text-decoration: line-through }
@media (prefers-color-scheme: dark) {
  rect { fill: #151b23; stroke: #3d444d } text { fill: #f0f6fc } .note { fill: #9198a1 }
  .accepted { fill: #3fb950 } .rejected { fill: #f85149 }
}"""


def session(main: Path, draft: Path) -> str:
    """Return what the terminal shows, with ANSI colours: the greeting, the question and the answer."""
    models = ["--main", main.name, "--draft", draft.name]
    with tempfile.TemporaryDirectory() as folder:
        for file in (main, draft):
            (Path(folder) / file.name).symlink_to(file.resolve())
        chat = pexpect.spawn(
            sys.executable,
            ["-m", "specdec_cli", "chat", *models, "--show-drafts", "--temp", "0"],
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": folder},
            dimensions=(60, COLUMNS),
            encoding="utf-8",
            timeout=300,
        )
        chat.expect(PROMPT)
        greeting = chat.before
        chat.sendline(QUESTION)
        chat.expect_exact("the rest: main model\x1b[0m\r\n")
        legend = (chat.before + chat.after).splitlines()[-1]  # the lines before echo the question
        chat.expect(PROMPT)
        answer = chat.before.rpartition("\n")[0]
        chat.close(force=True)
    command = f"$ specdec chat {' '.join(models)} --show-drafts"
    lines = [command, greeting.rpartition("\n")[0], f"\x1b[1m> {QUESTION}\x1b[0m", legend, answer]
    # The first use of a model also shows that it is measured.
    return "\n".join(line for line in plain("\n".join(lines)).splitlines() if "(first use with" not in line)


def plain(output: str) -> str:
    """Remove control sequences other than colours."""
    return OTHER_THAN_COLOUR.sub("", output)


def kind(style: Style) -> str:
    if style.strike:
        return "rejected"
    if style.color:
        return "accepted"
    return "note" if style.dim else "bold" if style.bold else ""


def words(lines: list[Text], console: Console) -> Iterator[str]:
    """Place every run of characters in one style, without the spaces around it, at its column."""
    for row, line in enumerate(lines):
        column = 0
        for segment in line.render(console):
            for word in re.finditer(r"\S+(?: \S+)*", segment.text.rstrip("\n")):
                x, y = 16 + WIDTH * (column + word.start()), 30 + HEIGHT * row
                length = f'textLength="{WIDTH * len(word[0]):.1f}" lengthAdjust="spacingAndGlyphs"'
                style = kind(segment.style or Style())
                style = f' class="{style}"' if style else ""
                yield f'<text{style} x="{x:.1f}" y="{y}" {length}>{escape(word[0])}</text>'
            column += len(segment.text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--main", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("chat.svg"))
    arguments = parser.parse_args()
    console = Console(width=COLUMNS)
    shown = Text.from_ansi(session(arguments.main, arguments.draft))
    lines = list(shown.wrap(console, COLUMNS))
    width, height = round(32 + WIDTH * COLUMNS), 28 + HEIGHT * len(lines)
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>specdec chat --show-drafts</title>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        *words(lines, console),
        "</svg>\n",
    ]
    arguments.out.write_text("\n".join(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
