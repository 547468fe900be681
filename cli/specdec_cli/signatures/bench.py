"""The options of `specdec bench`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typer import Option

from specdec_cli import options

_Prompts, _Variants, _Results = (
    functools.partial(Option, rich_help_panel=panel) for panel in ("Prompts", "Variants", "Results")
)
FormatChoice = Literal["md", "csv", "json", "jsonl"]


@dataclass(frozen=True)
class BenchModels(options.ModelOptions):
    """`ModelOptions` without a prompt cache: what was read once would not be measured again."""

    prompt_cache: ClassVar[str] = "off"  # type: ignore[misc]  # no option


@dataclass(frozen=True)
class BenchSampling(options.SamplingOptions):
    """`SamplingOptions` with the defaults of a benchmark."""

    temp: Annotated[
        float | None,
        Option(help="Temperature; 0 always takes the most probable token.", rich_help_panel="Sampling"),
    ] = 0.0
    max_tokens: Annotated[
        int | None, Option("--tokens", "--max-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 128
    json_schema: Annotated[
        str | None,
        Option(
            metavar="FILE|JSON",
            help="JSON schema for the answers: a file, or the schema itself.",
            rich_help_panel="Sampling",
        ),
    ] = None


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
    model: options.ModelArgument = None
    draft_model: options.DraftArgument = None
    prompts: Annotated[
        Path | None,
        _Prompts(
            metavar="FILE|FOLDER",
            help="Prompts: TOML or .jsonl with category, name and text; a set in the format of Spec-Bench, "
            "EAGLE or SPEED-Bench (.jsonl), or a folder of them; or one prompt per line (default: built-in "
            "prompts of 8 categories).",
        ),
    ] = None
    category: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Use only the categories with this name or word: chat, code writing, code editing, "
            "summarising, translation, extraction, maths, retrieval answer; repeatable.",
        ),
    ] = None
    per_category: Annotated[
        int | None, Option(metavar="N", help="Use only the first N prompts of each category.")
    ] = None
    runs: Annotated[
        int | None,
        _Variants(
            help="Number of runs per prompt and variant (default: 1, or up to 3 if the result is unclear)."
        ),
    ] = None
    sweep: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=A,B", help="Compare values of an option, for example draft-max=1,2,4,8; repeatable."
        ),
    ] = None
    proposers: Annotated[str | None, _Variants(metavar="A,B", help="Compare proposers.")] = None
    policies: Annotated[str | None, _Variants(metavar="A,B", help="Compare draft-length policies.")] = None
    parallel: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Measure the total speed of several answers at the same time, for example 1,2,4,8.",
        ),
    ] = None
    delay: Annotated[float, _Variants(help="Seconds to wait before each run, to let a laptop cool down.")] = (
        0.0
    )
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write the results to this file: .md, .csv, .json, or .jsonl (each run appends).",
        ),
    ] = None
    form: Annotated[
        FormatChoice | None,
        _Results(
            "--format", help="Format on standard output, or of a file with another suffix (default: md)."
        ),
    ] = None
    plot: Annotated[Path | None, _Results(metavar="FILE", help="Also draw a plot, as a PNG file.")] = None
    verbose: Annotated[
        int, options.VerboseFlag(help="Show a line per prompt; -vv: also llama.cpp's log.")
    ] = 0
