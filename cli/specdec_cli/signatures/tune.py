"""The options of `specdec tune`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from specdec_cli import options


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

    main: options.ModelArgument = None
    draft: options.DraftArgument = None
    main_option: options.MainOption = None
    draft_option: options.DraftOption = None
    ctx: Annotated[int, Option(help="Context size of later sessions, in tokens.")] = 4096
    threads: Annotated[
        list[int] | None,
        Option(
            metavar="<int>",
            help="Number of threads to measure; repeatable (default: those that are likely to be fastest).",
        ),
    ] = None
    device: options.DeviceOption = "auto"
    gpu_layers: options.GpuLayersOption = None
    cache_type: options.CacheTypeOption = "f16"
    kernels: options.KernelsOption = "auto"
    rounds: Annotated[
        int,
        Option(
            min=1,
            max=100,
            metavar="<int>",
            help="Number of measurements per size; unclear ones are repeated.",
        ),
    ] = 5
