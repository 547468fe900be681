"""Measure how much time each part of a step takes, and what share is spent outside llama.cpp.

    python benchmarks/step_profile.py --main MAIN.gguf --draft DRAFT.gguf

Without --draft, a Q4_0 copy of the main model is the draft model. --random-head writes an EAGLE-3 head
instead, whose drafts are all rejected, so that a step is as short as it can be. Wall time is measured from
the first step to the last event. "main model" and "draft model" are the decoding loop's own timings; the
time inside llama_decode and llama_encode is measured separately, which shows the overhead of the binding as
well.
"""

import contextlib
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import chat_text, machine, model_options, note, numbers, table, tokens_of
from random_head import write_random_head

from spec_local import Done, GenerationSettings, Prefilled, SamplingSettings, Session
from spec_local.bench.prompts import load, select
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize
from spec_local.proposers import SHAPE_NAMES

MODELS = ("main model", "draft model")


CALLS = ("llama_decode", "llama_encode")


@contextmanager
def timed_calls() -> Iterator[list[float]]:
    """Sum the seconds inside llama_decode and llama_encode in the single item of a list."""
    library: Any = runtime.library()
    originals = {name: getattr(library, name) for name in CALLS}
    inside = [0.0]

    def timed(original: Callable[..., int]) -> Callable[..., int]:
        def call(context: ctypes.c_void_p, batch: object) -> int:
            started = time.perf_counter()
            try:
                return int(original(context, batch))
            finally:
                inside[0] += time.perf_counter() - started

        return call

    for name, original in originals.items():
        setattr(library, name, timed(original))
    try:
        yield inside
    finally:
        for name, original in originals.items():
            setattr(library, name, original)


def profile(session: Session, prompt: list[int], settings: GenerationSettings) -> dict[str, float]:
    """Seconds by part of a step; keys with an underscore: wall time, that in `CALLS`, steps, tokens."""
    with timed_calls() as inside:
        started = 0.0
        for event in session.generate(prompt, settings):
            if isinstance(event, Prefilled):
                started, inside[0] = time.perf_counter(), 0.0
            elif isinstance(event, Done):
                statistics = event.statistics
                wall = time.perf_counter() - started
    parts = dict(statistics.profile)
    parts["between steps"] = wall - sum(parts.values())
    counts = {"_steps": float(statistics.n_steps), "_tokens": float(statistics.predicted_n)}
    return parts | counts | {"_wall": wall, "_decode": inside[0]}


def main() -> None:
    arguments = model_options(__doc__, draft="optional", n=96)
    arguments.add_argument("--random-head", action="store_true", help="draft with a random EAGLE-3 head")
    arguments.add_argument("--draft-max", type=int, default=7)
    arguments.add_argument("--settings", nargs="+", default=["0:1", "0.8:0.95"], help="temperature:top-p")
    arguments.add_argument(
        "--category", nargs="+", default=["code writing", "chat"], help="categories, one prompt each"
    )
    arguments.add_argument("--seeds", type=numbers(int), default=[1, 2])
    arguments.add_argument("--proposer", default="draft", choices=["draft", "lookup", "none"])
    arguments.add_argument("--shape", default="chain", choices=SHAPE_NAMES)
    arguments.add_argument("--tree-nodes", type=int, default=16)
    arguments.add_argument("--verifier", default="auto")
    options = arguments.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        draft = options.draft
        if options.random_head:
            note("writing the head")
            with contextlib.closing(Model(options.main, weights=False)) as main_model:
                draft = write_random_head(Path(folder) / "random-head.gguf", main_model)
        elif options.proposer == "draft" and not draft:
            note("making the Q4_0 copy")
            draft = quantize(options.main, Path(folder) / "draft-Q4_0.gguf", "Q4_0")
        branches = 1 if options.shape == "chain" else MAX_DRAFT
        with Session.open(
            options.main,
            draft,
            n_ctx=options.ctx,
            threads=options.threads,
            branches=branches,
            prompt_cache="off",
        ) as session:
            name = draft.name if draft else "none"
            print(
                f"main {options.main.name}, draft {name}, k = {options.draft_max}, {options.shape}, "
                f"{options.n} tokens, {options.threads} threads; {machine()}\n"
            )
            for setting in options.settings:
                temperature, top_p = map(float, setting.split(":"))
                report(session, options, temperature, top_p)


def report(session: Session, options: Any, temperature: float, top_p: float) -> None:
    runs = []
    for i, seed in enumerate([0, *options.seeds]):
        for entry in select(load(), options.category, 1):
            note(f"temperature {temperature:g}, seed {seed}, {entry}")
            settings = GenerationSettings(
                # With the command's defaults.
                sampling=SamplingSettings(temperature=temperature, top_k=40, top_p=top_p, min_p=0.05),
                seed=seed,
                max_tokens=options.n,
                proposer=options.proposer,
                policy="fixed",
                draft_max=options.draft_max,
                shape=options.shape,
                tree_nodes=options.tree_nodes,
                verifier=options.verifier,
            )
            prompt = tokens_of(session.main.model, chat_text(session.main.model, entry.text))
            run = profile(session, prompt, settings)
            if i:  # the first seed is the warm-up
                runs.append(run)
    note("")
    total = {key: sum(run.get(key, 0.0) for run in runs) for run in runs for key in run}
    wall, steps = total["_wall"], total["_steps"]
    parts = {name: seconds for name, seconds in total.items() if not name.startswith("_")}
    models = sum(parts.get(name, 0.0) for name in MODELS)
    parts["(of the models: outside llama.cpp)"] = models - total["_decode"]
    print(
        f"temperature {temperature:g}, top-p {top_p:g}: {len(runs)} runs, {steps:.0f} steps, "
        f"{total['_tokens'] / steps:.2f} tokens and {wall / steps * 1e3:.1f} ms per step\n"
    )
    rows = [[name, f"{s / steps * 1e3:.3f}", f"{s / wall:.2%}"] for name, s in parts.items()]
    table(["part", "ms per step", "share"], rows)
    shares = sorted(1 - sum(run.get(name, 0.0) for name in MODELS) / run["_wall"] for run in runs)
    print(
        f"outside the models' calls: {1 - models / wall:.2%} (runs {shares[0]:.2%} to {shares[-1]:.2%}), "
        f"outside llama.cpp: {1 - total['_decode'] / wall:.2%}\n"
    )


if __name__ == "__main__":
    main()
