"""The options of `specdec tune`."""

from dataclasses import dataclass

from specdec_cli import options
from specdec_cli.parameters import option


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Measure how long calls of the models take on this machine, and show when speculation pays off.

    Later sessions with these models use the results. Without them, the first
    session measures by itself for about a second, less accurately. With a GPU, the
    models are measured on it and on the CPU, to find where each is faster.

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
