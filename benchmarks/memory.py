"""How much memory a session takes, and for what.

    python benchmarks/memory.py --main MAIN.gguf --draft DRAFT.gguf

A child process opens the session, reads a prompt, says --n tokens with guesses, and looks at itself. Allowed: both
files, both KV caches at full length, and 150 MB. --set tries a setting of llama.cpp that sessions do not offer, such
as ``--set model.use_extra_bufts=0`` (weights not repacked for the CPU), ``model.load_mode=0`` (read, not mapped)
or ``context.n_ubatch=64``; the child then also gives its speed, plain and with guesses.
"""

import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from common import PROMPTS, chat_text, machine, parser, table, tokens_of

from spec_local import Done, GenerationSettings, SamplingSettings, Session
from spec_local.llama import runtime
from spec_local.llama.context import CACHE_TYPES
from spec_local.machine import default_threads

ALLOWANCE = 150_000_000
MB = 1e6


def arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--main", type=Path, required=True)
    options.add_argument("--draft", type=Path)
    options.add_argument("--ctx", type=int, default=4096)
    options.add_argument("--n", type=int, default=256)
    options.add_argument("--draft-max", type=int, default=7)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--threads", type=int, default=default_threads())
    options.add_argument("--cache-type", default="f16", choices=CACHE_TYPES)
    options.add_argument(
        "--set", action="append", default=[], metavar="model.NAME=NUMBER or context.NAME=NUMBER"
    )
    options.add_argument("--child", action="store_true", help="be the process that is looked at")
    return options.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(child(options)))
        return
    answer = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child"], stdout=subprocess.PIPE, check=True
    ).stdout
    facts = json.loads(answer.splitlines()[-1])
    files = [path.stat().st_size for path in (options.main, options.draft) if path]
    allowed = sum(files) + sum(facts["kv"]) + ALLOWANCE
    settings = ", ".join(options.set) or "as sessions have it"
    print(
        f"{options.main.name}, {options.draft.name if options.draft else 'no draft'}, context {options.ctx}, {settings}; {machine()}\n"
    )
    rows = [["files", *[f"{n / MB:.0f}" for n in (sum(files), sum(files))]]]
    rows.append(["KV caches", *[f"{sum(facts['kv']) / MB:.0f}"] * 2])
    rows.append(
        ["all else", *[f"{(facts[w] - sum(files) - sum(facts['kv'])) / MB:.0f}" for w in ("rss", "peak")]]
    )
    rows.append(["together", *[f"{facts[w] / MB:.0f}" for w in ("rss", "peak")]])
    rows.append(["allowed", *[f"{allowed / MB:.0f}"] * 2])
    table(["MB", "at the end", "at the peak"], rows)
    table(["resident at", "MB"], [[name, f"{n / MB:.0f}"] for name, n in facts["stages"].items()])
    if facts["kinds"]:
        table(
            ["resident memory by mapping", "MB"],
            [[name, f"{n / MB:.0f}"] for name, n in facts["kinds"].items()],
        )
    for line in facts["buffers"]:
        print(f"    {line}")
    for way, rate in facts["rates"].items():
        print(f"{way}: {rate:.2f} tokens/s")
    print(f"opened in {facts['open_s']:.1f} s")
    for what in ("rss", "peak"):
        print(f"{what} / allowed: {facts[what] / allowed:.3f}, wanted: ≤ 1")


def child(options: Any) -> dict[str, Any]:
    lines = watch_buffers()
    override(options.set)
    process = psutil.Process()
    stages = {"start (numpy, llama.cpp's library)": process.memory_info().rss}
    started = time.perf_counter()
    session = Session.open(
        options.main, options.draft, n_ctx=options.ctx, threads=options.threads, cache_type=options.cache_type
    )
    open_s = time.perf_counter() - started
    stages["session open"] = process.memory_info().rss
    prompt = tokens_of(session.main.model, chat_text(session.main.model, PROMPTS["summary"]))
    rates = {}
    for proposer in ["draft", "none"] if options.draft else ["none"]:
        settings = GenerationSettings(
            sampling=SamplingSettings(temperature=options.temperature),
            seed=1,
            max_tokens=options.n,
            proposer=proposer,
            policy="fixed",
            draft_max=options.draft_max,
        )
        *_, last = session.generate(prompt, settings)
        assert isinstance(last, Done)
        rates[proposer] = last.statistics.tokens_per_second
        gc.collect()
        stages[f"after {last.statistics.predicted_n} tokens, proposer {proposer}"] = process.memory_info().rss
    contexts = [c for c in (session.main, session.draft) if c]
    return {
        "rss": process.memory_info().rss,
        "peak": peak(),
        "kv": [c.model.kv_bytes(c.n_ctx, CACHE_TYPES[options.cache_type]) for c in contexts],
        "stages": stages,
        "kinds": kinds(process),
        "buffers": [" ".join(line.split()) for line in lines],
        "rates": rates,
        "open_s": open_s,
    }


def peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss survives exec there, and would hold the parent's
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def kinds(process: psutil.Process) -> dict[str, int]:
    """Resident bytes by what is mapped, where the system tells."""
    if not hasattr(process, "memory_maps"):
        return {}
    sizes: dict[str, int] = {}
    for entry in process.memory_maps():
        suffix = Path(entry.path).suffix
        kind = (
            entry.path
            if entry.path[0] == "["
            else Path(entry.path).name
            if suffix == ".gguf"
            else "libraries"
        )
        sizes[kind] = sizes.get(kind, 0) + entry.rss
    return {kind: size for kind, size in sorted(sizes.items(), key=lambda item: -item[1]) if size > 1e6}


def watch_buffers() -> list[str]:
    """The lines in which llama.cpp says what it allocates; the list fills as it does."""
    import llama_cpp

    lines: list[str] = []

    def on_log(_level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace")
        if "buffer size" in line:
            lines.append(line)

    runtime.library()
    callback = llama_cpp.llama_log_callback(on_log)
    lines_of[id(lines)] = callback  # llama.cpp keeps a bare pointer to it
    llama_cpp.llama_log_set(callback, None)
    return lines


lines_of: dict[int, object] = {}


def override(settings: list[str]) -> None:
    """Have llama.cpp's defaults, and what a session puts over them, overruled by these."""
    library: Any = runtime.library()
    for kind, function in (("model", "llama_model_load_from_file"), ("context", "llama_init_from_model")):
        mine = [s.removeprefix(f"{kind}.").split("=") for s in settings if s.startswith(f"{kind}.")]
        setattr(library, function, overruled(getattr(library, function), mine))


def overruled(original: Any, settings: list[list[str]]) -> Any:
    def call(first: object, params: Any) -> Any:
        for name, value in settings:
            setattr(params, name, int(value))
        return original(first, params)

    return call


if __name__ == "__main__":
    main()
