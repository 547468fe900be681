"""Errors as HTTP responses."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

from spec_local.errors import SpecLocalError
from spec_local.server.engine import Busy, NotReady
from spec_local.server.errors import body_of, code_of, status_of

_RETRY_S = 2  # while models load


def response(
    path: str, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with an error."""
    return JSONResponse(body_of(path, status, message, code), status, headers)


def response_for(path: str, error: SpecLocalError) -> JSONResponse:
    """The response for an error of the library."""
    headers = {}
    if isinstance(error, Busy | NotReady):
        headers["retry-after"] = str(error.retry_s if isinstance(error, Busy) else _RETRY_S)
    return response(path, status_of(error), str(error), code=code_of(error), headers=headers)
