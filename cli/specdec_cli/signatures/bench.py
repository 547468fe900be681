"""The options of `specdec bench`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from specdec_cli import options
from specdec_cli.parameters import option

_prompts, _variants, _results = (
    functools.partial(option, rich_help_panel=panel) for panel in ("Prompts", "Variants", "Results")
)
FormatChoice = Literal["md", "csv", "json", "jsonl"]


@dataclass(frozen=True)
class BenchModels(options.ModelOptions):
    """`ModelOptions` without a prompt cache: what was read once would not be measured again."""

    prompt_cache: ClassVar[str] = "off"  # type: ignore[misc]  # no option


@dataclass(frozen=True)
class BenchSampling(options.SamplingOptions):
    """`SamplingOptions` with the defaults of a benchmark."""

    temp: float | None = option(
        default=0.0, help="Temperature; 0 always takes the most probable token.", rich_help_panel="Sampling"
    )
    max_tokens: int | None = option(
        "--tokens", "--max-tokens", "-n", default=128, help="Maximum number of tokens per answer."
    )
    json_schema: str | None = option(
        metavar="FILE|JSON",
        help="JSON schema for the answers: a file, or the schema itself.",
        rich_help_panel="Sampling",
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure the speed-up of speculative decoding on this machine, with real prompts.

    Answers each prompt with and without speculation, and compares the speeds; the
    report ends with the conclusion.

    Examples:

      specdec bench coder-7b --per-category 2
      specdec bench main.gguf draft.gguf --sweep draft-max=2,4,8 -o out.md
      specdec bench coder-7b --parallel 1,2,4,8 --category chat
    """

    models: BenchModels
    sampling: BenchSampling
    model: str | None = options.model_argument()
    draft_model: str | None = options.draft_argument()
    prompts: Path | None = _prompts(
        metavar="FILE|FOLDER",
        help="Prompts: TOML or .jsonl with category, name and text; a set in the format of Spec-Bench, "
        "EAGLE or SPEED-Bench (.jsonl), or a folder of them; or one prompt per line (default: built-in "
        "prompts of 8 categories).",
    )
    category: list[str] | None = option(
        metavar="NAME",
        help="Use only the categories with this name or word: chat, code writing, code editing, "
        "summarising, translation, extraction, maths, retrieval answer; repeatable.",
    )
    per_category: int | None = option(metavar="N", help="Use only the first N prompts of each category.")
    runs: int | None = _variants(
        help="Number of runs per prompt and variant (default: 1, or up to 3 if the result is unclear)."
    )
    sweep: list[str] | None = option(
        metavar="NAME=A,B", help="Compare values of an option, for example draft-max=1,2,4,8; repeatable."
    )
    proposers: str | None = _variants(metavar="A,B", help="Compare proposers.")
    policies: str | None = _variants(metavar="A,B", help="Compare draft-length policies.")
    parallel: str | None = option(
        metavar="A,B",
        help="Measure the total speed of several answers at the same time, for example 1,2,4,8.",
    )
    delay: float = _variants(default=0.0, help="Seconds to wait before each run, to let a laptop cool down.")
    output: Path | None = option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the results to this file: .md, .csv, .json, or .jsonl (each run appends).",
    )
    form: FormatChoice | None = _results(
        "--format", help="Format on standard output, or of a file with another suffix (default: md)."
    )
    plot: Path | None = _results(metavar="FILE", help="Also draw a plot, as a PNG file.")
    verbose: int = options.verbose_option(help="Show a line per prompt; -vv: also llama.cpp's log.")
