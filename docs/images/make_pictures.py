"""Draw what commands show in a terminal as SVGs, from real sessions in a pseudo-terminal.

    python docs/images/make_pictures.py --main MAIN.gguf --draft DRAFT.gguf [chat|models|tune|bench …]

The pictures in docs/images show Qwen2.5-Coder 1.5B in Q4_K_M with its 0.5B sibling in Q4_0.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import pexpect
from rich.console import Console
from rich.style import Style
from rich.text import Text

QUESTION = "Write a Python function for the n-th Fibonacci number, then the same with type hints. Code only."
COLUMNS = 92
WIDTH, HEIGHT = 8.4, 19  # of a character and a line, in pixels
PROMPT = ">\x08\x1b\\[2C"  # the line editor writes the space of "> " by moving the cursor
OTHER_THAN_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[^\[]|\r")
FIRST_USE = "(first use"
STYLE = """\
svg { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
rect { fill: #f6f8fa; stroke: #d1d9e0 } text { fill: #1f2328 }
.note { fill: #59636e } .bold { font-weight: bold }
.accepted { fill: #1a7f37 } .corrected { fill: #9a6700 }
@media (prefers-color-scheme: dark) {
  rect { fill: #151b23; stroke: #3d444d } text { fill: #f0f6fc } .note { fill: #9198a1 }
  .accepted { fill: #3fb950 } .corrected { fill: #d29922 }
}"""


class Terminal:
    """Runs commands in a folder that has the two models, in a pseudo-terminal."""

    def __init__(self, folder: str, main: Path, draft: Path) -> None:
        self._folder = folder
        self.models = ["--main", main.name, "--draft", draft.name]
        for file in (main, draft):
            (Path(folder) / file.name).symlink_to(file.resolve())

    def start(self, *arguments: str) -> pexpect.spawn:
        return pexpect.spawn(
            sys.executable,
            ["-m", "specdec_cli", *arguments],
            cwd=self._folder,
            env={
                **os.environ,
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "XDG_STATE_HOME": self._folder,
                "COLUMNS": str(COLUMNS),
            },
            dimensions=(200, COLUMNS),
            encoding="utf-8",
            timeout=1800,
        )

    def output(self, *arguments: str) -> str:
        """Return the command and what it shows until it ends."""
        command = self.start(*arguments)
        command.expect(pexpect.EOF)
        return f"$ specdec {' '.join(arguments)}\n{last_states(command.before)}"


def chat(terminal: Terminal) -> str:
    arguments = ["chat", *terminal.models, "--show-drafts", "--temp", "0"]
    session = terminal.start(*arguments)
    session.expect(PROMPT)
    greeting = session.before.rpartition("\x1b8\x1b[J")[2]  # behind the line that said what it waited for
    session.sendline(QUESTION)
    session.expect_exact("green: ")  # the lines before echo the question
    session.expect(PROMPT)
    answer = f"\x1b[2mgreen: {session.before}"
    session.close(force=True)
    lines = [
        f"$ specdec {' '.join(arguments[:-2])}",
        greeting.rpartition("\n")[0],
        f"\x1b[1m> {QUESTION}\x1b[0m",
    ]
    return "\n".join([*lines, answer.rpartition("\n")[0]])


def models(terminal: Terminal) -> str:
    lines = terminal.output("models", "list").splitlines()
    pairs = next(i for i, line in enumerate(lines) if "Pairs of" in line)
    return "\n".join([*lines[:18], "…", "", *lines[pairs : pairs + 14], "…"])


def tune(terminal: Terminal) -> str:
    main, draft = terminal.models[1::2]
    return terminal.output("tune", main, draft)


def bench(terminal: Terminal) -> str:
    shown = terminal.output("bench", *terminal.models, "--per-category", "1", "-n", "64")
    return re.sub(r"(Linux|macOS)-\S+", lambda system: system[1].ljust(len(system[0])), shown)


def last_states(output: str) -> str:
    """Leave out progress bars: of a line that was written several times, only the last state remains."""
    lines = re.sub(r"\x1b\[\d*A|\x1b\[2K", "\r", output.replace("\r\n", "\n")).split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)


PICTURES: dict[str, tuple[str, Callable[[Terminal], str]]] = {
    "chat": ("specdec chat --show-drafts", chat),
    "models": ("specdec models list", models),
    "tune": ("specdec tune", tune),
    "bench": ("specdec bench", bench),
}


def plain(output: str) -> str:
    """Remove control sequences other than colours."""
    return OTHER_THAN_COLOUR.sub("", output)


def kind(style: Style) -> str:
    if style.color:
        return {2: "accepted", 3: "corrected"}.get(style.color.number or 0, "")  # green and yellow
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


def draw(title: str, output: str, out: Path) -> None:
    console = Console(width=COLUMNS)
    shown = [line for line in plain(output).splitlines() if FIRST_USE not in line]
    lines = list(Text.from_ansi("\n".join(shown)).wrap(console, COLUMNS))
    width, height = round(32 + WIDTH * COLUMNS), 28 + HEIGHT * len(lines)
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        *words(lines, console),
        "</svg>\n",
    ]
    out.write_text("\n".join(picture), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--main", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("pictures", nargs="*", choices=[[], *PICTURES], default=list(PICTURES))
    arguments = parser.parse_args()
    for name in arguments.pictures:
        title, shown = PICTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            output = shown(Terminal(folder, arguments.main, arguments.draft))
        draw(title, output, Path(__file__).with_name(f"{name}.svg"))


if __name__ == "__main__":
    main()
