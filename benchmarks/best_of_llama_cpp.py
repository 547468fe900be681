"""The adaptive policy against the best that llama.cpp's own speculation reaches with one fixed setting.

    python benchmarks/best_of_llama_cpp.py --llama-cpp-bin BUILD/bin --main MAIN.gguf --draft DRAFT.gguf --out FILE.jsonl

The built-in prompts of ``specdec bench``, at temperature 0. Every prompt is answered by specdec, plain and adaptive, and
by llama-speculative-simple with each setting, one after the other; the rate is each program's own, for what follows
the prompt, and a second time with the prompt's time, in which llama.cpp's draft reads every prompt and specdec's those
that it may repay. The best setting is the one with the best geometric mean over all prompts, chosen in hindsight. What
is in FILE already is not run again.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from against_llama_cpp import Outcome, Theirs, answer
from common import chat_text, geometric_mean, interval, machine, note, parser, table, tokens_of

from spec_local import GenerationSettings, SamplingSettings, Session
from spec_local.bench.figures import geometric_mean as mean_ratio
from spec_local.bench.prompts import load
from spec_local.machine import default_threads


def settings(theirs: Theirs, has_draft: bool) -> dict[str, list[Any]]:
    """llama.cpp's ways to speculate, each with one fixed setting."""
    copies = {
        "ngram-simple 12/48": ["--spec-type", "ngram-simple"],
        "ngram-simple 4/15": [
            *("--spec-type", "ngram-simple"),
            *("--spec-ngram-simple-size-n", 4, "--spec-ngram-simple-size-m", 15),
        ],
        "ngram-map-k": ["--spec-type", "ngram-map-k"],
        "ngram-mod": ["--spec-type", "ngram-mod"],
    }
    drafts = {
        "draft 3": theirs.draft(3),
        "draft 7": theirs.draft(7),
        "draft 15, p-min 0.75": theirs.draft(15, 0.75),
    }
    return copies | (drafts if has_draft else {})


def ours(session: Session, prompt: list[int], n: int, proposer: Any) -> Outcome:
    how = GenerationSettings(sampling=SamplingSettings(temperature=0), max_tokens=n, proposer=proposer)
    return answer(session, prompt, how)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--llama-cpp-bin", type=Path, required=True)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--draft", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--per-category", type=int, default=6)
    arguments.add_argument("--category", nargs="*")
    arguments.add_argument(
        "--settings", nargs="*", help="of llama.cpp, by the names in the table (default: all)"
    )
    arguments.add_argument("--n", type=int, default=128, help="tokens an answer")
    arguments.add_argument("--ctx", type=int, default=2048)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()

    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    with (
        tempfile.TemporaryDirectory() as folder,
        Session.open(options.main, options.draft, n_ctx=options.ctx, threads=options.threads) as session,
        options.out.open("a") as out,
    ):
        theirs = Theirs(session, options)
        ways = settings(theirs, bool(options.draft))
        for unknown in set(options.settings or ()) - set(ways):
            raise SystemExit(f"no setting is called {unknown!r}: give some of {', '.join(ways)}")
        ways = {way: ways[way] for way in options.settings or ways}
        ours(session, tokens_of(session.main.model, "Hello"), 8, "auto")  # touches all memory
        asked: dict[str, int] = {}
        for entry in load():
            asked[entry.category] = asked.get(entry.category, 0) + 1
            if asked[entry.category] > options.per_category or (
                options.category and entry.category not in options.category
            ):
                continue
            if any(row["name"] == entry.name for row in rows):
                continue
            text = chat_text(session.main.model, entry.text)
            file = Path(folder) / entry.name
            file.write_text(text, encoding="utf-8", newline="")
            prompt = tokens_of(session.main.model, text)
            found = {}
            for way, proposer in (("plain", "none"), ("adaptive", "auto")):
                note(f"{entry.name}: {way}")
                found[way] = ours(session, prompt, options.n, proposer)
            for way, speculation in ways.items():
                note(f"{entry.name}: {way}")
                found[way] = theirs.run(prompt, file, 0.0, speculation, 0)
            rows.append(
                {
                    "category": entry.category,
                    "name": entry.name,
                    "tokens": found["plain"].predicted,
                    "rates": {way: outcome.tokens_per_second for way, outcome in found.items()},
                    "whole": {way: outcome.whole for way, outcome in found.items()},
                }
            )
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    note("")
    print(f"main {options.main.name}, {len(rows)} prompts, {options.n} tokens; {machine()}\n")
    report(rows, "rates", "times plain")
    if all("whole" in row for row in rows):  # rows of an earlier version do not know it
        report(rows, "whole", "the prompt's time counted")


def report(rows: list[dict[str, Any]], rates: str, head: str) -> None:
    # Rows of an earlier run may know other settings.
    ways = [way for way in rows[0][rates] if way != "plain" and all(way in row[rates] for row in rows)]
    gains = {way: [row[rates][way] / row[rates]["plain"] for row in rows] for way in ways}
    of = {
        category: [i for i, row in enumerate(rows) if row["category"] == category]
        for category in dict.fromkeys(row["category"] for row in rows)
    }
    table(
        [head, *ways],
        [
            [category, *(f"{geometric_mean([gains[way][i] for i in some]):.2f}" for way in ways)]
            for category, some in of.items()
        ]
        + [["all", *(f"{geometric_mean(gains[way]):.3f}" for way in ways)]],
    )
    best = max((way for way in ways if way != "adaptive"), key=lambda way: geometric_mean(gains[way]))
    found = mean_ratio([ours / theirs for ours, theirs in zip(gains["adaptive"], gains[best], strict=True)])
    print(f"adaptive / best of llama.cpp ({best}): {interval((found.value, found.low, found.high))}\n")


if __name__ == "__main__":
    main()
