"""What there is to say of a session and its answers, as text: settings, statistics, how an answer ended."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from spec_local import kernels
from spec_local.answers.text import Done
from spec_local.engine.events import Statistics
from spec_local.llama import runtime
from spec_local.llama.sequence import LlamaSequence
from spec_local.settings import GenerationSettings
from spec_local.system.processors import usable_processors
from spec_local.text import counted

if TYPE_CHECKING:
    from spec_local.session import Session

_LEAST_SAVED = 0.005  # seconds of a cause that are shown


def threads(main: LlamaSequence) -> str:
    """Return the number of threads of the main model, with its unit."""
    return counted(main.threads, "thread")


def limit_note() -> str:
    """Return what allows fewer threads than the machine has cores, in brackets; "" if nothing does."""
    limit = usable_processors().limit
    return f" ({limit})" if limit else ""


def setting_lines(session: "Session") -> list[str]:
    """Return lines with the models; build, device, threads and instruction sets; the CPU kernels."""
    main, draft = session.main, session.draft
    models = [f"main {main.model.path.name} ({main.model.description})"]
    if draft:
        models.append(f"draft {draft.model.path.name} ({draft.model.description})")
    if session.mmproj:
        models.append(f"projector {session.mmproj.name}")
    on_cpu = main.model.uses_cpu or (draft and draft.model.uses_cpu)
    used = str(kernels.status()) if on_cpu else "not needed, as no layers are on the CPU"
    if kernels.status().instruction_set and (varying := session.logits_vary):
        used += f"; logits depend on the size of a call: {', '.join(varying)}"
    build = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
    uses = " ".join(runtime.features())
    return [
        " · ".join(models),
        " · ".join([build, session.device, threads(main) + limit_note(), uses]),
        f"CPU kernels: {used}",
    ]


def gain(session: "Session", settings: GenerationSettings, s: Statistics) -> str:
    """Return in words what drafts gained in an answer; "" if there is nothing to say."""
    found = session.gain(settings, s)
    return found.words if found else ""


def plain_statistics(s: Statistics, gain: str = "") -> str:
    """Return what most people want to know of an answer as one line; gain: what `gain` returns for it."""
    tokens = counted(s.predicted_n, "token")
    parts = [f"{tokens} in {s.predicted_s:.1f} s ({s.tokens_per_second:.1f} tokens/s)"]
    if gain:
        parts.append(gain)
    if s.draft_n:
        parts.append(f"{s.draft_n_accepted} of {tokens} drafted")
    return ", ".join(parts)


def statistics_line(s: Statistics, gain: str = "") -> str:
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


def cut_note(done: Done, settings: GenerationSettings) -> str | None:
    """Return a note if an answer under a grammar was cut short; None otherwise."""
    if not settings.constrained or not done.cut_short:
        return None
    return "the answer was cut short: it may be only the beginning of what the grammar allows"


def reasoning_note(done: Done) -> str | None:
    """Return a note if the usual budget has closed the reasoning; None otherwise."""
    if not done.reasoning_closed_at:
        return None
    return (
        f"the reasoning was closed after {done.reasoning_closed_at} tokens to leave room for the answer: "
        "give --thinking-budget, or a larger -n or --ctx"
    )


def profile_lines(s: Statistics) -> list[str]:
    """Return how the time of a step is spent, one line per part, and what drafting saved."""
    total = sum(s.profile.values())
    rows = sorted(s.profile.items(), key=lambda item: -item[1])
    return [
        f"{part:>15} {1e3 * seconds / max(1, s.n_steps):9.3f} ms per step {seconds / total:7.2%}"
        for part, seconds in rows
    ] + ([saved_line(s)] if s.saved_s else [])


def saved_line(s: Statistics) -> str:
    """Return in one line what drafting saved an answer, and what it cost, by cause in seconds."""
    net = s.net_saved_s
    verb = f"saved {net:.2f} s of" if net >= 0 else f"lost {-net:.2f} s against"
    causes = sorted(s.saved_s.items(), key=lambda item: -item[1])
    parts = [f"{cause} {seconds:.2f}" for cause, seconds in causes if abs(seconds) >= _LEAST_SAVED]
    line = f"drafting {verb} the {s.plain_s:.2f} s of plain decoding"
    return ": ".join([line, *([", ".join(parts).replace("-", "−")] if parts else [])])
