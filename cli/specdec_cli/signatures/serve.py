"""The options of `specdec serve`."""

import functools
import math
from dataclasses import dataclass

from typer import BadParameter

from specdec_cli import options
from specdec_cli.parameters import option

_server = functools.partial(option, rich_help_panel="Server")


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
    model: list[str] | None = options.named_model(
        metavar="MODEL",
        help="Main model: a file, a name or user/repo:quant. With several, each request names one.",
    )
    host: str = option(
        default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; any but loopback needs --api-key."
    )
    port: int = option(default=8080, min=0, max=65535, metavar="<int>", help="Port; 0 takes any free port.")
    api_key: str | None = option(metavar="KEY", help="Key that clients must send; safer in SPECDEC_API_KEY.")
    alias: str | None = _server(
        metavar="NAME", help="Name of the model for clients (default: that of its file)."
    )
    parallel: int | None = option(
        min=1,
        metavar="<int>",
        help="Maximum number of answers at the same time (default: 8, or as memory allows).",
    )
    memory: float | None = option(
        metavar="GiB",
        callback=_gibibytes,
        help="Memory for several models together (default: half of the free memory).",
    )
    keep_alive: str | None = _server(
        metavar="TIME",
        help="Unload a model after it is idle for this time, such as 10m; 0: at once (default: never).",
    )
    queue: int = _server(
        default=64, min=0, metavar="<int>", help="Maximum number of requests that wait for their turn."
    )
    cors: list[str] | None = _server(
        metavar="ORIGIN",
        help="Origin whose web pages may use the server, such as https://HOST, or * for all; repeatable.",
    )
    allow_host: list[str] | None = _server(
        metavar="NAME", help="Another host name, or *.DOMAIN, that clients without a key may use; repeatable."
    )
    image_urls: str | None = _server(
        metavar="HOST[,HOST]",
        help="Hosts, with or without :PORT, from whose URLs images are fetched (default: none).",
    )
    max_body: int | None = _server(
        min=1,
        metavar="<int>",
        help="Maximum size of a request in MiB (default: 16, or 64 for a model that reads images).",
    )
    keep_headers: bool = _server(
        default=False,
        help="Leave billing headers and times of day in system messages as clients send them.",
    )
