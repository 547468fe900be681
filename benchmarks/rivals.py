"""Compare `specdec serve` with the servers of other programs, over the same files and prompts.

    python benchmarks/rivals.py --main MAIN.gguf --draft DRAFT.gguf --output FILE.jsonl
        --llama-server BUILD/bin/llama-server --ik-llama-server BUILD/bin/llama-server
        [--speed-bench LLAMA.CPP/tools/server/bench/speed-bench/speed_bench.py]

The rivals are llama.cpp and ik_llama.cpp, each plain and with its own ways of drafting. llama.cpp repacks
weights when it loads them; so does ik_llama.cpp with `-rtr`. All servers are running, with the same threads
and context, and answer each prompt in turns, in another order each time, over HTTP and at temperature 0.
Rates after the prompt are those that each server reports; rates with the prompt's time are those that the
client sees. The best variant of a rival is the one with the best geometric mean, chosen in hindsight. Texts
are compared with those of specdec's plain decoding: programs whose kernels round differently give others.

`--speed-bench` takes the client of llama.cpp's SPEED-Bench, which must be downloaded with llama.cpp, in place
of this one; its table is printed, too. It gets the built-in prompts: its own are not part of llama.cpp.

Prompts whose results are in FILE are not asked again.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import geometric_mean, interval, machine, model_options, note, table
from servers import ANSWER_S, Answer, Server

from spec_local.bench import figures
from spec_local.bench.prompts import Prompt, load, select
from spec_local.llama.gguf_header import read_metadata
from spec_local.system.machine import OtherPrograms, is_busy, used_by_others

SPECDEC: Mapping[str, Sequence[str]] = {
    "plain": ("--no-spec",),
    "adaptive": (),
    "draft 3": ("--proposer", "draft", "--policy", "fixed", "--verifier", "block", "--draft-max", "3"),
    "draft 7": ("--proposer", "draft", "--policy", "fixed", "--verifier", "block", "--draft-max", "7"),
}
_DRAFT = ("--spec-type", "draft-KIND", "--spec-draft-p-min")
LLAMA_CPP: Mapping[str, Sequence[str]] = {
    "plain": (),
    "draft 3": (*_DRAFT, "0", "--spec-draft-n-max", "3"),
    "draft 7": (*_DRAFT, "0", "--spec-draft-n-max", "7"),
    "draft 15, p-min 0.75": (*_DRAFT, "0.75", "--spec-draft-n-max", "15"),
    "ngram-simple 4/15": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "15"),
    ),
    "ngram-mod": ("--spec-type", "ngram-mod"),
}
IK_LLAMA_CPP: Mapping[str, Sequence[str]] = {
    "plain": ("-rtr",),
    "not repacked": (),
    "draft 3": ("-rtr", "--spec-type", "draft:n_max=3,p_min=0"),
    "draft 15, p-min 0.75": ("-rtr", "--spec-type", "draft:n_max=15,p_min=0.75"),
    "ngram-simple 4/15": ("-rtr", "--spec-type", "ngram-simple:ngram_size_n=4,ngram_size_m=15"),
    "ngram-mod": ("-rtr", "--spec-type", "ngram-mod"),
}
_HEADS = {"eagle3", "dflash", "dspark"}  # architectures, and ways of drafting of llama.cpp
_PROGRAMS = {"specdec": SPECDEC, "llama.cpp": LLAMA_CPP, "ik_llama.cpp": IK_LLAMA_CPP}
_PLAIN = "specdec, plain"
Ask = Callable[[Server, Prompt], Answer]


def main() -> None:
    options = _options()
    rows = _known(options.output)
    asked = select(load(), options.category, options.per_category)
    new = [prompt for prompt in asked if all(row["prompt"] != str(prompt) for row in rows)]
    if new:
        rows += _measure(new, options)
    note("")
    print(f"{options.main.name}, {len(rows)} prompts, {options.n} tokens, temperature 0; {machine()}\n")
    if busy := [row for row in rows if is_busy(row["others"])]:
        most = max(row["others"] for row in busy)
        print(f"Do not quote these figures: in {len(busy)} prompts {used_by_others(most)}.\n")
    report(rows, lambda answer: answer.n / answer.answer_s, "after the prompt")
    report(rows, lambda answer: answer.n / answer.whole_s, "with the prompt's time")
    report_parts(rows)
    if options.speed_bench:
        _report_speed_bench(rows, options.speed_bench)


def _options() -> argparse.Namespace:
    options = model_options(__doc__, draft="optional", n=64)
    options.add_argument("--output", type=Path, required=True, help="JSON lines; an interrupted run resumes")
    options.add_argument("--llama-server", type=Path, help="llama.cpp's program")
    options.add_argument("--ik-llama-server", type=Path, help="ik_llama.cpp's program")
    options.add_argument("--speed-bench", type=Path, help="speed_bench.py of llama.cpp")
    options.add_argument("--per-category", type=int, default=2)
    options.add_argument("--category", nargs="*", default=[])
    options.add_argument("--specdec", nargs="*", choices=SPECDEC, default=["plain", "adaptive"])
    options.add_argument("--llama-cpp", nargs="*", choices=LLAMA_CPP, help="default: all but draft 7")
    options.add_argument("--ik", nargs="*", choices=IK_LLAMA_CPP, help="default: all")
    options.add_argument("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    return options.parse_args()


def _known(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["answers"] = {name: Answer(**answer) for name, answer in row["answers"].items()}
    return rows


# Servers --------------------------------------------------------------------------------------------------


def _commands(options: argparse.Namespace) -> Iterator[tuple[str, list[object]]]:
    """The name of each variant, and the command that starts its server."""
    draft = options.draft
    usual = ("-c", options.ctx, "-t", options.threads)
    for name in options.specdec:
        drafter = ("-md", draft or "none") if name != "plain" else ("--draft", "none")
        more = ("--parallel", "1", *usual, *drafter, *SPECDEC[name])
        yield f"specdec, {name}", [sys.executable, "-m", "specdec_cli", "serve", options.main, *more]
    for program, binary, chosen in (
        ("llama.cpp", options.llama_server, options.llama_cpp or [v for v in LLAMA_CPP if v != "draft 7"]),
        ("ik_llama.cpp", options.ik_llama_server, options.ik or list(IK_LLAMA_CPP)),
    ):
        for name in chosen if binary else ():
            if "draft" in name and not draft:
                continue
            more = tuple(each.replace("KIND", _kind(draft)) for each in _PROGRAMS[program][name])
            drafter = ("-md", draft) if "draft" in name else ()
            yield f"{program}, {name}", [binary, "-m", options.main, "-np", "1", *usual, *more, *drafter]


def _kind(draft: Path | None) -> str:
    """The name that llama.cpp has for drafting with this file."""
    architecture = read_metadata(draft)["general.architecture"] if draft else ""
    return architecture if architecture in _HEADS else "simple"


def _measure(prompts: Sequence[Prompt], options: argparse.Namespace) -> list[dict[str, Any]]:
    ask, rows, servers = _client(options), [], dict[str, Server]()
    with contextlib.ExitStack() as stack:
        for name, command in _commands(options):
            note(f"starting {name}")
            log = "-".join(re.findall(r"[\w.]+", name)) + ".log"
            servers[name] = server = Server(command, options.logs / log)
            stack.callback(server.close)
            with server.running():
                server.answer("Hello", 16)  # the first use of all memory
        out = stack.enter_context(options.output.open("a"))
        names = list(servers)
        for i, prompt in enumerate(prompts):
            programs, answers, began = OtherPrograms(), dict[str, Answer](), time.monotonic()
            used = sum(server.processor_s() for server in servers.values())
            start = i % len(names)
            for name in [*names[start:], *names[:start]]:
                note(f"{prompt}: {name}")
                with servers[name].running():
                    answers[name] = ask(servers[name], prompt)
            used = sum(server.processor_s() for server in servers.values()) - used
            others = max(0.0, programs.cores() - used / (time.monotonic() - began))
            asked = {"category": prompt.category, "prompt": str(prompt), "others": others}
            rows.append(asked | {"answers": {name: answers[name] for name in names}})
            out.write(json.dumps(rows[-1], default=asdict) + "\n")
            out.flush()
    return rows


def _client(options: argparse.Namespace) -> Ask:
    if not options.speed_bench:
        return lambda server, prompt: server.answer(prompt.text, options.n)
    client = _speed_bench(options.speed_bench)

    def ask(server: Server, prompt: Prompt) -> Answer:
        sample = client.Sample(str(prompt), prompt.category, [prompt.text])
        endpoint = f"{client.normalize_base_url(server.url)}/chat/completions"
        found = client.run_one(sample, endpoint, None, options.n, {"temperature": 0}, ANSWER_S)
        if not found.ok:
            raise SystemExit(f"SPEED-Bench's client failed: {found.error}")
        times = (found.prompt_ms or 0.0) / 1000, (found.predicted_ms or 0.0) / 1000
        counts = found.completion_tokens, found.prompt_tokens
        return Answer("", 0.0, found.latency_s, *counts, *times, found.draft_n, found.draft_n_accepted)

    return ask


def _speed_bench(path: Path) -> Any:
    """SPEED-Bench's client as a module; the library that downloads its prompts is not needed."""
    stand_in: Any = types.ModuleType("datasets")
    stand_in.get_dataset_config_names = stand_in.load_dataset = None
    sys.modules.setdefault("datasets", stand_in)
    spec = importlib.util.spec_from_file_location("speed_bench", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed_bench"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


# Reports --------------------------------------------------------------------------------------------------


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The variants that all rows have."""
    return [name for name in rows[0]["answers"] if all(name in row["answers"] for row in rows)]


def report(rows: Sequence[dict[str, Any]], rate: Callable[[Answer], float], title: str) -> None:
    """Print each variant's speed over specdec's plain decoding, and specdec's over the best of each rival."""
    names = _names(rows)
    speedups = {
        name: [rate(row["answers"][name]) / rate(row["answers"][_PLAIN]) for row in rows] for name in names
    }
    chosen = {
        category: [i for i, row in enumerate(rows) if row["category"] == category]
        for category in dict.fromkeys(row["category"] for row in rows)
    }
    cells = [
        [
            name,
            *(f"{geometric_mean([speedups[name][i] for i in where]):.2f}" for where in chosen.values()),
            f"{geometric_mean(speedups[name]):.2f}",
        ]
        for name in names
    ]
    table([title, *chosen, "mean"], cells)

    def compare(ours: str, theirs: str) -> None:
        ratios = [a / b for a, b in zip(speedups[ours], speedups[theirs], strict=True)]
        print(f"- {ours} / {theirs}: {interval(figures.geometric_mean(ratios))}")
        for category, where in chosen.items():
            if (mean := geometric_mean([ratios[i] for i in where])) < 1:
                print(f"  - slower: {category} {mean:.2f}")

    for program in _PROGRAMS:
        theirs = [name for name in names if name.startswith(f"{program}, ")]
        if program != "specdec" and theirs:
            compare(_PLAIN, f"{program}, plain")
            compare("specdec, adaptive", max(theirs, key=lambda name: geometric_mean(speedups[name])))
    print()


def report_parts(rows: Sequence[dict[str, Any]]) -> None:
    """Print what the servers report of prompts and draft tokens, and how many texts are those of plain."""
    cells = []
    for name in _names(rows):
        answers: list[Answer] = [row["answers"][name] for row in rows]
        plain: list[Answer] = [row["answers"][_PLAIN] for row in rows]
        # The beginning of a prompt may be known from the one before.
        read = [
            a.prompt_n / a.prompt_s / (b.prompt_n / b.prompt_s) for a, b in zip(answers, plain, strict=True)
        ]
        drafted = sum(answer.n_drafted for answer in answers)
        accepted = sum(answer.n_accepted for answer in answers)
        cells.append(
            [
                name,
                f"{geometric_mean(read):.2f}",
                drafted,
                f"{accepted / drafted:.2f}" if drafted else "",
                sum(a.text == b.text for a, b in zip(answers, plain, strict=True)) if plain[0].text else "",
            ]
        )
    table(["", "prompt tokens/s", "draft tokens", "accepted", f"same text, of {len(rows)}"], cells)


def _report_speed_bench(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Print the table of SPEED-Bench's client, for each server."""
    client = _speed_bench(path)
    for name in _names(rows):
        results = []
        for row in rows:
            answer: Answer = row["answers"][name]
            results.append(
                client.RequestResult(
                    row["prompt"], row["category"], True, 1, answer.whole_s, answer.prompt_n, answer.n,
                    answer.prompt_n + answer.n, None, answer.n_drafted, answer.n_accepted,
                    1000 * answer.prompt_s, 1000 * answer.answer_s, answer.prompt_n / answer.prompt_s,
                    answer.n / answer.answer_s, None,
                )
            )  # fmt: skip
        print(f"{name}:")
        categories = dict.fromkeys(row["category"] for row in rows)
        groups = {each: [r for r in results if r.category == each] for each in categories}
        client.print_table([client.summarize_group(*each) for each in {**groups, "overall": results}.items()])
        print()


if __name__ == "__main__":
    main()
