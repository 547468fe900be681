"""The options of `specdec models`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from specdec_cli import completion, options

_Name = Annotated[
    str,
    Argument(
        metavar="NAME",
        help="Name of a model or pair, user/repo:quant, or a name in ollama.",
        autocompletion=completion.names,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelsListOptions:
    """List models and pairs: those on this machine, including other programs' models, and those to download.

    In a file or a pipe, each is a line with tabs between name, state, licence,
    description and size in bytes. A pair has the names of its models in place of
    the licence, and the size of both.

    Examples:

      specdec models list --local
      specdec models list | grep coder
    """

    local: Annotated[bool, Option("--local", help="List only what is on this machine.")] = False


@dataclass(frozen=True, kw_only=True)
class ModelsPullOptions:
    """Download and verify a model, or both models of a pair, and print the path.

    A model that sees images comes with its projector (mmproj). A head that is
    published as safetensors, user/repo, is converted for its main model.

    Examples:

      specdec models pull starter
      specdec models pull coder-7b
      specdec models pull bartowski/Llama-3.2-3B-Instruct-GGUF:Q5_K_M
    """

    name: _Name = "starter"
    offline: Annotated[
        bool, Option("--offline", help="Do not use the network: only verify downloaded files.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ModelsPathOptions:
    """Print the path of a model's file, or of the first part of a split model.

    Example:

      ls -lh "$(specdec models path starter)"
    """

    name: _Name = "starter"


@dataclass(frozen=True, kw_only=True)
class ModelsShowOptions:
    """Print the details of a model, or of both models of a pair.

    Example:

      specdec models show coder-7b
    """

    name: _Name = "starter"


@dataclass(frozen=True, kw_only=True)
class ModelsRmOptions:
    """Delete the files of a model, including incomplete downloads.

    Example:

      specdec models rm qwen3-4b --yes
    """

    name: _Name
    yes: options.YesOption = False


@dataclass(frozen=True, kw_only=True)
class ModelsCheckOptions:
    """Check whether a draft model or head fits a main model: vocabulary, memory, expected speed-up.

    Only the headers of the files are read. The expected speed-up comes from costs
    that specdec tune MAIN DRAFT has measured, or else from the sizes of the
    models. Without a draft, the main model's projector, with which it sees images
    or hears, is checked.

    Examples:

      specdec models check coder-7b
      specdec models check main.gguf draft.gguf --ctx 16384
    """

    main: options.ModelArgument = None
    draft: options.DraftArgument = None
    main_option: options.MainOption = None
    draft_option: options.DraftOption = None
    ctx: options.LaterContextOption = 4096
    threads: Annotated[
        int | None,
        Option(min=1, max=512, help="Number of threads in later sessions (default: one per usable core)."),
    ] = None
    device: options.DeviceOption = "auto"
    gpu_layers: options.GpuLayersOption = None
    cache_type: options.CacheTypeOption = "f16"
    kernels: options.KernelsOption = "auto"
