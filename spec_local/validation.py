"""Pydantic's validation errors, as part of a one-line message."""

from pydantic import ValidationError

_MAX_LENGTH = 200


def first_error(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """The first error: its location, as keys and indices from the outside in, and what is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    match first["type"]:
        case "missing":
            what = "is missing"
        case "extra_forbidden":
            what = "unknown key"
        case "value_error":
            what = str(first["ctx"]["error"])
        case _:
            what = first["msg"][:1].lower() + first["msg"][1:]
    location = tuple(str(part) for part in first["loc"] if part != "[key]")
    return location, " ".join(what.split())[:_MAX_LENGTH]


def describe(error: ValidationError) -> str:
    """The first error, as ``location: message``."""
    location, what = first_error(error)
    return f"{'.'.join(location)}: {what}" if location else what
