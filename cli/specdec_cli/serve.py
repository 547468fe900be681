"""`specdec serve`: an HTTP server with the protocols of OpenAI, Anthropic and llama.cpp."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from spec_local.errors import InvalidRequest
from spec_local.models.names import STARTER
from specdec_cli import exits, render
from specdec_cli.options import (
    ModelArgument,
    ModelOptions,
    SamplerOptions,
    SamplingOptions,
    generation_settings,
)

if TYPE_CHECKING:
    from spec_local.server.engine import Engine


def serve(
    models: ModelOptions,
    sampler: SamplerOptions,
    model: ModelArgument = None,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on; all but loopback need --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, metavar="<int>", help="Port; 0: any that is free.")] = 8080,
    api_key: Annotated[
        str | None, Option(metavar="KEY", help="Key that clients must send. Better set SPECDEC_API_KEY.")
    ] = None,
    alias: Annotated[
        str | None, Option(metavar="NAME", help="Name of the model for clients (default: its file's).")
    ] = None,
    parallel: Annotated[
        int | None,
        Option(
            min=1,
            metavar="<int>",
            help="Number of answers at the same time (default: as many as there is memory for, up to 8).",
        ),
    ] = None,
    queue: Annotated[
        int, Option(min=0, metavar="<int>", help="Number of requests that may wait for one of them.")
    ] = 64,
    cors: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN", help="Web pages that may use the server, as https://HOST; repeatable; *: all."
        ),
    ] = None,
    max_body: Annotated[int, Option(min=1, metavar="<int>", help="Maximum size of a request in MiB.")] = 16,
) -> None:
    """Serve a model over HTTP to editors, agents and chat programs, and show a page to try it.

    Clients that speak to OpenAI, Anthropic or llama.cpp's server need only
    another address, such as http://localhost:8080/v1.

    Options for sampling and speculation apply to requests that do not set
    them.

    Examples:

      specdec serve

      specdec serve main.gguf --draft draft.gguf --port 8000

      SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0
    """
    with exits.guarded():
        try:
            from spec_local.server import run
            from spec_local.server.guard import Access
            from spec_local.system.machine import is_loopback
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                f"the server needs {error.name}: install it with pip install 'spec-local[serve]'"
            ) from None
        models = models.with_main(model)
        run.check_access(host, api_key)
        files = models.files()
        session, name = models.session_arguments(files, parallel=parallel), alias or _name(models, files[0])
        with run.listen(host, port) as opened:
            address = _address(host, opened.getsockname()[1])
            render.note(f"specdec: loading {name}; {address} answers as soon as it is ready")

            def on_ready(engine: "Engine") -> None:
                loaded = engine.check_ready()
                with_draft = f", draft {loaded.draft}" if loaded.draft else ""
                at_a_time = (
                    f"{loaded.n_rows} answers at a time" if loaded.n_rows > 1 else "one answer at a time"
                )
                render.note(f"specdec: {address} serves {name}{with_draft}; {at_a_time}, Ctrl-C ends it")

            run.run(
                opened,
                session,
                name,
                Access(api_key, is_loopback(host), tuple(cors or ()), max_body << 20),
                _defaults(models, sampler),
                max_waiting=queue,
                log=render.note,
                on_ready=on_ready,
                persist=bool(models.workers),
            )


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


def _name(models: ModelOptions, main: Path) -> str:
    """The name that was given, or that of the file."""
    given = models.main or STARTER
    return main.stem if Path(given).suffix == ".gguf" else given


def _address(host: str, port: int) -> str:
    shown = "localhost" if host in ("127.0.0.1", "::1") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
