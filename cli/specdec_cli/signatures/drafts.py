"""The options of the commands about drafts: draft, bench and tune."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from specdec_cli import completion, options
from specdec_cli.parameters import REQUIRED, argument, option

HeadKindChoice = Literal["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0"]
KindChoice = Literal["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16"]
_head_main = partial(
    options.named_model, metavar="MAIN", help="Main model that the head drafts for: a file or a name."
)


@dataclass(frozen=True, kw_only=True)
class DraftQuantizeOptions:
    """Quantize a model for use as a draft model, and print the path of the copy.

    A Q4_0 copy of a draft model (with --for MAIN) can be twice as fast, at nearly
    the same acceptance rate. A copy of the main model can be its draft model:
    this pays off if the main model is F16, but hardly if it is Q8_0. The command
    first shows the expected speed-up.

    Examples:

      specdec draft quantize draft.gguf --for main.gguf
      specdec draft quantize main-f16.gguf --type Q2_K --output main-q2.gguf
    """

    model: str = options.named_model(
        default=REQUIRED, metavar="MODEL", help="Model to quantize, main or draft: a file or a name."
    )
    main: str | None = option(
        "--for",
        metavar="MAIN",
        help="Main model that the copy will draft for (default: MODEL itself).",
        autocompletion=completion.models,
    )
    kind: KindChoice = option("--type", default="Q4_0", case_sensitive=False, help="Precision of the copy.")
    output: Path | None = option(
        "--output", "-o", metavar="FILE", help="Output file (default: beside the model)."
    )
    yes: bool = option("--yes", "-y", default=False, help="Make the copy even if it would not pay off.")
    force: bool = option(default=False, help="Replace an existing file.")
    ctx: int = options.later_context_option()
    threads: int | None = option(
        min=1, max=512, help="Number of threads, now and in later sessions (default: one per usable core)."
    )
    device: str = options.device_option()
    gpu_layers: int | None = options.gpu_layers_option()
    cache_type: options.CacheChoice = options.cache_type_option()
    kernels: options.KernelsChoice = options.kernels_option()


@dataclass(frozen=True, kw_only=True)
class DraftTrainOptions:
    """Train a head that drafts for a main model, and print its path.

    The main model answers prompts for a while, and an EAGLE-3 head learns to
    predict its answers from its hidden states. No original weights, data or
    network access are needed. With --from datastore, it learns mainly from the
    answers that you have received. To resume a run that was stopped, run the same
    command again. To extend a finished run, give more --minutes or --tokens.

    Requires PyTorch; where it is missing, an error shows how to install it.

    Examples:

      specdec draft train main.gguf --minutes 480
      specdec draft train main.gguf -o head.gguf --from src --from prompts.jsonl
      specdec draft train main.gguf --continue head.gguf --from datastore
    """

    main: str | None = options.named_model(
        metavar="MAIN", help="Main model to train a head for: a file or a name."
    )
    main_option: str | None = options.needed_main_option()
    output: Path | None = option(
        "--output",
        "-o",
        help="Output file (default: beside the main model or the head to continue; for a model name, in "
        "the current folder).",
    )
    sources: list[str] | None = option(
        "--from",
        metavar="datastore|FILE",
        help="Learn from the answers that --learn has kept, or from your own prompts (.toml, .jsonl), "
        "texts or code: a file or folder; repeatable.",
    )
    continued: Path | None = option(
        "--continue",
        metavar="HEAD",
        help="Train a head further, instead of a new one; the new file is HEAD-learned.gguf.",
    )
    minutes: float | None = option(
        help="Time for everything except the report, including data generation in earlier runs (default: 60)."
    )
    tokens: int | None = option(
        min=1000,
        max=10**9,
        help="Tokens of training data, instead of --minutes; training then takes as long as it needs.",
    )
    vocabulary: int | None = option(
        min=256,
        max=1 << 20,
        help="Number of tokens that the head can draft (default: 4,096 to 32,768, as many as cover 96 % "
        "of the main model's output).",
    )
    disk: float | None = option(
        help="Maximum size of the training data in GB (default: 20, or half of the free space)."
    )
    torch_device: Literal["cpu", "cuda", "mps"] = option(default="cpu", help="PyTorch device to train on.")
    seed: int = option(default=0, min=0, help="Random seed for prompts, sampling and training.")
    plot: Path | None = option(help="Save a PNG of the training curve (needs matplotlib).")
    force: bool = option(default=False, help="Replace an existing file.")
    threads: int | None = option(min=1, max=512, help="Number of threads (default: one per usable core).")
    device: str = options.device_option()
    gpu_layers: int | None = options.gpu_layers_option()
    kernels: options.KernelsChoice = options.kernels_option()


@dataclass(frozen=True, kw_only=True)
class DraftConvertOptions:
    """Convert a published head into a GGUF file for its main model, and print its path.

    HEAD is a folder with config.json and *.safetensors (or pytorch_model.bin), or
    a repository of the Hugging Face Hub with such files. Neither PyTorch nor the
    original main model is needed. Sessions of the main model find the new file.

    Examples:

      specdec draft convert eagle3-folder --main llama.gguf
      specdec draft convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B -m llama.gguf
    """

    head: str = argument(default=REQUIRED, metavar="HEAD", help="Head to convert: a folder, or user/repo.")
    main: str | None = option(
        "--main",
        "-m",
        metavar="MAIN",
        help="Main model that the head was trained for (default: the one beside HEAD, or the one that "
        "its config.json names, if it is on this machine).",
        autocompletion=completion.models,
    )
    kind: HeadKindChoice = option(
        "--type", default="Q8_0", case_sensitive=False, help="Precision of the file."
    )
    output: Path | None = option(
        "--output", "-o", metavar="FILE", help="Output file (default: beside the main model)."
    )
    force: bool = option(default=False, help="Replace an existing file.")


@dataclass(frozen=True, kw_only=True)
class DraftVersionsOptions:
    """List the heads that have learned from your answers, and their acceptance rates.

    For each version, shows the number of answers that it has learned from, and
    the acceptance rate of its first draft token before and after training, on
    your held-out answers and on built-in prompts.

    Example:

      specdec draft versions main.gguf
    """

    main: str | None = _head_main()
    main_option: str | None = options.needed_main_option()


@dataclass(frozen=True, kw_only=True)
class DraftRollbackOptions:
    """Go back to the previous head permanently.

    A running server switches to it when it is idle.

    Example:

      specdec draft rollback main.gguf
    """

    main: str | None = _head_main()
    main_option: str | None = options.needed_main_option()


_prompts, _variants, _results = (
    partial(option, rich_help_panel=panel) for panel in ("Prompts", "Variants", "Results")
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


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Measure how long calls of the models take on this machine, and show when speculation pays off.

    Later sessions with these models use the results. Without them, the first
    session measures by itself for about a second, less accurately. With a GPU,
    the models are measured on it and on the CPU, to find where each is faster.

    Examples:

      specdec tune main.gguf draft.gguf
      specdec tune main.gguf --threads 4 --threads 8
    """

    main: str | None = options.model_argument()
    draft: str | None = options.draft_argument()
    main_option: str | None = options.main_option()
    draft_option: str | None = options.draft_option()
    ctx: int = option(default=4096, help="Context size of later sessions, in tokens.")
    threads: list[int] | None = option(
        metavar="<int>",
        help="Number of threads to measure; repeatable (default: those that are likely to be fastest).",
    )
    device: str = options.device_option()
    gpu_layers: int | None = options.gpu_layers_option()
    cache_type: options.CacheChoice = options.cache_type_option()
    kernels: options.KernelsChoice = options.kernels_option()
    rounds: int = option(
        default=5,
        min=1,
        max=100,
        metavar="<int>",
        help="Number of measurements per size; unclear ones are repeated.",
    )
