"""Where the time of a step goes, and how much of it is not llama.cpp's.

    python benchmarks/step_profile.py --main MAIN.gguf --draft DRAFT.gguf

Without --draft, main drafts for itself from a Q4_0 copy. The session is driven as a program drives it, and the wall
clock runs from the first step to the last event. "main model" and "draft model" are the decoding loop's own
laps; the time inside llama_decode is taken beneath them, so that the binding's share of a lap shows too.
"""

import ctypes
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import PROMPTS, chat_text, machine, note, numbers, parser, table, tokens_of

from spec_local import Done, GenerationSettings, Prefilled, SamplingSettings, Session
from spec_local.llama import runtime
from spec_local.llama.quantize import quantize
from spec_local.machine import default_threads
from spec_local.settings import MAX_DRAFT, SHAPES

MODELS = ("main model", "draft model")


@contextmanager
def timed_decode() -> Iterator[list[float]]:
    """Seconds in llama_decode alone, as the one entry of a list."""
    library: Any = runtime.library()
    original = library.llama_decode
    inside = [0.0]

    def decode(context: ctypes.c_void_p, batch: object) -> int:
        started = time.perf_counter()
        try:
            return int(original(context, batch))
        finally:
            inside[0] += time.perf_counter() - started

    library.llama_decode = decode
    try:
        yield inside
    finally:
        library.llama_decode = original


def profile(session: Session, prompt: list[int], settings: GenerationSettings) -> dict[str, float]:
    """Seconds by part; with the wall time, the time in llama_decode, and counts."""
    with timed_decode() as inside:
        started = 0.0
        for event in session.generate(prompt, settings):
            if isinstance(event, Prefilled):
                started, inside[0] = time.perf_counter(), 0.0
            elif isinstance(event, Done):
                statistics = event.statistics
                wall = time.perf_counter() - started
    parts = dict(statistics.profile)
    parts["between steps"] = wall - sum(parts.values())
    counts = {
        "steps": statistics.n_steps,
        "tokens": statistics.predicted_n,
        "accepted": statistics.draft_n_accepted,
    }
    return (
        parts | {"_wall": wall, "_decode": inside[0]} | {f"_{name}": float(n) for name, n in counts.items()}
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--draft", type=Path)
    arguments.add_argument("--draft-max", type=int, default=7)
    arguments.add_argument("--settings", nargs="+", default=["0:1", "0.8:0.95"], help="temperature:top-p")
    arguments.add_argument("--prompts", nargs="+", default=["code", "prose"], choices=PROMPTS)
    arguments.add_argument("--seeds", type=numbers(int), default=[1, 2])
    arguments.add_argument("--n", type=int, default=96, help="tokens a run")
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--proposer", default="draft", choices=["draft", "lookup", "none"])
    arguments.add_argument("--shape", default="chain", choices=SHAPES)
    arguments.add_argument("--tree-nodes", type=int, default=16)
    arguments.add_argument("--verifier", default="auto")
    options = arguments.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        draft = options.draft
        if options.proposer == "draft" and not draft:
            note("making the Q4_0 copy")
            draft = quantize(options.main, Path(folder) / "draft-Q4_0.gguf", "Q4_0")
        branches = 1 if options.shape == "chain" else MAX_DRAFT
        with Session.open(
            options.main, draft, n_ctx=2048, threads=options.threads, branches=branches
        ) as session:
            print(
                f"main {options.main.name}, draft {draft.name if draft else 'none'}, k = {options.draft_max}, {options.shape}, "
                f"{options.n} tokens, {options.threads} threads; {machine()}\n"
            )
            for setting in options.settings:
                temperature, top_p = map(float, setting.split(":"))
                report(session, options, temperature, top_p)


def report(session: Session, options: Any, temperature: float, top_p: float) -> None:
    runs = []
    for i, seed in enumerate([0, *options.seeds]):
        for name in options.prompts:
            note(f"temperature {temperature:g}, seed {seed}, {name}")
            settings = GenerationSettings(
                sampling=SamplingSettings(temperature=temperature, top_p=top_p),
                seed=seed,
                max_tokens=options.n,
                proposer=options.proposer,
                policy="fixed",
                draft_max=options.draft_max,
                shape=options.shape,
                tree_nodes=options.tree_nodes,
                verifier=options.verifier,
            )
            run = profile(
                session, tokens_of(session.main.model, chat_text(session.main.model, PROMPTS[name])), settings
            )
            if i:  # the first seed warms up
                runs.append(run)
    note("")
    total = {key: sum(run.get(key, 0.0) for run in runs) for run in runs for key in run}
    wall, steps = total["_wall"], total["_steps"]
    parts = {name: seconds for name, seconds in total.items() if not name.startswith("_")}
    binding = sum(parts.get(name, 0.0) for name in MODELS) - total["_decode"]
    rows = [[name, f"{s / steps * 1e3:.3f}", f"{s / wall:.2%}"] for name, s in parts.items()]
    rows.append(
        ["(of the models: around llama_decode)", f"{binding / steps * 1e3:.3f}", f"{binding / wall:.2%}"]
    )
    print(
        f"temperature {temperature:g}, top-p {top_p:g}: {len(runs)} runs, {steps:.0f} steps, "
        f"{total['_tokens'] / steps:.2f} tokens and {wall / steps * 1e3:.1f} ms a step\n"
    )
    table(["part", "ms a step", "share"], rows)
    outside = wall - sum(parts.get(name, 0.0) for name in MODELS)
    per_run = sorted(1 - sum(r.get(name, 0.0) for name in MODELS) / r["_wall"] for r in runs)
    print(
        f"outside llama.cpp: {outside / wall:.2%} (runs {per_run[0]:.2%} to {per_run[-1]:.2%}), "
        f"with what is around llama_decode {1 - total['_decode'] / wall:.2%}; "
        f"wanted: ≤ 3 % with a main of 1.5B, ≤ 8 % with 135M\n"
    )


if __name__ == "__main__":
    main()
