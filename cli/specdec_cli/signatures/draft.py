"""The options of `specdec draft`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from specdec_cli import completion, options

HeadKindChoice = Literal["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0"]
KindChoice = Literal["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16"]
_HeadMain = Annotated[
    str | None,
    options.NamedModel(metavar="MAIN", help="Main model that the head drafts for: a file or a name."),
]


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

    model: Annotated[
        str, options.NamedModel(metavar="MODEL", help="Model to quantize, main or draft: a file or a name.")
    ]
    main: Annotated[
        str | None,
        Option(
            "--for",
            metavar="MAIN",
            help="Main model that the copy will draft for (default: MODEL itself).",
            autocompletion=completion.models,
        ),
    ] = None
    kind: Annotated[KindChoice, Option("--type", case_sensitive=False, help="Precision of the copy.")] = (
        "Q4_0"
    )
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Output file (default: beside the model).")
    ] = None
    yes: Annotated[bool, Option("--yes", "-y", help="Make the copy even if it would not pay off.")] = False
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False
    ctx: options.LaterContextOption = 4096
    threads: Annotated[
        int | None,
        Option(
            min=1,
            max=512,
            help="Number of threads, now and in later sessions (default: one per usable core).",
        ),
    ] = None
    device: options.DeviceOption = "auto"
    gpu_layers: options.GpuLayersOption = None
    cache_type: options.CacheTypeOption = "f16"
    kernels: options.KernelsOption = "auto"


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

    main: Annotated[
        str | None,
        options.NamedModel(metavar="MAIN", help="Main model to train a head for: a file or a name."),
    ] = None
    main_option: options.NeededMainOption = None
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Output file (default: beside the main model or the head to continue; for a model name, in "
            "the current folder).",
        ),
    ] = None
    sources: Annotated[
        list[str] | None,
        Option(
            "--from",
            metavar="datastore|FILE",
            help="Learn from the answers that --learn has kept, or from your own prompts (.toml, .jsonl), "
            "texts or code: a file or folder; repeatable.",
        ),
    ] = None
    continued: Annotated[
        Path | None,
        Option(
            "--continue",
            metavar="HEAD",
            help="Train a head further, instead of a new one; the new file is HEAD-learned.gguf.",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            help="Time for everything except the report, including data generation in earlier runs "
            "(default: 60)."
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Option(
            min=1000,
            max=10**9,
            help="Tokens of training data, instead of --minutes; training then takes as long as it needs.",
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        Option(
            min=256,
            max=1 << 20,
            help="Number of tokens that the head can draft (default: 4,096 to 32,768, as many as cover 96 % "
            "of the main model's output).",
        ),
    ] = None
    disk: Annotated[
        float | None,
        Option(help="Maximum size of the training data in GB (default: 20, or half of the free space)."),
    ] = None
    torch_device: Annotated[Literal["cpu", "cuda", "mps"], Option(help="PyTorch device to train on.")] = "cpu"
    seed: Annotated[int, Option(min=0, help="Random seed for prompts, sampling and training.")] = 0
    plot: Annotated[Path | None, Option(help="Save a PNG of the training curve (needs matplotlib).")] = None
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False
    threads: Annotated[
        int | None, Option(min=1, max=512, help="Number of threads (default: one per usable core).")
    ] = None
    device: options.DeviceOption = "auto"
    gpu_layers: options.GpuLayersOption = None
    kernels: options.KernelsOption = "auto"


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

    head: Annotated[str, Argument(metavar="HEAD", help="Head to convert: a folder, or user/repo.")]
    main: Annotated[
        str | None,
        Option(
            "--main",
            "-m",
            metavar="MAIN",
            help="Main model that the head was trained for (default: the one beside HEAD, or the one that "
            "its config.json names, if it is on this machine).",
            autocompletion=completion.models,
        ),
    ] = None
    kind: Annotated[HeadKindChoice, Option("--type", case_sensitive=False, help="Precision of the file.")] = (
        "Q8_0"
    )
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="Output file (default: beside the main model)."),
    ] = None
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False


@dataclass(frozen=True, kw_only=True)
class DraftVersionsOptions:
    """List the heads that have learned from your answers, and their acceptance rates.

    For each version, shows the number of answers that it has learned from, and
    the acceptance rate of its first draft token before and after training, on
    your held-out answers and on built-in prompts.

    Example:

      specdec draft versions main.gguf
    """

    main: _HeadMain = None
    main_option: options.NeededMainOption = None


@dataclass(frozen=True, kw_only=True)
class DraftRollbackOptions:
    """Go back to the previous head permanently.

    A running server switches to it when it is idle.

    Example:

      specdec draft rollback main.gguf
    """

    main: _HeadMain = None
    main_option: options.NeededMainOption = None
