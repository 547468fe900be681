"""`specdec serve`: an HTTP server with the protocols of OpenAI, Anthropic and llama.cpp."""

import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from spec_local.errors import InvalidRequest
from spec_local.models.names import FOUND_DRAFT, NO_DRAFT, STARTER, paired
from spec_local.system import extras
from specdec_cli import completion, exits, render, settings
from specdec_cli.options import (
    ModelOptions,
    SamplerOptions,
    SamplingOptions,
    generation_settings,
)

if TYPE_CHECKING:
    from spec_local.server.supervision.events import Loaded
    from spec_local.server.supervision.served_models import ServedModel


_Server = functools.partial(Option, rich_help_panel="Server")


def _gibibytes(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise BadParameter(f"{value} is not a size in GiB")
    return value


def serve(
    models: ModelOptions,
    sampler: SamplerOptions,
    model: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL",
            help="Main model: a file, a name or user/repo:quant. With several, each request names one.",
            autocompletion=completion.models,
        ),
    ] = None,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on; any but loopback needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, metavar="<int>", help="Port; 0 takes any free port.")
    ] = 8080,
    api_key: Annotated[
        str | None, Option(metavar="KEY", help="Key that clients must send; safer in SPECDEC_API_KEY.")
    ] = None,
    alias: Annotated[
        str | None, _Server(metavar="NAME", help="Name of the model for clients (default: that of its file).")
    ] = None,
    parallel: Annotated[
        int | None,
        Option(
            min=1,
            metavar="<int>",
            help="Maximum number of answers at the same time (default: 8, or as memory allows).",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        Option(
            metavar="GiB",
            callback=_gibibytes,
            help="Memory for several models together (default: half of the free memory).",
        ),
    ] = None,
    keep_alive: Annotated[
        str | None,
        _Server(
            metavar="TIME",
            help="Unload a model after it is idle for this time, such as 10m; 0: at once (default: never).",
        ),
    ] = None,
    queue: Annotated[
        int, _Server(min=0, metavar="<int>", help="Maximum number of requests that wait for their turn.")
    ] = 64,
    cors: Annotated[
        list[str] | None,
        _Server(
            metavar="ORIGIN",
            help="Origin whose web pages may use the server, such as https://HOST, or * for all; repeatable.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        _Server(
            metavar="NAME",
            help="Another host name, or *.DOMAIN, that clients without a key may use; repeatable.",
        ),
    ] = None,
    max_body: Annotated[int, _Server(min=1, metavar="<int>", help="Maximum size of a request in MiB.")] = 16,
    keep_headers: Annotated[
        bool,
        _Server(
            "--keep-headers",
            help="Leave billing headers and times of day in system messages as clients send them.",
        ),
    ] = False,
) -> None:
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
    with exits.guarded():
        try:
            from spec_local.llama.memory import free_memory
            from spec_local.server import run
            from spec_local.server.guard import Access, host_pattern
            from spec_local.server.supervision.served_models import ServedModels, seconds_of
        except ModuleNotFoundError as error:
            raise InvalidRequest(f"the server needs {error.name}: {extras.hint('serve')}") from None
        if len(model or ()) > 1:
            _check_several(models, alias)
        if keep_alive is not None and models.workers:
            raise InvalidRequest("--keep-alive does not work with --workers: remove one of the two")
        run.check_access(host, api_key)
        hosts = [host_pattern(name) for name in allow_host or ()]
        os.environ.pop(settings.variable("api-key"), None)  # child processes do not need it
        given = [models.with_models(name) for name in model or ()] or [models]
        served = ServedModels(
            [_served(each, sampler, parallel, alias) for each in given],
            memory=round(memory * 2**30) if memory else free_memory() // 2,
            keep_alive=None if keep_alive is None else seconds_of(keep_alive),
            max_waiting=queue,
            keep_headers=keep_headers,
            log=render.note,
        )
        names = [each.name for each in served.models]
        with run.listening(host, port) as opened:
            address = _address(host, opened[0].getsockname()[1])
            render.note(f"specdec: loading {names[0]}; {address} answers as soon as it is ready")

            def on_ready(loaded: "Loaded") -> None:
                with_draft = f", draft {loaded.draft}" if loaded.draft else ""
                at_a_time = (
                    f"{loaded.n_rows} answers at a time" if loaded.n_rows > 1 else "one answer at a time"
                )
                others = f"; when asked for: {', '.join(names[1:])}" if names[1:] else ""
                render.note(
                    f"specdec: {address} serves {names[0]}{with_draft}; {at_a_time}{others}; Ctrl-C ends it"
                )

            run.run(
                opened,
                served,
                Access(api_key, tuple(cors or ()), max_body << 20, hosts),
                on_ready=on_ready,
                persist=bool(models.workers),
                log=render.note,
            )


def _check_several(models: ModelOptions, alias: str | None) -> None:
    """Raise InvalidRequest for options that belong to one model."""
    if models.draft not in (None, FOUND_DRAFT, NO_DRAFT):
        raise InvalidRequest(
            "--draft works with one model only: name pairs, or remove --draft to use the drafts found"
        )
    for option, value in (("--alias", alias), ("--workers", models.workers)):
        if value:
            raise InvalidRequest(f"{option} is for one model: remove it, or serve one model")


def _served(
    models: ModelOptions, sampler: SamplerOptions, parallel: int | None, alias: str | None
) -> "ServedModel":
    """A model as clients know it: by the name that was given, or that of its file."""
    from spec_local.llama.model_file import check_header
    from spec_local.server.supervision.served_models import ServedModel
    from spec_local.text import printable

    files = models.files()
    check_header(files[0])
    given = models.main or STARTER
    is_file = Path(given).suffix == ".gguf"
    others = [files[0].stem] if is_file else [files[0].stem, paired(given)[0]]
    name = printable(alias or (files[0].stem if is_file else given))
    session = models.session_arguments(files, parallel=parallel)
    return ServedModel(name, session, others, _defaults(models, sampler))


def _defaults(models: ModelOptions, sampler: SamplerOptions) -> dict[str, Any]:
    """Return the fields of a request's body that the options stand for."""
    settings = generation_settings(models, SamplingOptions(**vars(sampler)))
    sampling, minus_infinity = settings.sampling, float("-inf")
    speed = (field.name for field in dataclasses.fields(settings) if field.metadata.get("affects") == "speed")
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repeat_last_n": sampling.penalty_window,
        "logit_bias": {
            str(token): bias if bias > minus_infinity else False  # JSON has no infinity
            for token, bias in sampling.logit_bias.items()
        },
        "speculative": {name: value for name in speed if (value := getattr(settings, name)) is not None},
    }


def _address(host: str, port: int) -> str:
    shown = "localhost" if host in ("127.0.0.1", "::1") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
