"""Output: the answer on stdout, exact unless it is a terminal; everything else on stderr.

All output passes through here, and on a terminal through `specdec_cli.terminal`, which makes it safe.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from spec_local.core.text import counted
from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import last_resort, names, terminal, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from spec_local.engine.events import Statistics
    from spec_local.llama.row import LlamaRow
    from spec_local.session import Done, Session
    from spec_local.settings import GenerationSettings


def prepare_stdout() -> None:
    """Make stdout write the model's bytes unchanged in any locale."""
    stdout: Any = sys.stdout
    stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")


def discard(stream: TextIO) -> None:
    """Discard the buffered output of a broken stream, which would otherwise fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write(text: str) -> None:
    """Write results other than an answer to stdout."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_object(content: Mapping[str, object]) -> None:
    """Write an object to stdout, as a line of JSON."""
    write(json.dumps(content, ensure_ascii=False) + "\n")


def confirmed(question: str, refusal: SpecLocalError) -> bool:
    """Ask a question on the terminal, and return whether the answer is yes.

    Raises:
        SpecLocalError: `refusal`; nobody can answer.
        KeyboardInterrupt: Ctrl-C or Ctrl-D was pressed.
    """
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        raise refusal
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None


def confirmed_deletion(what: str, yes: bool) -> bool:
    """Ask whether to delete something, unless `yes`, as of --yes, says so; raises as `confirmed` does."""
    refusal = InvalidRequest(f"this would delete {what}: pass --yes to confirm")
    return yes or confirmed(f"Delete {what}?", refusal)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write lines with aligned cells to stdout; right: columns that are aligned on their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row))
        write("  ".join(cells).rstrip() + "\n")


def date(seconds: float) -> str:
    """Return a time since the epoch as date and time of this place."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


_unfinished: Any = None  # stdout, if the last line of the answer has no end yet


def answer(text: str, style: str = "") -> None:
    """Write a part of an answer to stdout; style: an escape sequence, for terminals only."""
    global _unfinished
    stream: Any = sys.stdout
    if isinstance(stream, terminal.Screen):
        text, stream = stream.prose(text), stream.stream
    if text:
        _unfinished = None if text.endswith("\n") else sys.stdout
    with waiting.hidden():
        stream.write(f"{style}{text}{_PLAIN}" if style else text)
        stream.flush()


def line_is_open() -> bool:
    """Return whether the last line of the answer has no end yet."""
    return _unfinished is sys.stdout


def end_answer() -> None:
    """End the last line of the answer, if it has no end yet."""
    if _unfinished is sys.stdout:
        answer("\n")


_LEAST_SAVED = 0.005  # seconds of a cause that are shown
DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def coloured(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with styles, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return the columns of the terminal that shows stdout; None for a file or a pipe."""
    return terminal.width() if sys.stdout.isatty() else None


def note(line: str, text: str = "") -> None:
    """Write a line to stderr, dim and broken between words on a terminal.

    text: of a conversation, appended to the line.
    """
    _write_error(_fitting(_one_line(line) + terminal.Prose()(text)), DIM)


def notes(lines: Iterable[str]) -> None:
    """Write lines to stderr, as `note` does."""
    for line in lines:
        note(line)


def error(message: str) -> None:
    """Write an error to stderr, as one line."""
    _write_error(_one_line(f"specdec: {' '.join(message.split())}"))


def _fitting(line: str) -> str:
    """Break a line between words if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return line
    from specdec_cli.wrapping import Wrapped

    parts: list[str] = []
    wrapped = Wrapped(lambda text, style: parts.append(text), lambda: terminal.width(sys.stderr))
    wrapped(line)
    wrapped.flush()
    return "".join(parts)


def _one_line(text: str) -> str:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a file name may be no UTF-8
    return terminal.visible(names.with_options(text.replace("\n", " ")))


def _write_error(text: str, style: str = "") -> None:
    global _unfinished
    stream: Any = sys.stderr
    if stream is None:  # closed
        return
    if isinstance(stream, terminal.Screen):
        stream = stream.stream
    if style and coloured(stream):
        text = f"{style}{text}{_PLAIN}"
    if _follows_unfinished_line(stream):
        text, _unfinished = "\n" + text, None
    try:
        with waiting.hidden():
            stream.write(text + "\n")
            stream.flush()
    except OSError:  # a failed note must not end the answer
        discard(stream)


def _follows_unfinished_line(stderr: TextIO) -> bool:
    """Return whether the answer is in the same file, pipe or terminal, and its last line has no end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or no file
        if _unfinished is sys.stdout:
            return os.path.sameopenfile(sys.stdout.fileno(), stderr.fileno())
    return False


def console(stream: TextIO, **options: Any) -> "Console":
    """Return a rich console, which writes its escape sequences to a terminal: make texts visible first."""
    from rich.console import Console

    return Console(file=terminal.raw(stream), markup=False, emoji=False, highlight=False, **options)


def threads(main: "LlamaRow") -> str:
    """Return the number of threads of the main model, with its unit."""
    return counted(main.threads, "thread")


def limit_note() -> str:
    """Return what allows fewer threads than the machine has cores, in brackets; "" if nothing does."""
    from spec_local.system.processors import usable_processors

    limit = usable_processors().limit
    return f" ({limit})" if limit else ""


