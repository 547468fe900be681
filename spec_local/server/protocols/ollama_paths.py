"""The smaller paths of ollama's protocol: its models, and what does not exist here."""

import asyncio
import hashlib
import math
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spec_local.core.sampling_settings import SETTINGS
from spec_local.errors import ModelFileError
from spec_local.images.image import Image
from spec_local.llama.gguf_header import Metadata, quantization, read_metadata
from spec_local.llama.gguf_tensors import parts
from spec_local.server.protocols import errors
from spec_local.server.protocols.model_facts import ModelFacts, facts_of
from spec_local.server.protocols.ollama import timestamp
from spec_local.server.protocols.request_body import read_json
from spec_local.server.protocols.work import until_gone
from spec_local.server.supervision.served_models import ServedModel, ServedModels
from spec_local.server.supervision.supervisor import NotReady

IS_RUNNING = "Ollama is running"
"""What programs look for at ``/``."""
VERSION = "0.13.3"
"""The version of ollama whose protocol this is: programs refuse versions that are too old for them."""
_FOREVER_S = 2**63 / 1e9  # ollama's longest time
_COPILOT = "GitHubCopilotChat/"
_FILLS_GAPS = "{# .Suffix #}"
"""A comment at the end of a template: Continue looks for this word of ollama's own templates."""
_SAMPLING = [setting.body for setting in SETTINGS if setting.gguf]
_DOWNLOAD = "this server does not download models: run specdec models pull NAME, then specdec serve NAME"
_FIXED = "this server does not change models: stop it, and give specdec serve the ones that you want"
_NO_EMBEDDINGS = "this server only generates text: embeddings need another server, such as ollama"
_NOT_HERE = {
    **dict.fromkeys(("embed", "embeddings"), _NO_EMBEDDINGS),
    **dict.fromkeys(("pull", "blobs/{digest}"), _DOWNLOAD),
    **dict.fromkeys(("create", "copy", "delete", "push"), _FIXED),
}


def routes(served: ServedModels, max_body: int) -> list[Route]:
    """The routes. max_body: maximum size of a body in bytes."""

    async def tags(request: Request) -> Response:
        found = await asyncio.gather(*(asyncio.to_thread(_listed, model) for model in served.models))
        return JSONResponse({"models": [each for each in found if each]})

    async def show(request: Request) -> Response:
        body = await read_json(request, max_body)
        name = body.get("model") or body.get("name")
        model = served.chosen(name)
        if not (listed := await asyncio.to_thread(_listed, model)):
            raise NotReady(f"the file of {model.name} cannot be read: put it back, or start the server again")
        facts = await asyncio.to_thread(_facts, model)
        metadata = await asyncio.to_thread(read_metadata, Path(model.session["main"]))
        return JSONResponse(
            _shown(model, facts, metadata, listed, request.headers.get("user-agent", ""), name)
        )

    async def ps(request: Request) -> Response:
        loaded = [model for model in served.models if model.loaded]
        found = await asyncio.gather(*(asyncio.to_thread(_listed, model) for model in loaded))
        running = [
            each | _running(model, each["size"]) for model, each in zip(loaded, found, strict=True) if each
        ]
        return JSONResponse({"models": running})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    return [
        Route("/api/tags", tags),
        Route("/api/show", until_gone(show), methods=["POST"]),
        Route("/api/ps", ps),
        Route("/api/version", version),
        *(
            Route(f"/api/{name}", errors.refusing(message), methods=["GET", "POST", "DELETE"])
            for name, message in _NOT_HERE.items()
        ),
    ]


def _facts(model: ServedModel) -> ModelFacts:
    return facts_of(Path(model.session["main"]), model.session["n_ctx"])


def _listed(model: ServedModel) -> dict[str, Any] | None:
    """The fields of a model in lists, from the beginning of its file; None: it cannot be read."""
    path = Path(model.session["main"])
    metadata = read_metadata(path)
    try:
        size, modified = sum(part.stat().st_size for part in parts(path)), path.stat().st_mtime_ns
        parameters = str(metadata.get("general.size_label", "")) or _facts(model).parameters
    except (OSError, ModelFileError):
        return None
    family = str(metadata.get("general.architecture", ""))
    name = model.name if ":" in model.name else f"{model.name}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(modified),
        "size": size,
        "digest": hashlib.sha256(f"{model.name}\0{size}\0{modified}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family],
            "parameter_size": parameters,
            "quantization_level": quantization(metadata) or "unknown",
        },
    }


def _shown(
    model: ServedModel,
    facts: ModelFacts,
    metadata: Metadata,
    listed: dict[str, Any],
    user_agent: str,
    name: Any,
) -> dict[str, Any]:
    """The details of a model; name: as the client names it."""
    info = {k: v for k, v in metadata.items() if not isinstance(v, float) or math.isfinite(v)}
    n_ctx = model.loaded.n_ctx if model.loaded else facts.n_ctx
    info[f"{listed['details']['family']}.context_length"] = n_ctx  # clients send as much as this
    if user_agent.startswith(_COPILOT):
        info["general.basename"] = name  # as ollama: it is the name that Copilot shows
    can = {"completion": True, "tools": facts.has_tools, "insert": facts.has_gaps, "thinking": facts.thinks}
    can["vision"] = Image in model.reads
    parameters = {"num_ctx": n_ctx} | {k: model.defaults[k] for k in _SAMPLING if k in model.defaults}
    return {
        "license": str(metadata.get("general.license", "")),
        "modelfile": f"# A model of specdec serve\nFROM {model.name}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in parameters.items()),
        "template": facts.template + (_FILLS_GAPS if facts.has_gaps else ""),
        "details": listed["details"],
        "model_info": info,
        "capabilities": [name for name, there in can.items() if there],
        "modified_at": listed["modified_at"],
    }


def _running(model: ServedModel, size: int) -> dict[str, Any]:
    """The further fields of a model that is loaded; size: of its files in bytes."""
    assert model.loaded
    left = _FOREVER_S if model.keep_alive is None else min(model.keep_alive, _FOREVER_S)
    if model.timer and not model.timer.cancelled():
        left = model.timer.when() - asyncio.get_running_loop().time()
    needed = model.plan.needed if model.plan else size
    return {
        "size": needed,
        "size_vram": needed if model.loaded.offload != "0" else 0,
        "expires_at": timestamp(time.time_ns() + round(1e9 * min(left, _FOREVER_S))),
        "context_length": model.loaded.n_ctx,
    }
