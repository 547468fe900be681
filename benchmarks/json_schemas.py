"""Measure what drafting gains where an answer must match a JSON schema.

    python benchmarks/json_schemas.py --main MAIN.gguf [--draft DRAFT.gguf]

The schemas are those of the parameters of 12 tools (`tool_schemas.toml`). Each request is answered by plain
decoding and with draft tokens in turns, A B A B. Rates exclude the time for the prompt.
"""

import statistics
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import geometric_mean, machine, model_options, note, numbers, table, tokens_of

from spec_local import Done, GenerationSettings, SamplingSettings, Session, Text
from spec_local.chat.template import ChatTemplate
from spec_local.llama.model import Model

TOOLS = Path(__file__).with_name("tool_schemas.toml")
INSTRUCTIONS = (
    "You call the tool {name}. {description} Its parameters, as a JSON schema:\n{schema}\n"
    "Answer with the arguments for the user's request, as JSON."
)


def prompt(model: Model, tool: dict[str, Any]) -> list[int]:
    messages = [
        {"role": "system", "content": INSTRUCTIONS.format_map(tool)},
        {"role": "user", "content": tool["request"]},
    ]
    return tokens_of(model, str(ChatTemplate(model).render(messages)))


def answer(session: Session, tool: dict[str, Any], settings: GenerationSettings) -> tuple[str, Done]:
    session.main.truncate(0)
    events = list(session.generate(prompt(session.main.model, tool), settings))
    assert isinstance(events[-1], Done)
    return "".join(event.text for event in events if isinstance(event, Text)), events[-1]


def main() -> None:
    arguments = model_options(__doc__, draft="optional", n=400)
    arguments.add_argument("--runs", type=int, default=3, help="of each request, plain and with draft tokens")
    arguments.add_argument("--proposer", default="auto", help="of the answers with draft tokens")
    arguments.add_argument("--temp", type=float, default=0.0, help="temperature")
    arguments.add_argument("--tools", type=numbers(str), help="names of tools; without it, all of them")
    arguments.add_argument("--show", action="store_true", help="print the answers")
    options = arguments.parse_args()

    tools = tomllib.loads(TOOLS.read_text(encoding="utf-8"))["tools"]
    tools = [tool for tool in tools if not options.tools or tool["name"] in options.tools]
    drafting = GenerationSettings(
        SamplingSettings(temperature=options.temp), seed=1, max_tokens=options.n, proposer=options.proposer
    )
    variants = [replace(drafting, proposer="none"), drafting]
    rows, speedups, n_different = [], list[float](), 0
    with Session.open(
        options.main, options.draft, n_ctx=options.ctx, threads=options.threads, prompt_cache="off"
    ) as session:
        for settings in variants:  # measures costs, and compiles a first schema
            answer(session, tools[0], replace(settings, json_schema=tools[0]["schema"], max_tokens=16))
        for tool in tools:
            found, texts = list[float](), set[str]()
            for run in range(options.runs):
                note(f"{tool['name']}: run {run + 1} of {options.runs}")
                answers = [
                    answer(session, tool, replace(settings, json_schema=tool["schema"]))
                    for settings in variants
                ]
                texts |= {text for text, _ in answers}
                plain, drafted = (done.statistics for _, done in answers)
                found.append(drafted.tokens_per_second / plain.tokens_per_second)
            n_different += len(texts) > 1
            if options.show:
                print(*texts, sep="\n", file=sys.stderr)
            speedups.append(statistics.median(found))
            rows.append([
                tool["name"], plain.predicted_n, plain.predicted_n / drafted.n_steps, found[-1], speedups[-1],
                "no" if len(texts) > 1 else "yes",
            ])  # fmt: skip
    note("")
    drafts = f", draft {options.draft.name}" if options.draft else ""
    print(f"main {options.main.name}{drafts}, {options.runs} runs; {machine()}\n")
    table(["schema", "tokens", "tokens a step", "last", "times plain", "same text"], rows)
    print(
        f"median {statistics.median(speedups):.2f}, geometric mean {geometric_mean(speedups):.2f}; "
        f"{len(tools) - n_different} of {len(tools)} answers have the same text"
    )


if __name__ == "__main__":
    main()