def setting_lines(session: "Session") -> list[str]:
    """Return lines with the models; build, device, threads and instruction sets; the CPU kernels."""
    from importlib.metadata import version

    from spec_local import kernels
    from spec_local.llama import runtime

    main, draft = session.main, session.draft
    models = [f"main {main.model.path.name} ({main.model.description})"]
    if draft:
        models.append(f"draft {draft.model.path.name} ({draft.model.description})")
    used = str(kernels.status())
    if kernels.status().instruction_set and (varying := session.logits_vary):
        used += f"; logits depend on the size of a call: {', '.join(varying)}"
    build = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
    uses = " ".join(runtime.features())
    return [
        " · ".join(models),
        " · ".join([build, session.device, threads(main) + limit_note(), uses]),
        f"CPU kernels: {used}",
    ]


def gain(session: "Session", settings: "GenerationSettings", s: "Statistics") -> str:
    """Return in words what drafts gained in an answer; "" if there is nothing to say."""
    found = session.gain(settings, s)
    return found.words if found else ""


def plain_statistics(s: "Statistics", gain: str = "") -> str:
    """Return what most people want to know of an answer as one line; gain: what `gain` returns for it."""
    tokens = counted(s.predicted_n, "token")
    parts = [f"{tokens} in {s.predicted_s:.1f} s ({s.tokens_per_second:.1f} tokens/s)"]
    if gain:
        parts.append(gain)
    if s.draft_n:
        parts.append(f"{s.draft_n_accepted} of {tokens} drafted")
    return ", ".join(parts)


def statistics_line(s: "Statistics", gain: str = "") -> str:
    """Return the statistics of an answer as one line; gain: what `gain` returns for it."""
    tokens, n_steps = counted(s.predicted_n, "token"), counted(s.n_steps, "step")
    parts = [
        f"{s.tokens_per_second:.1f} tokens/s",
        *([gain] if gain else []),
        *([f"first token {s.first_token_s:.2f} s"] if s.first_token_s else []),  # not of several answers
        f"{tokens} in {n_steps} ({s.tokens_per_step:.2f} per step)",
    ]
    if s.cached_n:
        parts.insert(-1, f"prompt: {counted(s.cached_n, 'token')} cached, {s.prompt_n} read")
    if s.draft_n:
        parts.append(
            f"accepted {s.draft_n_accepted} of {counted(s.draft_n, 'draft token')} ({s.acceptance_rate:.0%})"
        )
    proposers = {name: n for name, n in s.steps_by.items() if name != "none"}
    if proposers:
        steps = ", ".join(f"{name} {n}" for name, n in sorted(proposers.items(), key=lambda item: -item[1]))
        parts.append(f"proposers: {steps} of {n_steps}")
    return " · ".join(parts)


def cut_note(done: "Done", settings: "GenerationSettings") -> str | None:
    """Return a note if an answer under a grammar was cut short; None otherwise."""
    if not settings.constrained or not done.cut_short:
        return None
    return "the answer was cut short: it may be only the beginning of what the grammar allows"


def reasoning_note(done: "Done") -> str | None:
    """Return a note if the usual budget has closed the reasoning; None otherwise."""
    if not done.reasoning_closed_at:
        return None
    return (
        f"the reasoning was closed after {done.reasoning_closed_at} tokens to leave room for the answer: "
        "give --thinking-budget, or a larger -n or --ctx"
    )


def profile_lines(s: "Statistics") -> list[str]:
    """Return how the time of a step is spent, one line per part, and what drafting saved."""
    total = sum(s.profile.values())
    rows = sorted(s.profile.items(), key=lambda item: -item[1])
    return [
        f"{part:>15} {1e3 * seconds / max(1, s.n_steps):9.3f} ms per step {seconds / total:7.2%}"
        for part, seconds in rows
    ] + ([saved_line(s)] if s.saved_s else [])


def saved_line(s: "Statistics") -> str:
    """Return in one line what drafting saved an answer, and what it cost, by cause in seconds."""
    net = s.net_saved_s
    verb = f"saved {net:.2f} s of" if net >= 0 else f"lost {-net:.2f} s against"
    causes = sorted(s.saved_s.items(), key=lambda item: -item[1])
    parts = [f"{cause} {seconds:.2f}" for cause, seconds in causes if abs(seconds) >= _LEAST_SAVED]
    line = f"drafting {verb} the {s.plain_s:.2f} s of plain decoding"
    return ": ".join([line, *([", ".join(parts).replace("-", "−")] if parts else [])])


# Signals that end a process. A closed terminal sends SIGHUP, which Windows does not have.
HANGUP = getattr(signal, "SIGHUP", None)
ENDING = (signal.SIGTERM, *([HANGUP] if HANGUP else []))


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C, SIGTERM and SIGHUP in the block; yields a function that returns whether one has arrived.

    A second signal is not delayed, except SIGHUP, which terminals send twice; if a call of the model does not
    end, the process does. After the block, a delayed SIGTERM or SIGHUP is raised again, and `exits.guarded`
    ends the command.
    """
    received: list[int] = []

    def on_signal(signum: int, frame: object) -> None:
        last_resort.notice()
        if received and signum != HANGUP:
            received.clear()
            restore()
            signal.raise_signal(signum)
        received.append(signum)

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    handled = [
        s for s in (signal.SIGINT, *ENDING) if signal.getsignal(s) != signal.SIG_IGN
    ]  # ignored under nohup
    previous = {s: signal.signal(s, on_signal) for s in handled}
    try:
        with last_resort.counting_signals():
            yield lambda: bool(received)
    finally:
        restore()
        for signum in set(received).intersection(ENDING):
            signal.raise_signal(signum)
