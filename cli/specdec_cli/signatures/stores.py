"""The options of the commands about what is kept: models, datastore and cache."""

from dataclasses import dataclass
from functools import partial

from specdec_cli import completion, options
from specdec_cli.parameters import REQUIRED, argument, option

_name = partial(
    argument,
    default="starter",
    metavar="NAME",
    help="Name of a model or pair, user/repo:quant, or a name in ollama.",
    autocompletion=completion.names,
)


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

    local: bool = option(default=False, help="List only what is on this machine.")


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

    name: str = _name()
    offline: bool = option(default=False, help="Do not use the network: only verify downloaded files.")


@dataclass(frozen=True, kw_only=True)
class ModelsPathOptions:
    """Print the path of a model's file, or of the first part of a split model.

    Example:

      ls -lh "$(specdec models path starter)"
    """

    name: str = _name()


@dataclass(frozen=True, kw_only=True)
class ModelsShowOptions:
    """Print the details of a model, or of both models of a pair.

    Example:

      specdec models show coder-7b
    """

    name: str = _name()


@dataclass(frozen=True, kw_only=True)
class ModelsRmOptions:
    """Delete the files of a model, including incomplete downloads.

    Example:

      specdec models rm qwen3-4b --yes
    """

    name: str = _name(default=REQUIRED)
    yes: bool = options.yes_option()


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

    main: str | None = options.model_argument()
    draft: str | None = options.draft_argument()
    main_option: str | None = options.main_option()
    draft_option: str | None = options.draft_option()
    ctx: int = options.later_context_option()
    threads: int | None = option(
        min=1, max=512, help="Number of threads in later sessions (default: one per usable core)."
    )
    device: str = options.device_option()
    gpu_layers: int | None = options.gpu_layers_option()
    cache_type: options.CacheChoice = options.cache_type_option()
    kernels: options.KernelsChoice = options.kernels_option()


@dataclass(frozen=True, kw_only=True)
class DatastoreShowOptions:
    """Show the contents of the datastore, by vocabulary.

    The lines "answers" are what --learn keeps, by model.

    Example:

      specdec datastore show
    """


@dataclass(frozen=True, kw_only=True)
class DatastoreAddOptions:
    """Add text files that the model will quote or edit.

    Adding a file again replaces its older version. No weights are loaded. With
    --main, the first argument is also a file, unless it can only be a model.

    Examples:

      specdec datastore add coder-7b src README.md
      specdec datastore add --main main.gguf notes.txt
    """

    arguments: list[str] = options.named_model(
        default=REQUIRED,
        metavar="[MAIN] FILES",
        help="Main model, followed by text files or folders of text files.",
        show_default=False,
    )
    main: str | None = options.needed_main_option()


@dataclass(frozen=True, kw_only=True)
class DatastoreClearOptions:
    """Delete the texts of all vocabularies, and the answers that --learn has kept.

    Asks for confirmation on a terminal. Also deletes damaged files that were set
    aside, and the data that trainings have made from these answers; running
    trainings end. Heads trained on these answers are kept and listed.

    Example:

      specdec datastore clear --yes
    """

    yes: bool = options.yes_option()


@dataclass(frozen=True, kw_only=True)
class CacheShowOptions:
    """Show how much is kept for each model, and when it was last used.

    A model has several lines if it was used with different settings. In a file or
    a pipe, each line has tabs between model, files, bytes and date.

    Example:

      specdec cache show
    """

    prompt_cache: str | None = options.prompt_cache_option(hidden=True)


@dataclass(frozen=True, kw_only=True)
class CacheClearOptions:
    """Delete what is kept for all models. Running programs are not interrupted.

    Asks for confirmation on a terminal. Running programs keep what they have read
    in memory, and go on writing what they read from now on.

    Example:

      specdec cache clear --yes
    """

    yes: bool = options.yes_option()
