"""What a person sees: the answer on stdout, raw; everything else on stderr, and colour only on a terminal."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from spec_local.engine.events import Statistics
    from spec_local.llama.context import Context
    from spec_local.session import Done, Session
    from spec_local.settings import GenerationSettings


def prepare_stdout() -> None:
    """Bytes go out as the model said them, whatever the locale."""
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")  # type: ignore[union-attr]


def discard(stream: TextIO) -> None:
    """Let what is still in a broken stream's buffer go nowhere, instead of failing again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str) -> None:
    """A part of the answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def coloured(stream: TextIO) -> bool:
    """Whether colour can be seen there, and is wanted."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def note(line: str) -> None:
    """A line for the person at the terminal, dim where that can be seen."""
    if sys.stderr is None:  # closed
        return
    if coloured(sys.stderr):
        line = f"\x1b[2m{line}\x1b[0m"
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:  # an answer is worth more than what is said about it
        discard(sys.stderr)


def device(main: "Context") -> str:
    """Where main runs, as llama.cpp names it."""
    from spec_local.llama import runtime

    return runtime.devices()[0 if main.model.gpu_layers else -1]


def threads(main: "Context") -> str:
    """How many main has."""
    return f"{main.threads} thread{'s' * (main.threads > 1)}"


def setting_lines(session: "Session") -> list[str]:
    """A session's models; their build, device, threads and instruction sets; the CPU kernels."""
    from importlib.metadata import version

    from spec_local import kernels
    from spec_local.llama import runtime

    main, draft = session.main, session.draft
    models = [f"main {main.model.path.name} ({main.model.description})"]
    if draft:
        models.append(f"draft {draft.model.path.name} ({draft.model.description})")
    build = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
    uses = " ".join(runtime.features())
    return [
        " · ".join(models),
        " · ".join([build, device(main), threads(main), uses]),
        f"CPU kernels: {kernels.status()}",
    ]


def statistics_line(s: "Statistics") -> str:
    """All that matters of an answer, in one line."""
    parts = [
        f"{s.tokens_per_second:.1f} tokens/s",
        f"first token {s.first_token_s:.2f} s",
        f"{s.predicted_n} tokens in {s.n_steps} steps ({s.tokens_per_step:.2f} a step)",
    ]
    if s.draft_n:
        parts.append(f"accepted {s.draft_n_accepted} of {s.draft_n} guesses ({s.acceptance_rate:.0%})")
    guessed = {name: n for name, n in s.steps_by.items() if name != "none"}
    if guessed:
        steps = ", ".join(f"{name} {n}" for name, n in sorted(guessed.items(), key=lambda item: -item[1]))
        parts.append(f"guessed by {steps} of {s.n_steps} steps")
    return " · ".join(parts)


def cut_note(done: "Done", settings: "GenerationSettings") -> str | None:
    """What there is to say of an answer that had to follow a grammar and did not come to its end."""
    if not settings.constrained or (done.reason == "stop" and not done.stopping_word):
        return None
    return "the answer was cut before its grammar was complete: it is the beginning of one that follows it"


def profile_lines(s: "Statistics") -> list[str]:
    """Where the time of a step goes."""
    total = sum(s.profile.values())
    rows = sorted(s.profile.items(), key=lambda item: -item[1])
    return [
        f"{part:>15} {1e3 * seconds / max(1, s.n_steps):9.3f} ms a step {seconds / total:7.2%}"
        for part, seconds in rows
    ]


# What asks a process to end; a closed terminal sends SIGHUP, which Windows does not have.
HANGUP = getattr(signal, "SIGHUP", None)
ENDING = (signal.SIGTERM, *([HANGUP] if HANGUP else []))


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP ask politely: the function says whether one of them has come.

    A second one no longer asks (but for SIGHUP: terminals send two). When the block has ended, SIGTERM and SIGHUP
    do what they would have done without it: `exits.guarded` ends the command.
    """
    asked: list[int] = []

    def on_signal(signum: int, frame: object) -> None:
        if asked and signum != HANGUP:
            asked.clear()
            restore()
            signal.raise_signal(signum)
        asked.append(signum)

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    heard = [s for s in (signal.SIGINT, *ENDING) if signal.getsignal(s) != signal.SIG_IGN]  # not under nohup
    previous = {s: signal.signal(s, on_signal) for s in heard}
    try:
        yield lambda: bool(asked)
    finally:
        restore()
        for signum in set(asked).intersection(ENDING):
            signal.raise_signal(signum)
