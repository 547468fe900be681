"""The description of this server for programs that generate clients and tests: GET /openapi.json."""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

import spec_local
from spec_local.server.protocols.protocol import Exchange

_REFERENCE = "#/components/schemas/{model}"


def describe(kinds: Mapping[str, type[Exchange]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document with the paths that generate, from the models that check their bodies.

    Args:
        kinds: the protocol of each path.
    """
    bodies = list(dict.fromkeys(kind.body for kind in kinds.values()))
    references, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REFERENCE
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": spec_local.__version__},
        "paths": {
            path: {"post": _operation(kind, references[kind.body, "validation"])}
            for path, kind in kinds.items()
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(kind: type[Exchange], body: Mapping[str, Any]) -> dict[str, Any]:
    summary = (kind.__doc__ or "").partition(".")[0].partition("\n")[0]
    error = {"description": "The request is wrong or cannot be served now; the body says why."}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The answer, or its events if the body has stream.",
                "content": {"application/json": {}, kind.media_type: {}},
            },
            "default": error,
        },
    }
