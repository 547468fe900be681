"""The options of `specdec serve`."""

import functools
import math
from dataclasses import dataclass
from typing import Annotated

from typer import BadParameter, Option

from specdec_cli import options

_Server = functools.partial(Option, rich_help_panel="Server")


def _gibibytes(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise BadParameter(f"{value} is not a size in GiB")
    return value


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve models over HTTP to editors, agents and chat programs, and show a page to try them.

    Clients of OpenAI, Anthropic, Ollama or llama.cpp's server need only another
    address, such as http://localhost:8080/v1; with --port 11434, those of Ollama
    find the server by themselves. With several models, the first is loaded at the
    start and each other one at its first request; the least recently used one is
    unloaded when memory runs out. A request can override the sampling and
    speculation options.

    Examples:

      specdec serve
      specdec serve main.gguf --draft draft.gguf --port 8000
      specdec serve coder-7b qwen3-4b main.gguf --memory 8
      SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0
    """

    models: options.ModelOptions
    sampler: options.SamplerOptions
    model: Annotated[
        list[str] | None,
        options.NamedModel(
            metavar="MODEL",
            help="Main model: a file, a name or user/repo:quant. With several, each request names one.",
        ),
    ] = None
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on; any but loopback needs --api-key.")
    ] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, metavar="<int>", help="Port; 0 takes any free port.")] = (
        8080
    )
    api_key: Annotated[
        str | None, Option(metavar="KEY", help="Key that clients must send; safer in SPECDEC_API_KEY.")
    ] = None
    alias: Annotated[
        str | None, _Server(metavar="NAME", help="Name of the model for clients (default: that of its file).")
    ] = None
    parallel: Annotated[
        int | None,
        Option(
            min=1,
            metavar="<int>",
            help="Maximum number of answers at the same time (default: 8, or as memory allows).",
        ),
    ] = None
    memory: Annotated[
        float | None,
        Option(
            metavar="GiB",
            callback=_gibibytes,
            help="Memory for several models together (default: half of the free memory).",
        ),
    ] = None
    keep_alive: Annotated[
        str | None,
        _Server(
            metavar="TIME",
            help="Unload a model after it is idle for this time, such as 10m; 0: at once (default: never).",
        ),
    ] = None
    queue: Annotated[
        int, _Server(min=0, metavar="<int>", help="Maximum number of requests that wait for their turn.")
    ] = 64
    cors: Annotated[
        list[str] | None,
        _Server(
            metavar="ORIGIN",
            help="Origin whose web pages may use the server, such as https://HOST, or * for all; repeatable.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        _Server(
            metavar="NAME",
            help="Another host name, or *.DOMAIN, that clients without a key may use; repeatable.",
        ),
    ] = None
    image_urls: Annotated[
        str | None,
        _Server(
            metavar="HOST[,HOST]",
            help="Hosts, with or without :PORT, from whose URLs images are fetched (default: none).",
        ),
    ] = None
    max_body: Annotated[
        int | None,
        _Server(
            min=1,
            metavar="<int>",
            help="Maximum size of a request in MiB (default: 16, or 64 for a model that reads images).",
        ),
    ] = None
    keep_headers: Annotated[
        bool,
        _Server(
            "--keep-headers",
            help="Leave billing headers and times of day in system messages as clients send them.",
        ),
    ] = False
