"""`specdec serve`: an HTTP server with the protocols of OpenAI, Anthropic and llama.cpp."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.llama.model_file import check_header
from spec_local.models.names import FOUND_DRAFT, FOUND_PROJECTOR, NO_DRAFT, NO_PROJECTOR, STARTER, paired
from spec_local.models.projectors import resolve_projector
from spec_local.system import extras
from spec_local.text import printable
from specdec_cli import render, settings
from specdec_cli.options import ModelOptions, SamplerOptions, SamplingOptions
from specdec_cli.sessions import generation_settings, session_arguments
from specdec_cli.signatures.answers import ServeOptions

try:
    from spec_local.server import run
    from spec_local.server.guard import Access, host_pattern
    from spec_local.server.protocols.image_urls import checked_host
    from spec_local.server.supervision.events import Loaded
    from spec_local.server.supervision.served_models import ServedModel, ServedModels, seconds_of
except ModuleNotFoundError as error:
    raise InvalidRequest(f"the server needs {error.name}: {extras.hint('serve')}") from None

_MAX_BODY, _MAX_BODY_WITH_IMAGES = 16, 64  # MiB: one image may have 32 MiB, which base64 makes 43


def serve(options: ServeOptions) -> None:
    _check(options)
    hosts = [host_pattern(name) for name in options.allow_host or ()]
    image_hosts = [checked_host(host) for host in (options.image_urls or "").split(",") if host.strip()]
    os.environ.pop(settings.variable("api-key"), None)  # child processes do not need it
    given = [options.models.with_models(name) for name in options.model or ()] or [options.models]
    served = ServedModels(
        [_served(each, options.sampler, options.parallel, options.alias) for each in given],
        memory=round(options.memory * 2**30) if options.memory else None,
        keep_alive=None if options.keep_alive is None else seconds_of(options.keep_alive),
        max_waiting=options.queue,
        keep_headers=options.keep_headers,
        log=render.note,
    )
    reads_images = any(model.kinds for model in served.models)
    max_body = options.max_body or (_MAX_BODY_WITH_IMAGES if reads_images else _MAX_BODY)
    access = Access(options.api_key, tuple(options.cors or ()), max_body << 20, hosts, image_hosts)
    names = [each.name for each in served.models]
    with run.listening(options.host, options.port) as opened:
        address = _address(options.host, opened[0].getsockname()[1])
        render.note(f"specdec: loading {names[0]}; {address} answers as soon as it is ready")

        def on_ready(loaded: Loaded) -> None:
            with_draft = f", draft {loaded.draft}" if loaded.draft else ""
            at_a_time = (
                f"{loaded.n_parallel} answers at a time" if loaded.n_parallel > 1 else "one answer at a time"
            )
            others = f"; when asked for: {', '.join(names[1:])}" if names[1:] else ""
            render.note(
                f"specdec: {address} serves {names[0]}{with_draft}; {at_a_time}{others}; Ctrl-C ends it"
            )

        persist = bool(options.models.workers)
        run.run(opened, served, access, on_ready=on_ready, persist=persist, log=render.note)


def _check(options: ServeOptions) -> None:
    """Raise InvalidRequest for options that exclude each other, and for an address that needs a key."""
    models = options.models
    if len(options.model or ()) > 1:
        if models.draft not in (None, FOUND_DRAFT, NO_DRAFT):
            raise InvalidRequest(
                "--draft works with one model only: name pairs, or remove --draft to use the drafts found"
            )
        mmproj = None if models.mmproj in (FOUND_PROJECTOR, NO_PROJECTOR) else models.mmproj
        of_one = (("--alias", options.alias), ("--workers", models.workers), ("--mmproj", mmproj))
        for option, value in of_one:
            if value:
                raise InvalidRequest(f"{option} is for one model: remove it, or serve one model")
    if options.keep_alive is not None and models.workers:
        raise InvalidRequest("--keep-alive does not work with --workers: remove one of the two")
    run.check_access(options.host, options.api_key)


def _served(
    models: ModelOptions, sampler: SamplerOptions, parallel: int | None, alias: str | None
) -> ServedModel:
    """A model as clients know it: by the name that was given, or that of its file."""
    files = models.files()
    check_header(files[0])
    projector = resolve_projector(files[0], models.mmproj)
    given = models.main or STARTER
    is_file = Path(given).suffix == ".gguf"
    others = [files[0].stem] if is_file else [files[0].stem, paired(given)[0]]
    name = printable(alias or (files[0].stem if is_file else given))
    session = session_arguments(models, files, parallel=parallel)
    reads = projector.reads if projector else ()
    return ServedModel(name, session, others, _defaults(models, sampler), reads)


def _defaults(models: ModelOptions, sampler: SamplerOptions) -> dict[str, Any]:
    """Return the fields of a request's body that the options stand for."""
    settings = generation_settings(models, SamplingOptions(**vars(sampler)))
    sampling, minus_infinity = settings.sampling, float("-inf")
    speed = (field.name for field in dataclasses.fields(settings) if field.metadata.get("affects") == "speed")
    return {
        **sampling.body,
        "logit_bias": {
            str(token): bias if bias > minus_infinity else False  # JSON has no infinity
            for token, bias in sampling.logit_bias.items()
        },
        "speculative": {name: value for name in speed if (value := getattr(settings, name)) is not None},
    }


def _address(host: str, port: int) -> str:
    shown = "localhost" if host in ("127.0.0.1", "::1") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
